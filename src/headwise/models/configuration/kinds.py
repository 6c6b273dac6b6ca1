"""The model types of transformers, a row each: how their sizes, as in `sizes`, follow from a configuration `c`."""

from typing import Any

from headwise.costs.configs import Convolution, Others, Recurrence, gated_delta, mamba_1, mamba_2, short_convolution
from headwise.errors import ConfigError
from headwise.models.configuration import (
    FULL,
    HYBRID,
    Family,
    Options,
    beside_states,
    by_type,
    everywhere,
    output,
    require,
    rotated,
    to_both_sides,
    types_of,
)

BOTH = "qkvo"


def _llama(c: Any, *, bias: str | None = None, **heads: Any) -> Options:
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


def _plain(c: Any, d_ff: int, bias: str | None = BOTH, **more: Any) -> Options:
    """Layer norms, and a feed-forward network with biases, unless other fields are given."""
    return {"heads": {"bias": bias}, "d_ff": d_ff, "ff_bias": True, "norm": "layer", "output": output(c), **more}


def _qkv(biased: bool) -> str:
    """With biases of queries, keys and values if any, and none of the output."""
    return "qkv" if biased else ""


def _gemma(c: Any) -> Options:
    if c.use_bidirectional_attention:  # masks then depend on the implementation of attention
        require(c, use_bidirectional_attention=False)
    return _llama(c)


def _cohere(c: Any) -> Options:
    """One norm for attention and feed-forward, which are parallel."""
    return {**_llama(c, qk_norm="each" if getattr(c, "use_qk_norm", False) else None), "norms": 1}


def _ernie(c: Any) -> Options:
    return {**_llama(c, bias=BOTH if c.use_bias else ""), "ff_bias": c.use_bias}


def _gpt2(c: Any) -> Options:
    return _plain(c, c.n_inner or 4 * c.n_embd, positions=c.n_positions)


def _opt(c: Any) -> Options:
    """Two learned positions more than the configuration states."""
    require(c, word_embed_proj_dim=c.hidden_size, layer_norm_elementwise_affine=True)
    last = c.do_layer_norm_before and not c._remove_final_layer_norm
    return _plain(
        c, c.ffn_dim, BOTH if c.enable_bias else None, ff_bias=c.enable_bias, final_norms=int(last),
        positions=c.max_position_embeddings + 2,
    )  # fmt: skip


def _stablelm(c: Any) -> Options:
    _require_pairs(c)
    found = _llama(c, bias=_qkv(c.use_qkv_bias), qk_norm="each" if c.qk_layernorm else None)
    return {**found, "norm": "layer", "norms": 1 if c.use_parallel_residual else None}


def _phi(c: Any) -> Options:
    require(c, qk_layernorm=False)
    _require_pairs(c)
    return {
        **_llama(c, bias=BOTH), "gated": False, "ff_bias": True, "norm": "layer", "norms": 1, "output_bias": True,
    }  # fmt: skip


def _require_pairs(c: Any) -> None:
    """Raise ConfigError if an odd number of a head's channels is rotated: they are rotated in pairs, and transformers
    fails, or with one channel widens queries and keys by another."""
    width = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    channels = int(rotated(c) * width)
    if channels % 2:
        raise ConfigError(
            "partial_rotary_factor={rotated}: rotates {channels} of {width} channels of a head; expected an even "
            "number for model_type={model_type!r}",
            rotated=rotated(c),
            channels=channels,
            width=width,
            model_type=c.model_type,
        )


def _falcon(c: Any) -> Options:
    """Falcon 40B and 180B (the new architecture) have KV heads, and norms of their own for attention and feed-forward
    unless `num_ln_in_parallel_attn` is 1; transformers caches a copy of keys and values for every query head."""
    heads: dict[str, Any] = {"num_kv_heads": 1 if c.multi_query else None, "bias": BOTH * c.bias}
    norms = 1 if c.parallel_attn else None
    if c.new_decoder_architecture:
        require(c, parallel_attn=True)
        heads |= {"num_kv_heads": c.num_kv_heads, "kv_copies": int(c.num_kv_heads < c.num_attention_heads)}
        norms = c.num_ln_in_parallel_attn or 2
    return _plain(c, c.ffn_hidden_size, heads=heads, ff_bias=c.bias, norms=norms)


