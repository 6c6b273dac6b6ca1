"""The base class of score modifications."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from headwise.errors import ConfigError, DeviceError, DTypeError, ShapeError, check_declared
from headwise.fields import Described, Inner, Section, Whole
from headwise.masks import Grid, Span
from headwise.scores.terms import Terms, beside


class Score(Described, ABC):
    """Base of the objects in `score=(…)`.

    A class declares `holds` (its fields, see `headwise.fields`), `placed` and `terms`. A score differs between
    batch entries, heads, queries and keys by fields with those axes, and by distance if it is placed.
    `register` lets files contain it.
    """

    known: ClassVar[dict[str, type["Score"]]] = {}
    called = "score"
    repeats: ClassVar[bool] = False  # whether one call may have two of the class
    placed: ClassVar[bool]  # whether it depends on the positions of queries and keys

    def __init_subclass__(cls, abstract: bool = False) -> None:
        super().__init_subclass__()
        if not abstract:
            check_declared(cls, Score, {
                "holds": "the arguments of its constructor as fields",
                "placed": "whether it depends on the positions of queries and keys",
                "terms": "the terms that kernels add",
            })  # fmt: skip
            if cls.holds is None:
                raise ConfigError(
                    f"class {cls.__name__}(Score): holds=None; expected its fields, for the parts of heads and blocks"
                )

    @abstractmethod
    def terms(self, grid: Grid, like: Tensor) -> Terms:
        """Return the terms of the score over a grid, in the dtype and on the device of `like`, with their graph.
        Biases may have other dtypes."""

    def check(self, grid: Grid, device: torch.device) -> None:
        """Raise ShapeError or DeviceError if the score does not fit a matrix of this size."""

    def part(self, rows: Span, cols: Span, grid: Grid) -> "Score | None":
        """Return the score of a rectangle, for `grid.part(rows, cols)`; None if it belongs to whole rows, and is added
        once when rectangles are merged."""
        return self.cut({"n": Section(*rows, grid.n), "m": Section(*cols, grid.m)})

    def with_gap(self, gap: Span, grid: Grid) -> "Score":
        """Return the score of the keys that remain, a matrix of the size of `grid`, when a range of keys before all
        queries is dropped."""
        return WithGap(self, gap.start, gap.size) if self.placed else self

    def terms_with_gap(self, gap: Span, grid: Grid, like: Tensor) -> Terms:
        """Return the terms of `with_gap(gap, grid)`: by default, those over the keys on each side of the gap."""
        whole = grid.with_dropped(gap.size)
        rows, before, after = Span(0, grid.n), Span(0, min(gap.start, grid.m)), Span(gap.stop, whole.m)
        found = [
            part.terms(whole.part(rows, cols), like)
            for cols in (before, after)
            if cols.start < cols.stop and (part := self.part(rows, cols, whole)) is not None
        ]
        if len(found) < 2:
            return found[0] if found else Terms(grid.n)
        return beside(found[0], found[1], (before.stop, grid.m - before.stop))

    @property
    def kind(self) -> type["Score"]:
        """The class that `repeats` is a property of."""
        return type(self)

    def kept(self) -> "Score":
        """Return the score for a map: detached, and independent of later optimizer steps."""
        return self.mapped(_kept)


@dataclass(frozen=True)
class WithGap(Score):
    """The rest of a score when a range of keys before all queries is dropped, as by a cache.

    Args:
        whole: the score over all keys.
        start, count: the first of the dropped keys, and how many they are.
    """

    whole: Score
    start: int
    count: int
    placed = True
    holds = {"whole": Inner(Score), "start": Whole(), "count": Whole()}

    @property
    def kind(self) -> type[Score]:
        return self.whole.kind

    def check(self, grid: Grid, device: torch.device) -> None:
        if self.count < 0 or not 0 <= self.start <= max(0, grid.shift):
            raise ShapeError(
                f"score={self!r}: a gap of {self.count} keys before key {self.start}, and the first query is at key "
                f"{grid.shift}; expected a gap before all queries"
            )
        self.whole.check(grid.with_dropped(self.count), device)

    def terms(self, grid: Grid, like: Tensor) -> Terms:
        return self.whole.terms_with_gap(Span(self.start, self.start + self.count), grid, like)

    def part(self, rows: Span, cols: Span, grid: Grid) -> Score | None:
        part = self.whole.part(rows, Span(cols.start, cols.stop + self.count), grid.with_dropped(self.count))
        return None if part is None else WithGap(part, max(0, self.start - cols.start), self.count)

    def __repr__(self) -> str:
        return f"{self.whole!r}.with_gap({self.start}:{self.start + self.count})"


def check_scores(scores: object, grid: Grid, device: torch.device) -> tuple[Score, ...]:
    """Return `score=…` as a tuple; raises for scores that do not fit the grid, and for repeated ones."""
    given = listed(scores)
    for at, score in enumerate(given):
        if not score.kind.repeats and any(other.kind is score.kind for other in given[:at]):
            raise ConfigError(f"score: two of {score.kind.__name__}; expected at most one")
        score.check(grid, device)
    return given


def listed(scores: object) -> tuple[Score, ...]:
    """Return `score=…` as a tuple; DTypeError for anything but scores."""
    given = (scores,) if isinstance(scores, Score) else scores
    if not isinstance(given, Sequence) or not all(isinstance(score, Score) for score in given):
        raise DTypeError(f"score: expected headwise scores such as (SoftCap(30.0),), got {scores!r}")
    return tuple(given)


def check_floats(name: str, values: Sequence[float] | Tensor, ndim: int) -> Tensor:
    """Return floating-point numbers as a tensor; DTypeError or ShapeError naming them otherwise."""
    if not isinstance(values, Tensor):
        values = torch.tensor(values, dtype=torch.float64).float() if ndim == 1 else torch.as_tensor(values)
    if not values.is_floating_point():
        raise DTypeError(f"{name}: expected floating numbers, got {values.dtype}")
    if values.ndim != ndim:
        raise ShapeError(f"{name}: expected {ndim} dimension{'s' * (ndim > 1)}, got shape {tuple(values.shape)}")
    return values


def check_device(name: str, values: Tensor, device: torch.device) -> None:
    """Raise DeviceError if values are not on q's device."""
    if values.device != device:
        raise DeviceError(f"score={name} is on {values.device}, but q is on {device}; move them to one device")


def _kept(values: Tensor) -> Tensor:
    """Return values detached, and copied if they are a parameter or a view of one, which training would change."""
    still = values.detach()
    # torch.compile does not support _is_view.
    shared = values.is_leaf or torch.compiler.is_dynamo_compiling() or values._is_view()
    return still.clone() if values.requires_grad and shared else still
