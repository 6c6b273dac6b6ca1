"""The sizes of a model in a checkpoint of headwise."""

from pathlib import Path

from headwise.costs.configs import ModelConfig
from headwise.errors import ConfigError
from headwise.lm.checkpoint import load_checkpoint
from headwise.nn.counts import sizes_of
from headwise.textbook.plan.folder import checked


def config_of_checkpoint(path: Path) -> ModelConfig:
    """The sizes of the model in a checkpoint, or in a folder that contains one.

    Raises:
        CheckpointError: if it cannot be read.
        ConfigError: for layers of different sizes, and for parameters that the sizes do not give.
    """
    decoder, _, _ = load_checkpoint(path)
    c = decoder.config
    layers = c.layers or ({},)
    if decoder.strange_layers or any(dict(layer) != dict(layers[0]) for layer in layers):
        raise ConfigError(
            f"--config {str(path)!r}: its layers have different sizes, which is not supported; a layer is planned by "
            f"--design",
            f"--config {str(path)!r}：各层大小不同，尚不支持；单独一层可用 --design 规划",
        )
    given = {"num_heads": c.num_heads, "num_kv_heads": c.num_kv_heads, **c.options, **layers[0]}
    known = sizes_of(c.design)
    config = ModelConfig(
        path.resolve().name, c.d_model, c.num_layers, c.d_ff, c.vocab_size,
        tuple((name, value) for name, value in given.items() if name in known and value is not None), 0, str(path),
        design=c.design, final_norm=c.order == "pre", output="tied", context=c.context,
    )  # fmt: skip
    return checked(config, path, decoder)
