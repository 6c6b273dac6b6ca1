"""A `Rule` as tensors in a fixed form for compiled kernels, O(n) numbers for most rules."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache, reduce

import torch
from torch import Tensor

from headwise.fields import inside
from headwise.masks import Grid, Mask, conjuncts, spans
from headwise.rule import Rule


@dataclass(frozen=True)
class Lowered:
    """A rule as tensors. Query i may attend to key j if j is in a span of i and `dense`, if not None, allows it.

    The tensors are differentiable functions of those of the scores.

    Attributes:
        spans: int32 [b or 1, n, K, 2], contiguous, on the CPU: half-open ranges of keys, sorted, disjoint, empty
            ones (0, 0) last.
        dense: bool [b or 1, h or 1, n, m], an n×m mask given by the caller that applies in addition to the spans, or
            None.
        soft_cap: 0.0 for none.
        relative: float32 [h or 1, n + m − 1], contiguous, or None; entry j − i + n − 1 is added to S_ij.
        bias: float32 [b or 1, h or 1, n or 1, m or 1], the sum of all `Bias`es, or None.
        sinks: float32 [h], or None.
    """

    spans: Tensor
    dense: Tensor | None = None
    soft_cap: float = 0.0
    relative: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None


def lowered(rule: Rule) -> Lowered | str:
    """`lower(rule)` on the CPU, cached: on the rule, or by value for masks without tensors, since a call may take less
    time than computing its spans."""
    found = rule.__dict__.get("_lowered")
    if found is None:
        plain, grid = not rule.scores and rule.mask.value, rule.grid
        found = _lowered_mask(rule.mask, grid.n, grid.m, grid.first) if plain else lower(rule)
        object.__setattr__(rule, "_lowered", found)
    return found


@lru_cache(maxsize=64)
def _lowered_mask(mask: Mask, n: int, m: int, first: int | None) -> Lowered | str:
    return lower(Rule(mask, 1.0, Grid(1, 1, n, m, first)))


def lower(rule: Rule, device: torch.device | str = "cpu") -> Lowered | str:
    """Return the rule as tensors, all but the spans on `device`, or the reason why it has no such form."""
    grid = rule.grid
    ranges: Tensor | None = None
    dense: Tensor | None = None
    if rule.scores and rule.mask.value:  # a backward pass lowers the rule again: use the cache
        plain = _lowered_mask(rule.mask, grid.n, grid.m, grid.first)
        if isinstance(plain, str):
            return plain
        ranges = plain.spans
    with torch.device("cpu"):  # regardless of PyTorch's default
        for mask in conjuncts(rule.mask) if ranges is None else ():
            found = mask.spans(grid)
            if found is not None:
                ranges = found if ranges is None else spans.intersect(ranges, found)
            elif (boolean := _as_dense(mask, grid)) is not None:
                dense = boolean if dense is None else dense & boolean
            else:
                return f"the mask {mask!r} does not allow each query a few ranges of keys"
        if ranges is None:
            ranges = torch.tensor([0, grid.m], dtype=torch.int32).expand(1, grid.n, 1, 2)
    terms = rule.terms(torch.empty(0, dtype=torch.float32, device=device))
    if len(terms.biases) > 1:
        shape = torch.broadcast_shapes(*(bias.shape for bias in terms.biases))
        held = sum(bias.numel() for bias in terms.biases)
        if math.prod(shape) > held + grid.b * grid.h * (grid.n + grid.m):
            given = " and ".join(str(tuple(bias.shape)) for bias in terms.biases)
            return f"the sum of biases of shapes {given} would have shape {tuple(shape)}"
    bias = joined(bias.to(device) for bias in terms.biases)
    relative = None if terms.relative is None else terms.relative.contiguous()
    dense = None if dense is None else dense.to(device)
    return Lowered(ranges.contiguous(), dense, terms.soft_cap, relative, bias, terms.sinks)


def joined(biases: Iterable[Tensor]) -> Tensor | None:
    """The sum of the biases in float32, or None if there are none."""
    floats = [bias.float() for bias in biases]
    return reduce(torch.add, floats) if floats else None


def _as_dense(mask: Mask, grid: Grid) -> Tensor | None:
    """The mask as a boolean tensor if it contains a boolean mask, so that the caller already stores n×m entries."""
    if mask.boolean is not None:
        return mask.boolean
    for one in inside(mask):
        if isinstance(one, Mask) and one.boolean is not None:
            device = one.boolean.device
            return mask.allowed(torch.arange(grid.n, device=device), torch.arange(grid.m, device=device), grid)
    return None
