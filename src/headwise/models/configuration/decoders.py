"""The sizes of decoders, with one feed-forward network per layer or mixtures of experts, as in `sizes`."""

from typing import Any

from headwise.errors import ConfigError
from headwise.models.configuration.config import Family, Options, by_type, everywhere, output, require, rotated

BOTH = "qkvo"


def llama(c: Any, *, bias: str | None = None, **heads: Any) -> Options:
    """Rotary positions, RMS norms, and a gated feed-forward network, unless other fields are put beside these."""
    if bias is None and getattr(c, "attention_bias", False):
        bias = BOTH
    own = {"num_kv_heads": c.num_key_value_heads, "head_dim": getattr(c, "head_dim", None), "bias": bias, **heads}
    if own["num_kv_heads"] == c.num_attention_heads:
        del own["num_kv_heads"]
    if own["head_dim"] and own["head_dim"] * c.num_attention_heads == c.hidden_size:
        del own["head_dim"]
    width = getattr(c, "intermediate_size", 0)  # a model with experts alone may state only theirs
    return {
        "heads": own, "d_ff": width, "gated": True, "ff_bias": bool(getattr(c, "mlp_bias", False)), "output": output(c),
    }  # fmt: skip


def _qwen2(c: Any) -> Options:
    return llama(c, bias="qkv")


def _qwen3(c: Any) -> Options:
    return llama(c, qk_norm=1)


def _gemma(c: Any) -> Options:
    if c.use_bidirectional_attention:  # masks then depend on the implementation of attention
        require(c, use_bidirectional_attention=False)
    return llama(c)


def _prefix(c: Any, norms: int | None = None) -> Options:
    """Image and prompt attend to both sides, and what is generated to all before it."""
    require(c, use_bidirectional_attention=True)
    return {**llama(c), "norms": norms, "prefix": True}


def _gemma3(c: Any) -> Options:
    return {**llama(c, qk_norm=1), "norms": 4, "causal": not c.use_bidirectional_attention}


def latent(c: Any) -> Options:
    """Keys and values of all heads come from one latent vector, which is what transformers caches."""
    require(c, attention_bias=False, mlp_bias=False)
    heads = {
        "latent_dim": c.kv_lora_rank, "rope_dim": c.qk_rope_head_dim, "head_dim": c.qk_nope_head_dim,
        "value_dim": c.v_head_dim, "query_latent_dim": c.q_lora_rank, "latent_norm": 1,
    }  # fmt: skip
    return {"design": "latent", "heads": heads, "d_ff": c.intermediate_size, "gated": True, "output": output(c)}


def _olmo2(c: Any) -> Options:
    return llama(c, qk_norm="each")


def _cohere(c: Any) -> Options:
    """One norm for attention and feed-forward, which are parallel."""
    scales = "each" if getattr(c, "use_qk_norm", False) else None
    return {**llama(c, qk_norm=scales), "norms": 1}


def _ungated(c: Any) -> Options:
    return {**llama(c), "gated": False}


def _biased(c: Any) -> Options:
    """With biases of queries, keys and values if any, and none of the output."""
    return llama(c, bias="qkv" if c.attention_bias else "")


def _seed_oss(c: Any) -> Options:
    return llama(c, bias=("qkv" if c.attention_bias else "") + ("o" if c.attention_out_bias else ""))


def _ernie(c: Any) -> Options:
    return {**llama(c, bias=BOTH if c.use_bias else ""), "ff_bias": c.use_bias}


def _stablelm(c: Any) -> Options:
    scales = "each" if c.qk_layernorm else None
    _require_pairs(c)
    found = llama(c, bias="qkv" if c.use_qkv_bias else "", qk_norm=scales)
    return {**found, "norm": "layer", "norms": 1 if c.use_parallel_residual else None}


def _phi(c: Any) -> Options:
    require(c, qk_layernorm=False)
    _require_pairs(c)
    return {
        **llama(c, bias=BOTH), "gated": False, "ff_bias": True, "norm": "layer", "norms": 1, "output_bias": True,
    }  # fmt: skip


def _gpt2(c: Any) -> Options:
    require(c, add_cross_attention=False)
    return {
        "heads": {"bias": BOTH}, "d_ff": c.n_inner or 4 * c.n_embd, "ff_bias": True, "norm": "layer",
        "positions": c.n_positions, "output": output(c),
    }  # fmt: skip


def _gpt_bigcode(c: Any) -> Options:
    return {**_gpt2(c), "heads": {"bias": BOTH, "num_kv_heads": 1 if c.multi_query else None}}


def _gpt_neox(c: Any) -> Options:
    return {
        "heads": {"bias": BOTH if c.attention_bias else None}, "d_ff": c.intermediate_size, "ff_bias": True,
        "norm": "layer", "output": output(c),
    }  # fmt: skip


