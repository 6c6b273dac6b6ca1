"""The numbers of a record: states of measures, which are merged and of constant size, and summaries of steps."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, islice
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from headwise.base.run import held_bytes
from headwise.errors import ConfigError, ShapeError, check_whole, unknown_name
from headwise.kernels.graph import has_no_numbers
from headwise.kernels.spread import Held
from headwise.masks import Grid
from headwise.publishing import AttentionCall
from headwise.stats import Measure, Measurements, describe
from headwise.stats.base import tensors_of, with_tensors
from headwise.stats.engine import Merging, Pooled
from headwise.table import HeadColumn, HeadTable
from headwise.table.heads import Tabled
from headwise.table.show import plain


@dataclass
class Layer:
    """The states of one layer, batches pooled."""

    grid: Grid  # the size of its latest attention matrix, for one batch entry
    pooling: Merging  # the measures of the states, and how they are merged
    pooled: Pooled | None  # the states of those that are pooled
    states: list[Any]  # of the others
    nonfinite: Tensor  # [4, heads] float64 counts, as in `Summary`
    heads: range  # the numbers of these heads in the layer
    of: int  # how many heads it has on all ranks together
    unknown: dict[str, str] = field(default_factory=dict)  # name → why a measure is NaN, "" where it is said elsewhere

    def merged(self, *others: "Layer") -> "Layer":
        """Merge several, in this order."""
        device, unknown, states = self.nonfinite.device, dict(self.unknown), list(self.states)
        # Others may be of a replica of the module.
        others = tuple(x if x.nonfinite.device == device else x.with_tensors(lambda y: y.to(device)) for x in others)
        for other in others:
            unknown |= other.unknown
            for i, m in enumerate(self.pooling.others):
                merged = self.pooling.tried(unknown, m, m.merge, states[i], other.states[i])
                states[i] = states[i] if m.name in unknown else merged
        pooled = self.pooled and self.pooled.merged(*(x.pooled for x in others if x.pooled is not None))
        nonfinite = torch.stack([self.nonfinite, *(x.nonfinite for x in others)]).sum(0)
        return replace(self, grid=others[-1].grid, pooled=pooled, states=states, nonfinite=nonfinite, unknown=unknown)

    def tensors(self) -> list[Tensor]:
        """All tensors of the states."""
        return [*tensors_of(self.pooled), *tensors_of(self.states), self.nonfinite]

    def with_tensors(self, take: Callable[[Tensor], Tensor]) -> "Layer":
        """The same with `take(x)` in place of each tensor x, in the order of `tensors`."""
        pooled, states = with_tensors(self.pooled, take), with_tensors(self.states, take)
        return replace(self, pooled=pooled, states=states, nonfinite=take(self.nonfinite))

    def filled(self) -> "Layer":
        """The same, with NaN in the states of unknown measures, to be laid beside those of other heads."""
        lost = [measure.name in self.unknown for measure in self.pooling.others]
        states = [
            with_tensors(x, lambda y: torch.full_like(y, torch.nan) if y.is_floating_point() else y) if gone else x
            for x, gone in zip(self.states, lost, strict=True)
        ]
        pooled = self.pooled
        if pooled is not None:
            gone = torch.tensor([[name in self.unknown] for name in self.pooling.names], device=pooled.numbers.device)
            totals, counts = pooled.numbers
            numbers = torch.stack([totals.masked_fill(gone, torch.nan), counts.masked_fill(gone, 1.0)])
            pooled = replace(pooled, numbers=numbers)
        return replace(self, pooled=pooled, states=states)

    def trusted(self) -> "Layer":
        """The same, with empty states if scores are NaN or infinite, which would spoil a sum for good."""
        if not bool(self.nonfinite[0].any()):
            return self
        unknown, device = dict(self.unknown), self.nonfinite.device
        states = [self.pooling.start(unknown, measure, self.grid, device) for measure in self.pooling.others]
        pooled = None if self.pooled is None else self.pooled.empty()
        return replace(self, pooled=pooled, states=states, unknown=unknown)


def columns(layers: Sequence[Sequence[Layer]]) -> Tensor:
    """The finished measures and the counts of layers on one device, each in the same steps: [steps, heads of all,
    measures + 4] float32. Layers with states that are merged one by one have one step."""
    firsts = [steps[0] for steps in layers]
    pooling, known = firsts[0].pooling, dict[str, Sequence[Tensor]]()
    sizes = [len(layer.heads) for layer in firsts]
    if firsts[0].pooled is not None:
        numbers = [torch.stack([layer.pooled.numbers for layer in steps if layer.pooled]) for steps in layers]
        finished = replace(firsts[0].pooled, numbers=torch.cat(numbers, -1)).finished()
        known = dict(zip(pooling.names, (row.split(sizes, -1) for row in finished.unbind(1)), strict=True))
    for i, measure in enumerate(pooling.others):
        known[measure.name] = [
            pooling.tried(layer.unknown, measure, _finished, measure, layer.states[i], layer.heads) for layer in firsts
        ]
    nonfinite = torch.cat([torch.stack([layer.nonfinite for layer in steps]) for steps in layers], -1)
    blank = torch.full_like(nonfinite[:, 0], torch.nan, dtype=torch.float32).split(sizes, -1)
    found = [
        torch.cat([
            nan if measure.name in layer.unknown else part
            for layer, nan, part in zip(firsts, blank, known[measure.name], strict=True)
        ], -1)
        for measure in pooling.measures
    ]  # fmt: skip
    return torch.stack([*found, *nonfinite.float().unbind(1)], -1)


def _finished(measure: Measure, state: Any, heads: range) -> Tensor:
    """The value of a measure for each head, [1, heads]; ShapeError if that is not what it returns."""
    found = measure.finish(state)
    if not isinstance(found, Tensor) or found.shape != (1, len(heads)):
        what = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ShapeError(f"{type(measure).__name__}.finish(state): expected [b, h]=[1, {len(heads)}], got {what}")
    return found


@dataclass
class Running:
    """The states of all layers, in the order of the first call."""

    layers: dict[str, Layer] = field(default_factory=dict)
    index: int = 0  # of a step that has ended, as the next two
    spoiled: bool = False  # as of the ledger
    known: int = 0  # the number of layers seen until then

    def kind(self) -> Any:
        """Equal for steps that are folded together: `tables` takes those of the same layers, without other states."""
        if any(layer.states for layer in self.layers.values()):
            return self.index
        facts = ((name, x.heads, x.nonfinite.device, *sorted(x.unknown)) for name, x in self.layers.items())
        return self.known, *facts

    def add(self, name: str, *layers: Layer) -> None:
        """Add the states of a layer, of one call or step after the other."""
        before = self.layers.get(name)
        first, *more = layers if before is None else (before, *layers)
        self.layers[name] = first.merged(*more) if more else first


_READ: Any = {"dtype": torch.float32, "device": "cpu"}  # of what is read, whatever the reader's defaults are


def tables(
    steps: Sequence[Running], names: tuple[str, ...], order: Mapping[str, range], heads: Sequence[int] | None
) -> tuple[tuple[tuple[str, int], ...], Tensor, Tensor]:
    """places, numbers and nonfinite of `Summary`, the tensors of all steps, with one transfer from each device. steps:
    as of `columns`, all with the same layers. order: layers in the order of their rows and the numbers of each one's
    heads, NaN for those that did not run; heads: those to keep, None for all."""
    table = torch.full((len(steps), sum(map(len, order.values())), len(names) + 4), torch.nan, **_READ)
    layers = steps[0].layers
    for device in {layer.nonfinite.device for layer in layers.values()}:
        here = [name for name in order if (x := layers.get(name)) and x.nonfinite.device == device]
        if here:
            rows = [i for i, name in enumerate(name for name in order for _ in order[name]) if name in here]
            table[:, rows] = columns([[step.layers[name] for step in steps] for name in here]).cpu()
    places = [(name, head) for name, here in order.items() for head in here]
    if heads is not None:
        wanted = [(name, head) for name, here in order.items() for head in heads if head in here]
        table = table[:, [places.index(place) for place in wanted]]
        places = wanted
    return tuple(places), table[..., : len(names)].contiguous(), table[..., len(names) :].nan_to_num(0.0)


def layer_of(call: AttentionCall, pooling: Merging) -> Layer:
    """The states of one call."""
    measured, amap = call.measured, call.map
    assert measured is not None  # a record has measures
    unknown = {name: f"{type(error).__name__}: {error}" for name, error in call.failed.items()}
    grid, device, heads, states = amap.rule.grid, amap.lse.device, amap.shape[1], []
    grid = grid if grid.b == 1 else replace(grid, b=1)
    given = measured.states if pooling.others else {}
    for m in pooling.others:
        state = start = pooling.start(unknown, m, grid, device)
        if m.name not in unknown:
            state = given[m.name]
            if len(amap.lse) != 1:
                state = pooling.tried(unknown, m, m.merge, start, state)
        states.append(start if m.name in unknown else state)
    nonfinite = torch.zeros(4, heads, dtype=torch.float64, device=device)
    if bool(measured.nonfinite.any()):
        nonfinite[0] = measured.nonfinite.sum(0)
        nonfinite[1] = _bad(amap.q, heads)
        nonfinite[2] = _bad(amap.k, heads)
    if amap.nonfinite_values is not None:
        nonfinite[3] = amap.nonfinite_values.sum(0).repeat_interleave(heads // amap.nonfinite_values.shape[1])
    for m in pooling.measures if call.unplaced or call.unstarted else ():
        if (call.unplaced and m.placed) or (call.unstarted and (m.requires or m.of_first)):
            unknown.setdefault(m.name, "")
    numbers, of = (range(heads), heads) if call.held is None else call.held
    return Layer(grid, pooling, pooling.pooled(measured), states, nonfinite, numbers, of, unknown)


def unknown_layer(held: Held | None, out: Tensor, pooling: Merging) -> Layer:
    """The states of a call that was not measured, of its output [b, h, n, d_v]."""
    heads, n = out.shape[1:3]
    device = torch.device("cpu") if has_no_numbers(out) else out.device
    grid = Grid(1, heads, n, n)
    unknown = {m.name: "" for m in pooling.measures}
    pooled = pooling.pooled(Measurements((), (), torch.zeros(1, heads, dtype=torch.int64, device=device)))
    states = [pooling.start(unknown, m, grid, device) for m in pooling.others]
    nonfinite = torch.zeros(4, heads, dtype=torch.float64, device=device)
    return Layer(grid, pooling, pooled, states, nonfinite, *(held or (range(heads), heads)), unknown)


def _bad(x: Tensor, heads: int) -> Tensor:
    """Count NaN and infinite entries of each query head, [h]."""
    return (~torch.isfinite(x)).sum((0, 2, 3)).repeat_interleave(heads // x.shape[1])


NONFINITE = ("rows", "queries", "keys", "values")  # where NaN and infinity are counted, for each head


@dataclass(frozen=True, eq=False, repr=False)
class Summary(Tabled, Mapping[str, Tensor]):
    """Measures of heads of a step, or of many: `summary.table` is the `HeadTable` of them, and `summary["entropy"]` one
    measure as [layers, heads] float32, NaN where a layer has no such head.

    Attributes:
        step: the last of its steps; steps: their number.
        places: (layer, head) of each row, in the order of the calls.
        names: of the measures.
        numbers: [rows, measures] float32 on the CPU; NaN where the head did not run.
        nonfinite: [rows, 4] counts of NaN and infinity: rows of scores, and entries of queries, keys and values.
        nonfinite_result: whether a result of the model had NaN or +infinity in this step; it is looked at where there
            is a `NonFiniteAlarm`.
    """

    step: int
    steps: int
    places: tuple[tuple[str, int], ...]
    names: tuple[str, ...]
    numbers: Tensor
    nonfinite: Tensor
    nonfinite_result: bool = False

    def __getitem__(self, name: str) -> Tensor:
        layers = self.layers
        table = torch.full((len(layers), max((head for _, head in self.places), default=-1) + 1), torch.nan, **_READ)
        index = {layer: i for i, layer in enumerate(layers)}
        for (layer, head), value in zip(self.places, self.column(name).tolist(), strict=True):
            table[index[layer], head] = value
        return table

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers, in the order of the calls."""
        return tuple(dict.fromkeys(layer for layer, _ in self.places))

    def column(self, name: str) -> Tensor:
        """A measure of every row of `places`, [rows]."""
        if name not in self.names:
            raise unknown_name("measure", name, self.names, listed="" if self.names else "nothing was measured")
        return self.numbers[:, self.names.index(name)]

    @cached_property
    def table(self) -> HeadTable:
        """The numbers as a `HeadTable`, with units; counts of NaN and infinity are columns where there are any."""
        index = {layer: i for i, layer in enumerate(self.layers)}
        columns = {name: _column(name, self.numbers[:, i]) for i, name in enumerate(self.names)}
        for i, what in enumerate(NONFINITE):
            if bool(self.nonfinite[:, i].any()):
                columns[f"nonfinite_{what}"] = HeadColumn(
                    [self.nonfinite[:, i]], description="NaN and infinity, counted."
                )
        places = [(index[layer], head) for layer, head in self.places]
        about = {"step": self.step, "steps": self.steps}
        title = f"step {self.step}" if self.steps else "no step measured yet"
        if self.steps > 1:
            title = f"{self.steps} steps, the last of them step {self.step}"
        return HeadTable.of_rows(columns, places, layers=self.layers, title=title, about=about)

    def to_dict(self) -> dict[str, Any]:
        """Numbers for JSON: step, steps, and for each layer its heads and their measures; None for NaN and infinity,
        whose counts are included where there are any."""
        layers: dict[str, Any] = {}
        for layer in self.layers:
            at = [i for i, (name, _) in enumerate(self.places) if name == layer]
            entry: dict[str, Any] = {"heads": [self.places[i][1] for i in at]}
            entry |= {name: plain(self.numbers[at, i].numpy()) for i, name in enumerate(self.names)}
            if bool(self.nonfinite[at].any()):
                entry["nonfinite"] = {
                    what: self.nonfinite[at, i].long().tolist() for i, what in enumerate(NONFINITE)
                }  # fmt: skip
            layers[layer] = entry
        return {"step": self.step, "steps": self.steps, "layers": layers}


