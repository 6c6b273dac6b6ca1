"""Small models of transformers with random weights, and what PyTorch counts that they hold and compute."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

transformers = pytest.importorskip("transformers", minversion="5")
LLAMA = {
    "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
    "intermediate_size": 77, "vocab_size": 101, "max_position_embeddings": 211,
}  # fmt: skip
SPECIAL = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
BART = {
    "d_model": 48, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 6, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 77, "decoder_ffn_dim": 61, "vocab_size": 101, "max_position_embeddings": 211, **SPECIAL,
}  # fmt: skip
T5 = {
    "d_model": 48, "d_kv": 7, "d_ff": 77, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 6, "vocab_size": 101,
    "relative_attention_num_buckets": 11,
}  # fmt: skip
DECODERS = {
    "llama": {**LLAMA, "attention_bias": True},
    "mistral": {**LLAMA, "sliding_window": 13, "head_dim": 16},
    "mixtral": {**LLAMA, "num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen2": LLAMA,
    "qwen3": {**LLAMA, "head_dim": 16},
    "gemma": {**LLAMA, "head_dim": 16},
    "gpt2": {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 211, "vocab_size": 101, **SPECIAL},
}
ENCODERS = {"bert": {name: size for name, size in LLAMA.items() if name != "num_key_value_heads"}}
BOTH = {
    "t5": T5, "mt5": {**T5, "feed_forward_proj": "gated-gelu"}, "umt5": T5,
    **dict.fromkeys(("bart", "plbart", "mbart", "pegasus", "marian"), BART),
    **dict.fromkeys(("m2m_100", "blenderbot", "blenderbot-small"), BART),
    "whisper": {**BART, "max_source_positions": 37, "max_target_positions": 211, "num_mel_bins": 11},
}  # fmt: skip
EVERY = DECODERS | ENCODERS | BOTH


def folder_of(path: Path, kind: str, **sizes: object) -> str:
    """Write a folder with nothing but config.json."""
    (path / "config.json").write_text(json.dumps({"model_type": kind, **sizes}), encoding="utf-8")
    return str(path)


def model_of(kind: str, **sizes: object) -> Any:
    """The model with random weights, and attention that PyTorch's counter of FLOPs knows."""
    auto = "AutoModel" if kind in ENCODERS else "AutoModelForCausalLM"
    if kind in BOTH:
        auto = "AutoModelForSpeechSeq2Seq" if kind == "whisper" else "AutoModelForSeq2SeqLM"
    config = transformers.AutoConfig.for_model(kind, **(sizes or EVERY[kind]))
    config._experts_implementation = "eager"  # the other ones require aligned sizes
    return getattr(transformers, auto).from_config(config, attn_implementation="eager").eval()


def parameters(model: Any) -> int:
    """The number of its parameters; shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def ids(b: int, n: int) -> torch.Tensor:
    """Token ids [b, n], none of which is special."""
    return torch.randint(5, 97, (b, n), generator=torch.Generator().manual_seed(3))


def source_of(model: Any, b: int, n: int) -> dict[str, torch.Tensor]:
    """The encoder's input of n positions."""
    if model.config.model_type == "whisper":  # two frames a position
        return {"input_features": torch.randn(b, model.config.num_mel_bins, 2 * n)}
    return {"input_ids": ids(b, n)}


@torch.no_grad()
def flops(model: Any, **inputs: Any) -> int:
    """FLOPs of a forward pass by PyTorch's counter, without the angles of rotary positions."""
    with FlopCounterMode(display=False) as counter:
        model(**inputs)
    found = counter.get_flop_counts()
    angles = sum(sum(ops.values()) for name, ops in found.items() if name.endswith(".rotary_emb"))
    return counter.get_total_flops() - angles


def cached(cache: Any) -> int:
    """Bytes of keys and values in a cache of transformers, of self and cross attention."""
    if hasattr(cache, "self_attention_cache"):
        return cached(cache.self_attention_cache) + cached(cache.cross_attention_cache)
    return sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))


@torch.no_grad()
def decoded(model: Any, b: int, prefill: int, steps: int, source: int) -> tuple[Any, dict[str, Any]]:
    """The cache after a prefill and some steps, and the arguments of the next step."""
    tokens = ids(b, prefill + steps + 1)
    if model.config.is_encoder_decoder:
        start = {"encoder_outputs": model.get_encoder()(**source_of(model, b, source))}
        name = "decoder_input_ids"
    else:
        start, name = {}, "input_ids"
    cache = model(**start, **{name: tokens[:, :prefill]}, use_cache=True).past_key_values
    for i in range(prefill, prefill + steps):
        cache = model(**start, **{name: tokens[:, i : i + 1]}, past_key_values=cache, use_cache=True).past_key_values
    return cache, {**start, name: tokens[:, -1:], "past_key_values": cache, "use_cache": True}
