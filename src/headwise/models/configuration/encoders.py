"""The sizes of encoders, as in `families`."""

from typing import Any

from headwise.models.configuration.family import Family, Options, require
from headwise.models.configuration.windows import to_both_sides


def _bert(c: Any) -> Options:
    require(c, is_decoder=False)
    return {
        "heads": {"bias": "qkvo"}, "d_ff": c.intermediate_size, "ff_bias": True, "norm": "layer", "causal": False,
        "final_norms": 0, "embedding_norms": 1, "positions": c.max_position_embeddings, "segments": c.type_vocab_size,
        "pooler": True, "output": "none",
    }  # fmt: skip


def _distilbert(c: Any) -> Options:
    return {
        "heads": {"bias": "qkvo"}, "d_ff": c.hidden_dim, "ff_bias": True, "norm": "layer", "causal": False,
        "final_norms": 0, "embedding_norms": 1, "positions": c.max_position_embeddings, "output": "none",
    }  # fmt: skip


def _modern_bert(c: Any) -> Options:
    """The first layer has no norm before its attention: with one less after the last, the numbers are right."""
    require(c, norm_bias=False)
    return {
        "heads": {"bias": "qkvo" if c.attention_bias else None}, "d_ff": c.intermediate_size, "gated": True,
        "ff_bias": c.mlp_bias, "causal": False, "final_norms": 0, "embedding_norms": 1, "output": "none",
    }  # fmt: skip


FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert"), Family(_bert, auto="AutoModel")),
    "distilbert": Family(_distilbert, auto="AutoModel"),
    "modernbert": Family(_modern_bert, to_both_sides, "AutoModel"),
}
