"""The sizes of a model in a checkpoint of headwise."""

from dataclasses import replace
from pathlib import Path

from headwise.costs.configs import ModelConfig
from headwise.lm.checkpoint import load_checkpoint
from headwise.nn.registry import sizes_of
from headwise.textbook.plan.folder import checked


def config_of_checkpoint(path: Path) -> ModelConfig:
    """The sizes of the model in a checkpoint, or in a folder that contains one.

    Raises:
        CheckpointError: if it cannot be read.
        ConfigError: for parameters that the sizes do not give.
    """
    decoder, _, _ = load_checkpoint(path)
    c = decoder.config
    known = sizes_of(c.design)
    layers = []
    for layer in c.layers or [{}] * c.num_layers:
        given = {"num_heads": c.num_heads, "num_kv_heads": c.num_kv_heads, **c.options, **layer}
        layers.append({name: value for name, value in given.items() if name in known and value is not None})
    config = ModelConfig(
        path.resolve().name, c.d_model, c.num_layers, c.d_ff, c.vocab_size, (), 0, str(path), design=c.design,
        final_norms=int(c.order == "pre"), output="tied", context=c.context,
    )  # fmt: skip
    built = sum(parameter.numel() for parameter in decoder.parameters())
    return checked(replace(config.with_layers(layers), published=built, stated=False), path)