def _latent(c: Any) -> Options:
    """Keys and values of all heads come from one latent vector, which is what transformers caches."""
    heads = {
        "latent_dim": c.kv_lora_rank, "rope_dim": c.qk_rope_head_dim, "head_dim": c.qk_nope_head_dim,
        "value_dim": c.v_head_dim, "query_latent_dim": c.q_lora_rank, "latent_norm": 1,
    }  # fmt: skip
    return {"design": "latent", "heads": heads, "d_ff": c.intermediate_size, "gated": True, "output": output(c)}


def _sparse(c: Any, found: Options, experts: int) -> Options:
    """Experts in every layer."""
    return {**found, "experts": experts, "active_experts": c.num_experts_per_tok}


def _qwen_moe(c: Any, experts: int, found: Options) -> Options:
    """Layers of `mlp_only_layers`, and those that `decoder_sparse_step` skips, have one network."""
    dense = sum(
        i in (c.mlp_only_layers or ()) or not experts or (i + 1) % c.decoder_sparse_step != 0
        for i in range(c.num_hidden_layers)
    )
    more = {"d_ff": c.moe_intermediate_size, "dense_layers": dense, "dense_d_ff": c.intermediate_size}
    return _sparse(c, found | more, experts)


def _qwen2_moe(c: Any) -> Options:
    """Experts beside a shared one, whose output each token scales."""
    found = _qwen_moe(c, c.num_experts, _llama(c, bias="qkv" if getattr(c, "qkv_bias", False) else None))
    return {**found, "shared_experts": 1, "shared_d_ff": c.shared_expert_intermediate_size, "shared_gate": True}


def _after_dense(c: Any, found: Options) -> Options:
    """The first `first_k_dense_replace` layers have one network; the others also have shared experts."""
    more = {
        "d_ff": c.moe_intermediate_size, "shared_experts": c.n_shared_experts or 0,
        "dense_layers": min(c.first_k_dense_replace, c.num_hidden_layers), "dense_d_ff": c.intermediate_size,
    }  # fmt: skip
    return _sparse(c, found | more, c.n_routed_experts)


def _with(c: Any, layer: Recurrence, found: Options) -> Options:
    """The sizes with this layer in place of attention, or beside it, wherever `layer_types` says so."""
    kinds = types_of(c, c.num_hidden_layers)
    attended = tuple(i for i, kind in enumerate(kinds) if kind in (FULL, HYBRID))
    if not attended:
        raise ConfigError("layer_types: no layer of model_type={model_type!r} has attention", model_type=c.model_type)
    recurrent = (layer,) * sum(kind != FULL for kind in kinds)
    return {**found, "recurrent": recurrent, "attended": attended if len(attended) < len(kinds) else ()}


def _mamba_2(c: Any, **more: Any) -> Recurrence:
    return mamba_2(
        c.hidden_size, heads=c.mamba_n_heads, head_dim=c.mamba_d_head, groups=c.mamba_n_groups, state=c.mamba_d_state,
        kernel=c.mamba_d_conv, bias=bool(c.mamba_proj_bias), conv_bias=bool(c.mamba_conv_bias),
        **{"out_bias": bool(c.mamba_proj_bias), **more},
    )  # fmt: skip


def _granite(c: Any) -> Options:
    """A shared expert in every layer, with others or alone."""
    found = _llama(c)
    if c.num_local_experts:
        found = _sparse(c, found, c.num_local_experts) | {
            "shared_experts": 1,
            "shared_d_ff": c.shared_intermediate_size,
        }
    else:
        found["d_ff"] = c.shared_intermediate_size
    return _with(c, _mamba_2(c), found)


