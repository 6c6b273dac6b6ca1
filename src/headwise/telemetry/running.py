"""Mergeable states of measures, of constant size: over batches, forwards, steps and ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from headwise.masks import Grid
from headwise.publishing import AttentionCall
from headwise.spread import Held
from headwise.stats import Measure, Measurements
from headwise.stats.base import RowState, tensors_of, with_tensors
from headwise.stats.pooled import Pooled, Pooling


class Merging(Pooling):
    """The measures of a record, of which one that fails is unknown, and the others are not.

    Args:
        strict: raise its error instead.
    """

    def __init__(self, measures: Sequence[Measure], *, strict: bool) -> None:
        super().__init__(measures)
        self.strict = strict

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

    def pooled(self, measured: Measurements) -> Pooled | None:
        """As in `Pooling`, with zeros for those that are missing."""
        if any(name not in measured for name in self.names):
            states, zeros = measured.states, torch.zeros_like(measured.nonfinite, dtype=torch.float64)
            blank = RowState(zeros, zeros)
            measured = Measurements(self.together, [states.get(m.name, blank) for m in self.together], zeros)
        return super().pooled(measured)


@dataclass
class Layer:
    """The states of one layer, batches pooled.

    Attributes:
        grid: the size of its latest attention matrix, for one batch entry.
        pooling: the measures of the states, and how they are merged.
        pooled: the states of those that are pooled; None if there are none. states: of the others.
        nonfinite: [4, heads] float64 counts, as in `Summary`.
        heads: the numbers of these heads in the layer; of: how many heads it has on all ranks together.
        unknown: name → why a measure is NaN, as that of some calls is not known; "" where it is said elsewhere.
    """

    grid: Grid
    pooling: Merging
    pooled: Pooled | None
    states: list[Any]
    nonfinite: Tensor
    heads: range
    of: int
    unknown: dict[str, str] = field(default_factory=dict)

    def merged(self, other: "Layer") -> "Layer":
        """Merge two."""
        device = self.nonfinite.device
        if other.nonfinite.device != device:  # of a replica of the module
            other = other.with_tensors(lambda x: x.to(device))
        unknown = self.unknown | other.unknown
        states = [
            one if (merged := self.pooling.tried(unknown, m, m.merge, one, two)) is None else merged
            for m, one, two in zip(self.pooling.others, self.states, other.states, strict=True)
        ]
        pooled = None if self.pooled is None or other.pooled is None else self.pooled.merged(other.pooled)
        nonfinite = self.nonfinite + other.nonfinite
        return Layer(other.grid, self.pooling, pooled, states, nonfinite, self.heads, self.of, unknown)

    def tensors(self) -> list[Tensor]:
        """All tensors of the states."""
        return [*tensors_of(self.pooled), *tensors_of(self.states), self.nonfinite]

    def with_tensors(self, take: Callable[[Tensor], Tensor]) -> "Layer":
        """The same with `take(x)` in place of each tensor x, in the order of `tensors`."""
        pooled, states = with_tensors(self.pooled, take), with_tensors(self.states, take)
        return replace(self, pooled=pooled, states=states, nonfinite=take(self.nonfinite))

    def trusted(self) -> "Layer":
        """The same, with empty states if there are NaN or infinity among the scores, which would spoil a sum for
        good."""
        if not bool(self.nonfinite[0].any()):
            return self
        unknown, device = dict(self.unknown), self.nonfinite.device
        states = [self.pooling.start(unknown, measure, self.grid, device) for measure in self.pooling.others]
        pooled = None if self.pooled is None else self.pooled.empty()
        return replace(self, pooled=pooled, states=states, unknown=unknown)


def columns(layers: Sequence[Layer]) -> Tensor:
    """The finished measures and the counts of layers on one device, [heads of all, measures + 4] float32."""
    first, *more = layers
    pooling, known = first.pooling, dict[str, list[Tensor]]()
    if first.pooled is not None:
        pooled = first.pooled.beside(*(layer.pooled for layer in more if layer.pooled is not None)).finished()
        sizes = [len(layer.heads) for layer in layers]
        known = dict(zip(pooling.names, map(list, (row.split(sizes) for row in pooled)), strict=True))
    for i, measure in enumerate(pooling.others):
        known[measure.name] = [
            pooling.tried(layer.unknown, measure, lambda state, m=measure: m.finish(state)[0], layer.states[i])
            for layer in layers
        ]
    blank = [torch.full((len(layer.heads),), torch.nan, device=layer.nonfinite.device) for layer in layers]
    found = [
        torch.cat([
            nan if measure.name in layer.unknown else part
            for layer, nan, part in zip(layers, blank, known[measure.name], strict=True)
        ])
        for measure in pooling.measures
    ]  # fmt: skip
    return torch.stack([*found, *torch.cat([layer.nonfinite for layer in layers], 1).float()], -1)


@dataclass
class Running:
    """The states of all layers, in the order of the first call."""

    layers: dict[str, Layer] = field(default_factory=dict)

    def add(self, name: str, layer: Layer) -> None:
        """Add the states of a layer."""
        before = self.layers.get(name)
        self.layers[name] = layer if before is None else before.merged(layer)

    def summary(
        self, names: tuple[str, ...], order: Mapping[str, range], heads: Sequence[int] | None
    ) -> tuple[tuple[tuple[str, int], ...], tuple[str, ...], Tensor, Tensor]:
        """The last four fields of a `Summary`, with one transfer from each device.

        Args:
            names: of the measures.
            order: the layers in the order of their rows, and the numbers of each one's heads; NaN for those that did
                not run.
            heads: those of each layer to keep; None for all.
        """
        table = torch.full((sum(map(len, order.values())), len(names) + 4), torch.nan)
        for device in {layer.nonfinite.device for layer in self.layers.values()}:
            here = {name: x for name in order if (x := self.layers.get(name)) and x.nonfinite.device == device}
            if here:
                rows = torch.tensor([one for name in order for one in [name in here] * len(order[name])])
                table[rows] = columns(list(here.values())).cpu()
        places = [(name, head) for name, here in order.items() for head in here]
        if heads is not None:
            wanted = [(name, head) for name, here in order.items() for head in heads if head in here]
            table = table[[places.index(place) for place in wanted]]
            places = wanted
        return tuple(places), names, table[:, : len(names)].contiguous(), table[:, len(names) :].nan_to_num(0.0)


def layer_of(call: AttentionCall, pooling: Merging) -> Layer:
    """The states of one call."""
    measured, amap = call.measured, call.map
    assert measured is not None  # a record has measures
    unknown = {name: f"{type(error).__name__}: {error}" for name, error in call.failed.items()}
    grid, device, given, states = replace(amap.rule.grid, b=1), amap.lse.device, measured.states, []
    for m in pooling.others:
        state = None if m.name in unknown else given[m.name]
        if len(amap.lse) != 1 and state is not None:
            start = pooling.start(unknown, m, grid, device)
            state = pooling.tried(unknown, m, m.merge, start, state)
        states.append(pooling.start(unknown, m, grid, device) if state is None else state)
    heads = amap.shape[1]
    nonfinite = torch.zeros(4, heads, dtype=torch.float64, device=device)
    if bool(measured.nonfinite.any()):
        nonfinite[0] = measured.nonfinite.sum(0)
        nonfinite[1] = _bad(amap.q, heads)
        nonfinite[2] = _bad(amap.k, heads)
    if amap.nonfinite_values is not None:
        nonfinite[3] = amap.nonfinite_values.sum(0).repeat_interleave(heads // amap.nonfinite_values.shape[1])
    unplaced = {m.name for m in pooling.measures if call.unplaced and m.placed}
    unplaced |= {m.name for m in pooling.measures if call.unstarted and (m.requires or m.of_first)}
    numbers, of = (range(heads), heads) if call.held is None else call.held
    pooled = pooling.pooled(measured)
    return Layer(grid, pooling, pooled, states, nonfinite, numbers, of, dict.fromkeys(unplaced, "") | unknown)


def unknown_layer(held: Held | None, out: Tensor, pooling: Merging) -> Layer:
    """The states of a call that was not measured, of its output [b, h, n, d_v]."""
    heads, n = out.shape[1:3]
    grid = Grid(1, heads, n, n)
    unknown = {m.name: "" for m in pooling.measures}
    pooled = pooling.pooled(Measurements((), (), torch.zeros(1, heads, dtype=torch.int64, device=out.device)))
    states = [pooling.start(unknown, m, grid, out.device) for m in pooling.others]
    nonfinite = torch.zeros(4, heads, dtype=torch.float64, device=out.device)
    return Layer(grid, pooling, pooled, states, nonfinite, *(held or (range(heads), heads)), unknown)


def _bad(x: Tensor, heads: int) -> Tensor:
    """Count NaN and infinite entries of each query head, [h]."""
    return (~torch.isfinite(x)).sum((0, 2, 3)).repeat_interleave(heads // x.shape[1])
