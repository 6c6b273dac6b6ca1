"""How the numbers of a cache are kept: as they came, in half precision, or as eight bits and a scale."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from headwise.costs.work import CACHE_BYTES
from headwise.errors import ConfigError, DTypeError, ShapeError, check_whole
from headwise.kernels.eight_bits import EightBits, Vectors


class Storage(Protocol):
    """Numbers in, tensors to keep out; all of them have the tokens at axis 2."""

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [b, h, n, d] as it is kept."""

    def decode(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """What `encode` kept, as [b, h, n, d] of this dtype."""

    def stored(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Vectors:
        """The same as attention can take it: what would cost the memory that was saved is left to it."""

    def bound(self, x: Tensor) -> Tensor:
        """How far decode(encode(x)) is from x at most, for each number, float64 [b, h, n, d]."""


class AsGiven:
    """Kept as it came."""

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """x."""
        return (x,)

    def decode(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """x: no copy."""
        return parts[0]

    def stored(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """x."""
        return parts[0]

    def bound(self, x: Tensor) -> Tensor:
        """Nothing changes."""
        return torch.zeros_like(x, dtype=torch.float64)


class Rounded:
    """Kept as floating-point numbers of another dtype: an error of at most u·|x|, u = 2⁻⁸ for bfloat16, 2⁻¹¹ for
    float16, 2⁻²⁴ for float32; below the smallest normal number, of half the smallest number there is."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """x in the other dtype; DTypeError if a number is too large for it."""
        kept = x.to(self.dtype)
        lost = int((~torch.isfinite(kept) & torch.isfinite(x)).sum())
        if lost:
            most = torch.finfo(self.dtype).max
            raise DTypeError(
                f"cache: {lost} of the new numbers are beyond ±{most:.5g}, the largest that {self.dtype} holds; use "
                f"stored='bfloat16' or None"
            )
        return (kept,)

    def decode(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """In the dtype asked for."""
        return parts[0].to(dtype)

    def stored(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """In the dtype asked for: attention computes in one."""
        return parts[0].to(dtype)

    def bound(self, x: Tensor) -> Tensor:
        """u·|x|, or half of the smallest number."""
        info = torch.finfo(self.dtype)
        return (x.double().abs() * (info.eps / 2)).clamp_min(info.tiny * info.eps / 2)


class Eight:
    """Each vector as `EightBits`: an error of at most max|x| / 254, beside the rounding of float32.

    Args:
        widths: the parts of a vector that get a scale each; None for one scale.
    """

    def __init__(self, widths: Sequence[int] | None = None) -> None:
        self.widths = None if widths is None else [check_whole("cache", "key_parts", width, 0) for width in widths]

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """int8 [b, h, n, d] and float32 [b, h, n, parts]; DTypeError if a number is not finite."""
        self._parts(x)
        try:
            kept = EightBits.of(x, self.widths)
        except DTypeError as error:
            raise DTypeError(f"cache: {error}; use stored=None") from None
        return kept.steps, kept.scales

    def stored(self, parts: Sequence[Tensor], dtype: torch.dtype) -> EightBits:
        """The eight bits."""
        steps, scales = parts
        return EightBits(steps, scales, self._parts(steps), dtype)

    def decode(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Steps times scales."""
        return self.stored(parts, dtype).decoded()

    def bound(self, x: Tensor) -> Tensor:
        """max|x| / 254 of each vector, and what float32 and x's own dtype round."""
        return self.stored(self.encode(x), x.dtype).bound()

    def _parts(self, x: Tensor) -> tuple[int, ...]:
        width = x.shape[-1]
        widths = (width,) if self.widths is None else tuple(self.widths)
        if sum(widths) != width:
            raise ShapeError(f"cache: key_parts={widths} are {sum(widths)} numbers, but a key has {width}")
        return tuple(part for part in widths if part)  # a vector without numbers has no scale


def storages(stored: str | None, key_parts: Sequence[int] | None) -> tuple[Storage, Storage]:
    """How keys and how values are kept."""
    if key_parts is not None and stored != "int8":
        raise ConfigError(f"key_parts={tuple(key_parts)}: separate scales per part require stored='int8'")
    if stored is None:
        return AsGiven(), AsGiven()
    if stored == "int8":
        return Eight(key_parts), Eight()
    if stored not in CACHE_BYTES:
        raise ConfigError(
            f"stored={stored!r}: expected None (the dtype of the keys) or one of {', '.join(CACHE_BYTES)}"
        )
    rounded = Rounded(getattr(torch, stored))
    return rounded, rounded


class Encoded(NamedTuple):
    """Numbers as a storage keeps them, and the dtype that they came in."""

    parts: tuple[Tensor, ...]
    dtype: torch.dtype


class Rows:
    """Vectors [b, h, length, d] of a storage, which may grow and be cut.

    Args:
        spare: room grows by doubling, so that a step copies O(1) tokens on average.
        capacity: room for so many from the beginning.
    """

    def __init__(self, storage: Storage, *, spare: bool = False, capacity: int | None = None) -> None:
        self._storage, self._spare, self._capacity = storage, spare, capacity
        self._parts: tuple[Tensor, ...] = ()
        self._dtype = torch.float32
        self.length = 0

    def encoded(self, x: Tensor) -> Encoded:
        """x [b, h, n, d] as it would be kept; raises if it cannot be, and changes nothing."""
        return Encoded(self._storage.encode(x.detach()), x.dtype)

    def add(self, new: Encoded) -> None:
        """Take in what `encoded` gave."""
        end = self.length + new.parts[0].shape[2]
        self._dtype = new.dtype
        self._parts = tuple(self._roomy(i, part, end) for i, part in enumerate(new.parts))
        for held, part in zip(self._parts, new.parts, strict=True):
            held[:, :, self.length : end] = part
        self.length = end

    def read(self) -> Tensor:
        """All of them, [b, h, length, d]; a view where nothing has to be decoded."""
        return self._storage.decode(self._held(), self._dtype)

    def stored(self) -> Vectors:
        """The same as they are kept, if attention can take it."""
        return self._storage.stored(self._held(), self._dtype)

    def cut(self, first: int, last: int) -> None:
        """Keep only so many at the beginning and at the end. What was read before stays as it is."""
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

    def _roomy(self, i: int, new: Tensor, end: int) -> Tensor:
        held = self._parts[i] if self._parts else None
        if held is not None and held.shape[2] >= end:
            return held
        size = max(end, 64, 2 * self.length) if self._spare else end
        b, h, _, d = new.shape
        room = new.new_empty(b, h, size if self._capacity is None else self._capacity, d)
        if held is not None:
            room[:, :, : self.length] = held[:, :, : self.length]
        return room
