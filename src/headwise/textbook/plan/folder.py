"""The sizes of a model of transformers, by the configuration in its folder. Weights are not read.

The model is built without memory, on the meta device, to compare its number of parameters with that of its sizes, so
that a variant that is not understood is refused.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from headwise.contents import theirs
from headwise.costs.configs import ModelConfig, Sizes
from headwise.costs.model import parameter_parts
from headwise.edit.folder import is_pruned, resize_as_saved
from headwise.errors import ConfigError
from headwise.lm.loading.files import check_shapes, read_config
from headwise.models import HeadSite, find_heads
from headwise.models.configuration.config import without_quantization
from headwise.models.configuration.sizes import build, model_config, with_unread
from headwise.nn.counts import attentions_of
from headwise.trust import bounded


def config_of(folder: Path) -> ModelConfig:
    """The sizes of the model in a folder with config.json, and heads.json if `save_pruned` wrote it.

    Raises:
        CheckpointError: if there is no config.json, it cannot be read, or the weights beside it have other shapes.
        ConfigError: for a model type that is not supported, and for a model with other parameters than its family.
    """
    c = read_config(folder, weights=False)
    quantized = without_quantization(c)
    try:
        config = replace(model_config(c, folder.resolve().name, str(folder / "config.json")), quantized=quantized)
        with theirs(folder, "the model cannot be built"), bounded(folder):
            model = build(c)
    except ConfigError as error:
        raise ConfigError(
            f"--config {str(folder)!r}: {error}; a layer of any sizes is planned by --design, --d-model and "
            f"--num-heads",
            f"--config {str(folder)!r}：{error.zh}；任意大小的一层可用 --design、--d-model 与 --num-heads 规划",
        ) from None
    if is_pruned(folder):
        resize_as_saved(model, folder)
        sites = find_heads(model)  # in the order of the layers
        if len(sites) == config.attention_layers:  # else it has parts that `checked` refuses
            config = config.with_layers([_resized(*one) for one in zip(config.attention_sizes, sites, strict=True)])
    check_shapes(folder, model)
    return checked(with_unread(config, model, c), folder)


def checked(config: ModelConfig, path: Path) -> ModelConfig:
    """The same; ConfigError if its sizes give another number of parameters than the model has that it describes."""
    counted = sum(parameter_parts(config, attentions_of(config)).values())
    if counted != config.published:
        raise ConfigError(
            f"--config {str(path)!r}: the model has {config.published:,} parameters, and one of these sizes "
            f"{counted:,}: it has parts that are not understood; a layer is planned by --design",
            f"--config {str(path)!r}：模型有 {config.published:,} 个参数，而按这些大小应有 {counted:,} 个："
            "其中有尚不支持的部分；单独一层可用 --design 规划",
        )
    return config


def _resized(sizes: Sizes, site: HeadSite) -> Mapping[str, int | str]:
    """The sizes of an attention layer with the heads of a site."""
    own = {**dict(sizes), "num_heads": site.num_heads, "num_kv_heads": site.num_kv_heads, "head_dim": site.head_dim}
    if site.num_kv_heads == site.num_heads:
        del own["num_kv_heads"]
    return own
