"""Running measures: all in one pass over the tiles, those of rows together, as dozens of tensor operations would take
longer than a small call."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from headwise.errors import ConfigError
from headwise.masks import Grid
from headwise.rule import Rule
from headwise.rule.tiles import Tile
from headwise.stats.base import Measure, RowMeasure, RowState, with_tensors, words_of
from headwise.stats.registry import resolve
from headwise.stats.statistic import Reduce, Reduced, RowValue, Statistic, ToReduce, declares_value
from headwise.table import HeadColumn, HeadTable
from headwise.table.show import html, text


@dataclass(frozen=True)
class Pooled:
    """The states of measures, over all entries of batches; of one step, or of several beside each other."""

    numbers: Tensor  # [2, measures, h] in float64, totals and counts; or [steps, 2, measures, h]
    largest: Tensor  # [measures, 1], where a total is a maximum, not a sum

    def merged(self, *others: "Pooled") -> "Pooled":
        """Merge those of one step each, in this order."""
        numbers = self.numbers.clone()
        for other in others:
            numbers += other.numbers
        tops = torch.stack([self.numbers[0], *(other.numbers[0] for other in others)]).amax(0)
        numbers[0] = torch.where(self.largest, tops, numbers[0])
        return Pooled(numbers, self.largest)

    def empty(self) -> "Pooled":
        """The same measures of no rows."""
        numbers = torch.zeros_like(self.numbers)
        numbers[0] = torch.where(self.largest, -torch.inf, numbers[0])
        return Pooled(numbers, self.largest)

    def beside(self, *others: "Pooled") -> "Pooled":
        """Those of more heads, one after the other."""
        return Pooled(torch.cat([self.numbers, *(other.numbers for other in others)], -1), self.largest)

    def finished(self) -> Tensor:
        """The value of each, [..., measures, h] float32."""
        totals, counts = self.numbers.unbind(-3)
        divided = totals / torch.where(self.largest, 1.0, counts).clamp_min(1)
        return divided.masked_fill(self.largest & (counts == 0), 0.0).float()


class Merging:
    """The measures of a record, and those that are pooled `together`: with the states of `RowMeasure`, merged as it
    does. One that fails is unknown, the others are not; its error is raised if `strict`."""

    def __init__(self, measures: Sequence[Measure], *, strict: bool) -> None:
        self.measures, self.strict = tuple(measures), strict
        self.together = [m for m in measures if goes_together(m) and type(m).merge is RowMeasure.merge]
        self.others = [m for m in measures if m not in self.together]  # those that are merged one by one
        self.names = [measure.name for measure in self.together]
        self._largest = torch.tensor([[m.reduce == "max"] for m in self.together], dtype=torch.bool, device="cpu")

    def tried(self, unknown: dict[str, str], measure: Measure, function: Callable[..., Any], *args: Any) -> Any:
        """function(*args) of a measure; None, and the reason in `unknown`, if it fails."""
        if measure.name in unknown:
            return None
        try:
            return function(*args)
        except Exception as error:
            if self.strict:
                raise
            unknown[measure.name] = f"{type(error).__name__}: {error}"
            return None

    def start(self, unknown: dict[str, str], measure: Measure, grid: Grid, device: torch.device) -> Any:
        """The state of a measure of no calls, which an unknown one has too; None if there is none."""
        failed = dict[str, str]()
        like = torch.empty(0, device=device)
        state = self.tried(failed, measure, lambda: measure.closed(measure.start(grid, like)))
        unknown |= failed
        return state

    def pooled(self, measured: "Measurements") -> Pooled | None:
        """The states of `together`, zeros for those that are missing; None if there are none."""
        if not self.together:
            return None
        if not {*self.names} <= {*measured}:
            states, zeros = measured.states, torch.zeros_like(measured.nonfinite, dtype=torch.float64)
            blank = RowState(zeros, zeros)
            measured = Measurements(self.together, [states.get(m.name, blank) for m in self.together], zeros)
        numbers = measured.stacked(self.names)
        largest = self._largest.to(numbers.device)
        if numbers.shape[2] == 1:
            return Pooled(numbers.squeeze(2), largest)
        pooled = numbers.sum(2)
        most = numbers[0].amax(1) if numbers.shape[2] else torch.full_like(pooled[0], -torch.inf)
        pooled[0] = torch.where(largest, most, pooled[0])
        return Pooled(pooled, largest)


def goes_together(measure: Measure) -> TypeGuard[RowMeasure]:
    """Whether it has the `start`, `take` and `finish` of `RowMeasure`, so that it can be computed with others."""
    kind = type(measure)
    return (
        isinstance(measure, RowMeasure)
        and kind.start is RowMeasure.start
        and kind.take is RowMeasure.take
        and kind.finish is RowMeasure.finish
    )


def value_of(measure: Measure, rule: Rule) -> RowValue | None:
    """The declared value of a measure's rows, if it is all that the measure consists of."""
    return measure.row_value(rule) if goes_together(measure) and declares_value(type(measure)) else None


