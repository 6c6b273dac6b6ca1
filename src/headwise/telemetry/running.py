"""Mergeable states of measures, of constant size: over batches, forwards, steps and ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from headwise.masks import Grid
from headwise.parallel.heads_held import held_heads
from headwise.publishing import AttentionCall
from headwise.stats import Measure
from headwise.stats.states import tensors_of, with_tensors


@dataclass
class Layer:
    """The states of one layer.

    Attributes:
        grid: the size of its latest attention matrix, for one batch entry.
        measures: the measures of the states.
        states: one for each measure, batches pooled.
        nonfinite: [4, heads] float64 counts, as in `Summary`.
        heads: the numbers of these heads in the layer; of: how many heads it has on all ranks together.
    """

    grid: Grid
    measures: tuple[Measure, ...]
    states: list[Any]
    nonfinite: Tensor
    heads: range
    of: int

    def merged(self, other: "Layer") -> "Layer":
        """Merge two."""
        device = self.nonfinite.device  # replicas of a module have others
        theirs = other.states
        if other.nonfinite.device != device:
            theirs = [with_tensors(state, lambda x: x.to(device)) for state in theirs]
        states = [m.merge(one, two) for m, one, two in zip(self.measures, self.states, theirs, strict=True)]
        nonfinite = self.nonfinite + other.nonfinite.to(self.nonfinite.device)
        return replace(self, grid=other.grid, states=states, nonfinite=nonfinite)

    def columns(self) -> Tensor:
        """The finished measures and the counts, [heads, measures + 4]."""
        values = [measure.finish(state)[0] for measure, state in zip(self.measures, self.states, strict=True)]
        return torch.stack([*values, *self.nonfinite.float()], -1)

    def tensors(self) -> list[Tensor]:
        """All tensors of the states."""
        return [x for state in self.states for x in tensors_of(state)] + [self.nonfinite]

    def trusted(self) -> "Layer":
        """The same, with empty states if there are NaN or infinity among the scores, which would spoil a sum for
        good."""
        if not bool(self.nonfinite[0].any()):
            return self
        like = torch.empty(0, device=self.nonfinite.device)
        return replace(self, states=[measure.start(self.grid, like) for measure in self.measures])


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
        """The last four fields of a `Summary`, with one transfer from the device for each layer.

        Args:
            names: of the measures.
            order: the layers in the order of their rows, and the numbers of each one's heads; NaN for those that did
                not run.
            heads: those of each layer to keep; None for all.
        """
        places: list[tuple[str, int]] = []
        numbers, counts = [torch.empty(0, len(names))], [torch.empty(0, 4)]
        for name, here in order.items():
            chosen = [head for head in (here if heads is None else heads) if head in here]
            places += [(name, head) for head in chosen]
            wanted = [head - here.start for head in chosen]
            layer = self.layers.get(name)
            columns = torch.full((len(here), len(names) + 4), torch.nan) if layer is None else layer.columns().cpu()
            numbers.append(columns[wanted, : len(names)])
            counts.append(columns[wanted, len(names) :].nan_to_num(0.0))
        return tuple(places), names, torch.cat(numbers), torch.cat(counts)


def layer_of(call: AttentionCall, measures: Sequence[Measure]) -> Layer:
    """The states of one call."""
    measured, amap = call.measured, call.map
    assert measured is not None  # a record has measures
    grid = replace(amap.rule.grid, b=1)
    found = measured.states
    states = [found[m.name] for m in measures]
    if len(amap.lse) != 1:  # pool the batch
        states = [m.merge(m.start(grid, amap.lse), state) for m, state in zip(measures, states, strict=True)]
    heads = amap.shape[1]
    nonfinite = torch.zeros(4, heads, dtype=torch.float64, device=amap.lse.device)
    nonfinite[0] = measured.nonfinite.sum(0)
    if bool(measured.nonfinite.any()):
        nonfinite[1] = _bad(amap.q, heads)
        nonfinite[2] = _bad(amap.k, heads)
    if amap.nonfinite_values is not None:
        nonfinite[3] = amap.nonfinite_values.sum(0).repeat_interleave(heads // amap.nonfinite_values.shape[1])
    held = held_heads(call.module)
    numbers, of = (range(heads), heads) if held is None else (held.heads, held.num_heads)
    return Layer(grid, tuple(measures), states, nonfinite, numbers, of)


def _bad(x: Tensor, heads: int) -> Tensor:
    """Count NaN and infinite entries of each query head, [h]."""
    return (~torch.isfinite(x)).sum((0, 2, 3)).repeat_interleave(heads // x.shape[1])