def _column(name: str, values: Tensor) -> HeadColumn:
    """The column of a measure, with unit and description if its name is registered."""
    if (words := describe(name, "en")) is None:
        return HeadColumn([values])
    return HeadColumn([values], unit=words.unit, description=words.summary, range=words.range)


class History(Sequence[Summary]):
    """The latest measured steps, oldest first; `history["max_logit"]` is [steps, layers, heads]."""

    def __init__(self, summaries: Sequence[Summary]) -> None:
        self._summaries = tuple(summaries)

    def __len__(self) -> int:
        return len(self._summaries)

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return self._summaries[key]
        tables = [summary[key] for summary in self._summaries]
        layers, heads = (max((table.shape[axis] for table in tables), default=0) for axis in (0, 1))
        grown = torch.full((len(tables), layers, heads), torch.nan, **_READ)
        for i, table in enumerate(tables):
            grown[i, : len(table), : table.shape[1]] = table
        return grown

    @property
    def steps(self) -> list[int]:
        """The number of each step."""
        return [summary.step for summary in self._summaries]

    @property
    def nbytes(self) -> int:
        """Size of the numbers in bytes."""
        return held_bytes(self._summaries)

    def to_dict(self) -> list[dict[str, Any]]:
        """`Summary.to_dict` of each."""
        return [summary.to_dict() for summary in self._summaries]

    def __repr__(self) -> str:
        if not self._summaries:
            return "History(no step measured yet)"
        return f"History({len(self)} steps, {self.steps[0]} to {self.steps[-1]}; {', '.join(self._summaries[-1])})"


