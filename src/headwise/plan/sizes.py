"""The sizes of a model by its name, its folder or its checkpoint."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from headwise.base.files import folder_of
from headwise.base.read import bounded, theirs
from headwise.costs.configs import ModelConfig, Sizes, find
from headwise.costs.model import parameter_parts
from headwise.errors import ConfigError
from headwise.nn.registry import attentions_of, sizes_of

if TYPE_CHECKING:
    from headwise.models import HeadSite


def read_config(name: str | Path) -> ModelConfig:
    """Return the sizes of a published model by name, or of the model in a folder or a checkpoint.

    Of a folder with config.json (and heads.json, if `save_pruned` wrote it) no weights are read: the model is built
    without memory, on the meta device, to compare its number of parameters with that of its sizes.

    Raises:
        CheckpointError: if a file cannot be read, or the weights beside config.json have other shapes.
        ConfigError: for an unknown name, a model type that is not supported, and a model with other parameters than
            its sizes give.
    """
    path = Path(name)
    if not path.exists():
        return find(str(name))
    path = folder_of(path)
    if path.is_file() or ((path / "model.safetensors").is_file() and not (path / "config.json").exists()):
        return _of_checkpoint(path)
    return _of_folder(path)


def _of_folder(folder: Path) -> ModelConfig:
    from headwise.edit.folder import is_pruned, resize_as_saved  # these import PyTorch's compiler
    from headwise.lm.loading.huggingface import check_shapes, read_config as read_json
    from headwise.models import find_heads
    from headwise.models.configuration import without_quantization
    from headwise.models.configuration.sizes import build, model_config, with_unread

    c = read_json(folder, weights=False)
    quantized = without_quantization(c)
    try:
        config = replace(model_config(c, folder.resolve().name, str(folder / "config.json")), quantized=quantized)
        with theirs(folder, "the model cannot be built"), bounded(folder):
            model = build(c)
    except ConfigError as error:
        raise ConfigError(
            f"{str(folder)!r}: {error}; `headwise plan layer` plans a layer of any sizes",
            f"{str(folder)!r}：{error.zh}；任意大小的一层可用 `headwise plan layer` 规划",
        ) from None
    if is_pruned(folder):
        resize_as_saved(model, folder)
        sites = find_heads(model)  # in the order of the layers
        if len(sites) == config.attention_layers:  # else it has parts that `_checked` refuses
            config = config.with_layers([_resized(*one) for one in zip(config.attention_sizes, sites, strict=True)])
    check_shapes(folder, model)
    return _checked(with_unread(config, model, c), folder)


def _of_checkpoint(path: Path) -> ModelConfig:
    from headwise.lm.checkpoint import load_checkpoint  # imports much of headwise.lm

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
    return _checked(replace(config.with_layers(layers), published=built, stated=False), path)


def _checked(config: ModelConfig, path: Path) -> ModelConfig:
    """The same; ConfigError if its sizes give another number of parameters than the model has that it describes."""
    counted = sum(parameter_parts(config, attentions_of(config)).values())
    if counted != config.published:
        raise ConfigError(
            f"{str(path)!r}: the model has {config.published:,} parameters, and one of these sizes {counted:,}: it has "
            f"parts that are not understood; `headwise plan layer` plans a layer",
            f"{str(path)!r}：模型有 {config.published:,} 个参数，而按这些大小应有 {counted:,} 个：其中有尚不支持的"
            "部分；单独一层可用 `headwise plan layer` 规划",
        )
    return config


def _resized(sizes: Sizes, site: "HeadSite") -> Mapping[str, int | str]:
    """The sizes of an attention layer with the heads of a site."""
    own = {**dict(sizes), "num_heads": site.num_heads, "num_kv_heads": site.num_kv_heads, "head_dim": site.head_dim}
    if site.num_kv_heads == site.num_heads:
        del own["num_kv_heads"]
    return own
