"""Maps of large logits, and what must hold for them against float64."""

from typing import Any

import torch
from torch import Tensor

import headwise as hw
from headwise.map import AttentionMap

KINDS = "equal", "near ties", "random", "negative", "one key"


def vectors(kind: str, size: float, d: int, n: int, m: int) -> tuple[Tensor, Tensor]:
    """q [1, 2, n, d] and k [1, 2, m, d] whose largest logit without a scale is about `size`."""
    generator = torch.Generator().manual_seed(d + n)
    q, k = torch.randn(1, 2, n, d, generator=generator), torch.randn(1, 2, m, d, generator=generator)
    if kind != "random":
        spread = torch.randn(1, 2, m, 1, generator=generator) * (1 / max(size, 1e3) if kind == "near ties" else 0.0)
        k = k[:, :, :1] * (1 + spread)
    if kind == "negative":
        q = -q * (q * k[:, :, :1]).sum(-1, keepdim=True).sign()
    if kind == "one key":
        k[:, :, 1:] *= 0.01
    return q * (size / (q @ k.mT).abs().max()), k


def made(q: Tensor, k: Tensor, kernel: str, **options: Any) -> AttentionMap:
    return hw.attend(q, k, k, scale=1.0, kernel=kernel, return_map=True, **options)[1]


def off(weights: Tensor, q: Tensor, k: Tensor, *biases: Tensor) -> tuple[float, float]:
    """How far rows are from a sum of 1, and weights from float64: relative, in units of 16·2⁻²⁴·max|S|, of
    at least 2: exp and sums are rounded, too."""
    scores = q.double() @ k.double().mT + sum(bias.double() for bias in biases)
    exact = scores.softmax(-1)
    relative = ((weights.double() - exact).abs() / exact)[exact > 1e-30].max()
    return float((weights.double().sum(-1) - 1).abs().max()), float(
        relative / (16 * 2.0**-24 * scores.abs().max().clamp_min(2.0))
    )