def _gptj(c: Any) -> Options:
    """One norm for attention and feed-forward, which are parallel."""
    return {
        "heads": {}, "d_ff": c.n_inner or 4 * c.n_embd, "ff_bias": True, "norm": "layer", "norms": 1,
        "output": output(c), "output_bias": True,
    }  # fmt: skip


def _opt(c: Any) -> Options:
    """Two learned positions more than the configuration states."""
    require(c, word_embed_proj_dim=c.hidden_size, layer_norm_elementwise_affine=True)
    last = c.do_layer_norm_before and not c._remove_final_layer_norm
    return {
        "heads": {"bias": BOTH if c.enable_bias else None}, "d_ff": c.ffn_dim, "ff_bias": c.enable_bias,
        "norm": "layer", "final_norms": int(last), "positions": c.max_position_embeddings + 2, "output": output(c),
    }  # fmt: skip


def _bloom(c: Any) -> Options:
    return {
        "heads": {"bias": BOTH}, "d_ff": 4 * c.hidden_size, "ff_bias": True, "norm": "layer", "embedding_norms": 1,
        "output": output(c),
    }  # fmt: skip


def _mpt(c: Any) -> Options:
    """Layer norms without a shift; transformers does not read `expansion_ratio`."""
    return {"heads": {}, "d_ff": 4 * c.d_model, "output": output(c)}


def _falcon(c: Any) -> Options:
    """Falcon 40B and 180B (the new architecture) have KV heads, and norms of their own for attention and feed-forward
    unless `num_ln_in_parallel_attn` is 1; transformers caches a copy of keys and values for every query head."""
    heads: dict[str, Any] = {"num_kv_heads": 1 if c.multi_query else None, "bias": BOTH * c.bias}
    norms = 1 if c.parallel_attn else None
    if c.new_decoder_architecture:
        require(c, parallel_attn=True)
        heads |= {"num_kv_heads": c.num_kv_heads, "kv_copies": int(c.num_kv_heads < c.num_attention_heads)}
        norms = c.num_ln_in_parallel_attn or 2
    return {
        "heads": heads, "d_ff": c.ffn_hidden_size, "ff_bias": c.bias, "norm": "layer", "norms": norms,
        "output": output(c),
    }  # fmt: skip


def _require_pairs(c: Any) -> None:
    """Raise ConfigError if an odd number of a head's channels is rotated: they are rotated in pairs, and transformers
    fails, or with one channel widens queries and keys by another."""
    width = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    channels = int(rotated(c) * width)
    if channels % 2:
        raise ConfigError(
            f"partial_rotary_factor={rotated(c)}: rotates {channels} of {width} channels of a head; expected an even "
            f"number for model_type={c.model_type!r}",
            f"partial_rotary_factor={rotated(c)}：旋转每个头 {width} 个通道中的 {channels} 个；"
            f"model_type={c.model_type!r} 时应为偶数",
        )


def _all_sparse(c: Any, **heads: Any) -> Options:
    """Experts in every layer, as wide as `intermediate_size`."""
    return {**llama(c, **heads), "experts": c.num_local_experts, "active_experts": c.num_experts_per_tok}


def _olmoe(c: Any) -> Options:
    return {**llama(c, qk_norm="each"), "experts": c.num_experts, "active_experts": c.num_experts_per_tok}


def _granite_shared(c: Any) -> Options:
    return {
        **_all_sparse(c),
        "shared_experts": int(c.shared_intermediate_size > 0),
        "shared_d_ff": c.shared_intermediate_size,
    }


def _phimoe(c: Any) -> Options:
    """A token uses two experts, whatever `num_experts_per_tok` is."""
    require(c, num_experts_per_tok=2)
    return {**_all_sparse(c), "norm": "layer", "output_bias": c.lm_head_bias}


def _qwen_moe(c: Any, experts: int, found: Options) -> Options:
    """Layers of `mlp_only_layers`, and those that `decoder_sparse_step` skips, have one network."""
    dense = sum(
        i in (c.mlp_only_layers or ()) or not experts or (i + 1) % c.decoder_sparse_step != 0
        for i in range(c.num_hidden_layers)
    )
    return {
        **found, "d_ff": c.moe_intermediate_size, "experts": experts, "active_experts": c.num_experts_per_tok,
        "dense_layers": dense, "dense_d_ff": c.intermediate_size,
    }  # fmt: skip


def qwen2_moe(c: Any) -> Options:
    """Experts beside a shared one, whose output each token scales."""
    found = _qwen_moe(c, c.num_experts, llama(c, bias="qkv" if getattr(c, "qkv_bias", False) else None))
    return {**found, "shared_experts": 1, "shared_d_ff": c.shared_expert_intermediate_size, "shared_gate": True}


