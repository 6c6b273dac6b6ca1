"""Vectors quantized to 8-bit integers with scales, for KV caches; `attend` accepts them as k and v.

>>> import torch, headwise as hw
>>> q, k, v = torch.randn(1, 32, 1, 64), torch.randn(1, 8, 999, 64), torch.randn(1, 8, 999, 64)
>>> keys, values = hw.kernels.QuantizedKV.of(k), hw.kernels.QuantizedKV.of(v)
>>> out = hw.attend(q, keys, values)                      # the same as with keys.decoded(), values.decoded()
>>> (out - hw.attend(q, k, v)).abs().max() < 0.05
tensor(True)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headwise.errors import DTypeError, ShapeError

LEVELS = 127  # levels of int8 on either side of 0


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedKV:
    """Each vector x as round(x / s) in int8 and its scale s = max|x| / 127 in float32 (absmax quantization,
    Dettmers et al. 2022, 2208.07339, §2): an error of at most s / 2 = max|x| / 254, plus float32 rounding.

    `attend` and the layers' caches accept it in place of its `decoded()`. The compiled CPU kernel reads the int8
    values without dequantizing them first (few queries, no gradients), a quarter of the memory traffic of float32.

    Attributes:
        steps: int8 [b, h, m, d]. scales: float32 [b, h, m, parts].
        parts: widths of the parts of a vector, each with its own scale; without empty parts.
        dtype: dtype of the original vectors and of `decoded()`.
    """

    steps: Tensor
    scales: Tensor
    parts: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, x: Tensor, parts: Sequence[int] | None = None) -> "QuantizedKV":
        """Quantize x [b, h, m, d].

        Args:
            parts: widths of the parts of a vector, each with its own scale; None for one scale.
        Raises:
            DTypeError: if x has non-finite values. ShapeError: if the parts do not add up to the width of x.
        """
        x = x.detach()
        width = x.shape[-1]
        given = (width,) if parts is None else tuple(parts)
        if sum(given) != width:
            raise ShapeError(f"parts={given} add up to {sum(given)}, but a vector has {width} entries")
        widths = tuple(part for part in given if part)  # an empty part has no scale
        scales = _largest(x, widths).float().div_(LEVELS)
        if not math.isfinite(float(scales.sum())) and not bool(torch.isfinite(scales).all()):  # a sum may overflow
            count = int((~torch.isfinite(x)).sum())
            what = f"{count} of the new values are infinite or NaN" if count else "a value exceeds the float32 range"
            raise DTypeError(f"{what} and cannot be quantized")
        steps = x / _over(scales, widths).clamp_min(1e-45)  # in float32 at least
        return cls(steps.round_().clamp_(-LEVELS, LEVELS).to(torch.int8), scales, widths, x.dtype)

    def __post_init__(self) -> None:
        steps, scales = self.steps, self.scales
        if steps.dtype != torch.int8 or scales.dtype != torch.float32:
            raise DTypeError(
                f"QuantizedKV: got steps of {steps.dtype} and scales of {scales.dtype}; expected int8 and float32"
            )
        if sum(self.parts) != steps.shape[-1] or scales.shape != (*steps.shape[:-1], len(self.parts)):
            raise ShapeError(
                f"QuantizedKV: steps {tuple(steps.shape)} and scales {tuple(scales.shape)} do not match parts "
                f"{self.parts}"
            )

    def decoded(self) -> Tensor:
        """Dequantize: steps times scales, [b, h, m, d] in `dtype`."""
        return (self.steps * _over(self.scales, self.parts)).to(self.dtype)

    def bound(self) -> Tensor:
        """Upper bound of |decoded() − x| for the x given to `of`, float64 [b, h, m, d]: half a step plus the rounding
        of float32 and of the dtype."""
        largest = _over(self.scales.double(), self.parts).expand(self.shape) * LEVELS
        dtype = torch.finfo(self.dtype)
        own = max(torch.finfo(torch.float32).eps, dtype.eps)
        subnormal = dtype.smallest_normal * dtype.eps  # the spacing of the dtype's subnormal numbers
        return largest / (2 * LEVELS) + largest * own + LEVELS * 1e-45 + subnormal

    def to(self, dtype: torch.dtype) -> "QuantizedKV":
        """The same quantized vectors with another `dtype`."""
        return self if dtype == self.dtype else replace(self, dtype=dtype)

    def clone(self) -> "QuantizedKV":
        """The same vectors with memory of their own."""
        return replace(self, steps=self.steps.clone(), scales=self.scales.clone())

    @property
    def shape(self) -> torch.Size:
        """[b, h, m, d]"""
        return self.steps.shape

    @property
    def ndim(self) -> int:
        """4"""
        return self.steps.ndim

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.steps.device

    @property
    def nbytes(self) -> int:
        """Size of steps and scales in bytes."""
        return self.steps.nbytes + self.scales.nbytes

    def __repr__(self) -> str:
        return f"QuantizedKV({'×'.join(map(str, self.shape))} {self.dtype}, {len(self.parts)} scales per vector)"


Vectors = Tensor | QuantizedKV


def decoded(x: Vectors) -> Tensor:
    """Return x as a tensor, dequantized if it is quantized."""
    return x.decoded() if isinstance(x, QuantizedKV) else x


def in_memory(k: Vectors, v: Vectors) -> tuple[Any, ...]:
    """What a kernel reads of keys and values: steps and scales if both have one scale per vector, else k and v."""
    if type(k) is QuantizedKV and type(v) is QuantizedKV and len(k.parts) == len(v.parts) == 1:
        return k.steps, v.steps, k.scales, v.scales
    return k, v


def _largest(x: Tensor, widths: tuple[int, ...]) -> Tensor:
    if not widths:
        return x.new_zeros(*x.shape[:-1], 0)
    if len(widths) == 1:
        return x.abs().amax(-1, keepdim=True)
    return torch.stack([part.abs().amax(-1) for part in x.split(list(widths), -1)], -1)


def _over(scales: Tensor, widths: tuple[int, ...]) -> Tensor:
    """The scale of each entry, broadcastable to [b, h, m, d]."""
    if len(widths) == 1:
        return scales
    return scales.repeat_interleave(torch.tensor(widths, dtype=torch.long, device=scales.device), -1)
