"""Merging the records of all ranks of a distributed run."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headwise.errors import ConfigError
from headwise.kernels.spread import is_dtensor, uneven
from headwise.stats.base import side_by_side
from headwise.table import HeadTable
from headwise.telemetry.ledger import Layer, Running, Summary


@dataclass(frozen=True, eq=False)
class Reduced:
    """The numbers of all ranks: means over all rows, maxima over all ranks.

    Attributes:
        record: the `Record` of this rank.
        latest, totals: as in `Record`, the same on every rank.
    """

    record: Any
    latest: Summary
    totals: Summary

    def table(self) -> HeadTable:
        """The totals as a table."""
        return self.totals.table


# Attributes of modules, and of their configurations, with the number of query heads of a layer.
HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head")


def gathered(runnings: Sequence[Running], group: Any, modules: Mapping[str, nn.Module]) -> list[Running]:
    """Merge each over the ranks, in their order, so that all get the same bits; one collective for sizes, one for
    numbers. ConfigError on every rank if they did not all measure the same layers and heads."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError("reduce(): torch.distributed is not initialised; use record.latest and record.totals")
    layers = [(i, name, layer) for i, one in enumerate(runnings) for name, layer in one.layers.items()]
    parts = [x for _, _, layer in layers for x in (*layer.tensors(), _facts(layer))]
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else "cpu"
    flat = torch.cat(
        [torch.empty(0, dtype=torch.float64, device=device), *(x.double().flatten().to(device) for x in parts)]
    )
    names = repr([(i, name, layer.of) for i, name, layer in layers])
    shapes = repr([[x.shape for x in layer.tensors()] for _, _, layer in layers])
    shapes += repr([_replica(modules.get(name), layer) for _, name, layer in layers])
    heads = max((len(layer.heads) for _, _, layer in layers), default=0)
    mine = torch.tensor([len(flat), heads, *(zlib.crc32(x.encode()) for x in (names, shapes))], device=device)
    sizes = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, mine, group=group)
    if any(not torch.equal(size, mine) for size in sizes):
        counts = [int(size[1]) for size in sizes]
        if len({*counts}) > 1 and len({int(size[2]) for size in sizes}) == 1:
            raise ConfigError(f"reduce(): {uneven(counts)}")
        raise ConfigError(
            f"reduce(): the ranks have not measured the same layers and heads ({[int(size[0]) for size in sizes]} "
            f"numbers), or the weights of a module that has fewer heads than it declares differ, as of heads that are "
            f"split without DTensors; call it where every rank has measured a step, with the same options of watch"
        )
    everyone = [torch.empty_like(flat) for _ in sizes]
    dist.all_gather(everyone, flat, group=group)
    there = [_rebuilt(runnings, numbers) for numbers in everyone]
    return [
        Running({name: _joined([one.layers[name] for one in ranks]) for name in ranks[0].layers})
        for ranks in zip(*there, strict=True)
    ]


def _replica(module: nn.Module | None, layer: Layer) -> list[float]:
    """Some sums of weights of a module with fewer heads than it declares: the same where ranks have copies of it."""
    declared = [getattr(one, name, 0) for one in (module, getattr(module, "config", None)) for name in HEADS]
    if module is None or layer.of >= max(x for x in declared if isinstance(x, int)):
        return []
    plain = [x.detach().flatten() for x in module.parameters() if not is_dtensor(x)]
    return [float(x[:: len(x) // 64 + 1].double().sum()) for x in plain]


def _joined(layers: Sequence[Layer]) -> Layer:
    """A layer over all ranks: states of the same heads merged, those of different heads concatenated."""
    by_heads: dict[int, Layer] = {}
    for layer in layers:
        start = layer.heads.start
        by_heads[start] = by_heads[start].merged(layer) if start in by_heads else layer
    first, *others = parts = [by_heads[start] for start in sorted(by_heads)]
    if not others:
        return first
    if any(one.heads.stop != other.heads.start for one, other in pairwise(parts)):
        held = ", ".join(f"{part.heads.start} to {part.heads.stop - 1}" for part in parts)
        raise ConfigError(f"reduce(): the ranks of the group hold the heads {held} of {first.of}, with gaps")
    counts, filled = [len(part.heads) for part in parts], [part.filled() for part in parts]
    # A measure that a rank does not know is NaN for the heads of that rank; for all heads, if none knows it.
    unknown = {name: why for name, why in first.unknown.items() if all(name in part.unknown for part in parts)}
    states = [
        first.states[i] if measure.name in unknown
        else side_by_side(measure, [part.states[i] for part in filled], counts)
        for i, measure in enumerate(first.pooling.others)
    ]  # fmt: skip
    pooled = [part.pooled for part in filled if part.pooled is not None]
    return replace(
        first, grid=replace(first.grid, h=sum(counts)), states=states,
        pooled=pooled[0].beside(*pooled[1:]) if pooled else None,
        heads=range(first.heads.start, others[-1].heads.stop), unknown=unknown,
        nonfinite=torch.cat([part.nonfinite for part in parts], 1),
    )  # fmt: skip


def _facts(layer: Layer) -> Tensor:
    """The number of the first head of a rank, and which measures are unknown there."""
    unknown = [measure.name in layer.unknown for measure in layer.pooling.measures]
    return torch.tensor([layer.heads.start, *unknown], dtype=torch.float64)


def _rebuilt(runnings: Sequence[Running], numbers: Tensor) -> list[Running]:
    """The same runnings with the numbers of another rank."""
    at = 0

    def take(like: Tensor) -> Tensor:
        nonlocal at
        here = numbers[at : at + like.numel()].view(like.shape).to(like)
        at += like.numel()
        return here

    def layer(one: Layer) -> Layer:
        rebuilt = one.with_tensors(take)
        first, *unknown = map(int, take(_facts(one)))
        names = [m.name for m, there in zip(one.pooling.measures, unknown, strict=True) if there]
        heads = range(first, first + len(one.heads))
        return replace(rebuilt, heads=heads, unknown={name: one.unknown.get(name, "") for name in names})

    return [Running({name: layer(x) for name, x in one.layers.items()}) for one in runnings]
