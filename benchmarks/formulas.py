"""Attention and its statistics from the stored matrix by their definitions: the eager peer, and the reference.

Computed in the dtype of the scores, float32 for the peer and float64 for the truth. The statistics are those of
`headwise measures`: means over the queries, [b, h].
"""

import torch
from torch import Tensor


def scores(q: Tensor, k: Tensor, allowed: Tensor | None) -> Tensor:
    """q kᵀ / √d, −∞ where the mask says no: [b, h, n, m]. Keys of fewer heads are repeated."""
    group = q.shape[1] // k.shape[1]
    keys = k.repeat_interleave(group, 1) if group > 1 else k
    found = q @ keys.mT / q.shape[-1] ** 0.5
    return found if allowed is None else found.masked_fill(~allowed, -torch.inf)


def mixed(p: Tensor, v: Tensor) -> Tensor:
    """p v: [b, h, n, d]."""
    group = p.shape[1] // v.shape[1]
    return p @ (v.repeat_interleave(group, 1) if group > 1 else v)


def statistics(
    s: Tensor, p: Tensor, allowed: Tensor | None, names: tuple[str, ...], radius: int = 8
) -> dict[str, Tensor]:
    """The named statistics of scores s and weights p, both [b, h, n, m]."""
    n, m = s.shape[-2:]
    position, key = torch.arange(m - n, m)[:, None], torch.arange(m)
    away = (position - key).abs()
    shared: dict[str, Tensor] = {}

    def distance() -> Tensor:
        if "distance" not in shared:
            shared["distance"] = (p * away.to(p.dtype)).sum(-1)
        return shared["distance"]

    def at(offset: int) -> Tensor:
        """Mean weight at a fixed offset from the query, over the queries for which this key is allowed."""
        there = p.diagonal(m - n + offset, dim1=-2, dim2=-1)
        if allowed is None:
            return there.mean(-1)
        may = allowed.diagonal(m - n + offset)
        return there.sum(-1) / may.sum().clamp_min(1)

    found = {
        "max_logit": lambda: s.amax((-2, -1)),
        "logsumexp": lambda: s.logsumexp(-1).mean(-1),
        # As torch.special.entr, whose gradient at 0 is infinite.
        "entropy": lambda: -(p * p.clamp_min(torch.finfo(p.dtype).tiny).log()).sum(-1).mean(-1),
        "effective_keys": lambda: (1 / p.square().sum(-1)).mean(-1),
        "top1_mass": lambda: p.amax(-1).mean(-1),
        "mean_distance": lambda: distance().mean(-1),
        "distance_variance": lambda: ((p * away.to(p.dtype).square()).sum(-1) - distance().square()).mean(-1),
        "local_mass": lambda: (p * (away <= radius)).sum(-1).mean(-1),
        "sink_mass": lambda: p[..., 0].mean(-1),
        "previous_mass": lambda: at(-1),
        "self_mass": lambda: at(0),
        "next_mass": lambda: at(1),
        "received_mass": lambda: (p.sum(-2) / (n if allowed is None else allowed.sum(-2).clamp_min(1))).amax(-1),
    }
    return {name: found[name]() for name in names}


def pooled(p: Tensor, allowed: Tensor | None, size: int) -> Tensor:
    """The mean of the allowed weights in squares, at most `size` per axis: [b, h, ⌈n/cell⌉, ⌈m/cell⌉]."""
    n, m = p.shape[-2:]
    cell = -(-max(n, m) // size)
    count = (p.new_ones(n, m) if allowed is None else allowed.to(p.dtype)).expand_as(p)

    def squares(x: Tensor) -> Tensor:
        x = torch.nn.functional.pad(x, (0, -m % cell, 0, -n % cell))
        return x.unflatten(-1, (-1, cell)).unflatten(-3, (-1, cell)).sum((-1, -3))

    return squares(p) / squares(count).clamp_min(1)
