"""The sizes of decoders whose last layers attend to the keys and values of earlier ones, as in `families`."""

from typing import Any

from headwise.costs.configs import Others
from headwise.errors import ConfigError
from headwise.models.configuration.decoders import llama
from headwise.models.configuration.family import Family, Options
from headwise.models.configuration.windows import by_type

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
        "layer_heads": [{"shared_kv": mode == REUSE or None} for mode in c.kv_sharing_modes],
        "others": Others(
            # Besides maps: three norms and a scale in each layer, and a norm of the embeddings of layers.
            layers * (of_layer + 4 * d) + ends + own + table,
            # The router is used twice; a prediction is a product of streams and coefficients for each channel.
            layers * (of_layer + router + d * streams**2) + ends,
            layers * (rank + 2 * own + 2 * streams * d) + 2 * streams * d, table, layers * own,
        ),
    }  # fmt: skip


FAMILIES: dict[str, Family] = {"gemma3n_text": Family(_gemma3n, by_type)}