def _after_dense(c: Any, found: Options) -> Options:
    """The first `first_k_dense_replace` layers have one network; the others also have shared experts."""
    return {
        **found, "d_ff": c.moe_intermediate_size, "experts": c.n_routed_experts,
        "active_experts": c.num_experts_per_tok, "shared_experts": c.n_shared_experts or 0,
        "dense_layers": min(c.first_k_dense_replace, c.num_hidden_layers), "dense_d_ff": c.intermediate_size,
    }  # fmt: skip


def _glm4_moe(c: Any) -> Options:
    return _after_dense(c, llama(c, bias="qkv" if c.attention_bias else "", qk_norm=1 if c.use_qk_norm else None))


def _llama4(c: Any) -> Options:
    """Layers that are not in `moe_layers` have one network of another width."""
    return {
        **_all_sparse(c), "shared_experts": 1, "dense_layers": c.num_hidden_layers - len(set(c.moe_layers)),
        "dense_d_ff": c.intermediate_size_mlp,
    }  # fmt: skip


FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("llama", "granite", "helium", "internlm3", "iquestcoder"), Family(llama)),
    "mistral": Family(llama, everywhere),
    "ministral": Family(llama, by_type),
    "ministral3": Family(llama, everywhere),
    "qwen2": Family(_qwen2, by_type),
    "qwen3": Family(_qwen3, by_type),
    "gemma": Family(_gemma),
    "gemma2": Family(lambda c: {**_gemma(c), "norms": 4}, by_type),
    "gemma3_text": Family(_gemma3, by_type),
    "vaultgemma": Family(llama, by_type),
    "phi3": Family(llama, everywhere),
    "phi": Family(_phi),
    "olmo": Family(lambda c: {**llama(c), "norm": "none"}),
    "olmo2": Family(_olmo2),
    "olmo3": Family(_olmo2, by_type),
    "cohere": Family(_cohere),
    "cohere2": Family(_cohere, by_type),
    "exaone4": Family(_qwen3, by_type),
    "smollm3": Family(llama, by_type),
    "cwm": Family(llama, by_type),
    "glm": Family(_biased),
    "glm4": Family(lambda c: {**_biased(c), "norms": 4}),
    "seed_oss": Family(_seed_oss),
    "hunyuan_v1_dense": Family(_qwen3),
    "ernie4_5": Family(_ernie),
    "arcee": Family(_ungated),
    **dict.fromkeys(("nemotron", "jais2"), Family(lambda c: {**_ungated(c), "norm": "layer"})),
    "granite_swa": Family(lambda c: llama(c, learned_sinks=1), by_type),
    **dict.fromkeys(("youtu", "minicpm3"), Family(latent)),
    "stablelm": Family(_stablelm),
    "starcoder2": Family(lambda c: {**_ernie(c), "gated": False, "norm": "layer"}, everywhere),
    "gpt2": Family(_gpt2),
    "gpt_bigcode": Family(_gpt_bigcode),
    "gpt_neox": Family(_gpt_neox),
    **dict.fromkeys(("gptj", "codegen"), Family(_gptj)),
    "opt": Family(_opt),
    "bloom": Family(_bloom),
    "mpt": Family(_mpt),
    "falcon": Family(_falcon),
    "mixtral": Family(_all_sparse, everywhere),
    "granitemoe": Family(_all_sparse),
    "granitemoeshared": Family(_granite_shared),
    "minimax_m2": Family(lambda c: _all_sparse(c, qk_norm="each")),
    "phimoe": Family(_phimoe, everywhere),
    "gpt_oss": Family(lambda c: {**_all_sparse(c, learned_sinks=1), "ff_bias": True, "router_bias": True}, by_type),
    **dict.fromkeys(("olmoe", "flex_olmo"), Family(_olmoe)),
    "qwen2_moe": Family(qwen2_moe, by_type),
    "qwen3_moe": Family(lambda c: _qwen_moe(c, c.num_local_experts, llama(c, qk_norm=1)), everywhere),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), Family(lambda c: _after_dense(c, latent(c)))),
    "glm4_moe": Family(_glm4_moe),
    "dots1": Family(lambda c: _after_dense(c, llama(c, qk_norm=1)), by_type),
    "llama4_text": Family(_llama4, by_type),
}

# Of models that have parts for other things as well.
PARTS: dict[str, Family] = {
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text"), Family(_qwen2, by_type)),
    "qwen3_vl_text": Family(_qwen3),
    "qwen3_vl_moe_text": Family(lambda c: _qwen_moe(c, c.num_experts, llama(c, qk_norm=1))),
}
PREFIXED: dict[str, Family] = {"gemma": Family(_prefix), "gemma2": Family(lambda c: _prefix(c, norms=4), by_type)}