def _jamba(c: Any) -> Options:
    layer = mamba_1(
        c.hidden_size, inner=c.mamba_expand * c.hidden_size, rank=c.mamba_dt_rank, state=c.mamba_d_state,
        kernel=c.mamba_d_conv, bias=bool(c.mamba_proj_bias), conv_bias=bool(c.mamba_conv_bias), norms=True,
    )  # fmt: skip
    found = _llama(c)
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
    found = _llama(c, qk_norm=1, gate="channel", gate_bias=bool(c.attention_bias))
    return {**_with(c, _delta(c), found), "design": "gated_output"}


def _lfm2(c: Any, **more: Any) -> Options:
    if "d_ff" not in more:
        width = c.intermediate_size
        if c.block_auto_adjust_ff_dim:
            width = int(2 * width / 3)
            if c.block_ffn_dim_multiplier is not None:
                width = int(c.block_ffn_dim_multiplier * width)
                width = -(-width // c.block_multiple_of) * c.block_multiple_of
        more["d_ff"] = width
    layer = short_convolution(c.hidden_size, kernel=c.conv_L_cache, bias=bool(c.conv_bias))
    return _with(c, layer, {**_llama(c, qk_norm=1), **more})


def _gemma3n(c: Any) -> Options:
    """The residual stream is several, which are predicted and corrected around each layer (AltUp: Baykal et al. 2023,
    2301.13310); each layer has a low-rank path beside attention (LAuReL: Menghani et al. 2024, 2411.07501) and an
    embedding of its own of each token, which is read from a table."""
    widths = set(c.intermediate_size)
    if len(widths) > 1:
        raise ConfigError(
            "intermediate_size={intermediate_size}: expected the same in all layers for model_type={model_type!r}",
            intermediate_size=c.intermediate_size,
            model_type=c.model_type,
        )
    try:
        modes = c.kv_sharing_modes  # what each layer does with keys and values
    except ValueError:
        raise ConfigError(
            "num_kv_shared_layers={shared}: of {layers} layers, expected one before them of each type in "
            "layer_types={layer_types} for model_type={model_type!r}",
            shared=c.num_kv_shared_layers,
            layers=c.num_hidden_layers,
            layer_types=c.layer_types,
            model_type=c.model_type,
        ) from None
    d, layers, streams, rank, own = (
        c.hidden_size, c.num_hidden_layers, c.altup_num_inputs, c.laurel_rank, c.hidden_size_per_layer_input,
    )  # fmt: skip
    router, coefficients = d * streams, streams**2 + streams**3  # of the correction and of the prediction
    of_layer = router + coefficients + 2 * d * (rank + own)
    ends = d * layers * own + 2 * (streams - 1) * d * d
    table = c.vocab_size_per_layer_input * layers * own
    return {
        **_llama(c, qk_norm=1), "d_ff": widths.pop(), "norms": 4,
        "layer_heads": [{"shared_kv": mode == "reuse" or None} for mode in modes],
        "others": Others(
            # Besides maps: three norms and a scale in each layer, and a norm of the embeddings of layers.
            layers * (of_layer + 4 * d) + ends + own + table,
            # The router is used twice; a prediction is a product of streams and coefficients for each channel.
            layers * (of_layer + router + d * streams**2) + ends,
            layers * (rank + 2 * own + 2 * streams * d) + 2 * streams * d, table, layers * own,
        ),
    }  # fmt: skip


def _gemma4(c: Any) -> Options:
    """Layers without a window have heads of another size; experts are beside the network of each layer, behind a router
    with a scale for each channel and expert."""
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


AUTO = TEXT, SPEECH = "AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq"


def _encoder(c: Any, d_ff: int, **more: Any) -> Options:
    own = {"causal": False, "final_norms": 0, "embedding_norms": 1, "output": "none", **more}
    return _plain(c, d_ff, **own)


def _t5(c: Any, *, in_every_layer: bool = False) -> Options:
    """Relative positions are a number per bucket and head, in the first layer of each stack or in all of them."""
    tables = c.num_layers + c.num_decoder_layers if in_every_layer else 2
    return {
        "heads": {"head_dim": None if c.d_kv * c.num_heads == c.d_model else c.d_kv}, "d_ff": c.d_ff,
        "decoder_layers": c.num_decoder_layers, "gated": c.is_gated_act, "causal": False, "final_norms": 2,
        "relative": tables * c.relative_attention_num_buckets * c.num_heads, "output": output(c),
    }  # fmt: skip


def _stacks(c: Any, bias: str, **more: Any) -> Options:
    """Encoder and decoder of the same structure as BART's."""
    return _plain(
        c, c.encoder_ffn_dim, bias, decoder_heads={"num_heads": c.decoder_attention_heads}, causal=False,
        decoder_d_ff=c.decoder_ffn_dim, decoder_layers=c.decoder_layers, **more,
    )  # fmt: skip


def _bart(more: int | None = 0, final_norms: int = 0, embedding_norms: int = 0) -> Family:
    """more: learned positions of each stack beyond those that the configuration states; None if they are computed."""

    def sizes(c: Any) -> Options:
        positions = 0 if more is None else 2 * (c.max_position_embeddings + more)
        return _stacks(c, BOTH, final_norms=final_norms, embedding_norms=embedding_norms, positions=positions)

    return Family(sizes, auto=TEXT)


def _whisper(c: Any) -> Options:
    """Two convolutions over frames of a spectrogram, of which the second halves their number."""
    channels, d = c.num_mel_bins, c.d_model
    return _stacks(
        c, "qvo", final_norms=2, positions=c.max_source_positions + c.max_target_positions,
        convolutions=(Convolution(channels, d, 3, positions=2), Convolution(d, d, 3, stride=2)),
        context=c.max_target_positions, source_tokens=c.max_source_positions,
    )  # fmt: skip


UNBIASED = {"attention_bias": False, "mlp_bias": False}
# Image and prompt attend to both sides, and what is generated to all before it.
PREFIX = {"use_bidirectional_attention": True}
FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("llama", "granite", "helium", "internlm3", "iquestcoder"), Family(_llama)),
    **dict.fromkeys(("mistral", "ministral3", "phi3"), Family(_llama, everywhere)),
    **dict.fromkeys(("ministral", "vaultgemma", "smollm3", "cwm"), Family(_llama, by_type)),
    "qwen2": Family(lambda c: _llama(c, bias="qkv"), by_type),
    **dict.fromkeys(("qwen3", "exaone4"), Family(lambda c: _llama(c, qk_norm=1), by_type)),
    "hunyuan_v1_dense": Family(lambda c: _llama(c, qk_norm=1)),
    "gemma": Family(_gemma),
    "gemma2": Family(lambda c: {**_gemma(c), "norms": 4}, by_type),
    "gemma3_text": Family(
        lambda c: {**_llama(c, qk_norm=1), "norms": 4, "causal": not c.use_bidirectional_attention}, by_type
    ),
    "phi": Family(_phi),
    "olmo": Family(lambda c: {**_llama(c), "norm": "none"}),
    "olmo2": Family(lambda c: _llama(c, qk_norm="each")),
    "olmo3": Family(lambda c: _llama(c, qk_norm="each"), by_type),
    "cohere": Family(_cohere),
    "cohere2": Family(_cohere, by_type),
    "glm": Family(lambda c: _llama(c, bias=_qkv(c.attention_bias))),
    "glm4": Family(lambda c: {**_llama(c, bias=_qkv(c.attention_bias)), "norms": 4}),
    "seed_oss": Family(lambda c: _llama(c, bias=_qkv(c.attention_bias) + ("o" if c.attention_out_bias else ""))),
    "ernie4_5": Family(_ernie),
    "arcee": Family(lambda c: {**_llama(c), "gated": False}),
    **dict.fromkeys(("nemotron", "jais2"), Family(lambda c: {**_llama(c), "gated": False, "norm": "layer"})),
    "granite_swa": Family(lambda c: _llama(c, learned_sinks=1), by_type),
    **dict.fromkeys(("youtu", "minicpm3"), Family(_latent, needs=UNBIASED)),
    "stablelm": Family(_stablelm),
    "starcoder2": Family(lambda c: {**_ernie(c), "gated": False, "norm": "layer"}, everywhere),
    "gpt2": Family(_gpt2, needs={"add_cross_attention": False}),
    "gpt_bigcode": Family(
        lambda c: {**_gpt2(c), "heads": {"bias": BOTH, "num_kv_heads": 1 if c.multi_query else None}},
        needs={"add_cross_attention": False},
    ),
    "gpt_neox": Family(lambda c: _plain(c, c.intermediate_size, BOTH if c.attention_bias else None)),
    **dict.fromkeys(  # one norm for attention and feed-forward, which are parallel
        ("gptj", "codegen"),
        Family(lambda c: _plain(c, c.n_inner or 4 * c.n_embd, None, norms=1, output_bias=True)),
    ),
    "opt": Family(_opt),
    "bloom": Family(lambda c: _plain(c, 4 * c.hidden_size, embedding_norms=1)),
    # Layer norms without a shift; transformers does not read `expansion_ratio`.
    "mpt": Family(lambda c: {"heads": {}, "d_ff": 4 * c.d_model, "output": output(c)}),
    "falcon": Family(_falcon),
    "mixtral": Family(lambda c: _sparse(c, _llama(c), c.num_local_experts), everywhere),
    "granitemoe": Family(lambda c: _sparse(c, _llama(c), c.num_local_experts)),
    "granitemoeshared": Family(lambda c: _sparse(c, _llama(c), c.num_local_experts) | {
        "shared_experts": int(c.shared_intermediate_size > 0), "shared_d_ff": c.shared_intermediate_size,
    }),
    "minimax_m2": Family(lambda c: _sparse(c, _llama(c, qk_norm="each"), c.num_local_experts)),
    "phimoe": Family(  # a token uses two experts, whatever `num_experts_per_tok` is
        lambda c: {**_sparse(c, _llama(c), c.num_local_experts), "norm": "layer", "output_bias": c.lm_head_bias},
        everywhere, needs={"num_experts_per_tok": 2},
    ),
    "gpt_oss": Family(
        lambda c: {
            **_sparse(c, _llama(c, learned_sinks=1), c.num_local_experts), "ff_bias": True, "router_bias": True,
        }, by_type,
    ),
    **dict.fromkeys(("olmoe", "flex_olmo"), Family(lambda c: _sparse(c, _llama(c, qk_norm="each"), c.num_experts))),
    "qwen2_moe": Family(_qwen2_moe, by_type),
    "qwen3_moe": Family(lambda c: _qwen_moe(c, c.num_local_experts, _llama(c, qk_norm=1)), everywhere),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3"), Family(lambda c: _after_dense(c, _latent(c)), needs=UNBIASED)
    ),
    "glm4_moe": Family(lambda c: _after_dense(
        c, _llama(c, bias=_qkv(c.attention_bias), qk_norm=1 if c.use_qk_norm else None)
    )),
    "dots1": Family(lambda c: _after_dense(c, _llama(c, qk_norm=1)), by_type),
    # Layers that are not in `moe_layers` have one network of another width.
    "llama4_text": Family(lambda c: _sparse(c, _llama(c), c.num_local_experts) | {
        "shared_experts": 1, "dense_layers": c.num_hidden_layers - len(set(c.moe_layers)),
        "dense_d_ff": c.intermediate_size_mlp,
    }, by_type),
    "bamba": Family(lambda c: _with(c, _mamba_2(c), _llama(c)), beside_states),
    # Attention and a state-space model in every layer, which read the same and are added.
    "falcon_h1": Family(
        lambda c: _with(c, _mamba_2(c, out_bias=bool(c.projectors_bias), norm=bool(c.mamba_rms_norm)), _llama(c)),
        beside_states,
    ),
    "granitemoehybrid": Family(_granite, beside_states),
    "jamba": Family(_jamba, beside_states),
    "lfm2": Family(_lfm2, beside_states),
    "lfm2_moe": Family(lambda c: _lfm2(c, **_sparse(c, {  # the first layers have one network
        "d_ff": c.moe_intermediate_size, "dense_d_ff": c.intermediate_size,
        "dense_layers": min(c.num_dense_layers, c.num_hidden_layers),
    }, c.num_experts)), beside_states),
    "olmo_hybrid": Family(lambda c: _with(c, _delta(c), _llama(c, qk_norm="each")), beside_states),
    "qwen3_5_text": Family(_qwen3_5, beside_states),
    "qwen3_5_moe_text": Family(lambda c: _sparse(c, _qwen3_5(c), c.num_experts) | {
        "d_ff": c.moe_intermediate_size, "shared_experts": 1, "shared_d_ff": c.shared_expert_intermediate_size,
        "shared_gate": True,
    }, beside_states),
    "qwen3_next": Family(lambda c: (own := _qwen3_5(c)) | _qwen2_moe(c) | {"heads": own["heads"]}, beside_states),
    "gemma3n_text": Family(_gemma3n, by_type),
    # If layers share keys and values, transformers computes them for the last token alone in a prefill: not supported.
    "gemma4_text": Family(_gemma4, by_type, per_layer=True, needs={"num_kv_shared_layers": 0}),
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert"), Family(
        lambda c: _encoder(
            c, c.intermediate_size, positions=c.max_position_embeddings, segments=c.type_vocab_size, pooler=True
        ), auto="AutoModel", needs={"is_decoder": False},
    )),
    "distilbert": Family(
        lambda c: _encoder(c, c.hidden_dim, positions=c.max_position_embeddings), auto="AutoModel"
    ),
    # The first layer has no norm before its attention: with one less after the last, the numbers are right.
    "modernbert": Family(lambda c: {
        "heads": {"bias": BOTH if c.attention_bias else None}, "d_ff": c.intermediate_size, "gated": True,
        "ff_bias": c.mlp_bias, "causal": False, "final_norms": 0, "embedding_norms": 1, "output": "none",
    }, to_both_sides, "AutoModel", needs={"norm_bias": False}),
    **dict.fromkeys(("t5", "mt5"), Family(_t5, auto=TEXT)),
    "umt5": Family(lambda c: _t5(c, in_every_layer=True), auto=TEXT),
    **dict.fromkeys(("bart", "plbart"), _bart(2, embedding_norms=2)),
    "mbart": _bart(2, embedding_norms=2, final_norms=2),
    **dict.fromkeys(("pegasus", "blenderbot"), _bart(final_norms=2)),
    "marian": _bart(),
    "m2m_100": _bart(None, final_norms=2),
    "blenderbot-small": _bart(embedding_norms=2),
    "whisper": Family(_whisper, auto=SPEECH),
}  # fmt: skip

# Of models that have parts for other things as well.
PARTS: dict[str, Family] = {
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text"), FAMILIES["qwen2"]),
    "qwen3_vl_text": FAMILIES["hunyuan_v1_dense"],
    "qwen3_vl_moe_text": Family(lambda c: _qwen_moe(c, c.num_experts, _llama(c, qk_norm=1))),
}
PREFIXED: dict[str, Family] = {
    "gemma": Family(lambda c: {**_llama(c), "norms": None, "prefix": True}, needs=PREFIX),
    "gemma2": Family(lambda c: {**_llama(c), "norms": 4, "prefix": True}, by_type, needs=PREFIX),
}
