"""Mergeable states of measures, of constant size: over batches, forwards, steps and ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from headwise.masks import Grid
from headwise.publishing import AttentionCall
from headwise.spread import Held
from headwise.stats import Measurements
from headwise.stats.base import tensors_of, with_tensors
from headwise.stats.pooled import Pooled, Pooling


@dataclass
class Layer:
    """The states of one layer, batches pooled.

    Attributes:
        grid: the size of its latest attention matrix, for one batch entry.
        pooling: the measures of the states.
        pooled: the states of those that are pooled; None if there are none. states: of the others.
        nonfinite: [4, heads] float64 counts, as in `Summary`.
        heads: the numbers of these heads in the layer; of: how many heads it has on all ranks together.
        unknown: names of the measures that are NaN, because those of some calls are not known.
    """

    grid: Grid
    pooling: Pooling
    pooled: Pooled | None
    states: list[Any]
    nonfinite: Tensor
    heads: range
    of: int
    unknown: frozenset[str] = frozenset()

    def merged(self, other: "Layer") -> "Layer":
        """Merge two."""
        device = self.nonfinite.device
        if other.nonfinite.device != device:  # of a replica of the module
            other = other.with_tensors(lambda x: x.to(device))
        states = [m.merge(one, two) for m, one, two in zip(self.pooling.others, self.states, other.states, strict=True)]
        pooled = None if self.pooled is None or other.pooled is None else self.pooled.merged(other.pooled)
        nonfinite = self.nonfinite + other.nonfinite
        unknown = self.unknown | other.unknown
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
        like = torch.empty(0, device=self.nonfinite.device)
        pooled = None if self.pooled is None else self.pooled.empty()
        return replace(self, pooled=pooled, states=[measure.start(self.grid, like) for measure in self.pooling.others])


def columns(layers: Sequence[Layer]) -> Tensor:
    """The finished measures and the counts of layers on one device, [heads of all, measures + 4] float32."""
    first, *more = layers
    pooling, known = first.pooling, {}
    if first.pooled is not None:
        pooled = first.pooled.beside(*(layer.pooled for layer in more if layer.pooled is not None))
        known = dict(zip(pooling.names, pooled.finished(), strict=True))
    for i, measure in enumerate(pooling.others):
        known[measure.name] = torch.cat([measure.finish(layer.states[i])[0] for layer in layers])
    for name in frozenset().union(*(layer.unknown for layer in layers)):
        here = [name in layer.unknown for layer in layers for _ in layer.heads]
        known[name] = known[name].masked_fill(torch.tensor(here, device=first.nonfinite.device), torch.nan)
    counts = torch.cat([layer.nonfinite for layer in layers], 1).float()
    return torch.stack([*(known[measure.name] for measure in pooling.measures), *counts], -1)


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


def layer_of(call: AttentionCall, pooling: Pooling) -> Layer:
    """The states of one call."""
    measured, amap = call.measured, call.map
    assert measured is not None  # a record has measures
    whole, states = amap.rule.grid, []
    grid = replace(whole, b=1)
    if pooling.others:
        states = [measured.states[m.name] for m in pooling.others]
        if len(amap.lse) != 1:
            states = [m.merge(m.start(grid, amap.lse), x) for m, x in zip(pooling.others, states, strict=True)]
    heads = amap.shape[1]
    nonfinite = torch.zeros(4, heads, dtype=torch.float64, device=amap.lse.device)
    if bool(measured.nonfinite.any()):
        nonfinite[0] = measured.nonfinite.sum(0)
        nonfinite[1] = _bad(amap.q, heads)
        nonfinite[2] = _bad(amap.k, heads)
    if amap.nonfinite_values is not None:
        nonfinite[3] = amap.nonfinite_values.sum(0).repeat_interleave(heads // amap.nonfinite_values.shape[1])
    unknown = {m.name for m in pooling.measures if call.unplaced and m.placed}
    unknown |= {m.name for m in pooling.measures if call.unstarted and (m.requires or m.of_first)}
    numbers, of = (range(heads), heads) if call.held is None else call.held
    return Layer(grid, pooling, pooling.pooled(measured), states, nonfinite, numbers, of, frozenset(unknown))


def unknown_layer(held: Held | None, out: Tensor, pooling: Pooling) -> Layer:
    """The states of a call that was not measured, of its output [b, h, n, d_v]."""
    heads, n = out.shape[1:3]
    grid, like = Grid(1, heads, n, n), torch.zeros(1, heads, n, device=out.device)
    measured = Measurements(pooling.measures, [m.closed(m.start(grid, like)) for m in pooling.measures], like[..., 0])
    numbers, of = held or (range(heads), heads)
    states = [measured.states[m.name] for m in pooling.others]
    nonfinite, names = torch.zeros(4, heads, dtype=torch.float64, device=out.device), {m.name for m in pooling.measures}
    return Layer(grid, pooling, pooling.pooled(measured), states, nonfinite, numbers, of, frozenset(names))


def _bad(x: Tensor, heads: int) -> Tensor:
    """Count NaN and infinite entries of each query head, [h]."""
    return (~torch.isfinite(x)).sum((0, 2, 3)).repeat_interleave(heads // x.shape[1])
