"""Weights of selected rows of a map, in tiles of keys."""

from collections.abc import Iterator

import torch
from torch import Tensor

from headwise.map import AttentionMap
from headwise.masks import Span, State
from headwise.rule import score_tile


def row_tiles(amap: AttentionMap, batch: int, rows: Tensor, width: int) -> Iterator[tuple[Span, Tensor]]:
    """Exact weights of any rows of one batch entry: (keys, [h, r, c]), without fully masked tiles.

    Args:
        rows: ascending query indices [r].
        width: keys a tile.
    """
    h, m = amap.shape[1], amap.shape[3]
    held = slice(batch, batch + 1)
    q, lse = amap.q[held, :, rows], amap.lse[held, :, rows]
    terms = amap.rule.terms(amap.lse)
    minus = lse.masked_fill(lse == -torch.inf, torch.inf)  # fully masked rows have weights of 0
    span = Span(int(rows[0]), int(rows[-1]) + 1)

    def here(x: Tensor) -> Tensor:
        return x[held] if x.shape[0] > 1 else x

    for start in range(0, m, width):
        cols = Span(start, min(start + width, m))
        state = amap.mask.state(span, cols, amap.rule.grid)
        if state is State.EMPTY:
            continue
        keys = torch.arange(cols.start, cols.stop, device=rows.device)
        k = amap.k[held, :, cols.start : cols.stop]
        added = [here(term) for term in terms.added_at(rows, keys)]
        logs = score_tile(q, k, amap.rule.scale, terms.soft_cap, added, minus=minus)
        if state is not State.FULL:
            allowed = here(amap.mask.allowed(rows, keys, amap.rule.grid))
            logs.masked_fill_(~allowed, -torch.inf)
        yield cols, logs.exp_().view(h, len(rows), len(keys))
