"""All sizes of a model of transformers, by its model type, of which `headwise.costs.model` computes its costs; and the
numbers of heads, kept up to date when they change."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

from torch import nn

from headwise.base.run import without_memory
from headwise.costs.configs import ModelConfig
from headwise.errors import ConfigError
from headwise.models.adapters.huggingface.library import library
from headwise.models.configuration import (
    Family,
    chunked,
    num_heads,
    num_layers,
    refuse,
    require,
    text_part,
    trained_context,
    two_stacks,
    width,
)
from headwise.models.configuration.kinds import AUTO, FAMILIES, PARTS, PREFIXED
from headwise.models.find import find_heads
from headwise.wording import tr

IMAGES = "AutoModelForImageTextToText"
WITH_IMAGES = (  # models with a part for texts, whose own model type is in FAMILIES or PARTS, and parts for images
    "aya_vision", "cohere2_vision", "gemma3", "idefics3", "internvl", "llama4", "llava", "llava_next",
    "llava_onevision", "mistral3", "paligemma", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl",
    "qwen3_vl_moe", "smolvlm",
)  # fmt: skip
_PREFIXED = ("paligemma",)  # of those, whose own model type is in `PREFIXED`


def model_config(config: Any, name: str, source: str) -> ModelConfig:
    """The sizes of a model by its configuration, with `published=0`; those of its part for texts, if there are others.
    ConfigError for a model type that is not in `FAMILIES`, and for values that are not supported."""
    c, family = text_part(config), _family(config)
    if getattr(c, "is_heterogeneous", False) and not family.per_layer:
        raise ConfigError(tr("per_layer_config: not supported"))
    require(c, **family.needs)
    found = family.sizes(c)
    heads, decoder_heads = found.pop("heads", {}), found.pop("decoder_heads", {})
    layer_heads = found.pop("layer_heads", None)
    both = num_layers(c) or 0
    if both < 1:
        raise ConfigError(tr("has no layers"))
    layers = both - found.get("decoder_layers", 0)
    own = _without_nothing({"num_heads": num_heads(c), **heads})
    whole = ModelConfig(
        name, width(c) or 0, layers, found.pop("d_ff"), c.vocab_size, tuple(own.items()), 0, source,
        **{"context": trained_context(c) or 0, "chunked": chunked(c), **found},
    )  # fmt: skip
    whole = whole.with_windows(family.windows(c, whole.self_attentions))
    each = [_without_nothing(own | more) for more in layer_heads or [{}] * whole.self_attentions]
    return whole.with_layers(each + [_without_nothing(own | decoder_heads)] * (2 * whole.decoder_layers))


def build(config: Any) -> nn.Module:
    """The model of a configuration on the meta device: shapes without memory. ConfigError as in `model_config`."""
    auto = _family(config).auto if text_part(config) is config else IMAGES
    with without_memory():
        made: nn.Module = getattr(library("models.auto"), auto).from_config(config)
        return made


def with_unread(config: ModelConfig, model: Any, source: Any) -> ModelConfig:
    """The sizes of a built model with its number of parameters, those of parts that texts do not pass through counted
    apart; source: its configuration."""
    whole = _count(model)
    published = replace(config, published=whole, stated=False)
    if text_part(source) is source:
        return published
    first, last = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    unread = whole - _count(model.get_decoder(), model.get_output_embeddings())
    return replace(published, unread=unread, output="tied" if first is last else "own")  # of two keys, one is read


def _count(*modules: nn.Module) -> int:
    return sum({id(one): one.numel() for module in modules for one in module.parameters()}.values())


def _family(config: Any) -> Family:
    text = text_part(config)
    kind, outer = text.model_type, config.model_type
    family = FAMILIES.get(kind)
    if text is not config:
        known = PREFIXED if outer in _PREFIXED else FAMILIES | PARTS
        family = known.get(kind) if outer in WITH_IMAGES else None
    if family is None:
        kinds = ", ".join(dict.fromkeys(getattr(text, "layer_types", None) or ()))
        layers = tr(" (layer_types: {kinds})", kinds=kinds) if kinds else ""
        raise ConfigError(
            "model_type={outer!r}{layers}: not supported; `headwise plan list` lists those that are",
            outer=outer,
            layers=layers,
        )
    if two_stacks(config) != (family.auto in AUTO):
        refuse(text, "is_encoder_decoder", two_stacks(config))
    return family


def _without_nothing(sizes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: size for name, size in sizes.items() if size or size is False}


def difference(model: nn.Module, built: nn.Module) -> str:
    """The first parameter with another shape in a model that transformers built from the configuration; "" if none."""
    ours, theirs = ({name: tuple(x.shape) for name, x in one.named_parameters()} for one in (model, built))
    for name in ours | theirs:
        if ours.get(name) != theirs.get(name):
            return tr(
                "{name} is {own}, and {other} in a model of the configuration", name=name, own=ours.get(name),
                other=theirs.get(name),
            )  # fmt: skip
    return ""


def update_config(model: nn.Module) -> None:
    """Set the numbers of heads in a model's configuration, which `save_pretrained` writes, to those of its layers:
    unless layers differ, its class builds other shapes from these numbers, or the configuration refuses them."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "num_attention_heads"):
        return
    sizes = {(site.num_heads, site.num_kv_heads, site.head_dim) for site in find_heads(model)}
    if len(sizes) != 1:
        return
    num_heads, num_kv_heads, head_dim = sizes.pop()
    wanted = {"num_attention_heads": num_heads}
    if hasattr(config, "num_key_value_heads"):
        wanted["num_key_value_heads"] = num_kv_heads
    if all(getattr(config, name) == value for name, value in wanted.items()):
        return
    for values in (wanted, {**wanted, "head_dim": head_dim}):
        changed = deepcopy(config)
        try:
            for name, value in values.items():
                setattr(changed, name, value)
            changed = type(changed).from_dict(changed.to_dict())  # setattr checks no value against others, reading does
            with without_memory():  # shapes without memory
                built = type(model)(changed)
        except Exception:  # their code, with other values
            continue
        if not difference(model, built):
            for name, value in values.items():
                setattr(config, name, value)
            return
