"""Measures: statistics of each head, reduced tile by tile, which add up over batches and machines.

A measure of your own is a few lines. For each row, add something up over the tiles of its keys:

    >>> import torch, headwise as hw
    >>> class LongRange(hw.stats.RowMeasure):
    ...     name, unit, range = "long_range", "mass", "0 to 1"
    ...     source = "weight on keys more than 100 positions back"
    ...     def partial(self, tile):
    ...         far = tile.positions[:, None] - tile.keys > 100
    ...         return (tile.weights * far).sum(-1)
    >>> q = torch.randn(1, 2, 300, 8)
    >>> _, amap = hw.attend(q, q, q, mask=hw.Causal(), return_map=True)
    >>> amap.measure(LongRange())["long_range"].shape
    torch.Size([1, 2])
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from headwise.errors import ConfigError, ShapeError, check_declared
from headwise.masks import Grid
from headwise.rule import Rule
from headwise.rule.tiles import Tile
from headwise.stats.statistic import RowValue, Statistic, declares_value
from headwise.wording import Message, in_language, language_of, tr

UNITS = (
    tr("nats", sense="unit"), tr("share", sense="unit"), tr("keys", sense="unit"), tr("logit", sense="unit"),
    tr("tokens", sense="unit"), tr("tokens²", sense="unit"), tr("mass", sense="unit"),
    tr("probability", sense="unit"), tr("loss", sense="unit"), tr("cosine", sense="unit"),
)  # fmt: skip


SENTENCE_END = re.compile(r"(?<=[.:;])\s|(?<=[。；：])")


def unit_of(unit: str) -> Message:
    """A unit, to be shown in the reader's language: one of UNITS, or of a catalogue."""
    return Message(unit, sense="unit")


class Words(NamedTuple):
    """A measure in one language, as reports show it.

    Attributes:
        label: its name in words; short: the same for a narrow column.
        about: what it is; summary: the first sentence of that.
    """

    label: str
    short: str
    about: str
    summary: str
    unit: str
    range: str


def texts_of(measure: Any) -> tuple[Message, Message, Message, Message]:
    """Label, description (first paragraph of the docstring), unit, range of a measure or class, in its catalogue."""
    kind = measure if isinstance(measure, type) else type(measure)
    package = kind.__module__.partition(".")[0]
    label = measure.label or measure.name.replace("_", " ")
    about = re.sub(r"\s+", " ", (kind.__doc__ or "").split("\n\n")[0]).strip()
    return (
        Message(label, sense="measure", domain=package),
        Message(about, domain=package),
        Message(measure.unit, sense="unit", domain=package),
        Message(measure.range, sense="range", domain=package),
    )


