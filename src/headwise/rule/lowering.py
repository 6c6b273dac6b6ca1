"""A `Rule` as tensors in a fixed form for compiled kernels, O(n) numbers for most rules."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, reduce

import torch
from torch import Tensor

from headwise.fields import inside
from headwise.masks import Grid, Mask, Span, conjuncts, spans
from headwise.rule import TILE_ELEMENTS, Rule, add_diagonals
from headwise.scores import Terms


@dataclass(frozen=True)
class Lowered:
    """A rule as tensors. Query i may attend to key j if j is in a span of i and `dense`, if not None, allows it. The
    tensors are differentiable functions of those of the scores."""

    spans: Tensor  # int32 [b or 1, n, K, 2] on the CPU, contiguous: as in `masks.spans`
    dense: Tensor | None = None  # bool [b or 1, h or 1, n, m], a mask given by the caller beside the spans
    soft_cap: float = 0.0  # 0.0 for none
    relative: Tensor | None = None  # float32 [h or 1, n + m − 1], contiguous; entry j − i + n − 1 is added to S_ij
    bias: Tensor | None = None  # float32 [b or 1, h or 1, n or 1, m or 1], the sum of all `Bias`es
    sinks: Tensor | None = None  # float32 [h]


def lowered(rule: Rule) -> Lowered | str:
    """`lower(rule)` on the CPU, cached: computing spans may take longer than a call."""
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
    # On the CPU, whatever PyTorch's default is; its mode makes each operation take some microseconds more, and most
    # programs do without.
    with nullcontext() if torch.empty(0).is_cpu else torch.device("cpu"):
        for mask in conjuncts(rule.mask) if ranges is None else ():
            if mask.value and Rule(mask, 1.0, grid).is_full():  # such as Causal() for one query
                continue
            found = mask.spans(grid)
            if found is not None:
                ranges = found if ranges is None else spans.intersect(ranges, found)
            elif (boolean := _as_dense(mask, grid)) is not None:
                dense = boolean if dense is None else dense & boolean
            else:
                return f"the mask {mask!r} does not allow each query a few ranges of keys"
        if ranges is None:
            ranges = torch.tensor([0, grid.m], dtype=torch.int32).expand(1, grid.n, 1, 2)
    terms = _without_split(rule.terms(torch.empty(0, dtype=torch.float32, device=device)), grid)
    if isinstance(terms, str):
        return terms
    if len(terms.biases) > 1:
        shape = torch.broadcast_shapes(*(bias.shape for bias in terms.biases))
        held = sum(bias.numel() for bias in terms.biases)
        if math.prod(shape) > held + grid.b * grid.h * (grid.n + grid.m):
            given = " and ".join(str(tuple(bias.shape)) for bias in terms.biases)
            return f"the sum of biases of shapes {given} would have shape {tuple(shape)}"
    floats = [bias.to(device).float() for bias in terms.biases]
    bias = reduce(torch.add, floats) if floats else None
    relative = None if terms.relative is None else terms.relative.contiguous()
    dense = None if dense is None else dense.to(device)
    return Lowered(ranges.contiguous(), dense, terms.soft_cap, relative, bias, terms.sinks)


def _without_split(terms: Terms, grid: Grid) -> Terms | str:
    """The terms with distances that have a gap as a bias, or why they do not become one."""
    if not terms.split or terms.relative is None:
        return terms
    shape = 1, len(terms.relative), grid.n, grid.m
    if math.prod(shape) > TILE_ELEMENTS:
        return f"distances with a gap before key {terms.split} would be a bias of shape {shape}"
    bias = next(terms.added(Span(0, grid.n), Span(0, grid.m)))
    return replace(terms, relative=None, biases=(*terms.biases, bias), split=0)


def requested(terms: Terms, wanted: Sequence[bool]) -> tuple[bool, bool, bool]:
    """Which gradients of `Lowered` (relative, bias, sinks) are needed for the wanted (relative, sinks, *biases)."""
    of_relative, of_sinks, *of_biases = wanted
    as_bias = of_relative and terms.split > 0
    return of_relative and not as_bias, as_bias or any(of_biases), of_sinks


def of_terms(
    terms: Terms, wanted: Sequence[bool], relative: Tensor | None, bias: Tensor | None
) -> tuple[Tensor | None, list[Tensor | None]]:
    """The gradients of relative and of each bias of the terms, from those of `Lowered` that are `requested`."""
    of_relative, _, *of_biases = wanted
    if of_relative and terms.split and terms.relative is not None and bias is not None:
        relative = torch.zeros_like(terms.relative, dtype=bias.dtype)
        add_diagonals(relative, terms, bias, Span(0, bias.shape[2]), Span(0, bias.shape[3]))
    biases = [
        bias.sum_to_size(one.shape).to(one.dtype) if want and bias is not None else None
        for one, want in zip(terms.biases, of_biases, strict=True)
    ]
    return relative, biases


def _as_dense(mask: Mask, grid: Grid) -> Tensor | None:
    """The mask as a boolean tensor if it contains a boolean mask, so that the caller already stores n×m entries."""
    if mask.boolean is not None:
        return mask.boolean
    for one in inside(mask):
        if isinstance(one, Mask) and one.boolean is not None:
            device = one.boolean.device
            return mask.allowed(torch.arange(grid.n, device=device), torch.arange(grid.m, device=device), grid)
    return None
