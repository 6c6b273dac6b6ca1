"""The base class of score modifications, and scores as terms that every kernel can compute."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar

import torch
from torch import Tensor

from headwise.errors import ConfigError, DeviceError, DTypeError, ShapeError, check_declared
from headwise.fields import Described, Inner, Section, Whole
from headwise.masks import Grid, Span


@dataclass(frozen=True)
class Terms:
    """One score, or all of a rule, as tensors with their graph.

    Attributes:
        n: queries.
        soft_cap: 0.0 for none.
        relative: [h or 1, n + m − 1] in the accumulating dtype, or None; entry j − i + n − 1 is added to S_ij.
        split: 0, or the first key after a gap in the distances. `relative` is then two such tables, one after the
            other, [h or 1, 2n + m − 2]: of the keys before it, and of the others. For one query both are one table.
        biases: each [b or 1, h or 1, n or 1, m or 1]; kept separate, as their sum may be larger than each of them.
        sinks: [h] in the accumulating dtype, or None.
    """

    n: int
    soft_cap: float = 0.0
    relative: Tensor | None = None
    biases: tuple[Tensor, ...] = ()
    sinks: Tensor | None = None
    split: int = 0

    def added(self, rows: Span, cols: Span) -> Iterator[Tensor]:
        """Yield what is added to a tile, each [b or 1, h or 1, r or 1, c or 1]."""
        if self.relative is not None:
            # Each row starts one entry before the row above it.
            parts = [
                self.relative[:, strip].unfold(-1, part.size, 1).flip(1)[None]
                for part, strip in self.strips(rows, cols)
            ]
            yield parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        for bias in self.biases:
            yield bias[cell(bias, rows, cols)]

    def added_at(self, i: Tensor, j: Tensor) -> Iterator[Tensor]:
        """Yield the same for any query and key indices, each [b or 1, h or 1, len(i) or 1, len(j) or 1]."""
        if self.relative is not None:
            yield self.relative[:, self.entries(i[:, None], j)][None]
        for bias in self.biases:
            tall = bias if bias.shape[2] == 1 else bias[:, :, i]
            yield tall if bias.shape[3] == 1 else tall[..., j]

    def entries(self, i: Tensor, j: Tensor) -> Tensor:
        """Return the entries of `relative` of pairs of query and key indices, which broadcast."""
        found = j - i + self.n - 1
        return found + (self.n - 1) * (j >= self.split) if self.split else found

    def strips(self, rows: Span, cols: Span) -> list[tuple[Span, slice]]:
        """Return the entries of `relative` that a tile reads: its diagonals, from the lower left on. A tile with keys
        on both sides of the split has two parts, each with its keys."""
        if cols.start < self.split < cols.stop:
            parts = Span(cols.start, self.split), Span(self.split, cols.stop)
            return [strip for part in parts for strip in self.strips(rows, part)]
        shift = self.n + (self.n - 1 if 0 < self.split <= cols.start else 0)
        return [(cols, slice(cols.start - rows.stop + shift, cols.stop - 1 - rows.start + shift))]


def together(n: int, terms: Iterable[Terms]) -> Terms:
    """Join the terms of several scores. ConfigError for two soft caps, or distances with different gaps."""
    given = list(terms)
    if len(given) == 1:
        return given[0]
    caps = [one.soft_cap for one in given if one.soft_cap]
    if len(caps) > 1:
        raise ConfigError(f"score: soft caps of {caps[0]} and {caps[1]}; expected at most one")
    splits = {one.split for one in given if one.split}
    if len(splits) > 1:
        raise ConfigError(f"score: distances with gaps before keys {sorted(splits)}; expected at most one gap")
    split = splits.pop() if splits else 0
    return Terms(
        n,
        caps[0] if caps else 0.0,
        _all(torch.add, [_split(one, split) for one in given]),
        tuple(bias for one in given for bias in one.biases),
        _all(torch.logaddexp, [one.sinks for one in given]),  # their weights are added
        split,
    )


def beside(before: Terms, after: Terms, widths: tuple[int, int]) -> Terms:
    """Join the terms that one score has over the first keys and over the others; `widths` counts both."""
    tables = [one.relative for one in (before, after) if one.relative is not None]
    biases = (
        torch.cat([bias.expand(-1, -1, -1, width) for bias, width in zip(pair, widths, strict=True)], -1)
        for pair in zip(before.biases, after.biases, strict=True)
    )
    split = widths[0] if tables and before.n > 1 else 0
    return Terms(
        before.n, before.soft_cap, torch.cat(tables, -1) if tables else None, tuple(biases), before.sinks, split
    )  # fmt: skip


def _split(terms: Terms, at: int) -> Tensor | None:
    """The `relative` of terms, as two tables if `at` is not 0."""
    table = terms.relative
    if table is None or at == terms.split:
        return table
    return torch.cat((table[:, : at + terms.n - 1], table[:, at:]), -1)


def _all(join: Callable[[Tensor, Tensor], Tensor], given: list[Tensor | None]) -> Tensor | None:
    found = [x for x in given if x is not None]
    return reduce(join, found) if found else None


def cell(bias: Tensor, rows: Span, cols: Span) -> tuple[slice, ...]:
    """Return the index of a tile in a bias [b or 1, h or 1, n or 1, m or 1]."""
    sides = zip(bias.shape[2:], (rows, cols), strict=True)
    return slice(None), slice(None), *(slice(0, 1) if size == 1 else slice(*span) for size, span in sides)


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
