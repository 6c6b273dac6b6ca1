"""All sizes of a model of transformers, by its model type: what `headwise.costs.model` computes its costs from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headwise.costs.configs import ModelConfig
from headwise.errors import ConfigError
from headwise.models.adapters.huggingface.library import library
from headwise.models.configuration import encoder_decoders
from headwise.models.configuration.keys import num_heads, num_layers, trained_context, two_stacks, width

Options = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """One model type.

    sizes: fields of `ModelConfig` by a configuration; "heads" are the sizes of an attention layer besides num_heads,
        "decoder_heads" those in a decoder with cross attention. auto: the class of transformers that builds the model.
    """

    sizes: Callable[[Any], Options]
    auto: str = "AutoModelForCausalLM"


def model_config(config: Any, name: str, source: str) -> ModelConfig:
    """The sizes of a model by its configuration, with `published=0`.

    Raises:
        ConfigError: for a model type that is not in `FAMILIES`, and for layers whose windows differ.
    """
    c, family = config, _family(config)
    found = family.sizes(c)
    if "sliding_attention" in (getattr(c, "layer_types", None) or ()) and not found.get("window"):
        raise ConfigError("attends in windows in some layers, which is not supported", "部分层使用滑动窗口，尚不支持")
    heads, decoder_heads = found.pop("heads", {}), found.pop("decoder_heads", {})
    both = num_layers(c) or 0
    if both < 1:
        raise ConfigError("has no layers", "没有任何层")
    layers = both - found.get("decoder_layers", 0)
    own = _without_nothing({"num_heads": num_heads(c), **heads})
    whole = ModelConfig(
        name, width(c) or 0, layers, found.pop("d_ff"), c.vocab_size, tuple(own.items()), 0, source,
        **{"context": trained_context(c) or 0, **found},
    )  # fmt: skip
    return whole.with_layers([own] * layers + [_without_nothing(own | decoder_heads)] * (2 * whole.decoder_layers))


def build(config: Any) -> nn.Module:
    """The model of a configuration on the meta device: shapes without memory. ConfigError as in `model_config`."""
    with torch.device("meta"):
        made: nn.Module = getattr(library("models.auto"), _family(config).auto).from_config(config)
        return made


def _family(config: Any) -> Family:
    kind = config.model_type
    family = FAMILIES.get(kind)
    if family is None:
        raise ConfigError(
            f"model_type={kind!r}: expected one of {', '.join(FAMILIES)}",
            f"model_type={kind!r}：应为 {'、'.join(FAMILIES)} 之一",
        )
    if two_stacks(config) != (family.auto in encoder_decoders.AUTO):
        raise ConfigError(
            f"is_encoder_decoder={two_stacks(config)}: not supported for model_type={kind!r}",
            f"model_type={kind!r} 不支持 is_encoder_decoder={two_stacks(config)}",
        )
    return family


def _without_nothing(sizes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: size for name, size in sizes.items() if size}


def _llama(c: Any, **heads: Any) -> Options:
    bias = "qkvo" if getattr(c, "attention_bias", False) else None
    own = {"num_kv_heads": c.num_key_value_heads, "head_dim": getattr(c, "head_dim", None), "bias": bias, **heads}
    if own["num_kv_heads"] == c.num_attention_heads:
        del own["num_kv_heads"]
    if own["head_dim"] and own["head_dim"] * c.num_attention_heads == c.hidden_size:
        del own["head_dim"]
    return {"heads": own, "d_ff": c.intermediate_size, "gated": True, "output": encoder_decoders.output(c)}


def _windowed(c: Any, **heads: Any) -> Options:
    return {**_llama(c, **heads), "window": c.sliding_window}


def _mixtral(c: Any) -> Options:
    return {**_windowed(c), "experts": c.num_local_experts, "active_experts": c.num_experts_per_tok}


def _gpt2(c: Any) -> Options:
    return {
        "heads": {"bias": "qkvo"}, "d_ff": c.n_inner or 4 * c.n_embd, "ff_bias": True, "norm": "layer",
        "positions": c.n_positions, "output": encoder_decoders.output(c),
    }  # fmt: skip


def _bert(c: Any) -> Options:
    if c.is_decoder:
        raise ConfigError("is_decoder=True: not supported for BERT", "BERT 不支持 is_decoder=True")
    return {
        "heads": {"bias": "qkvo"}, "d_ff": c.intermediate_size, "ff_bias": True, "norm": "layer", "causal": False,
        "final_norms": 0, "embedding_norms": 1, "positions": c.max_position_embeddings, "segments": c.type_vocab_size,
        "pooler": True, "output": "none",
    }  # fmt: skip


FAMILIES: dict[str, Family] = {
    "llama": Family(_llama),
    "gemma": Family(_llama),
    "mistral": Family(_windowed),
    "mixtral": Family(_mixtral),
    "qwen2": Family(lambda c: _llama(c, bias="qkv")),
    "qwen3": Family(lambda c: _llama(c, qk_norm=1)),
    "gpt2": Family(_gpt2),
    "bert": Family(_bert, "AutoModel"),
    **{name: Family(sizes, auto) for name, (sizes, auto) in encoder_decoders.SIZES.items()},
}
