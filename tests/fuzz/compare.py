"""Comparing tensors, and what is raised where they differ."""

import torch
from torch import Tensor


class Mismatch(Exception):
    """Something differs from the oracle; `name` says what, the same for all sizes."""

    def __init__(self, name: str, told: str) -> None:
        super().__init__(f"{name}: {told}")
        self.name = name


def close(name: str, got: Tensor, expected: Tensor, limit: Tensor, where: Tensor | None = None) -> None:
    """Raise unless |got − expected| ≤ limit, at all places or those of `where`."""
    if got.shape != expected.shape:
        raise Mismatch(name, f"shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
    off = (got.detach().double() - expected).abs()
    wrong = ~(off <= limit)
    if where is not None:
        wrong &= where
    if bool(wrong.any()):
        excess = (off / limit.clamp_min(1e-300)).nan_to_num(torch.inf).masked_fill(~wrong, 0.0)
        at = tuple(int(x) for x in torch.unravel_index(excess.flatten().argmax(), got.shape))
        values = f"{got[at].item():.9g}, expected {expected[at].item():.9g} ± {limit[at].item():.2g}"
        raise Mismatch(name, f"{int(wrong.sum())} of {wrong.numel()} differ; at {list(at)}: {values}")


def same(name: str, got: Tensor, expected: Tensor) -> None:
    """Raise unless both are the same, NaN for NaN."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        raise Mismatch(name, f"{got.dtype} {tuple(got.shape)}, expected {expected.dtype} {tuple(expected.shape)}")
    differ = (got != expected) & ~(got.isnan() & expected.isnan()) if got.is_floating_point() else got != expected
    if bool(differ.any()):
        at = tuple(differ.nonzero()[0].tolist())
        told = f"{int(differ.sum())} of {differ.numel()} differ; at {list(at)}: {got[at].item()!r}"
        raise Mismatch(name, f"{told}, expected {expected[at].item()!r}")
