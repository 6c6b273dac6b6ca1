"""Storage formats of a cache: unchanged, in another floating dtype, or int8 with scales."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from headwise.costs.work import CACHE_BYTES
from headwise.errors import ConfigError, DTypeError, ShapeError, check_whole
from headwise.kernels.quantized import QuantizedKV, Vectors


class Storage(Protocol):
    """Encodes keys or values to the tensors that are stored; all have the tokens at axis 2.

    Attributes:
        differentiable: whether gradients flow through it.
    """

    differentiable: bool

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors to store for x [b, h, n, d]."""

    def decode(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return what `encode` stored, as [b, h, n, d] of this dtype."""

    def stored(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Vectors:
        """Return the same in a form that attention can read, quantized if it is stored so."""

    def bound(self, x: Tensor) -> Tensor:
        """Return the largest error of decode(encode(x)) for each element, float64 [b, h, n, d]."""


class AsGiven:
    """Stored unchanged, without a copy."""

    differentiable = True

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x,)

    def decode(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        return parts[0]

    stored = decode

    def bound(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x, dtype=torch.float64)


class Rounded:
    """Stored in another floating dtype, with an error of at most u·|x|, u = 2⁻⁸ for bfloat16, 2⁻¹¹ for float16 and 2⁻²⁴
    for float32; for subnormal numbers, of half the smallest one."""

    differentiable = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """Convert x; DTypeError if a number overflows."""
        kept = x.to(self.dtype)
        lost = int((~torch.isfinite(kept) & torch.isfinite(x)).sum())
        if lost:
            most = torch.finfo(self.dtype).max
            raise DTypeError(
                f"cache: {lost} of the new values exceed ±{most:.5g}, the largest of {self.dtype}; use "
                f"stored='bfloat16' or None"
            )
        return (kept,)

    def decode(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        return parts[0].to(dtype)

    stored = decode

    def bound(self, x: Tensor) -> Tensor:
        info = torch.finfo(self.dtype)
        return (x.double().abs() * (info.eps / 2)).clamp_min(info.tiny * info.eps / 2)


class Quantized:
    """Stored as `QuantizedKV`, with an error of at most max|x| / 254 per vector beside the rounding of float32.

    Args:
        widths: widths of the parts of a vector with a scale each; None for one scale.
    """

    differentiable = False

    def __init__(self, widths: Sequence[int] | None = None) -> None:
        self.widths = None if widths is None else [check_whole("cache", "key_parts", width, 0) for width in widths]

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return int8 [b, h, n, d] and float32 [b, h, n, parts]; DTypeError if a number is not finite."""
        self._parts(x)
        try:
            kept = QuantizedKV.of(x, self.widths)
        except DTypeError as error:
            raise DTypeError(f"cache: {error}; use stored=None") from None
        return kept.steps, kept.scales

    def stored(self, parts: Sequence[Tensor], dtype: torch.dtype) -> QuantizedKV:
        steps, scales = parts
        return QuantizedKV(steps, scales, self._parts(steps), dtype)

    def decode(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        return self.stored(parts, dtype).decoded()

    def bound(self, x: Tensor) -> Tensor:
        return self.stored(self.encode(x), x.dtype).bound()

    def _parts(self, x: Tensor) -> tuple[int, ...]:
        width = x.shape[-1]
        widths = (width,) if self.widths is None else tuple(self.widths)
        if sum(widths) != width:
            raise ShapeError(f"cache: key_parts={widths} add up to {sum(widths)}, but keys have width {width}")
        return tuple(part for part in widths if part)  # an empty part has no scale


def storages(stored: str | None, key_parts: Sequence[int] | None) -> tuple[Storage, Storage]:
    """Return the storage of keys and of values."""
    if key_parts is not None and stored != "int8":
        raise ConfigError(f"key_parts={tuple(key_parts)}: separate scales per part require stored='int8'")
    if stored is None:
        return AsGiven(), AsGiven()
    if stored == "int8":
        return Quantized(key_parts), Quantized()
    if stored not in CACHE_BYTES:
        raise ConfigError(
            f"stored={stored!r}: expected None (the dtype of the keys) or one of {', '.join(CACHE_BYTES)}"
        )
    rounded = Rounded(getattr(torch, stored))
    return rounded, rounded


class Encoded(NamedTuple):
    """Encoded tensors, and the dtype before encoding."""

    parts: tuple[Tensor, ...]
    dtype: torch.dtype


class Rows:
    """Stored vectors [b, h, length, d], which can grow and be cut.

    Args:
        spare: capacity doubles as needed, so that a step copies O(1) tokens on average.
        capacity: number of vectors to allocate at once.
    """

    def __init__(self, storage: Storage, *, spare: bool = False, capacity: int | None = None) -> None:
        self._storage, self._spare, self._capacity = storage, spare, capacity
        self._parts: tuple[Tensor, ...] = ()
        self._dtype = torch.float32
        self.length = 0

    def encoded(self, x: Tensor) -> Encoded:
        """Encode x [b, h, n, d] without adding it; raises if it cannot be stored."""
        return Encoded(self._storage.encode(x if self._storage.differentiable else x.detach()), x.dtype)

    def add(self, new: Encoded) -> None:
        """Add the result of `encoded`; as a copy of all vectors if gradients flow to them."""
        end = self.length + new.parts[0].shape[2]
        self._dtype = new.dtype
        if any(part.requires_grad for part in (*self._parts, *new.parts)):
            held = self._held() or [part[:, :, :0] for part in new.parts]
            self._parts = tuple(torch.cat(both, 2) for both in zip(held, new.parts, strict=True))
            self.length = end
            return
        self._parts = tuple(self._with_room(i, part, end) for i, part in enumerate(new.parts))
        for room, part in zip(self._parts, new.parts, strict=True):
            _write(room, self.length, end, part)
        self.length = end

    def read(self) -> Tensor:
        """Return all vectors, [b, h, length, d]; a view if no decoding is needed."""
        return self._storage.decode(self._held(), self._dtype)

    def stored(self) -> Vectors:
        """Return all vectors in a form that attention can read, quantized if they are stored so."""
        return self._storage.stored(self._held(), self._dtype)

    def cut(self, first: int, last: int) -> None:
        """Keep the first `first` and the last `last` vectors only. Tensors read before are unchanged."""
        if self.length <= first + last:
            return
        start = self.length - last
        self._parts = tuple(torch.cat((part[:, :, :first], part[:, :, start : self.length]), 2) for part in self._parts)
        self.length = first + last

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return sum(part[:, :, : self.length].numel() * part.element_size() for part in self._parts)

    def _held(self) -> list[Tensor]:
        return [part[:, :, : self.length] for part in self._parts]

    def _with_room(self, i: int, new: Tensor, end: int) -> Tensor:
        held = self._parts[i] if self._parts else None
        if held is not None and held.shape[2] >= end:
            return held
        size = max(end, 64, 2 * self.length) if self._spare else end
        b, h, _, d = new.shape
        room = new.new_empty(b, h, size if self._capacity is None else self._capacity, d)
        if held is not None:
            _write(room, 0, self.length, held[:, :, : self.length])
        return room


def _write(room: Tensor, start: int, stop: int, new: Tensor) -> None:
    """Write where nobody has read yet. Through `.data` it is no change of the vectors before, of which attention maps
    and autograd hold views."""
    room = room if torch.compiler.is_compiling() else room.data
    room[:, :, start:stop] = new
