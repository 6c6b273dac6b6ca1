"""The sizes of decoders whose feed-forward networks are mixtures of experts, as in `families`."""

from typing import Any

from headwise.models.configuration.decoders import latent, llama
from headwise.models.configuration.family import Family, Options, require
from headwise.models.configuration.windows import by_type, everywhere


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


def _gpt_oss(c: Any) -> Options:
    return {**_all_sparse(c, learned_sinks=1), "ff_bias": True, "router_bias": True}


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


def _qwen3_moe(c: Any) -> Options:
    return _qwen_moe(c, c.num_local_experts, llama(c, qk_norm=1))


def _qwen3_vl_moe(c: Any) -> Options:
    return _qwen_moe(c, c.num_experts, llama(c, qk_norm=1))


def _after_dense(c: Any, found: Options) -> Options:
    """The first `first_k_dense_replace` layers have one network; the others also have shared experts."""
    return {
        **found, "d_ff": c.moe_intermediate_size, "experts": c.n_routed_experts,
        "active_experts": c.num_experts_per_tok, "shared_experts": c.n_shared_experts or 0,
        "dense_layers": min(c.first_k_dense_replace, c.num_hidden_layers), "dense_d_ff": c.intermediate_size,
    }  # fmt: skip


def _deepseek(c: Any) -> Options:
    return _after_dense(c, latent(c))


def _glm4_moe(c: Any) -> Options:
    return _after_dense(c, llama(c, bias="qkv" if c.attention_bias else "", qk_norm=1 if c.use_qk_norm else None))


def _dots1(c: Any) -> Options:
    return _after_dense(c, llama(c, qk_norm=1))


def _llama4(c: Any) -> Options:
    """Layers that are not in `moe_layers` have one network of another width."""
    return {
        **_all_sparse(c), "shared_experts": 1, "dense_layers": c.num_hidden_layers - len(set(c.moe_layers)),
        "dense_d_ff": c.intermediate_size_mlp,
    }  # fmt: skip


FAMILIES: dict[str, Family] = {
    "mixtral": Family(_all_sparse, everywhere),
    "granitemoe": Family(_all_sparse),
    "granitemoeshared": Family(_granite_shared),
    "minimax_m2": Family(lambda c: _all_sparse(c, qk_norm="each")),
    "phimoe": Family(_phimoe, everywhere),
    "gpt_oss": Family(_gpt_oss, by_type),
    **dict.fromkeys(("olmoe", "flex_olmo"), Family(_olmoe)),
    "qwen2_moe": Family(qwen2_moe, by_type),
    "qwen3_moe": Family(_qwen3_moe, everywhere),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), Family(_deepseek)),
    "glm4_moe": Family(_glm4_moe),
    "dots1": Family(_dots1, by_type),
    "llama4_text": Family(_llama4, by_type),
}
PARTS: dict[str, Family] = {"qwen3_vl_moe_text": Family(_qwen3_vl_moe)}  # of models that also have other parts
