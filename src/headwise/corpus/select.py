"""What a sweep measures: texts as windows, the measures with their distribution, the heads.

Texts as windows of tokens, and windows as batches. A window is one input of the model: its special tokens around tokens
of one text. Windows begin every `stride` tokens; the last one of a text may be shorter and is padded in a batch.

Measures with their distribution: count, mean, sum of squared deviations, minimum and maximum, all of which merge. A
measure of rows has a value for each query, other measures one for each window. Quantiles cannot be merged, so they are
not kept.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from headwise.errors import ConfigError
from headwise.lm.loading import LoadedModel
from headwise.lm.loading.base import check_window
from headwise.masks import Grid
from headwise.rule import Rule
from headwise.rule.tiles import Tile
from headwise.stats import GIVEN, Measure, RowMeasure, Statistic, Tokens, known, of_tokens
from headwise.wording import LIST, joined, tr

POOL = 16  # batches whose windows are sorted by length together


@dataclass(frozen=True)
class TextWindow:
    """A window of a text: ids [n] int64 and special [n] boolean, with special tokens; the pieces of its tokens, and
    words, the same with the blanks between them."""

    ids: Tensor
    content: int
    source: int
    where: str
    first: int
    pieces: Sequence[str]
    words: Sequence[str]
    special: Tensor
    share: float
    room: int
    number: int = 0

    def __str__(self) -> str:
        return f"the text at {self.where}, window from token {self.first:,}"


@dataclass(frozen=True)
class Frame:
    """The special tokens that a model's tokenizer adds before and after a text."""

    head: Tensor
    tail: Tensor

    @classmethod
    def of(cls, loaded: LoadedModel) -> "Frame":
        """The special tokens around a short text."""
        reading = loaded.read("a")
        own = [i for i, special in enumerate(reading.special) if not special]
        first, last = (own[0], own[-1]) if own else (len(reading), len(reading) - 1)
        return cls(reading.ids[:first], reading.ids[last + 1 :])

    def __len__(self) -> int:
        return len(self.head) + len(self.tail)

    def content(self, ids: Tensor) -> Tensor:
        """The tokens of a text without the special tokens around it."""
        return ids[len(self.head) : len(ids) - len(self.tail)]


def length_of(window: int | None, loaded: LoadedModel, frame: Frame) -> int:
    """Tokens of a window including special ones: `window`, or the training length of the model."""
    length = window if window is not None else loaded.context or loaded.limit
    if length is None:
        raise ConfigError(
            "window: {name} does not specify its training length; give --window N, in tokens", name=loaded.name
        )
    check_window(length, loaded.limit, loaded.name)
    if length <= len(frame):
        raise ConfigError(
            "window={length}: {count} special tokens are added to every window; expected a larger window",
            length=length,
            count=len(frame),
        )
    return length


def windows(
    ids: Tensor, pieces: Sequence[str], frame: Frame, length: int, stride: int, source: int, where: str,
    size: int, words: Sequence[str] | None = None,
) -> Iterator[TextWindow]:  # fmt: skip
    """The windows of the tokens [n] of a text, given without special tokens. pieces: the text of each token. size:
    bytes of the whole text. words: as of `TextWindow`; pieces by default."""
    content = length - len(frame)
    head, tail = ([""] * len(part) for part in (frame.head, frame.tail))
    done = 0
    for first in range(0, len(ids), stride):
        part = ids[first : first + content]
        stop = first + len(part)
        whole = torch.cat((frame.head, part, frame.tail))
        special = torch.ones(len(whole), dtype=torch.bool)
        special[len(head) : len(whole) - len(tail)] = False
        new = stop - max(done, first)
        here, shown = ([*head, *texts[first:stop], *tail] for texts in (pieces, words or pieces))
        yield TextWindow(whole, new, source, where, first, here, shown, special, size * new / len(ids), content)
        done = stop
        if stop == len(ids):
            return


def batches(stream: Iterable[TextWindow], size: int) -> Iterator[list[TextWindow]]:
    """Batches of windows. The windows of several batches are sorted by length, longest first, to reduce padding; the
    result depends on their order alone."""
    stream = iter(stream)
    while pool := list(islice(stream, size * POOL)):
        pool.sort(key=lambda window: -len(window.ids))
        yield from (pool[i : i + size] for i in range(0, len(pool), size))


