"""What a score is, defined once: scale · q·k where the mask allows, −∞ elsewhere.

Every kernel, the float64 reference and the tiles of an `AttentionMap` follow this file.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.masks import Grid, Mask, Span, State

TILE_ELEMENTS = 3 << 18  # scores held at once, all batches and heads together: 3 MB in float32
KEY_BLOCK = 256


@dataclass(frozen=True)
class Rule:
    """A mask and a scale laid over an attention matrix of a given size.

    S_ij = scale · q_i·k_j if the mask allows (i, j), else −∞ (Vaswani et al. 2017, eq. 1).
    """

    mask: Mask
    scale: float
    grid: Grid

    def row_blocks(self, multiple: int = 1) -> Iterator[Span]:
        """Query blocks whose tiles of KEY_BLOCK keys stay within TILE_ELEMENTS (at least 16 rows), each but
        the last a multiple of `multiple` rows."""
        b, h, n, m = self.grid
        height = max(16, TILE_ELEMENTS // max(1, b * h * min(m, KEY_BLOCK)))
        height = -(-height // multiple) * multiple
        for start in range(0, n, height):
            yield Span(start, min(start + height, n))

    def tiles(self, rows: Span, width: int = KEY_BLOCK) -> Iterator[tuple[Span, State]]:
        """The tiles of `width` keys that these rows can see something of, in order; empty ones are skipped."""
        for start in range(0, self.grid.m, width):
            cols = Span(start, min(start + width, self.grid.m))
            state = self.mask.state(rows, cols, self.grid)
            if state is not State.EMPTY:
                yield cols, state

    def allowed(self, rows: Span, cols: Span, device: torch.device) -> Tensor:
        """Boolean [b or 1, h or 1, rows, cols] of a MIXED tile."""
        i = torch.arange(rows.start, rows.stop, device=device)
        j = torch.arange(cols.start, cols.stop, device=device)
        return self.mask.allowed(i, j, self.grid)

    def is_full(self) -> bool:
        """True if every query sees every key."""
        whole = Span(0, self.grid.n), Span(0, self.grid.m)
        return self.mask.state(*whole, self.grid) is State.FULL


def raw_scores(q: Tensor, k: Tensor, scale: float, minus: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """scale · q kᵀ − minus before the mask, in the accumulating dtype.

    Args:
        q: [b, h, r, d]; k: [b, h_kv, c, d]. With h_kv < h (grouped queries) the group is folded into the
            rows, so that keys are never repeated in memory.
        minus: [b, h, r] subtracted from each row (its log-sum-exp, to get log-weights), or None.
        out: [b, h, r, c] contiguous memory to write into, or None for new memory; only with `minus`.
    Returns:
        [b, h, r, c] float32, or float64 for float64 inputs.
    """
    b, h, r, d = q.shape
    h_kv, c = k.shape[1], k.shape[2]
    rows = compute(q).reshape(b * h_kv, h // h_kv * r, d)
    keys = compute(k).reshape(b * h_kv, c, d).transpose(1, 2)
    if minus is None:
        scores = torch.bmm(rows, keys).mul_(scale)
    else:
        start = minus.reshape(b * h_kv, h // h_kv * r, 1).to(rows.dtype)
        out = None if out is None else out.view(b * h_kv, h // h_kv * r, c)
        scores = torch.baddbmm(start, rows, keys, beta=-1.0, alpha=scale, out=out)
    return scores.view(b, h, r, c)


def grouped(weights: Tensor, values: Tensor) -> Tensor:
    """weights [b, h, r, c] times values [b, h_kv, c, e], each value head shared by h / h_kv heads: [b, h, r, e]."""
    b, h, r, c = weights.shape
    h_kv, e = values.shape[1], values.shape[-1]
    out = torch.bmm(weights.reshape(b * h_kv, h // h_kv * r, c), compute(values).reshape(b * h_kv, c, e))
    return out.view(b, h, r, e)


def grouped_t(weights: Tensor, rows: Tensor, h_kv: int) -> Tensor:
    """weightsᵀ [b, h, c, r] times rows [b, h, r, e], summed over the heads of a group: [b, h_kv, c, e]."""
    b, h, r, c = weights.shape
    e = rows.shape[-1]
    left = weights.reshape(b * h_kv, h // h_kv * r, c).transpose(1, 2)
    out = torch.bmm(left, compute(rows).reshape(b * h_kv, h // h_kv * r, e))
    return out.view(b, h_kv, c, e)


def compute(x: Tensor) -> Tensor:
    """In the dtype that logits and softmax are kept in: float32, or float64 for float64."""
    return x if x.dtype == torch.float64 else x.float()
