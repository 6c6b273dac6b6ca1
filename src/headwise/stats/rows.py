"""Numbers of rows without the weights: values that follow from one statistic, and counts that follow from the rule.

A measure that declares its value so (`RowMeasure.row_value`) can be reduced over the rows by compiled code, together
with others: in small calls, tensor operations for each measure take longer than the attention.

Counts are O(n) from the spans of the mask. A mask that also holds a boolean n×m has no such form; `ranges` is then
None, and the measures that need it read the tiles.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.lowering import lowered
from headwise.rule import Rule, sink_weight
from headwise.stats.statistic import Statistic


@dataclass(frozen=True, eq=False)
class Formula:
    """The value of a row as a function of a statistic x [b, h, n] and the log-sum-exp [b, h, n]."""

    name: str
    of: Callable[[Any, Tensor], Tensor]


SAME = Formula("same", lambda x, lse: x)
INVERSE = Formula("inverse", lambda x, lse: x.reciprocal())
SHARE = Formula("share", lambda x, lse: (x - lse).clamp_max(0.0).exp())  # of a logit x
LOGIT = Formula("logit", lambda x, lse: x - lse + lse)  # NaN where a score is
LOG_SUM = Formula("log_sum", lambda x, lse: lse)  # of no statistic


class RowValue(NamedTuple):
    """The value of each row."""

    formula: Formula  # of the statistic, and the log-sum-exp
    statistic: Statistic | None = None  # None if the formula has none
    counted: Tensor | None = None  # which rows, boolean [b or 1, 1, n] on the CPU; None: those not fully masked


class Reduced(NamedTuple):
    """Measures of rows, reduced over the rows of each head."""

    values: Tensor  # float32 [s, b, h]
    sums: Tensor  # of what they are, float64 [2, s, b, h]: the sum or largest of the rows that count, and their number
    nonfinite: Tensor  # int64 [b, h], the rows whose log-sum-exp is NaN or infinite


class ToReduce(NamedTuple):
    """A measure of rows to be reduced: its value, the statistic's numbers [b, h, n] or None, and how."""

    value: RowValue
    x: Tensor | None
    largest: bool


Reduce = Callable[[Tensor, Sequence[ToReduce]], Reduced | None]  # from the log-sum-exp; None: not possible

DEFINED_WITH = "value", "counted", "from_rows", "row_values", "needs"


@cache
def declares_value(kind: type) -> bool:
    """Whether the class's `row_value` is still that of its other methods, which no subclass overrides alone."""
    order = kind.__mro__

    def place(name: str) -> int:
        return next(i for i, one in enumerate(order) if name in vars(one))

    return place("row_value") <= min(map(place, DEFINED_WITH))


def ranges(rule: Rule) -> Tensor | None:
    """Half-open ranges of keys that each query may see, int32 [b or 1, n, K, 2], or None."""
    found = lowered(rule)
    return None if isinstance(found, str) or found.dense is not None else found.spans


def allowed_keys(rule: Rule, like: Tensor) -> Tensor:
    """How many keys each query may see, [b or 1, 1, n]."""
    spans = _known(rule)
    return (spans[..., 1] - spans[..., 0]).sum(-1)[:, None].to(like)


def sees_offset(rule: Rule, offset: int) -> Tensor:
    """Whether each query may see the key at its position + offset, boolean [b or 1, 1, n] on the CPU. Made once for
    rules that share their spans, as those of calls alike do."""
    found = lowered(rule)
    kept: dict[tuple[int, int], Tensor] = found.__dict__.setdefault("_sees_offset", {})
    place = offset, rule.grid.shift
    if place not in kept:
        key = torch.arange(rule.grid.n, device="cpu") + rule.grid.shift + offset
        spans = _known(rule)
        kept[place] = ((key[:, None] >= spans[..., 0]) & (key[:, None] < spans[..., 1])).any(-1)[:, None]
    return kept[place]


def queries_of_keys(rule: Rule, like: Tensor) -> Tensor:
    """How many queries may see each key, [b, h, m] in float64."""
    b, h, _, m = rule.grid
    spans = _known(rule).long()
    change = torch.zeros(len(spans), m + 1, dtype=torch.float64, device="cpu")
    one = torch.ones((), dtype=torch.float64, device="cpu")
    change.scatter_add_(1, spans[..., 0].flatten(1), one.expand(len(spans), spans[..., 0][0].numel()))
    change.scatter_add_(1, spans[..., 1].flatten(1), -one.expand(len(spans), spans[..., 1][0].numel()))
    return change.cumsum(1)[:, None, :m].to(like.device).expand(b, h, m)


def same_label(rule: Rule, keys: Tensor, queries: Tensor, ahead: int, like: Tensor) -> Tensor:
    """How many of the keys j < position + ahead that each query may see have its integer label, [b or 1, 1, n]; keys [b
    or 1, m], queries [b or 1, n], −1 is no label."""
    spans = _known(rule).long()
    b, m = max(len(spans), len(keys)), rule.grid.m
    stop = torch.minimum(spans[..., 1], (rule.grid.positions() + ahead)[:, None])
    # A label and a place as one number: those of a label lie together, in the order of their places.
    places = (keys.long() * (m + 1) + torch.arange(m, device="cpu")).sort(-1).values.expand(b, -1).contiguous()
    labels = queries.long()[..., None] * (m + 1)
    first, last = (
        torch.searchsorted(places, (labels + ends).expand(b, -1, -1).flatten(1).contiguous())
        for ends in (spans[..., 0], torch.maximum(stop, spans[..., 0]))
    )
    count = (last - first).view(b, *spans.shape[1:3]).sum(-1) * (queries >= 0)
    return count[:, None].to(like)


def row_mass(rule: Rule, lse: Tensor) -> Tensor:
    """Σ_j p_ij, [b, h, n]: 1, or what a learned sink leaves; 0 for a fully masked query."""
    sees = (lse != -torch.inf).to(lse.dtype)
    return sees * (1.0 - learned_sink(rule, lse)).clamp_min(0.0)


def learned_sink(rule: Rule, lse: Tensor) -> Tensor:
    """What a learned sink takes of each row, [b, h, n]; 0 without one."""
    sinks = rule.terms(lse[..., :0]).sinks
    return torch.zeros_like(lse) if sinks is None else sink_weight(sinks, lse)


def _known(rule: Rule) -> Tensor:
    spans = ranges(rule)
    assert spans is not None  # callers check `ranges` first
    return spans
