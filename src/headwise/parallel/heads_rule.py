"""What some heads of an attention see of masks and scores that are given for all heads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headwise.cache import HeadWindows
from headwise.errors import ShapeError
from headwise.masks import (
    And,
    Causal,
    Dense,
    Documents,
    Everything,
    Grid,
    Lengths,
    Mask,
    Or,
    Sinks,
    Span,
    State,
    Window,
)  # fmt: skip
from headwise.scores import ALiBi, Bias, Relative, RelativeBias, Score, SinkLogits

_ALIKE = (Causal, Documents, Everything, Lengths, Sinks, Window)  # masks that know no heads


def mask_of_heads(mask: Mask, heads: range, num_heads: int) -> Mask:
    """A mask that is given for `num_heads` heads, as the heads of a range see it."""
    match mask:
        case And() | Or():
            left, right = (mask_of_heads(one, heads, num_heads) for one in (mask.left, mask.right))
            return type(mask)(left, right)
        case Dense() if mask.mask.shape[1] in (1, num_heads):
            return mask if mask.mask.shape[1] == 1 else Dense(mask.mask[:, heads.start : heads.stop])
        case HeadWindows() if len(mask.windows) == num_heads:
            return HeadWindows(mask.windows[heads.start : heads.stop], mask.sinks)
    return mask if type(mask) in _ALIKE else OfHeads(mask, heads, num_heads)


def scores_of_heads(
    scores: Score | Sequence[Score], heads: range, num_heads: int, enter: Callable[[Tensor], Tensor]
) -> tuple[Score, ...]:
    """Each of `score=…`, given for `num_heads` heads, as the heads of a range have it.

    Args:
        enter: what each tensor goes through before it is cut, such as one that adds up its gradients over ranks.
    """
    given = (scores,) if isinstance(scores, Score) else scores
    return tuple(_score(score, heads, num_heads, enter) for score in given)


def _score(score: Score, heads: range, num_heads: int, enter: Callable[[Tensor], Tensor]) -> Score:
    def cut(name: str, x: Tensor, axis: int) -> Tensor:
        if x.shape[axis] not in (1, num_heads) or (x.ndim == 1 and len(x) != num_heads):
            raise ShapeError(f"score={name}: shape {tuple(x.shape)} for the {num_heads} heads of all ranks together")
        x = enter(x)
        return x if x.shape[axis] == 1 < num_heads else x.narrow(axis, heads.start, len(heads))

    match score:
        case ALiBi():
            return ALiBi(cut("ALiBi(slopes)", score.slopes, 0))
        case RelativeBias():
            return RelativeBias(cut("RelativeBias(values)", score.values, 0), score.first)
        case Bias():
            return Bias(cut("Bias(values)", score.values, 1))
        case SinkLogits():
            return SinkLogits(cut("SinkLogits(logits)", score.logits, 0))
        case Relative():
            return RelativeOfHeads(score, heads, num_heads, enter)
    return score


@dataclass(frozen=True)
class OfHeads(Mask):
    """The rows of some heads of a mask of any class."""

    whole: Mask
    heads: range
    num_heads: int

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        found = self.whole.allowed(rows, cols, self._grid(grid))
        return found if found.shape[1] == 1 else found[:, self.heads.start : self.heads.stop]

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        return self.whole.state(rows, cols, self._grid(grid))

    def spans(self, grid: Grid) -> Tensor | None:
        return self.whole.spans(self._grid(grid))

    def check(self, grid: Grid) -> None:
        self.whole.check(self._grid(grid))

    def only(self, batch: int, head: int) -> Mask:
        return self.whole.only(batch, self.heads[head])

    def part(self, rows: Span, cols: Span, grid: Grid) -> Mask:
        return OfHeads(self.whole.part(rows, cols, self._grid(grid)), self.heads, self.num_heads)

    def _grid(self, grid: Grid) -> Grid:
        return replace(grid, h=self.num_heads)


class RelativeOfHeads(Relative):
    """The biases of some heads of a `Relative` of any class; arguments as in `scores_of_heads`."""

    def __init__(self, whole: Relative, heads: range, num_heads: int, enter: Callable[[Tensor], Tensor]) -> None:
        self.whole, self.heads, self.num_heads, self.enter = whole, heads, num_heads, enter

    def at(self, offset: Tensor, dtype: torch.dtype) -> Tensor:
        found = self.enter(self.whole.at(offset, dtype))
        return found if len(found) == 1 < self.num_heads else found[self.heads.start : self.heads.stop]

    def check(self, grid: Grid, device: torch.device) -> None:
        self.whole.check(replace(grid, h=self.num_heads), device)

    def only(self, batch: int, head: int) -> Score:
        return self.whole.only(batch, self.heads[head])

    def kept(self) -> Score:
        kept = self.whole.kept()
        assert isinstance(kept, Relative)
        return RelativeOfHeads(kept, self.heads, self.num_heads, self.enter)
