"""How the numbers of a cache are kept: as they came, in half precision, or as eight bits and a scale."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from headwise.cache.base import whole
from headwise.costs.work import CACHE_BYTES
from headwise.errors import ConfigError, DTypeError, ShapeError

LEVELS = 127  # of eight bits, on either side of 0


class Storage(Protocol):
    """Numbers in, tensors to keep out; all of them have the tokens at axis 2."""

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [b, h, n, d] as it is kept."""

    def decode(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """What `encode` kept, as [b, h, n, d] of this dtype."""

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

    def bound(self, x: Tensor) -> Tensor:
        """u·|x|, or half of the smallest number."""
        info = torch.finfo(self.dtype)
        return (x.double().abs() * (info.eps / 2)).clamp_min(info.tiny * info.eps / 2)


class Eight:
    """Each vector x as round(x / s) in eight bits and its scale s = max|x| / 127 in float32 (absmax quantisation,
    Dettmers et al. 2022, 2208.07339, §2): an error of at most s / 2 = max|x| / 254, beside the rounding of float32.

    Args:
        widths: the parts of a vector that get a scale each; None for one scale.
    """

    def __init__(self, widths: Sequence[int] | None = None) -> None:
        self.widths = None if widths is None else [whole("cache", "key_parts", width, 0) for width in widths]

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """int8 [b, h, n, d] and float32 [b, h, n, parts]; DTypeError if a number is not finite."""
        scale = self._largest(x).float() / LEVELS  # [b, h, n, parts]
        if not bool(torch.isfinite(scale).all()):
            count = int((~torch.isfinite(x)).sum())
            what = f"{count} of the new numbers are infinite or NaN" if count else "a number is beyond float32"
            raise DTypeError(f"cache: {what}, which eight bits and a scale cannot hold; use stored=None")
        steps = x.to(torch.promote_types(x.dtype, torch.float32)) / self._over(scale, x).clamp_min(1e-45)
        return steps.round().clamp(-LEVELS, LEVELS).to(torch.int8), scale

    def decode(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Steps times scales."""
        steps, scale = parts
        return steps.to(torch.float32).mul_(self._over(scale, steps)).to(dtype)

    def bound(self, x: Tensor) -> Tensor:
        """max|x| / 254 of each vector, and what float32 and x's own dtype round."""
        largest = self._over(self._largest(x).double(), x).expand(x.shape)
        own = max(torch.finfo(torch.float32).eps, torch.finfo(x.dtype).eps)
        return largest / (2 * LEVELS) + largest * own + LEVELS * 1e-45

    def _parts(self, x: Tensor) -> list[int]:
        width = x.shape[-1]
        widths = [width] if self.widths is None else self.widths
        if sum(widths) != width:
            raise ShapeError(f"cache: key_parts={tuple(widths)} are {sum(widths)} numbers, but a key has {width}")
        return [part for part in widths if part]  # a vector without numbers has no scale

    def _largest(self, x: Tensor) -> Tensor:
        parts = self._parts(x)
        if not parts:
            return x.new_zeros(*x.shape[:-1], 0)
        return torch.stack([part.abs().amax(-1) for part in x.split(parts, -1)], -1)

    def _over(self, scale: Tensor, x: Tensor) -> Tensor:
        """The scale of every number, [b, h, n, d] or what broadcasts to it."""
        parts = self._parts(x)
        if len(parts) == 1:
            return scale
        repeats = torch.tensor(parts, dtype=torch.long, device=scale.device)
        return scale.repeat_interleave(repeats, -1)


def storages(stored: str | None, key_parts: Sequence[int] | None) -> tuple[Storage, Storage]:
    """How keys and how values are kept."""
    if key_parts is not None and stored != "int8":
        raise ConfigError(f"key_parts={tuple(key_parts)}: parts have scales of their own only with stored='int8'")
    if stored is None:
        return AsGiven(), AsGiven()
    if stored == "int8":
        return Eight(key_parts), Eight()
    if stored not in CACHE_BYTES:
        raise ConfigError(f"stored={stored!r}: expected None (as it comes) or one of {', '.join(CACHE_BYTES)}")
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
        return self._storage.decode([part[:, :, : self.length] for part in self._parts], self._dtype)

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
