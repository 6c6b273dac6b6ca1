"""The sizes of encoders, and of encoder-decoders: T5, BART and models of the same structure, and Whisper."""

from collections.abc import Callable
from functools import partial
from typing import Any

from headwise.costs.configs import Convolution
from headwise.models.configuration.config import Family, Options, output, require, to_both_sides


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


AUTO = TEXT, SPEECH = "AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq"


def _t5(c: Any, *, in_every_layer: bool = False) -> dict[str, Any]:
    """Relative positions are a number per bucket and head, in the first layer of each stack or in all of them."""
    tables = c.num_layers + c.num_decoder_layers if in_every_layer else 2
    return {
        "heads": {"head_dim": None if c.d_kv * c.num_heads == c.d_model else c.d_kv}, "d_ff": c.d_ff,
        "decoder_layers": c.num_decoder_layers, "gated": c.is_gated_act, "causal": False, "final_norms": 2,
        "relative": tables * c.relative_attention_num_buckets * c.num_heads, "output": output(c),
    }  # fmt: skip


def _bart(c: Any, *, more: int | None = 0, final_norms: int = 0, embedding_norms: int = 0) -> dict[str, Any]:
    """more: learned positions of each stack beyond those that the configuration states; None if they are computed."""
    return {
        "heads": {"bias": "qkvo"}, "decoder_heads": {"num_heads": c.decoder_attention_heads}, "d_ff": c.encoder_ffn_dim,
        "decoder_d_ff": c.decoder_ffn_dim, "decoder_layers": c.decoder_layers, "ff_bias": True, "norm": "layer",
        "causal": False, "final_norms": final_norms, "embedding_norms": embedding_norms,
        "positions": 0 if more is None else 2 * (c.max_position_embeddings + more), "output": output(c),
    }  # fmt: skip


def _whisper(c: Any) -> dict[str, Any]:
    """Two convolutions over frames of a spectrogram, of which the second halves their number."""
    channels, d = c.num_mel_bins, c.d_model
    return {
        "heads": {"bias": "qvo"}, "decoder_heads": {"num_heads": c.decoder_attention_heads}, "d_ff": c.encoder_ffn_dim,
        "decoder_d_ff": c.decoder_ffn_dim, "decoder_layers": c.decoder_layers, "ff_bias": True, "norm": "layer",
        "causal": False, "final_norms": 2, "positions": c.max_source_positions + c.max_target_positions,
        "convolutions": (Convolution(channels, d, 3, positions=2), Convolution(d, d, 3, stride=2)),
        "context": c.max_target_positions, "source_tokens": c.max_source_positions, "output": output(c),
    }  # fmt: skip


SIZES: dict[str, tuple[Callable[[Any], dict[str, Any]], str]] = {
    "t5": (_t5, TEXT),
    "mt5": (_t5, TEXT),
    "umt5": (partial(_t5, in_every_layer=True), TEXT),
    "bart": (partial(_bart, more=2, embedding_norms=2), TEXT),
    "plbart": (partial(_bart, more=2, embedding_norms=2), TEXT),
    "mbart": (partial(_bart, more=2, embedding_norms=2, final_norms=2), TEXT),
    "pegasus": (partial(_bart, final_norms=2), TEXT),
    "marian": (_bart, TEXT),
    "m2m_100": (partial(_bart, more=None, final_norms=2), TEXT),
    "blenderbot": (partial(_bart, final_norms=2), TEXT),
    "blenderbot-small": (partial(_bart, embedding_norms=2), TEXT),
    "whisper": (_whisper, SPEECH),
}
FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert"), Family(_bert, auto="AutoModel")),
    "distilbert": Family(_distilbert, auto="AutoModel"),
    "modernbert": Family(_modern_bert, to_both_sides, "AutoModel"),
    **{name: Family(sizes, auto=auto) for name, (sizes, auto) in SIZES.items()},
}
