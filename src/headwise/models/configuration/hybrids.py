"""The sizes of decoders with layers of a constant state beside attention, as in `families`."""

from typing import Any

from headwise.costs.work import Recurrence, gated_delta, mamba_1, mamba_2, short_convolution
from headwise.errors import ConfigError
from headwise.models.configuration.decoders import llama
from headwise.models.configuration.experts import qwen2_moe
from headwise.models.configuration.family import Family, Options
from headwise.models.configuration.windows import FULL, HYBRID, beside_states, types_of


def _with(c: Any, layer: Recurrence, found: Options) -> Options:
    """The sizes with this layer in place of attention, or beside it, wherever `layer_types` says so."""
    kinds = types_of(c, c.num_hidden_layers)
    attended = tuple(i for i, kind in enumerate(kinds) if kind in (FULL, HYBRID))
    if not attended:
        raise ConfigError(
            f"layer_types: no layer of model_type={c.model_type!r} has attention",
            f"layer_types：model_type={c.model_type!r} 没有带注意力的层",
        )
    recurrent = (layer,) * sum(kind != FULL for kind in kinds)
    return {**found, "recurrent": recurrent, "attended": attended if len(attended) < len(kinds) else ()}


def _mamba_2(c: Any, **more: Any) -> Recurrence:
    return mamba_2(
        c.hidden_size, heads=c.mamba_n_heads, head_dim=c.mamba_d_head, groups=c.mamba_n_groups, state=c.mamba_d_state,
        kernel=c.mamba_d_conv, bias=bool(c.mamba_proj_bias), conv_bias=bool(c.mamba_conv_bias),
        **{"out_bias": bool(c.mamba_proj_bias), **more},
    )  # fmt: skip


def _bamba(c: Any) -> Options:
    return _with(c, _mamba_2(c), llama(c))


def _falcon_h1(c: Any) -> Options:
    """Attention and a state-space model in every layer, which read the same and are added."""
    return _with(c, _mamba_2(c, out_bias=bool(c.projectors_bias), norm=bool(c.mamba_rms_norm)), llama(c))


def _granite(c: Any) -> Options:
    """A shared expert in every layer, with others or alone."""
    found = llama(c)
    if c.num_local_experts:
        found |= {
            "experts": c.num_local_experts, "active_experts": c.num_experts_per_tok, "shared_experts": 1,
            "shared_d_ff": c.shared_intermediate_size,
        }  # fmt: skip
    else:
        found["d_ff"] = c.shared_intermediate_size
    return _with(c, _mamba_2(c), found)


def _jamba(c: Any) -> Options:
    layer = mamba_1(
        c.hidden_size, inner=c.mamba_expand * c.hidden_size, rank=c.mamba_dt_rank, state=c.mamba_d_state,
        kernel=c.mamba_d_conv, bias=bool(c.mamba_proj_bias), conv_bias=bool(c.mamba_conv_bias), norms=True,
    )  # fmt: skip
    found = llama(c)
    if c.num_experts > 1:
        found |= {
            "experts": c.num_experts, "active_experts": c.num_experts_per_tok, "dense_d_ff": c.intermediate_size,
            "dense_layers": sum(count == 1 for count in c.layers_num_experts),
        }  # fmt: skip
    return _with(c, layer, found)


def _delta(c: Any) -> Recurrence:
    return gated_delta(
        c.hidden_size, heads=c.linear_num_value_heads, key_heads=c.linear_num_key_heads, key_dim=c.linear_key_head_dim,
        value_dim=c.linear_value_head_dim, kernel=c.linear_conv_kernel_dim,
    )  # fmt: skip


def _qwen3_5(c: Any) -> Options:
    """Attention with a gate for each channel of a head, which is part of the projection of the queries."""
    found = llama(c, qk_norm=1, gate="channel", gate_bias=bool(c.attention_bias))
    return {**_with(c, _delta(c), found), "design": "gated_output"}


def _qwen3_next(c: Any) -> Options:
    own = _qwen3_5(c)
    return {**own, **qwen2_moe(c), "heads": own["heads"]}


def _qwen3_5_moe(c: Any) -> Options:
    """Experts in every layer."""
    return {
        **_qwen3_5(c), "d_ff": c.moe_intermediate_size, "experts": c.num_experts,
        "active_experts": c.num_experts_per_tok, "shared_experts": 1,
        "shared_d_ff": c.shared_expert_intermediate_size, "shared_gate": True,
    }  # fmt: skip


def _olmo(c: Any) -> Options:
    return _with(c, _delta(c), llama(c, qk_norm="each"))


def _short(c: Any) -> Recurrence:
    return short_convolution(c.hidden_size, kernel=c.conv_L_cache, bias=bool(c.conv_bias))


def _lfm2(c: Any) -> Options:
    width = c.intermediate_size
    if c.block_auto_adjust_ff_dim:
        width = int(2 * width / 3)
        if c.block_ffn_dim_multiplier is not None:
            width = int(c.block_ffn_dim_multiplier * width)
            width = -(-width // c.block_multiple_of) * c.block_multiple_of
    return _with(c, _short(c), {**llama(c, qk_norm=1), "d_ff": width})


def _lfm2_moe(c: Any) -> Options:
    """The first layers have one network."""
    return _with(c, _short(c), {
        **llama(c, qk_norm=1), "d_ff": c.moe_intermediate_size, "experts": c.num_experts,
        "active_experts": c.num_experts_per_tok, "dense_layers": min(c.num_dense_layers, c.num_hidden_layers),
        "dense_d_ff": c.intermediate_size,
    })  # fmt: skip


FAMILIES: dict[str, Family] = {
    "bamba": Family(_bamba, beside_states),
    "falcon_h1": Family(_falcon_h1, beside_states),
    "granitemoehybrid": Family(_granite, beside_states),
    "jamba": Family(_jamba, beside_states),
    "lfm2": Family(_lfm2, beside_states),
    "lfm2_moe": Family(_lfm2_moe, beside_states),
    "olmo_hybrid": Family(_olmo, beside_states),
    "qwen3_5_text": Family(_qwen3_5, beside_states),
    "qwen3_5_moe_text": Family(_qwen3_5_moe, beside_states),
    "qwen3_next": Family(_qwen3_next, beside_states),
}