KEPT = 64  # the most steps that have ended and are not folded
_folding = RLock()  # records are read in any thread


class Ledger:
    """Accumulates steps; its size depends on the number of heads and on `history`, the steps kept one by one. Ended
    steps are folded into sums and summaries, many at once, when these are read."""

    def __init__(self, names: tuple[str, ...], heads: Sequence[int] | None, history: int) -> None:
        self._names, self._heads = names, heads
        self._past: deque[Summary] = deque(maxlen=history)
        self._order: dict[str, range] = {}
        self._current, self._ended = Running(), list[Running]()
        self._last, self._total = Running(), Running()
        self.index = self.steps = 0  # measured ones
        self.clipped: int | None = None  # the step by which `qk_clip` last changed weights
        self.spoiled = False  # whether a result in the current step has NaN or +infinity, as far as looked at
        self._latest = self.summarise(self._last, 0, 0)

    def begin_at(self, step: int) -> None:
        """Number the current step so."""
        number = check_whole("start", "step", step, 0)
        if self.pending and number != self.index:
            raise ConfigError(
                f"start(step={number}): step {self.index} has numbers already; end it with record.step(), or discard "
                f"all steps with record.clear()"
            )
        if number < self.index:
            raise ConfigError(
                f"start(step={number}): expected at least {self.index}, the step that is next; record.clear() counts "
                f"from 0 again"
            )
        self.index = number

    def check_heads(self, name: str, layer: Layer) -> None:
        """Raise ConfigError if a layer does not have the heads that are kept of each."""
        if bad := [head for head in self._heads or () if head >= layer.of]:
            raise ConfigError(f"heads={bad[0]}: {name or 'the model'} has the heads 0 to {layer.of - 1}")

    def add(self, name: str, layer: Layer) -> None:
        """Add the states of a layer of a forward to the current step. ConfigError if it had other heads before."""
        before = self._order.setdefault(name, layer.heads)
        if layer.heads != before:
            raise ConfigError(
                f"{name or 'the model'} had {_listed(before)} when it was first watched, and has "
                f"{_listed(layer.heads)} now; record.clear() discards the numbers so far"
            )
        self._current.add(name, layer)

    def end_step(self) -> Running | None:
        """End the current step and return its states; None if nothing was measured."""
        with _folding:
            step = Running(self._current.layers, self.index, self.spoiled, len(self._order))
            self._current, self.index, self.spoiled = Running(), self.index + 1, False
            if not step.layers and not step.spoiled:
                return None
            self._ended.append(step)
            self.steps += 1
            if len(self._ended) >= KEPT:
                self.fold()
        return step

    def fold(self) -> None:
        """Add the steps that have ended to the totals and the history; where that raises, they wait for the next."""
        with _folding:
            ended, self._ended = self._ended, []
            try:
                for steps in [list(alike) for _, alike in groupby(ended, Running.kind)]:
                    order = dict(islice(self._order.items(), steps[-1].known))
                    places, *found = tables(steps, self._names, order, self._heads)
                    total = Running(dict(self._total.layers))
                    for name in steps[-1].layers:
                        layers = [step.layers[name] for step in steps]
                        if bool(torch.stack([layer.nonfinite for layer in layers]).any()):
                            layers = [layer.trusted() for layer in layers]
                        total.add(name, *layers)
                    for step, given, bad in zip(steps, *found, strict=True):  # copies: a summary can outlive the others
                        numbers, nonfinite = given.clone(), bad.clone()
                        self._past.append(Summary(step.index, 1, places, self._names, numbers, nonfinite, step.spoiled))
                    self._last, self._total, self._latest = steps[-1], total, self._past[-1]
                    del ended[: len(steps)]
            finally:
                self._ended = ended + self._ended

    @property
    def states(self) -> tuple[Running, Running]:
        """The states of the last step, and of all steps."""
        with _folding:
            self.fold()
            return self._last, self._total

    @property
    def latest(self) -> Summary:
        """The summary of the last step."""
        self.fold()
        return self._latest

    @property
    def pending(self) -> bool:
        """Whether the current step has numbers."""
        return bool(self._current.layers)

    @property
    def totals(self) -> Summary:
        """The summary of all steps."""
        with _folding:  # of the same steps, whatever ends in another thread
            return self.summarise(self.states[1], self._latest.step, self.steps)

    @property
    def history(self) -> History:
        """The latest steps."""
        with _folding:
            self.fold()
            return History(tuple(self._past))

    def summarise(self, running: Running, step: int, steps: int, whole: Running | None = None) -> Summary:
        """The summary of states of several steps, such as those of all ranks, with the heads of `whole`."""
        order = self._order | {name: x.heads for name, x in (whole.layers if whole else {}).items()}
        places, numbers, nonfinite = tables([running], self._names, order, self._heads)
        return Summary(step, steps, places, self._names, numbers[0], nonfinite[0])


def _listed(heads: range) -> str:
    return f"{len(heads)} heads" + (f" from {heads.start} on" if heads.start else "")