def stacked(batch: list[TextWindow]) -> tuple[Tensor, Tensor | None]:
    """The ids [b, n] padded at the end, and the mask of tokens, [b, n] boolean, or None without padding."""
    longest = max(len(window.ids) for window in batch)
    if all(len(window.ids) == longest for window in batch):
        return torch.stack([window.ids for window in batch]), None
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    mask = torch.zeros(len(batch), longest, dtype=torch.bool)
    for i, window in enumerate(batch):
        ids[i, : len(window.ids)] = window.ids
        mask[i, : len(window.ids)] = True
    return ids, mask


FIELDS = ("count", "mean", "squares", "least", "largest")


def empty(*shape: int, like: Tensor | None = None) -> Tensor:
    """Moments of no values, [*shape[:-1], 5, shape[-1]] in float64."""
    numbers = torch.zeros(*shape[:-1], len(FIELDS), shape[-1], dtype=torch.float64)
    numbers[..., 3, :], numbers[..., 4, :] = torch.inf, -torch.inf
    return numbers if like is None else numbers.to(like.device)


def merged(one: Tensor, other: Tensor) -> Tensor:
    """Merge two sets of moments [..., 5, h]. Source: Chan, Golub & LeVeque 1983, eq. 2.1."""
    n1, mean1, squares1, least1, largest1 = one.unbind(-2)
    n2, mean2, squares2, least2, largest2 = other.unbind(-2)
    n = n1 + n2
    share = n2 / n.clamp_min(1)
    apart = mean2 - mean1
    squares = squares1 + squares2 + apart.square() * n1 * share
    least, largest = torch.minimum(least1, least2), torch.maximum(largest1, largest2)
    return torch.stack((n, mean1 + apart * share, squares, least, largest), -2)


def of_values(value: Tensor, counted: Tensor) -> Tensor:
    """The moments [b, 5, h] of the `counted` values [b, h, r]."""
    value = value.double()
    # Of values that all count, fewer operations have the same bits. A GPU would have to be waited for to know.
    left_out = None if value.device.type == "cpu" and bool(counted.all()) else ~counted

    def other(x: Tensor, instead: float) -> Tensor:
        return x if left_out is None else x.masked_fill(left_out, instead)

    n = counted.sum(-1).double()
    mean = other(value, 0.0).sum(-1) / n.clamp_min(1)
    squares = other(value - mean[..., None], 0.0).square_().sum(-1)
    least, largest = other(value, torch.inf).amin(-1), other(value, -torch.inf).amax(-1)
    return torch.stack((n, mean, squares, least, largest), -2)


@dataclass
class State:
    """The accumulated moments. inner: the state of a measure that is not one of rows."""

    numbers: Tensor  # [b, 5, h] float64
    current: Tensor | None = None
    inner: Any = None


class Varied(Measure):
    """A measure with its moments; `numbers` of its state are [b, 5, h], one set for each batch entry."""

    name: str
    unit: str
    range: str
    source: str
    per: str
    largest: bool  # whether the value of the measure is the maximum instead of the mean

    def __init__(self, measure: Measure) -> None:
        self.measure = measure
        self.name, self.unit, self.range, self.source = measure.name, measure.unit, measure.range, measure.source

    def needs(self, rule: Rule) -> tuple[Statistic, ...] | None:
        return self.measure.needs(rule)

    def merge(self, one: State, other: State) -> State:
        entries = torch.cat((one.numbers, other.numbers)).split(1)
        return State(reduce(merged, entries))

    def finish(self, state: State) -> Tensor:
        at = FIELDS.index("largest" if self.largest else "mean")
        return state.numbers[:, at].masked_fill(state.numbers[:, 0] == 0, 0.0).float()