@dataclass(frozen=True)
class Together:
    """Measures that were reduced together, each made from `reduced` when requested; places: name → its place in it."""

    places: Mapping[str, int]
    reduced: Reduced

    def value(self, name: str) -> Tensor:
        """The measure [b, h]."""
        return self.reduced.values[self.places[name]]

    def state(self, name: str) -> RowState:
        """What was added up for it."""
        totals, counts = self.reduced.sums[:, self.places[name]]
        return RowState(totals, counts)


def places_of(measures: Sequence[Measure]) -> dict[str, int]:
    """The place of each measure in a stack of all."""
    return {measure.name: i for i, measure in enumerate(measures)}


def reduce_together(
    measures: Sequence[RowMeasure], found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule, reduce: Reduce
) -> Together | None:
    """The measures that declare their value, in one call of a kernel; None if there are none, or it cannot."""
    declared = [(measure, value) for measure in measures if (value := value_of(measure, rule)) is not None]
    given = [
        ToReduce(value, None if value.statistic is None else found[value.statistic], measure.reduce == "max")
        for measure, value in declared
    ]
    reduced = reduce(lse, given) if given else None
    return None if reduced is None else Together(places_of([measure for measure, _ in declared]), reduced)


def take_together(
    measures: Sequence[RowMeasure], found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule, every: bool,
    nonfinite: Tensor,
) -> list[Together]:  # fmt: skip
    """State and value of each, as by `start`, `take` and `finish`. every: no query fully masked, all finite."""
    result = []
    seen = None if every else lse != -torch.inf
    for largest in (False, True):
        here = [measure for measure in measures if (measure.reduce == "max") is largest]
        if not here:
            continue
        values, counts = [], {}
        for i, measure in enumerate(here):
            value, which = measure.row_values(found, lse, rule)
            which = seen if which is None else which
            # A check costs less than a mask, except on a device that has to be synchronised.
            if which is not None and not (which.device.type == "cpu" and bool(which.all())):
                if not (every and measure.blank):
                    value = torch.where(which, value, -torch.inf if largest else 0.0)
                counts[i] = which.sum(-1)
            values.append(value if value.shape == lse.shape else value.expand(lse.shape))
        rows = torch.stack(values)  # [s, b, h, n]
        total = rows.amax(-1) if largest else rows.sum(-1)  # float32 sums are cascaded
        sums = total.new_full((2, *total.shape), lse.shape[-1], dtype=torch.float64)
        sums[0] = total
        for i, number in counts.items():
            sums[1, i] = number
        if not largest:
            final = sums[0] / (sums[1].clamp_min(1) if counts else lse.shape[-1])
        else:
            final = sums[0].masked_fill(sums[1] == 0, 0.0) if counts else sums[0]
        result.append(Together(places_of(here), Reduced(final.float(), sums, nonfinite)))
    return result


