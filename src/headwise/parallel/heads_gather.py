"""Gathering maps and statistics of the heads of all ranks, in the order of the heads."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headwise.errors import ConfigError
from headwise.map import AttentionMap
from headwise.parallel.heads_held import HeldHeads, held_heads
from headwise.rule import Rule
from headwise.stats import Measurements
from headwise.stats.base import side_by_side, tensors_of, with_tensors


def gather_map(amap: AttentionMap, layer: nn.Module) -> AttentionMap:
    """Gather the maps of all ranks to the map of all heads, on every rank. All ranks of the layer's mesh must call it.

    Args:
        amap: this rank's map, from `layer(x, return_map=True)`.
        layer: a layer partitioned by `parallelize_heads`.
    Returns:
        The map of the whole layer, with the statistics of all heads if measures were computed. Memory is O(n) per head
        for all heads: queries, keys and log-sum-exps are sent to every rank.
    Raises:
        ConfigError: if the layer's heads are not partitioned, or if a custom measure has no [batch, heads, …] sums.
    """
    held = held_heads(layer)
    if held is None:
        raise ConfigError(f"gather_map: the heads of this {type(layer).__name__} are not spread over ranks")
    rule, own = amap.rule, amap.nonfinite_values
    bad = gathered(torch.zeros_like(amap.k[:, :, 0, 0], dtype=torch.long) if own is None else own, held, keys=True)

    def join(x: Tensor, dim: int) -> Tensor:
        parts = gathered(x.to(amap.q.device, torch.uint8 if x.dtype == torch.bool else x.dtype), held, dim)
        return parts.to(x.device, x.dtype)

    whole = AttentionMap(
        gathered(amap.q, held),
        gathered(amap.k, held, keys=True),
        gathered(amap.lse, held),
        Rule(
            rule.mask.joined("h", len(held.heads), join), rule.scale, replace(rule.grid, h=held.num_heads),
            tuple(score.joined("h", len(held.heads), join) for score in rule.scores),
        ),
        kernel=amap.kernel, named=amap.named, refusals=amap.refusals,
        nonfinite_values=bad if bool(bad.any()) else None,
    )  # fmt: skip
    if amap.measured is not None:
        whole.measured = _measured(amap.measured, held)
        whole.measured.nonfinite_values = whole.nonfinite_values
    return whole


def gathered(x: Tensor, held: HeldHeads, dim: int = 1, *, keys: bool = False) -> Tensor:
    """The parts of all ranks joined along the axis of heads; each KV head once."""
    parts = _of_ranks(x, held)
    return torch.cat(parts[:: held.sharing] if keys else parts, dim)


def _of_ranks(x: Tensor, held: HeldHeads) -> list[Tensor]:
    """The tensors of all ranks."""
    x = x.detach().contiguous()
    parts = [torch.empty_like(x) for _ in range(held.ranks)]
    dist.all_gather(parts, x, group=held.mesh.get_group())
    return parts


def _measured(own: Measurements, held: HeldHeads) -> Measurements:
    """The statistics of all ranks side by side."""
    states = []
    for measure, state in zip(own._measures, own.states.values(), strict=True):
        tensors = zip(*(_of_ranks(x, held) for x in tensors_of(state)), strict=True)
        of_ranks = []
        for each in tensors:
            numbers = iter(each)
            of_ranks.append(with_tensors(state, lambda _, numbers=numbers: next(numbers)))  # type: ignore[misc]
        states.append(side_by_side(measure, of_ranks, [len(held.heads)] * held.ranks))
    return Measurements(own._measures, states, gathered(own.nonfinite, held))