class OfRows(Varied):
    """Moments over the queries that a measure of rows counts."""

    per = "query"
    measure: RowMeasure

    def __init__(self, measure: RowMeasure) -> None:
        super().__init__(measure)
        self.largest = measure.reduce == "max"

    def start(self, grid: Grid, like: Tensor) -> State:
        self.measure.start(grid, like)  # checks its arguments about the tokens
        return State(empty(grid.b, grid.h, like=like))

    def update(self, state: State, tile: Tile) -> None:
        part = self.measure.partial(tile)
        state.current = part if tile.first or state.current is None else self.measure.combine(state.current, part)
        if tile.last:
            total = state.current
            value, counted = self.measure.value(total, tile.lse), self.measure.counted(total, tile.lse)
            state.numbers = merged(state.numbers, of_values(value, counted.expand_as(value)))
            state.current = None

    def take(self, state: State, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> None:
        value, counted = self.measure.row_values(found, lse, rule)
        counted = lse != -torch.inf if counted is None else counted
        state.numbers = of_values(value, counted.expand_as(value))


class OfWindows(Varied):
    """Moments over the windows, for a measure with one number for each."""

    per = "window"
    largest = True  # how such measures merge several inputs

    def start(self, grid: Grid, like: Tensor) -> State:
        return State(empty(grid.b, grid.h, like=like), inner=self.measure.start(grid, like))

    def update(self, state: State, tile: Tile) -> None:
        self.measure.update(state.inner, tile)
        self._count(state)

    def take(self, state: State, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> None:
        self.measure.take(state.inner, found, lse, rule)
        self._count(state)

    def _count(self, state: State) -> None:
        value = self.measure.finish(state.inner)[..., None]
        state.numbers = of_values(value, torch.ones_like(value, dtype=torch.bool))


def varied(measure: Measure) -> OfRows | OfWindows:
    """A measure with its moments."""
    if isinstance(measure, RowMeasure) and type(measure).update is RowMeasure.update:
        return OfRows(measure)
    return OfWindows(measure)


NOTHING = Tokens(torch.zeros(1, 0, dtype=torch.long), [[]], torch.zeros(1, 0, dtype=torch.bool))


def checked_names(names: Sequence[str]) -> list[str]:
    """The names of the measures. ConfigError for an unknown one, with similar ones, and for one that is given twice."""
    found = [names] if isinstance(names, str) else list(names)
    measures_for(NOTHING, found)
    if not found:
        raise ConfigError(tr("measures=(): give at least one; `headwise measures` lists all"))
    if twice := {name for name in found if found.count(name) > 1}:
        raise ConfigError("measures: {twice!r} is given twice", twice=min(twice))
    return found


def tokens_of(ids: Tensor, batch: Sequence[TextWindow]) -> Tokens:
    """The tokens of a batch of windows with ids [b, n]; padding has no text."""
    width = ids.shape[1]
    special = torch.zeros(ids.shape, dtype=torch.bool)
    for i, window in enumerate(batch):
        special[i, : len(window.ids)] = window.special
    return Tokens(ids, [[*window.pieces, *[""] * (width - len(window.ids))] for window in batch], special)


def measures_for(tokens: Tokens, names: Sequence[str]) -> list[OfRows | OfWindows]:
    """The measures of these names for these tokens, or `NOTHING`. ConfigError for one that a corpus cannot have."""
    made = []
    for name in names:
        if known(name) is not None and of_tokens(name, NOTHING) is None:
            possible = [other for other in GIVEN if of_tokens(other, NOTHING) is not None]
            raise ConfigError(
                "measures: {name!r} requires {requires}; a corpus supports {possible}",
                name=name,
                requires=GIVEN[name].requires,
                possible=joined(possible, LIST),
            )
        try:
            found = of_tokens(name, tokens)
        except ConfigError as error:
            raise ConfigError("measures: {error}", error=error) from None
        assert found is not None
        made.append(varied(found))
    return made


@dataclass(frozen=True)
class Head:
    """A head: the number of its layer in forward order, the name of the attention module, and its own number."""

    layer: int
    name: str
    head: int


def chosen(loaded: LoadedModel, layers: Sequence[int] | None, heads: Sequence[int] | None) -> list[Head]:
    """The heads of these layers with these numbers; None for all."""
    count, most = len(loaded.layers), max(loaded.heads)
    for what, wanted, there in (("layers", layers, count), ("heads", heads, most)):
        for number in wanted or ():
            if not 0 <= number < there:
                raise ConfigError(
                    "{what}: {number} does not exist in {name}; expected 0 to {last}",
                    what=what,
                    number=number,
                    name=loaded.name,
                    last=there - 1,
                )
    kept = [
        Head(i, name, head)
        for i, (name, width) in enumerate(zip(loaded.layers, loaded.heads, strict=True))
        for head in range(width)
        if (layers is None or i in layers) and (heads is None or head in heads)
    ]
    if not kept:
        raise ConfigError(
            "layers={layers}, heads={heads}: selects no head of {name}", layers=layers, heads=heads, name=loaded.name
        )
    return kept
