"""How a cache stores vectors: in which format, and in memory that grows and that copies share."""

import math
import os
from collections.abc import Sequence
from functools import cache
from threading import Lock
from typing import Protocol

import torch
from torch import Tensor

from headwise.costs.work import CACHE_BYTES
from headwise.errors import ConfigError, DTypeError, ShapeError, check_sequence, check_whole
from headwise.kernels.quantized import QuantizedKV, Vectors


class Storage(Protocol):
    """Encodes keys or values to the tensors that are stored; all have the tokens at axis 2."""

    differentiable: bool  # whether gradients flow through it

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
        if math.isfinite(float(kept.detach().sum())):  # that of finite numbers may overflow too
            return (kept,)
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
    """Stored as `QuantizedKV`, with an error of at most max|x| / 254 per vector beside the rounding of float32. widths:
    of the parts of a vector with a scale each; None for one scale."""

    differentiable = False

    def __init__(self, widths: Sequence[int] | None = None) -> None:
        self.widths: list[int] | None = None
        if widths is not None:
            entries = check_sequence("cache", "key_parts", widths, "widths of the parts of a key, such as (512, 64)")
            self.widths = [check_whole("cache", "key_parts", width, 0) for width in entries]

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
    """Return the storage of keys and of values: one object if it encodes both in the same way."""
    if stored is not None and not (isinstance(stored, str) and stored in CACHE_BYTES):
        raise ConfigError(
            f"stored={stored!r}: expected None (the dtype of the keys) or one of {', '.join(CACHE_BYTES)}"
        )
    if key_parts is not None and stored != "int8":
        raise ConfigError(f"key_parts={key_parts!r}: separate scales per part require stored='int8'")
    if stored is None:
        return AsGiven(), AsGiven()
    if key_parts is not None:
        return Quantized(key_parts), Quantized()
    both = Quantized() if stored == "int8" else Rounded(getattr(torch, stored))
    return both, both


_CLAIM = Lock()
if hasattr(os, "register_at_fork"):  # a lock that another thread holds at a fork would stay locked in the child
    os.register_at_fork(before=_CLAIM.acquire, after_in_parent=_CLAIM.release, after_in_child=_CLAIM.release)


class Room:
    """Memory that caches share: `parts` [b, h, capacity, …], how many are `written`, whether another refers to it."""

    def __init__(self, parts: Sequence[Tensor], written: int) -> None:
        self.parts, self.written, self.shared = tuple(parts), written, False
        self._inference = not torch.compiler.is_compiling() and any(part.is_inference() for part in parts)

    @property
    def capacity(self) -> int:
        """The number of vectors that fit."""
        return self.parts[0].shape[2]

    @property
    def differentiable(self) -> bool:
        """Whether gradients flow to what it holds: it must then not be written to."""
        return any(part.requires_grad for part in self.parts)

    def writable(self, at: int) -> bool:
        """Whether vectors from `at` on can be written without a change of what others hold or were given."""
        if self.differentiable:
            return False
        if torch.compiler.is_compiling():
            forbidden = self._inference  # a graph cannot ask for the mode
        else:  # PyTorch forbids to write to tensors of `torch.inference_mode` outside of it
            forbidden = not torch.is_inference_mode_enabled() and any(part.is_inference() for part in self.parts)
        if forbidden or at >= self.written:
            return not forbidden
        if self.shared or torch.compiler.is_compiling() or not all(type(part) is Tensor for part in self.parts):
            return False
        alone = _references_alone()  # no other tensor refers to the memory, such as a view that an attention map holds
        return all(_references(part) == alone for part in self.parts)

    def claimed(self, at: int, stop: int) -> bool:
        """`writable(at)`; the vectors up to `stop` are then the caller's: caches of other threads have to move."""
        if torch.compiler.is_compiling():  # a graph has no locks
            return self.writable(at)
        with _CLAIM:
            if not self.writable(at):
                return False
            self.written = stop
            return True

    def write(self, at: int, new: Sequence[Tensor]) -> None:
        """Write vectors [b, h, n, …] from `at` on, through `.data`: those before, of which maps hold views, stay."""
        self.written = at + new[0].shape[2]
        self.overwrite(at, new)

    def overwrite(self, at: int, new: Sequence[Tensor]) -> None:
        """`write` between vectors that have been written."""
        end = at + new[0].shape[2]
        for part, x in zip(self.parts, new, strict=True):
            part = part if torch.compiler.is_compiling() else part.data
            part[:, :, at:end] = x


def _references(x: Tensor) -> int:
    """How many tensors and Python objects refer to the memory of x; 0 if PyTorch does not say."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return 0 if count is None else int(count(x.untyped_storage()._cdata))


@cache
def _references_alone() -> int:
    """The same for a tensor without views."""
    return _references(torch.empty(1, device="cpu")) or -1
