"""Running measures: all of them in one pass over the tiles."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.errors import ConfigError
from headwise.rule import Rule
from headwise.stats.base import Measure, RowMeasure
from headwise.stats.registry import resolve
from headwise.stats.states import with_tensors
from headwise.stats.statistic import Statistic
from headwise.stats.together import StateOf, goes_together, reduce_together, states_of, take_together
from headwise.stats.values import Reduce, Reduced
from headwise.stats.words import words_of
from headwise.table import HeadColumn, HeadTable
from headwise.table.show import html, text
from headwise.tiles import Tile


class Measurements(Mapping[str, Tensor]):
    """The result of a measurement: name → [b, h] float32, on the map's device, a number for each entry of the batch and
    each head. Prints itself as a table; `table()` is the `HeadTable` of it.

    Attributes:
        rows: name → [b, h, n], each query's own value, with `rows=True` (0 where not counted).
        nonfinite: [b, h], queries whose scores are NaN or infinite; the head's numbers are then not to be trusted.
        nonfinite_values: [b, h_kv], NaN and infinite entries of v, or None if there are none.
    """

    def __init__(
        self, measures: Sequence[Measure], states: Sequence[Any], nonfinite: Tensor, known: Mapping[str, Tensor] = {}
    ) -> None:
        """`known`: values that were found with the states; of those `states` has what makes them."""
        self._measures, self._given, self.nonfinite = tuple(measures), list(states), nonfinite
        self._late = set(known)
        self._values = {
            measure.name: known[measure.name] if measure.name in known else measure.finish(state)
            for measure, state in zip(measures, states, strict=True)
        }
        self.nonfinite_values: Tensor | None = None
        self.rows: dict[str, Tensor] = {
            measure.name: state.rows
            for measure, state in zip(measures, states, strict=True)
            if getattr(state, "rows", None) is not None
        }

    def __getitem__(self, name: str) -> Tensor:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def _states(self) -> list[Any]:
        for i, measure in enumerate(self._measures):
            if measure.name in self._late:
                self._given[i] = self._given[i]()
        self._late = set()
        return self._given

    @property
    def states(self) -> dict[str, Any]:
        """name → what was added up, to be merged by the measure that made it."""
        return {measure.name: state for measure, state in zip(self._measures, self._states, strict=True)}

    def stacked(self, names: Sequence[str]) -> tuple[Tensor, Tensor]:
        """The totals and the counts of measures of rows, each [measures, b, h] in float64."""
        given = {measure.name: state for measure, state in zip(self._measures, self._given, strict=True)}
        parts = [given[name] for name in names]
        if all(isinstance(x, StateOf) and x.reduced is parts[0].reduced and x.at == i for i, x in enumerate(parts)):
            totals, counts = parts[0].reduced.totals, parts[0].reduced.counts
            return totals[: len(parts)], counts[: len(parts)]
        states = [self.states[name] for name in names]
        return torch.stack([x.total for x in states]), torch.stack([x.count for x in states])

    def merge(self, other: "Measurements") -> "Measurements":
        """Both inputs as one: batches are pooled, so values become [1, h]. Exact, in any order of merging."""
        if list(self) != list(other):
            raise ConfigError(f"merge: the measures differ: {list(self)} and {list(other)}")
        states = [
            measure.merge(one, two)
            for measure, one, two in zip(self._measures, self._states, other._states, strict=True)
        ]
        nonfinite = torch.cat((self.nonfinite, other.nonfinite)).sum(0, keepdim=True)
        return Measurements(self._measures, states, nonfinite)

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
        found = dict(self._values)
        if bool(self.nonfinite.any()):
            found["nonfinite_rows"] = self.nonfinite
        if self.nonfinite_values is not None:
            heads, kv_heads = self.nonfinite.shape[1], self.nonfinite_values.shape[1]
            found["nonfinite_values"] = self.nonfinite_values.repeat_interleave(heads // kv_heads, 1)
        return found

    def _pooled(self) -> dict[str, Tensor]:
        """`_numbers` of the batch as a whole, [h]."""
        found = self._numbers()
        if len(self.nonfinite) != 1:
            empty = (with_tensors(state, lambda x: x[:0]) for state in self._states)
            found |= {
                measure.name: measure.finish(measure.merge(state, none))
                for measure, state, none in zip(self._measures, self._states, empty, strict=True)
            }
        return {name: value[0] if name in self._values else value.sum(0) for name, value in found.items()}

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
    known = {m.name for m in measures if found is not None and _computable(m, given, rule)}
    together = [] if rows or not lse.shape[-1] else [m for m in measures if m.name in known and goes_together(m)]
    reduced = None if reduce is None else reduce_together(together, given, lse, rule, reduce)
    if reduced is None:
        every, nonfinite = _look_at(lse)
        taken = take_together(together, given, lse, rule, every)
    else:
        taken, nonfinite = states_of(*reduced), reduced[1].nonfinite
        if others := [m for m in together if m.name not in taken]:
            taken |= take_together(others, given, lse, rule, _look_at(lse)[0])
    states: list[Any] = []
    by_tiles = []
    for m in measures:
        if m.name in taken:
            states.append(taken[m.name][0])
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
    return Measurements(measures, states, nonfinite, {name: value for name, (_, value) in taken.items()})


def measured(measures: Sequence[Measure], reduced: Reduced) -> Measurements:
    """The measures of rows that a kernel reduced."""
    taken = states_of([m.name for m in measures], reduced)
    states = [state for state, _ in taken.values()]
    return Measurements(measures, states, reduced.nonfinite, {name: value for name, (_, value) in taken.items()})


def _computable(m: Measure, given: Mapping[Statistic, Tensor], rule: Rule) -> bool:
    """Whether the measure can be computed from these statistics."""
    needed = m.needs(rule)
    return needed is not None and all(statistic in given for statistic in needed)


def _look_at(lse: Tensor) -> tuple[bool, Tensor]:
    """Whether each row is known to see something, and how many are not finite, [b, h]. One look at all of them costs
    less than a mask, but for a device that would have to be waited for."""
    if lse.device.type == "cpu" and lse.numel():
        least, largest = map(float, torch.aminmax(lse))
        if -torch.inf < least and largest < torch.inf:
            return True, torch.zeros(lse.shape[:2], dtype=torch.int64, device=lse.device)
    return False, (~(lse < torch.inf)).sum(-1)
