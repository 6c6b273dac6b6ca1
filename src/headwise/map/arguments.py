"""The arguments of attention: their checks, their rule, and masks given as tensors, without n×m copies.

Masks are given as in PyTorch and transformers: boolean, added to the scores, padding. Most functions of them take
`before`: the number of keys that precede those of the mask, which every query may attend to. If the values of a mask
match a shorter form, such as `Lengths`, that is returned, unless they are unknown, as in a graph.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from headwise.errors import ConfigError, DTypeError, ShapeError
from headwise.kernels.graph import has_no_numbers, in_graph
from headwise.kernels.quantized import QuantizedKV, Vectors
from headwise.masks import Causal, Dense, Everything, Grid, Mask, Span
from headwise.masks.given import shortest_boolean, shortest_padding
from headwise.masks.grid import NO_GAP
from headwise.rule import Rule, check_vectors
from headwise.scores import Bias, Score, check_scores
from headwise.stats import Measure

CAUSAL = Causal()


def rule_of(
    q: Tensor, k: Vectors, v: Vectors, mask: Mask | None, scale: float | None, score: Score | Sequence[Score],
    dropout_p: float, graph: bool = False, gap: tuple[int, int] | None = None,
) -> Rule:  # fmt: skip
    """Validate the arguments, except for the mask's data, and return their rule. In a graph, sizes may be symbolic."""
    _check_tensors(q, k, v)
    b, h, n, d = q.shape
    m = k.shape[2]
    check_mask(mask)
    if d == 0 and scale is None:
        raise ShapeError("q: head_dim is 0, so the default scale 1/√d is undefined; pass scale=")
    if scale is not None:
        _check_number("scale", scale)
        if not math.isfinite(scale):
            raise ConfigError(f"scale={scale}: expected a finite number")
    _check_number("dropout_p", dropout_p)
    if not 0.0 <= dropout_p < 1.0:
        raise ConfigError(f"dropout_p={dropout_p}: expected 0 <= dropout_p < 1")
    mask = Everything() if mask is None else mask
    scale = 1.0 / math.sqrt(d) if scale is None else float(scale)
    if score == () and not graph and gap is None and mask.value:
        return _plain_rule(mask, scale, b, h, n, m)
    grid = Grid(b, h, n, m) if gap is None else Grid(b, h, n, m, gap=_checked_gap(gap, m - n))
    return Rule(mask, scale, grid, check_scores(score, grid, q.device))


@lru_cache(maxsize=64)
def _plain_rule(mask: Mask, scale: float, b: int, h: int, n: int, m: int) -> Rule:
    """Cached for repeated calls, such as those of a model's layers: a small call takes less time than creating it."""
    return Rule(mask, scale, Grid(b, h, n, m))


def _check_tensors(q: Tensor, k: Vectors, v: Vectors) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor if name == "q" else (Tensor, QuantizedKV)):
            raise DTypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    check_vectors(q, k, v)


def check_mask(mask: object) -> None:
    """Raise DTypeError if this is not a mask; whether it matches the sizes is checked later."""
    if mask is not None and not isinstance(mask, Mask):
        hint = "; wrap a boolean tensor (True = may attend) in Dense(…)" if isinstance(mask, Tensor) else ""
        raise DTypeError(f"mask: expected a headwise mask such as Causal(), got {type(mask).__name__}{hint}")


def check_measures(measures: Sequence[str | Measure], return_map: bool, differentiable: bool = False) -> None:
    """Raise ConfigError for measures, or gradients, without a map."""
    if differentiable and not return_map:
        raise ConfigError("differentiable=True requires return_map=True: it is the map that has gradients")
    if measures and not return_map:
        raise ConfigError("measures=… requires return_map=True: the results are stored in the map, as map.measured")


def _check_number(name: str, value: Any) -> None:
    """Raise ConfigError for what is neither a number nor a tensor of one without gradients."""
    if isinstance(value, (float, torch.SymFloat, torch.SymInt)):
        return
    if isinstance(value, Tensor) and value.requires_grad:
        raise ConfigError(
            f"{name}: a tensor that requires gradients, which would not reach it; for a learned scale, multiply q by "
            f"it, and give scale=1"
        )
    try:
        if not isinstance(value, (str, bytes, bytearray)):
            float(value)
            return
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass
    raise ConfigError(f"{name}={value!r}: expected a number")


