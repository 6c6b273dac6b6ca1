"""Small models of transformers with random weights, and what PyTorch counts that they hold and compute."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from headwise.costs.model import Load
from headwise.plan import Plan, plan_model, read_config

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
WIDE = {**LLAMA, "head_dim": 16, **SPECIAL}
WINDOW = {**WIDE, "sliding_window": 13}
LATER = {**WINDOW, "use_sliding_window": True, "max_window_layers": 1}
EXPERTS = {**WIDE, "num_local_experts": 5, "num_experts_per_tok": 2}
MANY = {**WIDE, "moe_intermediate_size": 29, "num_experts_per_tok": 2}
ROUTED = {**MANY, "n_routed_experts": 6, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {
    **{name: size for name, size in ROUTED.items() if name != "head_dim"}, "kv_lora_rank": 10, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 14, "v_head_dim": 11, "n_shared_experts": 2, "num_key_value_heads": 6,
}  # fmt: skip
GPT2 = {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 211, "vocab_size": 101, **SPECIAL}
PLAIN = {name: size for name, size in LLAMA.items() if name != "num_key_value_heads"} | SPECIAL
DECODERS = {
    "llama": {**LLAMA, "attention_bias": True},
    "mistral": {**LLAMA, "sliding_window": 13, "head_dim": 16},
    "mixtral": {**LLAMA, "num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen2": {**LATER, "head_dim": 8},
    "qwen3": LATER,
    "gemma": {**LLAMA, "head_dim": 16},
    "gpt2": GPT2,
    "ministral": {**WINDOW, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    "ministral3": WINDOW,
    "gemma2": WINDOW,
    "gemma3_text": {**WINDOW, "sliding_window_pattern": 2},
    "vaultgemma": WINDOW,
    "cohere": {**LLAMA, **SPECIAL, "use_qk_norm": True},
    "cohere2": {**WINDOW, "sliding_window_pattern": 3},
    "olmo": {**LLAMA, **SPECIAL},
    "olmo2": {**LLAMA, **SPECIAL},
    "olmo3": {**LLAMA, **SPECIAL, "sliding_window": 13, "num_hidden_layers": 4},
    "phi": {**LLAMA, **SPECIAL},
    "phi3": {**LLAMA, **SPECIAL, "sliding_window": 13},
    "exaone4": {**LLAMA, **SPECIAL, "sliding_window": 13, "num_hidden_layers": 4},
    "smollm3": {
        **LLAMA, **SPECIAL, "sliding_window": 13, "use_sliding_window": True, "no_rope_layers": [1, 0, 1],
    },
    "cwm": {**WINDOW, "num_hidden_layers": 4},
    "granite": {**LLAMA, **SPECIAL, "mlp_bias": True},
    "helium": {**LLAMA, **SPECIAL, "head_dim": 8},
    "glm": {**WIDE, "attention_bias": True},
    "glm4": {**WIDE, "attention_bias": True},
    "seed_oss": {**WIDE, "attention_bias": True, "attention_out_bias": False},
    "hunyuan_v1_dense": WIDE,
    "ernie4_5": {**WIDE, "use_bias": True},
    "arcee": WIDE,
    "nemotron": WIDE,
    "stablelm": {**LLAMA, **SPECIAL, "use_qkv_bias": True, "qk_layernorm": True},
    "starcoder2": {**LLAMA, **SPECIAL, "sliding_window": 13},
    "internlm3": WIDE,
    "iquestcoder": WIDE,
    "jais2": WIDE,
    "granite_swa": {**LLAMA, **SPECIAL, "sliding_window": 13},
    "youtu": {**LATENT, "q_lora_rank": 13},
    "minicpm3": {**LATENT, "q_lora_rank": 13},
    "gpt_bigcode": GPT2,
    "gpt_neox": PLAIN,
    "gptj": {**GPT2, "rotary_dim": 4, "tie_word_embeddings": False},
    "codegen": {**GPT2, "n_head": 4, "rotary_dim": 4, "tie_word_embeddings": False},
    "opt": {
        "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "ffn_dim": 77, "vocab_size": 101,
        "max_position_embeddings": 211, "word_embed_proj_dim": 48, **SPECIAL,
    },
    "bloom": {"hidden_size": 48, "n_layer": 3, "n_head": 6, "vocab_size": 101, **SPECIAL},
    "mpt": {"d_model": 48, "n_layers": 3, "n_heads": 6, "vocab_size": 101, "max_seq_len": 211, **SPECIAL},
    "falcon": {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "vocab_size": 101, **SPECIAL},
    "granitemoe": {**LLAMA, **SPECIAL, "num_local_experts": 5, "num_experts_per_tok": 2},
    "granitemoeshared": {
        **LLAMA, **SPECIAL, "num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 31,
    },
    "minimax_m2": EXPERTS,
    "phimoe": {**LLAMA, **SPECIAL, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 13},
    "gpt_oss": {**EXPERTS, "sliding_window": 13},
    **{key: {**LLAMA, **SPECIAL, "num_experts": 5, "num_experts_per_tok": 2} for key in ("olmoe", "flex_olmo")},
    "qwen2_moe": {
        **LATER, **MANY, "num_experts": 5, "shared_expert_intermediate_size": 31, "decoder_sparse_step": 2,
        "head_dim": 8,
    },
    "qwen3_moe": {**LATER, **MANY, "num_experts": 5, "mlp_only_layers": [1]},
    "deepseek_v2": {**LATENT, "n_group": 1, "topk_method": "greedy", "q_lora_rank": None},
    "deepseek_v3": {**LATENT, "q_lora_rank": 13},
    "glm4_moe": {**ROUTED, "use_qk_norm": True, "attention_bias": True, "n_shared_experts": 1},
    "dots1": {**ROUTED, **WINDOW, "max_window_layers": 1, "n_shared_experts": 1, "n_group": 1},
    "llama4_text": {
        **EXPERTS, "attention_chunk_size": 7, "intermediate_size_mlp": 59, "interleave_moe_layer_step": 2,
        "no_rope_layers": [1, 0, 1],
    },
}  # fmt: skip
MAMBA_2 = {
    "mamba_n_heads": 8, "mamba_d_head": 12, "mamba_n_groups": 2, "mamba_d_state": 10, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 5,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 5, "linear_value_head_dim": 9,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
HYBRIDS = {
    "bamba": {**LLAMA, **SPECIAL, **MAMBA_2, "attn_layer_indices": [1]},
    "falcon_h1": {**LLAMA, **SPECIAL, **MAMBA_2, "mamba_d_ssm": 96},
    "granitemoehybrid": {
        **LLAMA, **SPECIAL, **MAMBA_2, "num_local_experts": 5, "num_experts_per_tok": 2,
        "shared_intermediate_size": 31, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "jamba": {
        **LLAMA, **SPECIAL, "num_experts": 5, "num_experts_per_tok": 2, "mamba_d_state": 10, "mamba_dt_rank": 7,
        "attn_layer_period": 3, "attn_layer_offset": 1,
    },
    "lfm2": {**LLAMA, **SPECIAL, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3},
    "lfm2_moe": {
        **LLAMA, **SPECIAL, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3, "num_experts": 5,
        "num_experts_per_tok": 2, "moe_intermediate_size": 29, "num_dense_layers": 1,
    },
    "olmo_hybrid": {**LLAMA, **SPECIAL, **DELTA},
    "qwen3_5_text": {**WIDE, **DELTA},
    "qwen3_5_moe_text": {**MANY, **DELTA, "num_experts": 5, "shared_expert_intermediate_size": 31},
    "qwen3_next": {
        **MANY, **DELTA, "num_experts": 5, "shared_expert_intermediate_size": 31, "decoder_sparse_step": 2,
    },
}  # fmt: skip
DECODERS |= HYBRIDS | {
    "gemma3n_text": {
        **WINDOW, "num_hidden_layers": 5, "num_kv_shared_layers": 2, "laurel_rank": 9, "altup_num_inputs": 3,
        "hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": 97,
        "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")],
        "activation_sparsity_pattern": [0.0] * 5,
    },
    "gemma4_text": {
        **WINDOW, "num_hidden_layers": 5, "hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": 97,
        "global_head_dim": 24, "num_global_key_value_heads": 3,
        "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")],
        "attention_k_eq_v": True,
    },
}  # fmt: skip
ENCODERS = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert"), PLAIN),
    "distilbert": {"dim": 48, "n_layers": 3, "n_heads": 6, "hidden_dim": 77, "vocab_size": 101},
    "modernbert": {**PLAIN, "local_attention": 10, "global_attn_every_n_layers": 2},
}
IMAGES = {
    "hidden_size": 12, "intermediate_size": 19, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 7, "depth": 2, "embed_dim": 12, "num_heads": 2,
}  # fmt: skip
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
TEXTS: dict[str, dict[str, Any]] = {  # of models with a part for texts and one for images
    "gemma3": DECODERS["gemma3_text"],
    "llama4": DECODERS["llama4_text"],
    "mistral3": {"model_type": "mistral", **WINDOW},
    "paligemma": {"model_type": "gemma2", **WINDOW},
    **{key: {"model_type": "llama", **WIDE} for key in ("llava", "llava_next", "smolvlm", "idefics3")},
    **{key: {"model_type": "qwen2", **DECODERS["qwen2"]} for key in ("internvl", "llava_onevision")},
    **{key: {"model_type": "cohere2", **DECODERS["cohere2"]} for key in ("aya_vision", "cohere2_vision")},
    **{key: {**LLAMA, **SPECIAL, **SECTIONS} for key in ("qwen2_vl", "qwen2_5_vl")},
    "qwen3_vl": WIDE,
    "qwen3_5": HYBRIDS["qwen3_5_text"],
    "qwen3_5_moe": HYBRIDS["qwen3_5_moe_text"],
    "qwen3_vl_moe": {**MANY, "num_experts": 5},
}
WHOLE = {kind: {"text_config": text, "vision_config": IMAGES} for kind, text in TEXTS.items()}
BOTH = {
    "t5": T5, "mt5": {**T5, "feed_forward_proj": "gated-gelu"}, "umt5": T5,
    **dict.fromkeys(("bart", "plbart", "mbart", "pegasus", "marian"), BART),
    **dict.fromkeys(("m2m_100", "blenderbot", "blenderbot-small"), BART),
    "whisper": {**BART, "max_source_positions": 37, "max_target_positions": 211, "num_mel_bins": 11},
}  # fmt: skip
EVERY = DECODERS | ENCODERS | BOTH | WHOLE


def plan_of(name: Any, batch: int = 1, tokens: int = 2048, **options: Any) -> Plan:
    """The plan of a model by name or folder."""
    given = {key: options.pop(key) for key in ("machine", "devices", "link") if key in options}
    return plan_model(read_config(name), Load(batch, tokens, **options), **given)


def folder_of(path: Path, kind: str, **sizes: object) -> str:
    """Write a folder with nothing but config.json."""
    (path / "config.json").write_text(json.dumps({"model_type": kind, **sizes}), encoding="utf-8")
    return str(path)


def model_of(kind: str, **sizes: object) -> Any:
    """The model with random weights, and attention that PyTorch's counter of FLOPs knows."""
    auto = "AutoModel" if kind in ENCODERS else "AutoModelForCausalLM"
    if kind in WHOLE:
        auto = "AutoModelForImageTextToText"
    if kind in BOTH:
        auto = "AutoModelForSpeechSeq2Seq" if kind == "whisper" else "AutoModelForSeq2SeqLM"
    config = transformers.AutoConfig.for_model(kind, **(sizes or EVERY[kind]))
    config.get_text_config()._experts_implementation = "eager"  # the other ones require aligned sizes
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