class Measurements(Mapping[str, Tensor]):
    """The result of a measurement: name → [b, h] float32, on the map's device, a number for each entry of the batch and
    each head. Prints itself as a table; `table()` is the `HeadTable` of it.

    Attributes:
        rows: name → [b, h, n], each query's own value, with `rows=True` (0 where not counted).
        nonfinite: [b, h], queries whose scores are NaN or infinite; the head's numbers are then not to be trusted.
        nonfinite_values: [b, h_kv], NaN and infinite entries of v, or None if there are none; as in the map.
    """

    def __init__(
        self, measures: Sequence[Measure], states: Sequence[Any], nonfinite: Tensor, together: Sequence[Together] = ()
    ) -> None:
        """`states`: of the measures that are not in `together`."""
        self._measures, self._together, self.nonfinite = tuple(measures), together, nonfinite
        self.nonfinite_values: Tensor | None = None
        self._alone: dict[str, tuple[Tensor, Any]] = {}  # value and state
        self.rows: dict[str, Tensor] = {}
        if states:
            alone = [m for m in measures if not any(m.name in part.places for part in together)]
            self._alone = {m.name: (m.finish(state), state) for m, state in zip(alone, states, strict=True)}
            found = {name: getattr(state, "rows", None) for name, (_, state) in self._alone.items()}
            self.rows = {name: rows for name, rows in found.items() if rows is not None}

    def __getitem__(self, name: str) -> Tensor:
        for part in self._together:
            if name in part.places:
                return part.value(name)
        return self._alone[name][0]

    def __iter__(self) -> Iterator[str]:
        return (measure.name for measure in self._measures)

    def __len__(self) -> int:
        return len(self._measures)

    @property
    def states(self) -> dict[str, Any]:
        """name → what was added up, to be merged by the measure that made it."""
        of = {name: part for part in self._together for name in part.places}
        return {name: of[name].state(name) if name in of else self._alone[name][1] for name in self}

    def only(self, measures: Sequence[Measure]) -> "Measurements":
        """The numbers of some of the measures."""
        states = self.states
        found = type(self)(measures, [states[measure.name] for measure in measures], self.nonfinite)
        found.nonfinite_values = self.nonfinite_values
        return found

    def stacked(self, names: Sequence[str]) -> Tensor:
        """The totals and the counts of measures of rows, [2, measures, b, h] in float64."""
        for part in self._together:
            if list(part.places)[: len(names)] == list(names):
                return part.reduced.sums[:, : len(names)]
        states = self.states
        found = [states[name] for name in names]
        return torch.stack([torch.stack([x.total for x in found]), torch.stack([x.count for x in found])])

    def merge(self, other: "Measurements") -> "Measurements":
        """Both inputs as one: batches are pooled, so values become [1, h]. Exact, in any order of merging."""
        if list(self) != list(other):
            raise ConfigError(f"merge: the measures differ: {list(self)} and {list(other)}")
        states = [
            measure.merge(one, two)
            for measure, one, two in zip(self._measures, self.states.values(), other.states.values(), strict=True)
        ]
        nonfinite = torch.cat((self.nonfinite, other.nonfinite)).sum(0, keepdim=True)
        result = Measurements(self._measures, states, nonfinite)
        counts = [x.nonfinite_values for x in (self, other) if x.nonfinite_values is not None]
        if len({x.shape[1] for x in counts}) > 1:  # two forms of one layer, with other KV heads
            counts = [self._values_of_heads(), other._values_of_heads()]
        result.nonfinite_values = torch.cat(counts).sum(0, keepdim=True) if counts else None
        return result

    def table(self, entry: int | None = None) -> HeadTable:
        """The numbers as a `HeadTable` of one layer, with units: of the whole batch, pooled exactly as `merge` pools,
        or of one entry of it. `HeadTable.stack` puts the tables of several layers into one."""
        if entry is None:
            values = self._pooled()
        elif -len(self.nonfinite) <= entry < len(self.nonfinite):
            values = {name: value[entry] for name, value in self._numbers().items()}
        else:
            raise ConfigError(f"table(entry={entry}): the batch has {len(self.nonfinite)} entries, counted from 0")
        known = {measure.name: measure for measure in self._measures}
        return HeadTable({name: _column(value, known.get(name)) for name, value in values.items()})

    def _numbers(self) -> dict[str, Tensor]:
        """The values, and the counts of what is not finite where there are any, [b, h]."""
        found = dict(self)
        if bool(self.nonfinite.any()):
            found["nonfinite_rows"] = self.nonfinite
        if self.nonfinite_values is not None and bool(self.nonfinite_values.any()):
            found["nonfinite_values"] = self._values_of_heads()
        return found

    def _values_of_heads(self) -> Tensor:
        """`nonfinite_values` of query heads, [b, h]."""
        assert self.nonfinite_values is not None
        heads, kv_heads = self.nonfinite.shape[1], self.nonfinite_values.shape[1]
        return self.nonfinite_values.repeat_interleave(heads // kv_heads, 1)

    def _pooled(self) -> dict[str, Tensor]:
        """`_numbers` of the batch as a whole, [h]."""
        found = self._numbers()
        if len(self.nonfinite) != 1:
            for measure, state in zip(self._measures, self.states.values(), strict=True):
                found[measure.name] = measure.finish(measure.merge(state, with_tensors(state, lambda x: x[:0])))
        return {name: value[0] if name in self else value.sum(0) for name, value in found.items()}

    def _entries(self) -> HeadTable:
        """A table whose layers are the entries of the batch."""
        return HeadTable.stack([self.table(entry) for entry in range(len(self.nonfinite))])

    def __repr__(self) -> str:
        found = self._entries()
        return text("", found.layers, found.places, found, first="batch")

    def _repr_html_(self) -> str:
        found = self._entries()
        return html("", found.layers, found.places, found, first="batch")


def _column(value: Tensor, measure: Measure | None) -> HeadColumn:
    """The numbers of one layer, with what is known of them."""
    if measure is None:
        return HeadColumn([value], description="NaN and infinity, counted.")
    words = words_of(measure, "en")
    return HeadColumn([value], unit=words.unit, description=words.summary, range=words.range)


def statistics_for(measures: Sequence[Measure], rule: Rule) -> tuple[Statistic, ...]:
    """The statistics that these measures need from a kernel, each once; measures computed from tiles need none."""
    return tuple(dict.fromkeys(statistic for m in measures for statistic in m.needs(rule) or ()))


def measure(
    tiles: Callable[[], Iterable[Tile]],
    lse: Tensor,
    rule: Rule,
    wanted: Sequence[str | Measure],
    *,
    rows: bool = False,
    found: Mapping[Statistic, Tensor] | None = None,
    reduce: Reduce | None = None,
) -> Measurements:
    """Compute measures of a matrix of weights that is given by its tiles; `AttentionMap.measure` calls it.

    Args:
        tiles: makes the tiles of the matrix, row block by row block; called once if a measure requires tiles.
        lse: [b, h, n], the log-sum-exp of each row. rule: what the scores are.
        wanted: names of registered measures, or `Measure`s.
        rows: also keep the value of each row, for measures that have one.
        found: statistics that a kernel computed in its pass; a measure that they suffice for takes no tiles.
        reduce: reduces values of rows in one call of a kernel, where it can.
    Returns:
        The measures, name → [b, h].
    """
    measures = resolve(wanted)
    given: Mapping[Statistic, Tensor] = {} if found is None else found
    known = {
        m.name
        for m in measures
        if found is not None and (needed := m.needs(rule)) is not None and all(one in given for one in needed)
    }
    together = [] if rows or not lse.shape[-1] else [m for m in measures if m.name in known and goes_together(m)]
    reduced = None if reduce is None else reduce_together(together, given, lse, rule, reduce)
    taken = [] if reduced is None else [reduced]
    others = together if reduced is None else [m for m in together if m.name not in reduced.places]
    if reduced is None or others:
        every, nonfinite = _look_at(lse)
        taken += take_together(others, given, lse, rule, every, nonfinite)
    else:
        nonfinite = reduced.reduced.nonfinite
    states: list[Any] = []
    by_tiles = []
    for m in measures:
        if any(m.name in part.places for part in taken):
            continue
        state = m.start(rule.grid, lse, keep_rows=rows) if isinstance(m, RowMeasure) else m.start(rule.grid, lse)
        states.append(state)
        if m.name in known:
            m.take(state, given, lse, rule)
        else:
            by_tiles.append((m, state))
    if by_tiles:
        for tile in tiles():
            for m, state in by_tiles:
                m.update(state, tile)
    return Measurements(measures, states, nonfinite, taken)


def _look_at(lse: Tensor) -> tuple[bool, Tensor]:
    """Whether each row is known to see something, and how many are not finite, [b, h]: less than a mask costs."""
    if lse.device.type == "cpu" and lse.numel():
        least, largest = map(float, torch.aminmax(lse))
        if -torch.inf < least and largest < torch.inf:
            return True, torch.zeros(lse.shape[:2], dtype=torch.int64, device=lse.device)
    return False, (~(lse < torch.inf)).sum(-1)
