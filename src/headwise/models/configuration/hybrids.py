"""The sizes of decoders whose layers differ: with states beside attention (hybrids), or with the keys and values of
other layers (Gemma 3n and 4), as in `sizes`."""

from typing import Any

from headwise.costs.configs import Others, Recurrence, gated_delta, mamba_1, mamba_2, short_convolution
from headwise.errors import ConfigError
from headwise.models.configuration.config import (
    FULL,
    HYBRID,
    Family,
    Options,
    beside_states,
    by_type,
    output,
    require,
    types_of,
)
from headwise.models.configuration.decoders import BOTH, llama, qwen2_moe


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


REUSE = "reuse"


def _gemma3n(c: Any) -> Options:
    """The residual stream is several, which are predicted and corrected around each layer (AltUp: Baykal et al. 2023,
    2301.13310); each layer has a low-rank path beside attention (LAuReL: Menghani et al. 2024, 2411.07501) and an
    embedding of its own of each token, which is read from a table."""
    widths = set(c.intermediate_size)
    if len(widths) > 1:
        raise ConfigError(
            f"intermediate_size={c.intermediate_size}: expected the same in all layers for model_type={c.model_type!r}",
            f"intermediate_size={c.intermediate_size}：model_type={c.model_type!r} 的各层应相同",
        )
    d, layers, streams, rank, own = (
        c.hidden_size, c.num_hidden_layers, c.altup_num_inputs, c.laurel_rank, c.hidden_size_per_layer_input,
    )  # fmt: skip
    router, coefficients = d * streams, streams**2 + streams**3  # of the correction and of the prediction
    of_layer = router + coefficients + 2 * d * (rank + own)
    ends = d * layers * own + 2 * (streams - 1) * d * d
    table = c.vocab_size_per_layer_input * layers * own
    return {
        **llama(c, qk_norm=1), "d_ff": widths.pop(), "norms": 4,
        "layer_heads": [{"shared_kv": mode == REUSE or None} for mode in _sharing_modes(c)],
        "others": Others(
            # Besides maps: three norms and a scale in each layer, and a norm of the embeddings of layers.
            layers * (of_layer + 4 * d) + ends + own + table,
            # The router is used twice; a prediction is a product of streams and coefficients for each channel.
            layers * (of_layer + router + d * streams**2) + ends,
            layers * (rank + 2 * own + 2 * streams * d) + 2 * streams * d, table, layers * own,
        ),
    }  # fmt: skip


def _sharing_modes(c: Any) -> list[str | None]:
    """What each layer does with keys and values; ConfigError if transformers refuses the numbers."""
    try:
        found: list[str | None] = c.kv_sharing_modes
    except ValueError:
        shared, layers = c.num_kv_shared_layers, c.num_hidden_layers
        raise ConfigError(
            f"num_kv_shared_layers={shared}: of {layers} layers, expected one before them of each type in "
            f"layer_types={c.layer_types} for model_type={c.model_type!r}",
            f"num_kv_shared_layers={shared}：共 {layers} 层；model_type={c.model_type!r} 时，在它们之前，"
            f"layer_types={c.layer_types} 中的每种类型应至少有一层",
        ) from None
    return found


def _gemma4(c: Any) -> Options:
    """Layers without a window have heads of another size; experts are beside the network of each layer, behind a router
    with a scale for each channel and expert. If layers share keys and values, transformers computes them for the last
    token alone in a prefill: not supported."""
    require(c, num_kv_shared_layers=0)
    if c.use_bidirectional_attention == "all":
        require(c, use_bidirectional_attention=None)
    layers = [
        {
            "num_kv_heads": None if one.num_key_value_heads == c.num_attention_heads else one.num_key_value_heads,
            "head_dim": one.head_dim, "values_of_keys": (c.attention_k_eq_v and kind == FULL) or None,
        }
        for one, kind in zip(c.per_layer_config, types_of(c, c.num_hidden_layers), strict=True)
    ]  # fmt: skip
    found: Options = {
        "heads": {"qk_norm": 1, "bias": BOTH if c.attention_bias else None}, "layer_heads": layers,
        "d_ff": c.intermediate_size, "gated": True, "norms": 4, "output": output(c),
    }  # fmt: skip
    if c.enable_moe_block:
        found |= {
            "d_ff": c.moe_intermediate_size, "experts": c.num_experts, "active_experts": c.top_k_experts,
            "shared_experts": 1, "shared_d_ff": c.intermediate_size, "router_bias": True, "norms": 8,
        }  # fmt: skip
    if own := c.hidden_size_per_layer_input:
        count = c.num_hidden_layers
        table, maps = c.vocab_size_per_layer_input * count * own, 3 * c.hidden_size * count * own
        parameters = maps + own + count * c.hidden_size + table
        found["others"] = Others(parameters, maps, 3 * count * own, table, count * own)
    return found


FAMILIES: dict[str, Family] = {
    "bamba": Family(lambda c: _with(c, _mamba_2(c), llama(c)), beside_states),
    "falcon_h1": Family(_falcon_h1, beside_states),
    "granitemoehybrid": Family(_granite, beside_states),
    "jamba": Family(_jamba, beside_states),
    "lfm2": Family(_lfm2, beside_states),
    "lfm2_moe": Family(_lfm2_moe, beside_states),
    "olmo_hybrid": Family(lambda c: _with(c, _delta(c), llama(c, qk_norm="each")), beside_states),
    "qwen3_5_text": Family(_qwen3_5, beside_states),
    "qwen3_5_moe_text": Family(_qwen3_5_moe, beside_states),
    "qwen3_next": Family(_qwen3_next, beside_states),
    "gemma3n_text": Family(_gemma3n, by_type),
    "gemma4_text": Family(_gemma4, by_type, per_layer=True),
}