def prefix(model: Any, b: int, n: int) -> dict[str, torch.Tensor]:
    """What a model says of n tokens that attend to both sides, as images and prompts do, if it has such."""
    return {"token_type_ids": torch.zeros(b, n, dtype=torch.long)} if model.config.model_type == "paligemma" else {}


@torch.no_grad()
def flops(model: Any, **inputs: Any) -> int:
    """FLOPs of a forward pass by PyTorch's counter, without the angles of rotary positions. Of recurrent layers, those
    of linear maps, and of the convolution over the tokens without padding; not those of states, as transformers'
    reference computes them in chunks or number by number."""
    with FlopCounterMode(display=False) as counter:
        model(**inputs)
    found = counter.get_flop_counts()
    angles = sum(sum(ops.values()) for name, ops in found.items() if name.endswith(".rotary_emb"))
    kinds = [ops for name, ops in found.items() if re.search(r"layers\.\d+\.(mamba|linear_attn|conv)$", name)]
    reference = sum(count for ops in kinds for op, count in ops.items() if str(op) not in ("aten.mm", "aten.addmm"))
    kernels = [x for name, x in model.named_parameters() if re.search(r"\.(conv1d|conv\.conv)\.weight$", name)]
    if not kinds:
        return counter.get_total_flops() - angles
    convolved = 2 * inputs["input_ids"].numel() * sum(x.numel() for x in kernels)
    return counter.get_total_flops() - angles - reference + convolved


@torch.no_grad()
def attended(model: Any, **inputs: Any) -> int:
    """Pairs of queries and keys that have a weight in any head of the model, summed over heads and layers."""
    return sum(int((weights > 0).sum()) for weights in model(**inputs, output_attentions=True).attentions)


def states(cache: Any) -> int:
    """Bytes of the states in a cache of transformers, of recurrent layers and of their convolutions."""
    layers = getattr(cache, "layers", ())  # an encoder-decoder has two caches, and no states
    kinds = (getattr(layer, name, None) or {} for layer in layers for name in ("conv_states", "recurrent_states"))
    return sum(x.numel() * x.element_size() for kind in kinds for x in kind.values() if x is not None)


def cached(cache: Any) -> int:
    """Bytes of keys and values in a cache of transformers, of self and cross attention."""
    if hasattr(cache, "self_attention_cache"):
        return cached(cache.self_attention_cache) + cached(cache.cross_attention_cache)
    found = [x for layer in cache.layers for x in (getattr(layer, "keys", None), getattr(layer, "values", None))]
    return sum(x.numel() * x.element_size() for x in found if x is not None)


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
