"""Inner products ⟨L_i R_iᵀ, L_j R_jᵀ⟩ between many low-rank matrices without storing any of them.

Such products of thin matrices are W_Q W_Kᵀ, W_V W_O, projections onto subspaces, and what heads write into the
residual stream.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

ELEMENTS = 1 << 23  # numbers at once, 32 MB in float32

Factors = tuple[Sequence[Tensor], Sequence[Tensor]]  # L and R: for each layer [h, D₁, d] and [h, D₂, d]


def inner_products(one: Factors, two: Factors | None = None) -> Tensor:
    """⟨L_i R_iᵀ, L'_j R'_jᵀ⟩ for all heads of all layers, [G, G'] float64; `two` is `one` by default.

    The method with fewer operations is used: ⟨L_iᵀL'_j, R_iᵀR'_j⟩ with small d × d' products for each pair, or blocks
    of rows of each head's product and one product of heads by heads. Sums of blocks are float64.
    """
    other = one if two is None else two
    heads, wide = sum(map(len, one[0])), sum(map(len, other[0]))
    (tall, d), (side, e) = one[0][0].shape[1:], (one[1][0].shape[1], other[0][0].shape[2])
    alike = one[0] is one[1] and other[0] is other[1]  # L Lᵀ is symmetric: half of one product is enough
    pairs = heads * wide * d * e * (tall + (0 if alike else side)) / (2 if two is None else 1)
    rows = tall * side * (heads * wide + heads * d + (0 if two is None else wide * e)) / (2 if alike else 1)
    return _by_pairs(one, other, two is None, alike) if pairs < rows else _by_rows(one, other, two is None, alike)


def _by_pairs(one: Factors, two: Factors, same: bool, alike: bool) -> Tensor:
    lines: list[list[Tensor]] = []
    for a, (left, right) in enumerate(zip(*one, strict=True)):
        line = []
        for c, (left2, right2) in enumerate(zip(*two, strict=True)):
            if same and c < a:
                line.append(lines[c][a].T)
                continue
            first = crossed(left, left2)
            second = first if alike else crossed(right, right2)
            line.append((first * second).sum((1, 3), dtype=torch.float64))
        lines.append(line)
    return torch.cat([torch.cat(line, 1) for line in lines])


def _by_rows(one: Factors, two: Factors, same: bool, alike: bool) -> Tensor:
    (left, right), (left2, right2) = one, two
    heads, wide = sum(map(len, left)), sum(map(len, left2))
    tall, side = left[0].shape[1], right[0].shape[1]
    total = torch.zeros(heads, wide, dtype=torch.float64, device=left[0].device)
    height = max(1, ELEMENTS // (max(heads, wide) * side))
    for start in range(0, tall, height):
        rows = slice(start, min(start + height, tall))
        # In a symmetric matrix the part right of the block equals the part below it.
        for cols, times in ((rows, 1.0), (slice(rows.stop, side), 2.0)) if alike else ((slice(0, side), 1.0),):
            if cols.start >= side:
                continue
            mine = _block(left, right, rows, cols)
            theirs = mine if same else _block(left2, right2, rows, cols)
            total += (mine @ theirs.T).double() * times
    return total


def _block(left: Sequence[Tensor], right: Sequence[Tensor], rows: slice, cols: slice) -> Tensor:
    """Rows and columns of each head's L Rᵀ, [G, r·c]."""
    return torch.cat([(x[:, rows] @ y[:, cols].mT).flatten(1) for x, y in zip(left, right, strict=True)])


def crossed(one: Tensor, two: Tensor) -> Tensor:
    """x_iᵀ x_j of [h, D, d] and [h', D, e] as [h, d, h', e]: one product for all heads of two layers."""
    (h, tall, d), (w, _, e) = one.shape, two.shape
    flat, wide = one.transpose(0, 1).reshape(tall, h * d), two.transpose(0, 1).reshape(tall, w * e)
    return (flat.T @ wide).view(h, d, w, e)
