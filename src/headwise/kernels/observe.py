"""What the compiled kernel can do with a map: statistics, products and pictures from q, k and the log-sum-exp.

Each gives None (or {}) where it cannot, and the caller goes over the tiles in PyTorch.
"""

from contextlib import suppress

import torch
from torch import Tensor

from headwise.kernels.call import Call, Declined
from headwise.kernels.cpu import kernel
from headwise.kernels.cpu.kernel import CPU
from headwise.rule import Rule
from headwise.statistics import KeyWeights, Statistic
from headwise.tiles import Progress


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
    if call.statistics and CPU().refuse(call) is None:
        with suppress(Declined):
            return kernel.forward(call)[2]
    return {}


def _only(statistic: Statistic, batch: int) -> Statistic:
    """The statistic as one batch entry has it."""
    if isinstance(statistic, KeyWeights) and len(statistic.weights) > 1:
        return KeyWeights(statistic.weights[batch : batch + 1])
    return statistic


@torch.no_grad()
def times(q: Tensor, k: Tensor, rule: Rule, x: Tensor) -> Tensor | None:
    """Weights @ x for x [b, h_kv or h, m, e]: [b, h, n, e]. Attention with the values x."""
    if x.dtype != q.dtype:
        return None
    call = Call(q, _spread(k, x.shape[1]), x, rule)
    if CPU().refuse(call) is None:
        with suppress(Declined):
            return kernel.forward(call)[0]
    return None


@torch.no_grad()
def transposed_times(q: Tensor, k: Tensor, lse: Tensor, rule: Rule, y: Tensor) -> Tensor | None:
    """Weightsᵀ @ y for y [b, h, n, e]: [b, h, m, e]. The gradient of the values for that of the output."""
    if y.dtype != q.dtype:
        return None
    k = _spread(k, q.shape[1])  # or the heads that share keys would be added up
    call = Call(q, k, k[..., :0], rule)
    if CPU().refuse(call) is None:
        with suppress(Declined):
            return kernel.transposed(call, lse, y)
    return None


@torch.no_grad()
def pooled(
    q: Tensor, k: Tensor, lse: Tensor, rule: Rule, cell: int, reduce: str, progress: Progress | None = None
) -> Tensor | None:
    """Weights in squares, as `pooling.pool` gives them; head by head with `progress`."""
    if progress is not None:
        b, h, n, m = rule.grid
        picture = lse.new_zeros(b, h, -(-n // cell), -(-m // cell))
        for batch in range(b):
            for head in range(h):
                key = k[batch, head * k.shape[1] // h][None, None]
                one = q[batch, head][None, None], key, lse[batch, head][None, None]
                found = pooled(*one, rule.only(batch, head), cell, reduce)
                if found is None:
                    return None
                picture[batch, head] = found[0, 0]
                progress((batch * h + head + 1) * n // (b * h), n)
        return picture
    call = Call(q, k, k[..., :0], rule)
    if CPU().refuse(call) is None:
        with suppress(Declined):
            return kernel.pool(call, lse, cell, reduce)
    return None


def _spread(k: Tensor, heads: int) -> Tensor:
    """k [b, h_kv, m, d] with as many heads, each repeated in its place."""
    return k if k.shape[1] == heads else k.repeat_interleave(heads // k.shape[1], 1)
