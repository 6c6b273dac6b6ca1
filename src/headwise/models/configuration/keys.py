"""Sizes in the configuration of any model of transformers; None where it does not have one.

transformers maps other names of a family, such as `n_head` of GPT-2, to these itself.
"""

from typing import Any

QUANTIZATION = "quantization_config"


def num_heads(config: Any) -> int | None:
    """Query heads of a layer; in an encoder-decoder, of its encoder."""
    return _whole(config, "num_attention_heads")


def num_layers(config: Any) -> int | None:
    """Layers of the part that reads text, of encoder and decoder together."""
    text = text_part(config)
    first = _whole(text, "num_hidden_layers")
    if first is None or not two_stacks(text):
        return first
    second = _whole(text, "decoder_layers") or _whole(text, "num_decoder_layers")
    return first + (second or 0)


def width(config: Any) -> int | None:
    """d_model of the part that reads text."""
    return _whole(text_part(config), "hidden_size")


def trained_context(config: Any) -> int | None:
    """The longest text in training, or the number of learned positions; None if it is not limited (XLNet has −1)."""
    text = text_part(config)
    length = _whole(text, "max_position_embeddings") or _whole(text, "max_seq_len")  # the latter of MPT
    return length if length is None or length > 0 else None


def two_stacks(config: Any) -> bool:
    """Whether it is an encoder-decoder."""
    return bool(getattr(config, "is_encoder_decoder", False))


def rotated(config: Any) -> float:
    """The share of a head's channels that rotary positions rotate."""
    rope = getattr(config, "rope_parameters", None) or {}
    return getattr(config, "partial_rotary_factor", None) or rope.get("partial_rotary_factor") or 1.0


def without_quantization(config: Any) -> str:
    """Remove what a configuration states about quantized weights, so that transformers builds the model of their sizes;
    return the name of the method, "" if there is none."""
    parts = [part for part in vars(config).values() if hasattr(part, "get_text_config")]
    found = [_removed(part) for part in (config, *parts)]
    return next((str(stated.get("quant_method", "quantized")) for stated in found if stated), "")


def _removed(config: Any) -> dict[str, Any]:
    stated = getattr(config, QUANTIZATION, None)
    if stated is None:
        return {}
    delattr(config, QUANTIZATION)
    return stated if isinstance(stated, dict) else stated.to_dict()


def text_part(config: Any) -> Any:
    """The configuration of the part that reads text, which is the whole in most models."""
    try:
        return config.get_text_config()
    except ValueError:  # several parts read text
        return config


def _whole(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) else None
