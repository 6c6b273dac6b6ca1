"""What a module asks of a cache, and what every cache asks of its keys and values."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from headwise.errors import DeviceError, DTypeError, ShapeError
from headwise.kernels.eight_bits import Vectors
from headwise.masks import Mask


class Cache(Protocol):
    """What a module asks of a cache: one object a layer, given as `cache=` at every step."""

    @property
    def seen(self) -> int:
        """Tokens taken in so far: the position of the next one."""

    def limits(self, n: int, num_heads: int) -> Mask | None:
        """What the queries of the next call, n of them in each of `num_heads` heads, may see of the keys that it gives
        back, beside what the caller's own mask says; None: all. The layer joins it to that mask."""

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Take in new keys and values [b, h_kv, n, d]; return those that any of the new queries may look at."""

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values that are in use."""


def remembered(cache: Cache, k: Tensor, v: Tensor) -> tuple[Vectors, Vectors]:
    """`cache.append(k, v)` for who gives them to `attend` alone: in eight bits if the cache keeps them so and can hand
    them out, by a method `take`, as they are."""
    take = getattr(cache, "take", cache.append)
    return take(k, v)


def told(cache: Cache, **options: object) -> str:
    """A cache in a line: its options, tokens and bytes."""
    given = ", ".join(f"{name}={value!r}" for name, value in options.items() if value not in (None, 0))
    return f"{type(cache).__name__}({given}): {cache.seen:,} tokens seen, {cache.nbytes:,} bytes held"


class Kind(NamedTuple):
    """What must not change while a cache is filled."""

    batch: int
    heads: int
    key: int  # widths
    value: int
    dtypes: tuple[torch.dtype, torch.dtype]  # of keys and of values
    device: torch.device


def kind_of(k: Tensor, v: Tensor, held: Kind | None) -> Kind:
    """The kind of new keys and values; raises if it is not the one held."""
    if k.ndim != 4 or k.shape[:3] != v.shape[:3]:
        raise ShapeError(f"cache: k {tuple(k.shape)} and v {tuple(v.shape)} differ in batch, heads or tokens")
    kind = Kind(k.shape[0], k.shape[1], k.shape[3], v.shape[3], (k.dtype, v.dtype), k.device)
    if held is None or kind == held:
        return kind
    if kind[:4] != held[:4]:
        raise ShapeError(
            f"cache: new keys and values {_sizes(kind)} do not match the cached ones {_sizes(held)}; use a "
            f"new cache for each "
            f"layer, each design and each batch"
        )
    if kind.dtypes != held.dtypes:
        new, old = (" and ".join(sorted({str(dtype) for dtype in x.dtypes})) for x in (kind, held))
        raise DTypeError(f"cache: new keys and values are {new}, the cached ones are {old}; use a new cache")
    raise DeviceError(f"cache: new keys are on {kind.device}, the cached ones on {held.device}; use a new cache")


def _sizes(kind: Kind) -> str:
    return f"[batch {kind.batch}, heads {kind.heads}, widths {kind.key} and {kind.value}]"
