"""What the keys of a configuration of transformers mean: sizes that all families have, the window of each layer, what
is known of one model type. Nothing else in headwise reads them.

kinds    the model types, a row each
sizes    every size of a model, by its model type; numbers of heads, kept up to date when they change
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

from headwise.errors import ConfigError

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
    found: list[dict[str, Any]] = []
    for part in (config, *parts):
        if (stated := getattr(part, QUANTIZATION, None)) is not None:
            delattr(part, QUANTIZATION)
            found.append(stated if isinstance(stated, dict) else stated.to_dict())
    return next((str(stated.get("quant_method", "quantized")) for stated in found if stated), "")


def text_part(config: Any) -> Any:
    """The configuration of the part that reads text, which is the whole in most models."""
    try:
        return config.get_text_config()
    except ValueError:  # several parts read text
        return config


def _whole(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) else None


SLIDING, CHUNKED, FULL = "sliding_attention", "chunked_attention", "full_attention"
HYBRID = "hybrid"  # attention and a state
STATES = {"linear_attention", "conv", HYBRID}
Windows = Callable[[Any, int], Sequence[int | None]]


def nowhere(config: Any, layers: int, known: Collection[str] = (FULL,)) -> Sequence[int | None]:
    """No windows; ConfigError for a configuration with keys that transformers' cache reads and the model does not."""
    for name in ("sliding_window", "attention_chunk_size"):
        if size := getattr(config, name, None):
            refuse(config, name, size)
    if (kinds := _kinds(config)) - {*known}:
        refuse(config, "layer_types", ", ".join(sorted(kinds)))
    return (None,) * layers


# The same in a model that has layers with a state, of which `layers` have attention.
beside_states = partial(nowhere, known={FULL, *STATES})


def everywhere(config: Any, layers: int) -> Sequence[int | None]:
    """`sliding_window`, if it is not None, in all layers."""
    kinds, window = _kinds(config), config.sliding_window
    if kinds - {FULL if window is None else SLIDING}:
        refuse(config, "layer_types", ", ".join(sorted(kinds)))
    return (window,) * layers


def by_type(config: Any, layers: int) -> list[int | None]:
    """Those of `layer_types`, which transformers computes from older keys such as `sliding_window_pattern`."""
    if unknown := _kinds(config) - {SLIDING, CHUNKED, FULL}:
        refuse(config, "layer_types", ", ".join(sorted(unknown)))
    sizes = {}
    for kind, name in ((SLIDING, "sliding_window"), (CHUNKED, "attention_chunk_size")):
        if kind in _kinds(config):
            sizes[kind] = getattr(config, name, None)
            if not sizes[kind]:
                raise ConfigError(
                    "{name}={sizes}: expected at least 1, as layer_types has {kind}",
                    name=name,
                    sizes=sizes[kind],
                    kind=kind,
                )
    return [sizes.get(kind) for kind in types_of(config, layers)]


def types_of(config: Any, layers: int) -> list[str]:
    """`layer_types`; ConfigError if they are not those of all layers."""
    found: list[str] = list(config.layer_types or ())
    if len(found) != layers:
        raise ConfigError("layer_types: {count} of {layers} layers", count=len(found), layers=layers)
    return found


def to_both_sides(config: Any, layers: int) -> Sequence[int | None]:
    """As `by_type`, where `sliding_window` is the largest distance of a key."""
    return [None if distance is None else distance + 1 for distance in by_type(config, layers)]


def chunked(config: Any) -> bool:
    """Whether windows are chunks."""
    return CHUNKED in _kinds(config)


def _kinds(config: Any) -> set[str]:
    return set(getattr(config, "layer_types", None) or ())


def refuse(config: Any, name: str, value: object) -> NoReturn:
    """Raise ConfigError: this model type does not have that value of a key."""
    raise ConfigError(
        "{name}={value}: not supported for model_type={model_type!r}",
        name=name,
        value=value,
        model_type=config.model_type,
    )


Options = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """One model type. sizes: fields of `ModelConfig`; "heads" are those of an attention layer besides num_heads,
    "layer_heads" more of each layer if they differ, "decoder_heads" those in a decoder with cross attention."""

    sizes: Callable[[Any], Options]
    windows: Windows = nowhere
    auto: str = "AutoModelForCausalLM"
    per_layer: bool = False
    needs: Mapping[str, Any] = field(default_factory=dict)  # values of keys: others are not supported


def output(c: Any) -> str:
    """Whether the output matrix is the embedding: `ModelConfig.output`."""
    return "tied" if getattr(c, "tie_word_embeddings", False) else "own"


def require(c: Any, **values: Any) -> None:
    """Raise ConfigError, which names the key, unless a configuration has these values of keys, or lacks the keys."""
    for name, value in values.items():
        found = getattr(c, name, value)
        if found != value:
            refuse(c, name, repr(found))