def words_of(measure: Any, lang: str) -> Words:
    """The words of a measure or its class in "en" or "zh"."""
    label, about, unit, range = (in_language(words, lang) for words in texts_of(measure))
    short = measure.short if lang == "en" and measure.short else label
    summary = SENTENCE_END.split(about, maxsplit=1)[0].rstrip(":;：；")
    return Words(label, short, about, summary, unit, range)


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of the keys.

    Attributes:
        ids: integers [m] or [b, m]. pieces: the text of each token, a list of m for each batch entry.
        special: boolean [1 or b, m], True for tokens that are not part of the text, such as [SEP].
    """

    ids: Tensor | None = None
    pieces: Sequence[Sequence[str]] | None = None
    special: Tensor | None = None


PLACES = ("report", "viewer", "watch", "corpus")  # where measures are shown without being named


class Measure(ABC):
    """A statistic of each head. `start` makes a state, `update` takes one tile after the other, `finish` gives
    the number; `merge` joins the states of two inputs (their batches are pooled).

    A class declares `name`, `unit`, `range` and `source`; its docstring says what it is.

    Attributes:
        label: its name in words, if that is not the name with blanks; short: the same for a narrow column.
        shown: where it is shown without being named, one of `PLACES`, and its place in the order there.
        dispensable: how soon a table leaves it out for want of room: the largest first, 0 last.
        placed: whether it depends on the distance of queries and keys; cross attention, where there is no such
            distance, is then shown without it.
        of_first: whether it is of the first tokens of a sequence.
        ahead: whether it is of keys after the query alone, and is 0 under a causal mask.
        requires: what it must be given of the tokens, for messages; "" if nothing.
    """

    name: str
    unit: str
    range: str
    source: str
    label: ClassVar[str] = ""
    short: ClassVar[str] = ""
    shown: ClassVar[Mapping[str, int]] = {}
    dispensable: ClassVar[int] = 0
    placed: ClassVar[bool] = True
    of_first: ClassVar[bool] = False
    ahead: ClassVar[bool] = False
    requires: ClassVar[str] = ""

    def __init_subclass__(cls, *, abstract: bool = False, **options: Any) -> None:
        """`abstract`: the class leaves something for its own subclasses to declare."""
        super().__init_subclass__(**options)
        if not abstract:
            check_declared(cls, Measure, {
                "name": "what it is called", "unit": "of its values", "range": "of its values",
                "source": "the paper that defines it",
            })  # fmt: skip

    @classmethod
    def of(cls, tokens: Tokens) -> "Measure | None":
        """The measure for an input with these tokens; None if they do not say what it `requires`."""
        return cls()

    def words(self, lang: str | None = None) -> Words:
        """What it is called and what it is, in English ("en") or Chinese ("zh"); None for the locale's."""
        return words_of(self, language_of(lang))

    @abstractmethod
    def start(self, grid: Grid, like: Tensor) -> Any:
        """A fresh state for a matrix of this size, on the device of `like`."""

    @abstractmethod
    def update(self, state: Any, tile: Tile) -> None:
        """Add a tile. Tiles come row block by row block; `tile.first` and `tile.last` mark its edges."""

    def needs(self, rule: Rule) -> tuple[Statistic, ...] | None:
        """The statistics that `take` requires from a kernel; None if the measure can only be computed from tiles."""
        return None

    def take(self, state: Any, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> None:
        """Add the whole matrix at once, from the statistics that a kernel computed."""
        raise NotImplementedError(f"{type(self).__name__} defines `needs` but not `take`")

    def of_blocks(self) -> Mapping[str, Literal["sum", "max"]]:
        """How the states of blocks of queries, each with all keys, become that of the whole matrix: for each attribute
        of the state that holds numbers, whether they are added up or the largest counts. Empty: not at all."""
        return {}

    def closed(self, state: Any) -> Any:
        """The state to which no more is added: whatever `finish` and `merge` need, in tensors [b, h, …]."""
        return state

    @abstractmethod
    def merge(self, one: Any, other: Any) -> Any:
        """The state of both inputs together, their batches pooled into one."""

    @abstractmethod
    def finish(self, state: Any) -> Tensor:
        """[b, h] float32, or [1, h] after a merge; 0 where no row counted."""


@dataclass
class RowState:
    """Sums over rows, [b, h] in float64, and the row block in the making."""

    total: Tensor
    count: Tensor
    current: Tensor | None = None
    rows: Tensor | None = None  # [b, h, n], if they are kept


class RowMeasure(Measure, abstract=True):
    """A measure that has a value for each row (query): subclass it and give `partial`.

    `reduce` is how rows become one number per head: "mean" or "max". Fully masked queries are not counted.
    """

    reduce: ClassVar[str] = "mean"
    blank: ClassVar[bool] = False  # whether a row that does not count has the value 0, where its scores are finite

    @abstractmethod
    def partial(self, tile: Tile) -> Tensor:
        """What the tile adds to each of its rows, [b, h, r] or [b, h, r, parts]."""

    def combine(self, one: Tensor, other: Tensor) -> Tensor:
        """Join two tiles of the same rows; a sum unless overridden."""
        return one + other

    def value(self, total: Tensor, lse: Tensor) -> Tensor:
        """The row's value [b, h, r] from the joined partials and the row's log-sum-exp."""
        return total

    def counted(self, total: Tensor, lse: Tensor) -> Tensor:
        """Which rows count, boolean [b, h, r]: those that are not fully masked, unless overridden."""
        return lse != -torch.inf

    def row_value(self, rule: Rule) -> RowValue | None:
        """The value of a row as one of the functions in `statistic.py`, which compiled code reduces over the rows; None
        if it has no such form. A measure with a `row_value` has `needs`, and `from_rows` if partials are values."""
        return None

    def needs(self, rule: Rule) -> tuple[Statistic, ...] | None:
        known = self.row_value(rule)
        if known is None:
            return None
        return () if known.statistic is None else (known.statistic,)

    def from_rows(self, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> Tensor:
        """The joined partials of all rows, computed from the statistics in `needs`."""
        known = self.row_value(rule)
        if known is not None:
            return known.formula.of(known.statistic and found[known.statistic], lse)
        raise NotImplementedError(f"{type(self).__name__} defines `needs` but not `from_rows`")

    def row_values(self, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> tuple[Tensor, Tensor | None]:
        """Values of all rows, [b, h, n], and which of them count, broadcasting to that; None: those not fully masked.

        That of `row_value`, or of `from_rows`, `value` and `counted`; a measure overrides it where it takes less work.
        """
        if (known := self.row_value(rule) if declares_value(type(self)) else None) is not None:
            value = known.formula.of(known.statistic and found[known.statistic], lse)
            return value, None if known.counted is None else known.counted.to(lse.device)
        total = self.from_rows(found, lse, rule)
        usual = type(self).counted is RowMeasure.counted
        return self.value(total, lse), None if usual else self.counted(total, lse)

    def start(self, grid: Grid, like: Tensor, keep_rows: bool = False) -> RowState:
        zero = torch.zeros(grid.b, grid.h, dtype=torch.float64, device=like.device)
        total = torch.full_like(zero, -torch.inf) if self.reduce == "max" else zero
        rows = like.new_zeros(grid.b, grid.h, grid.n) if keep_rows else None
        return RowState(total, torch.zeros_like(zero), rows=rows)

    def update(self, state: RowState, tile: Tile) -> None:
        part = self.partial(tile)
        if not isinstance(part, Tensor) or part.shape[:3] != tile.lse.shape or part.ndim > 4:
            shape = tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__
            raise ShapeError(
                f"{type(self).__name__}.partial(tile): expected [b, h, r]={list(tile.lse.shape)} or [b, h, r, parts], "
                f"what the tile adds to each of its rows; got {shape}"
            )
        state.current = part if tile.first or state.current is None else self.combine(state.current, part)
        if tile.last:
            self._close(state, state.current, tile.lse, tile.rows.start)
            state.current = None

    def take(self, state: RowState, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> None:
        value, counted = self.row_values(found, lse, rule)
        self._add(state, value, counted, lse, 0)

    def _close(self, state: RowState, total: Tensor, lse: Tensor, first: int) -> None:
        """Add rows whose partials are complete, the first of them being row `first`."""
        self._add(state, self.value(total, lse), self.counted(total, lse), lse, first)

    def _add(self, state: RowState, value: Tensor, counted: Tensor | None, lse: Tensor, first: int) -> None:
        # Checking all rows costs less than masking each of them, except on a device that has to be synchronised.
        every = value.device.type == "cpu"
        if counted is None:
            every = every and value.numel() > 0 and bool(lse.amin() > -torch.inf)
            counted = lse if every else lse != -torch.inf
        else:
            every = every and bool(counted.all())
        if not every:
            value = value.masked_fill(~counted, -torch.inf if self.reduce == "max" else 0.0)
        if state.rows is not None:
            rows = value if every else value.masked_fill(~counted, 0.0)
            state.rows[:, :, first : first + value.shape[-1]] = rows
        if self.reduce == "max":
            largest = value.amax(-1) if value.shape[-1] else value.new_full(value.shape[:-1], -torch.inf)
            state.total = torch.maximum(state.total, largest.double())
        else:
            state.total = state.total + value.sum(-1).double()  # float32 sums of a block are cascaded
        state.count = state.count + (value.shape[-1] if every else counted.sum(-1))

    def of_blocks(self) -> Mapping[str, Literal["sum", "max"]]:
        return {"total": "max" if self.reduce == "max" else "sum", "count": "sum"}

    def merge(self, one: RowState, other: RowState) -> RowState:
        totals = torch.cat((one.total, other.total))
        if self.reduce == "max":
            total = totals.amax(0, keepdim=True) if len(totals) else totals.new_full((1, totals.shape[1]), -torch.inf)
        else:
            total = totals.sum(0, keepdim=True)
        return RowState(total, torch.cat((one.count, other.count)).sum(0, keepdim=True))

    def finish(self, state: RowState) -> Tensor:
        if self.reduce == "max":
            return state.total.masked_fill(state.count == 0, 0.0).float()
        return (state.total / state.count.clamp_min(1)).float()


def row_measure(
    name: str, partial: Callable[[Tile], Tensor], *, unit: str = "", range: str = "", source: str = ""
) -> RowMeasure:
    """A row-wise measure from one line: `partial(tile)` gives [b, h, r], summed over the tiles of a row.

    >>> import headwise as hw
    >>> even = hw.stats.row_measure("even_keys", lambda tile: tile.weights[..., tile.keys % 2 == 0].sum(-1))

    Args:
        name: of the measure. partial: as above. unit, range, source: shown by `headwise measures`.
    Returns:
        A `RowMeasure`, for `measures=` and `AttentionMap.measure`.
    """
    fields = {"name": name, "unit": unit, "range": range, "source": source, "__doc__": source or name}
    return type(name, (RowMeasure,), {**fields, "partial": lambda self, tile: partial(tile)})()


def tensors_of(state: Any) -> list[Tensor]:
    """The tensors in a measure's state, in a fixed order."""
    found: list[Tensor] = []

    def take(x: Tensor) -> Tensor:
        found.append(x)
        return x

    with_tensors(state, take)
    return found


def with_tensors(state: Any, take: Callable[[Tensor], Tensor]) -> Any:
    """A measure's state with `take(x)` in place of each tensor x, in the order of `tensors_of`."""
    if isinstance(state, Tensor):
        return take(state)
    if isinstance(state, dict):
        return {key: with_tensors(part, take) for key, part in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(with_tensors(part, take) for part in state)
    if is_dataclass(state) and not isinstance(state, type):
        return replace(state, **{one.name: with_tensors(getattr(state, one.name), take) for one in fields(state)})
    return state


def side_by_side(measure: Measure, states: Sequence[Any], heads: Sequence[int]) -> Any:
    """A measure's state for all heads, of its states for `heads` each; ConfigError if the joined one is another."""
    columns = zip(*(tensors_of(state) for state in states), strict=True)
    joined = (
        torch.cat(xs, 1) if all(x.shape[1:2] == (h,) for x, h in zip(xs, heads, strict=True)) else xs[0]
        for xs in columns
    )
    whole = with_tensors(states[0], lambda _: next(joined))
    found, expected = measure.finish(whole), torch.cat([measure.finish(state) for state in states], 1)
    if found.shape != expected.shape or not torch.allclose(found, expected, rtol=0.0, atol=0.0, equal_nan=True):
        raise ConfigError(f"measure {measure.name!r} keeps its heads otherwise than as [batch, heads, …]")
    return whole
