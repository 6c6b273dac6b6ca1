"""The sizes of Gemma 3n, whose last layers attend to the keys and values of earlier ones, and of Gemma 4, as in
`families`."""

from typing import Any

from headwise.costs.configs import Others
from headwise.errors import ConfigError
from headwise.models.configuration.decoders import BOTH, llama
from headwise.models.configuration.family import Family, Options, output, require
from headwise.models.configuration.windows import FULL, by_type, types_of

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
    "gemma3n_text": Family(_gemma3n, by_type),
    "gemma4_text": Family(_gemma4, by_type, per_layer=True),
}
