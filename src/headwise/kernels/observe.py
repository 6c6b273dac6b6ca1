"""Statistics of an attention matrix by themselves: a kernel's pass without values."""

from contextlib import suppress

import torch
from torch import Tensor

from headwise.kernels import KERNELS
from headwise.kernels.call import Call, Declined
from headwise.rule import Rule
from headwise.statistics import KeyWeights, Statistic
from headwise.tiles import Progress

OBSERVERS = ("cpu",)  # kernels that give statistics


@torch.no_grad()
def observe(
    q: Tensor, k: Tensor, rule: Rule, wanted: tuple[Statistic, ...], progress: Progress | None = None
) -> dict[Statistic, Tensor]:
    """Those of the wanted statistics that a compiled kernel can give; {} where none can.

    With `progress` it goes head by head, and tells the rows done and the rows in all as if they went together.
    """
    if progress is None or not wanted:
        return _observe(Call(q, k, k[..., :0], rule, statistics=wanted))
    b, h, n, _ = rule.grid
    found: dict[Statistic, list[Tensor]] = {statistic: [] for statistic in wanted}
    for batch in range(b):
        here = {statistic: _only(statistic, batch) for statistic in wanted}
        for head in range(h):
            one = q[batch, head][None, None], k[batch, head * k.shape[1] // h][None, None]
            call = Call(*one, one[1][..., :0], rule.only(batch, head), statistics=tuple(here.values()))
            told = _observe(call)
            if not told:
                return {}
            for statistic in wanted:
                if here[statistic] in told:
                    found[statistic].append(told[here[statistic]])
            progress((batch * h + head + 1) * n // (b * h), n)
    return {s: torch.cat(parts, 1).view(b, h, -1) for s, parts in found.items() if len(parts) == b * h}


def _observe(call: Call) -> dict[Statistic, Tensor]:
    for name in OBSERVERS if call.statistics else ():
        if KERNELS[name].refuse(call) is None:
            with suppress(Declined):
                return dict(KERNELS[name].run(call).statistics)
    return {}


def _only(statistic: Statistic, batch: int) -> Statistic:
    """The statistic as one batch entry has it."""
    if isinstance(statistic, KeyWeights) and len(statistic.weights) > 1:
        return KeyWeights(statistic.weights[batch : batch + 1])
    return statistic
