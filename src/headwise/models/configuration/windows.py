"""The window of each layer of a model of transformers, as its masks and its `DynamicCache` have it."""

from collections.abc import Callable, Sequence
from typing import Any

from headwise.errors import ConfigError

SLIDING, CHUNKED, FULL = "sliding_attention", "chunked_attention", "full_attention"
HYBRID = "hybrid"  # attention and a state
STATES = {"linear_attention", "conv", HYBRID}
Windows = Callable[[Any, int], Sequence[int | None]]


def nowhere(config: Any, layers: int) -> Sequence[int | None]:
    """No windows; ConfigError for a configuration with keys that transformers' cache reads and the model does not."""
    return _nowhere(config, layers, {FULL})


def beside_states(config: Any, layers: int) -> Sequence[int | None]:
    """The same in a model that has layers with a state, of which `layers` have attention."""
    return _nowhere(config, layers, {FULL, *STATES})


def everywhere(config: Any, layers: int) -> Sequence[int | None]:
    """`sliding_window`, if it is not None, in all layers."""
    kinds, window = _kinds(config), config.sliding_window
    if kinds - {FULL if window is None else SLIDING}:
        _refuse(config, "layer_types", ", ".join(sorted(kinds)))
    return (window,) * layers


def by_type(config: Any, layers: int) -> list[int | None]:
    """Those of `layer_types`, which transformers computes from older keys such as `max_window_layers` and
    `sliding_window_pattern`."""
    if unknown := _kinds(config) - {SLIDING, CHUNKED, FULL}:
        _refuse(config, "layer_types", ", ".join(sorted(unknown)))
    sizes = {}
    for kind, name in ((SLIDING, "sliding_window"), (CHUNKED, "attention_chunk_size")):
        if kind in _kinds(config):
            sizes[kind] = getattr(config, name, None)
            if not sizes[kind]:
                raise ConfigError(
                    f"{name}={sizes[kind]}: expected at least 1, as layer_types has {kind}",
                    f"{name}={sizes[kind]}：layer_types 中有 {kind}，应不小于 1",
                )
    return [sizes.get(kind) for kind in types_of(config, layers)]


def types_of(config: Any, layers: int) -> list[str]:
    """`layer_types`; ConfigError if they are not those of all layers."""
    found: list[str] = list(config.layer_types or ())
    if len(found) != layers:
        raise ConfigError(
            f"layer_types: {len(found)} of {layers} layers", f"layer_types：{layers} 层中有 {len(found)} 项"
        )
    return found


def to_both_sides(config: Any, layers: int) -> Sequence[int | None]:
    """As `by_type`, where `sliding_window` is the largest distance of a key."""
    return [None if distance is None else distance + 1 for distance in by_type(config, layers)]


def chunked(config: Any) -> bool:
    """Whether windows are chunks."""
    return CHUNKED in _kinds(config)


def _nowhere(config: Any, layers: int, known: set[str]) -> Sequence[int | None]:
    for name in ("sliding_window", "attention_chunk_size"):
        if size := getattr(config, name, None):
            _refuse(config, name, size)
    if (kinds := _kinds(config)) - known:
        _refuse(config, "layer_types", ", ".join(sorted(kinds)))
    return (None,) * layers


def _kinds(config: Any) -> set[str]:
    return set(getattr(config, "layer_types", None) or ())


def _refuse(config: Any, name: str, value: object) -> None:
    raise ConfigError(
        f"{name}={value}: not supported for model_type={config.model_type!r}",
        f"model_type={config.model_type!r} 不支持 {name}={value}",
    )
