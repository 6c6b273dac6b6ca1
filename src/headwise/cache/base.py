"""The cache protocol, and checks of keys and values."""

from copy import copy
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from headwise.cache.storage import Rows
from headwise.errors import DeviceError, DTypeError, ShapeError
from headwise.kernels.quantized import Vectors
from headwise.masks import Mask, Span


class Cache(Protocol):
    """A KV cache: one object per layer, given as `cache=` at every step.

    Optional: `take`, as `append`, but returns what `attend` reads, such as quantized keys and values; `gap`, a `Span`
    of the tokens that no head holds any more: it begins after those that are always kept, and is empty before any is
    dropped.
    """

    @property
    def seen(self) -> int:
        """The number of tokens so far, which is the position of the next one."""

    def limits(self, n: int, num_heads: int) -> Mask | None:
        """Return the mask of the next call's n queries over the keys that it returns, or None for all keys. The layer
        combines it with the caller's mask."""

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values [b, h_kv, n, d]; return those visible to any of the new queries."""

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values in use."""


def remembered(cache: Cache, k: Tensor, v: Tensor) -> tuple[Vectors, Vectors]:
    """Append and return keys and values for `attend`: quantized if the cache stores them so and has `take`."""
    take = getattr(cache, "take", cache.append)
    return take(k, v)


def gap_of(cache: Cache | None) -> Span:
    """The tokens that a cache has dropped for all heads."""
    gap: Span = getattr(cache, "gap", Span(0, 0))
    return gap


class Mark:
    """The state of a cache, to return to if the call that appended to it fails."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._held = {name: _kept(value) for name, value in getattr(cache, "__dict__", {}).items()}

    def restore(self) -> None:
        """Return to it."""
        if self._held:
            vars(self._cache).update(self._held)


def _kept(value: Any) -> Any:
    """An attribute as it is now. Numbers that are written later are beyond those that it holds."""
    if isinstance(value, list):
        return [_kept(each) for each in value]
    return copy(value) if isinstance(value, Rows) else value


def described(cache: Cache, **options: object) -> str:
    """Return a one-line description: options, tokens and bytes."""
    given = ", ".join(f"{name}={value!r}" for name, value in options.items() if value not in (None, 0))
    return f"{type(cache).__name__}({given}): {cache.seen:,} tokens seen, {cache.nbytes:,} bytes held"


class Kind(NamedTuple):
    """Properties of keys and values that must not change while a cache is in use."""

    batch: int
    heads: int
    key: int  # widths
    value: int
    dtypes: tuple[torch.dtype, torch.dtype]  # of keys and of values
    device: torch.device


def kind_of(k: Tensor, v: Tensor, held: Kind | None) -> Kind:
    """Return the kind of new keys and values; raises if it differs from the cached one."""
    if k.ndim != 4 or k.shape[:3] != v.shape[:3]:
        raise ShapeError(f"cache: k {tuple(k.shape)} and v {tuple(v.shape)} differ in batch, heads or tokens")
    kind = Kind(k.shape[0], k.shape[1], k.shape[3], v.shape[3], (k.dtype, v.dtype), k.device)
    if held is None or kind == held:
        return kind
    if kind[:4] != held[:4]:
        raise ShapeError(
            f"cache: new keys and values {_sizes(kind)} do not match the cached ones {_sizes(held)}; use a "
            f"new cache for each layer, each design and each batch"
        )
    if kind.dtypes != held.dtypes:
        new, old = (" and ".join(sorted({str(dtype) for dtype in x.dtypes})) for x in (kind, held))
        raise DTypeError(f"cache: new keys and values are {new}, the cached ones are {old}; use a new cache")
    raise DeviceError(f"cache: new keys are on {kind.device}, the cached ones on {held.device}; use a new cache")


def _sizes(kind: Kind) -> str:
    return f"[batch {kind.batch}, heads {kind.heads}, widths {kind.key} and {kind.value}]"
