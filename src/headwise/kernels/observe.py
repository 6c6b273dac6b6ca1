"""What the compiled kernel can do with a map: statistics, products and pictures from q, k and the log-sum-exp.

Each gives None (or {}) where it cannot, and the caller goes over the tiles in PyTorch.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from headwise.kernels.call import Call, Declined
from headwise.kernels.cpu import kernel, matrix
from headwise.kernels.cpu.kernel import CPU
from headwise.rule import Rule
from headwise.statistics import KeyWeights, SameLabel, Squares, Statistic
from headwise.tiles import Progress

Result = TypeVar("Result")


@torch.no_grad()
def observe(
    q: Tensor, k: Tensor, rule: Rule, wanted: tuple[Statistic, ...], progress: Progress | None = None
) -> dict[Statistic, Tensor]:
    """Those of the wanted statistics that a compiled kernel can give; {} where none can.

    With `progress` it goes head by head, and tells the rows done and the rows in all as if they went together.
    """
    b, h, n, _ = rule.grid
    if progress is None or not wanted or b * h == 0:
        all_at_once = _observe(Call(q, k, k[..., :0], rule, statistics=wanted))
        if progress is not None and all_at_once:
            progress(n, n)
        return all_at_once
    found: dict[Statistic, list[Tensor]] = {statistic: [] for statistic in wanted}
    for batch, _, call in _heads(q, k, rule, progress):
        here = {statistic: _only(statistic, batch) for statistic in wanted}
        told = _observe(replace(call, statistics=tuple(here.values())))
        if not told:
            return {}
        for statistic in wanted:
            if here[statistic] in told:
                found[statistic].append(told[here[statistic]])
    whole = {s: torch.cat(parts) for s, parts in found.items() if len(parts) == b * h}
    return {s: x.view(b, h, *x.shape[2:]) for s, x in whole.items()}


def _observe(call: Call) -> dict[Statistic, Tensor]:
    found = _compiled(call, kernel.forward) if call.statistics else None
    return {} if found is None else found[2]


def _compiled(call: Call, work: Callable[[Call], Result]) -> Result | None:
    """What the compiled kernel makes of a call, or None if it cannot."""
    if CPU().refuse(call) is None:
        with suppress(Declined):
            return work(call)
    return None


def _heads(q: Tensor, k: Tensor, rule: Rule, progress: Progress) -> Iterator[tuple[int, int, Call]]:
    """Batch entry, head, and the call of that head alone; the rows done are told as if all heads went together."""
    b, h, n, _ = rule.grid
    for batch in range(b):
        for head in range(h):
            key = k[batch, head * k.shape[1] // h][None, None]
            yield batch, head, Call(q[batch, head][None, None], key, key[..., :0], rule.only(batch, head))
            progress((batch * h + head + 1) * n // (b * h), n)


def _only(statistic: Statistic, batch: int) -> Statistic:
    """The statistic as one batch entry has it."""
    if isinstance(statistic, KeyWeights) and len(statistic.weights) > 1:
        return KeyWeights(statistic.weights[batch : batch + 1])
    if isinstance(statistic, SameLabel):
        keys, queries = (x if len(x) == 1 else x[batch : batch + 1] for x in (statistic.keys, statistic.queries))
        return SameLabel(keys, queries, statistic.ahead)
    return statistic


@torch.no_grad()
def times(q: Tensor, k: Tensor, rule: Rule, x: Tensor) -> Tensor | None:
    """Weights @ x for x [b, h_kv or h, m, e]: [b, h, n, e]. Attention with the values x."""
    if x.dtype != q.dtype:
        return None
    found = _compiled(Call(q, _spread(k, x.shape[1]), x, rule), kernel.forward)
    return None if found is None else found[0]


@torch.no_grad()
def transposed_times(q: Tensor, k: Tensor, lse: Tensor, rule: Rule, y: Tensor) -> Tensor | None:
    """Weightsᵀ @ y for y [b, h, n, e]: [b, h, m, e]. The gradient of the values for that of the output."""
    if y.dtype != q.dtype:
        return None
    k = _spread(k, q.shape[1])  # or the heads that share keys would be added up
    return _compiled(Call(q, k, k[..., :0], rule), lambda call: kernel.transposed(call, lse, y))


@torch.no_grad()
def pooled(
    q: Tensor, k: Tensor, lse: Tensor, rule: Rule, cell: int, progress: Progress | None = None
) -> Squares | None:
    """Weights in squares, as `pooling.squares` gives them; head by head with `progress`."""
    b, h, n, _ = rule.grid
    if progress is None or b * h == 0:
        found = _compiled(Call(q, k, k[..., :0], rule), lambda call: matrix.squares(call, lse, cell))
        if progress is not None and found is not None:
            progress(n, n)
        return None if found is None else Squares(*found)
    parts = []
    for batch, head, call in _heads(q, k, rule, progress):
        one = pooled(call.q, call.k, lse[batch, head][None, None], call.rule, cell)
        if one is None:
            return None
        parts.append(one)
    return Squares(*(torch.cat(x).view(b, h, *x[0].shape[2:]) for x in zip(*parts, strict=True)))


@torch.no_grad()
def weights(q: Tensor, k: Tensor, lse: Tensor, rule: Rule) -> Tensor | None:
    """The weights themselves, [b, h, n, m]."""
    return _compiled(Call(q, k, k[..., :0], rule), lambda call: matrix.weights(call, lse))


@torch.no_grad()
def diagonals(q: Tensor, k: Tensor, lse: Tensor, rule: Rule) -> Tensor | None:
    """Weights added up along the diagonals, [b, h, n + m − 1], from that of the last query and the first key on."""
    return _compiled(Call(q, k, k[..., :0], rule), lambda call: matrix.diagonals(call, lse))


def _spread(k: Tensor, heads: int) -> Tensor:
    """k [b, h_kv, m, d] with as many heads, each repeated in its place."""
    return k if k.shape[1] == heads else k.repeat_interleave(heads // k.shape[1], 1)