def _checked_gap(gap: Any, most: int) -> Span:
    """The gap of `attend`, checked; `most`: the keys before all queries."""
    try:
        start, stop = gap
        fits = 0 <= start <= stop and (start <= most or stop == start)
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise ConfigError(
            f"gap={gap!r}: expected (start, stop) with 0 <= start <= stop, start <= {most}: tokens before all queries"
        )
    return Span(start, stop) if start < stop else NO_GAP


def torch_arguments(
    q: Tensor, k: Vectors, v: Vectors, mask: Mask | Tensor | None, is_causal: bool, score: Score | Sequence[Score]
) -> tuple[Mask | None, Score | Sequence[Score]]:
    """Convert `mask=<tensor>` and `is_causal=True` to a mask and scores."""
    if isinstance(mask, Tensor):
        _check_tensors(q, k, v)
        b, h, n, _ = q.shape
        grid = Grid(b, h, n, k.shape[2])
        mask, bias = of_argument(mask, grid)
        if bias:
            score = (*check_scores(score, grid, q.device), *bias)
    if not is_causal:
        return mask, score
    check_mask(mask)
    return (CAUSAL if mask is None else mask & CAUSAL), score


def of_argument(given: Tensor, grid: Grid) -> tuple[Mask | None, tuple[Score, ...]]:
    """The mask and the scores of `mask=<tensor>` as `F.scaled_dot_product_attention` defines it: broadcastable to [b,
    h, n, m], boolean (True = may attend), or floating point and added, with gradients; −∞ masks a key."""
    if given.dtype != torch.bool and not given.is_floating_point():
        raise DTypeError(
            f"mask: expected a boolean tensor (True = may attend) or a floating point one (added to the scores), got "
            f"{given.dtype}"
        )
    full = tuple(grid)
    shape = (1,) * (4 - given.ndim) + tuple(given.shape)
    if len(shape) > 4 or any(size not in (1, whole) for size, whole in zip(shape, full, strict=True)):
        hint = "; a mask per batch entry has shape [b, 1, n, m]" if given.ndim == 3 else ""
        raise ShapeError(
            f"mask: a tensor of shape {tuple(given.shape)} does not broadcast to [b, h, n, m] = {list(full)}{hint}"
        )
    b, _, n, m = full
    cells = given.reshape(shape).expand(-1, -1, -1, m)
    if shape[1] == shape[2] == 1:
        cells = cells.expand(b, -1, -1, -1)  # padding has a length for each batch entry
    if given.is_floating_point():
        return of_additive(cells, n)
    return (of_padding(cells[:, 0, 0], n) if shape[1] == shape[2] == 1 else of_boolean(cells.expand(-1, -1, n, -1))), ()


def of_padding(real: Tensor, n: int, before: int = 0) -> Mask | None:
    """The mask of a padding mask [b, m], True for tokens, for n queries."""
    if _unknown(real):
        return Dense(pad(real, (before, 0), value=True)[:, None, None, :].expand(-1, 1, n, -1))
    return shortest_padding(real, n, before)


def of_boolean(allowed: Tensor, before: int = 0) -> Mask | None:
    """The mask of a boolean tensor [b or 1, h or 1, n, m], True = may attend."""
    return Dense(pad(allowed, (before, 0), value=True)) if _unknown(allowed) else shortest_boolean(allowed, before)


def of_additive(
    values: Tensor, n: int, before: int = 0, lowest: float = -torch.inf
) -> tuple[Mask | None, tuple[Score, ...]]:
    """The mask and scores of values [b or 1, h or 1, n or 1, m] that are added to scores: values ≤ `lowest` mask a key,
    the others become a `Bias`, with gradients. NaN is kept and spreads to the output."""
    hidden = values.detach() <= lowest
    mask = None
    unknown = _unknown(values)
    if unknown or bool(hidden.any()):
        rows = hidden.shape[2]
        mask = (
            of_padding(~hidden[:, 0, 0], n, before)
            if rows < n and hidden.shape[1] == 1
            else of_boolean(~hidden.expand(-1, -1, n, -1), before)
        )
    rest = values.masked_fill(hidden, 0.0)
    if not unknown and not rest.requires_grad and bool((rest == 0.0).all()):
        return mask, ()
    return mask, (Bias(pad(rest, (before, 0)) if before else rest),)


def _unknown(x: Tensor) -> bool:
    """Whether the values of a mask are unknown: a graph must hold for all values, and fake tensors have none."""
    return in_graph() or has_no_numbers(x)
