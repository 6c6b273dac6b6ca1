"""Gradients of statistics of rows, and of the log-sum-exp, in the same backward pass as those of the output.

A statistic x with a `Slope` has g_ij = ∂x_i/∂p_ij that a kernel can compute from what its backward pass recomputes.
With the gradients λ of statistics and of the log-sum-exp, and δ = rowsum(dO ∘ O), that pass becomes

    dS_ij = p_ij (dO_i·V_j + Σ_x λ_i g_ij − δ_i − D_i),    D_i = Σ_x λ_i Σ_k p_ik g_ik − λ_lse,i

and D is known before it, from the statistics themselves: the weights are recomputed once for all of them. Largest
scores have a gradient in few keys, which is added afterwards.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.kernels.call import Call
from headwise.kernels.reads import Matrix, TileReads
from headwise.masks import Span
from headwise.rule import TILE_ELEMENTS, Terms, add_diagonals, score_tile
from headwise.scores import cell
from headwise.stats.statistic import Slope, Statistic, row_mass


class RowGradients(NamedTuple):
    """What statistics of rows add to the gradient of the weights before dropout. All are [b, h, n]."""

    shift: Tensor  # D − logs, to be added to δ; learned sinks, whose value is 0, have the gradient −p (δ + D)
    logs: Tensor | None  # times ln p_ij; its constant, 1, is in `shift`
    distance: Tensor | None  # times |i − j|
    masses: Sequence[tuple[Tensor, Slope]]  # times the numbers of the keys, in `keys` or `within`

    def of_tile(self, log_weights: Tensor, rows: Span, cols: Span, shift: int) -> Tensor:
        """What is added on a tile, [b, h, r, c]; not finite where its weights are 0. shift: position of query 0."""
        r = slice(*rows)
        i, j = (torch.arange(*span, device=log_weights.device) for span in (rows, cols))
        ahead = j - (i[:, None] + shift)
        total = torch.zeros_like(log_weights)
        if self.logs is not None:
            total += self.logs[:, :, r, None] * log_weights
        if self.distance is not None:
            total += self.distance[:, :, r, None] * ahead.abs()
        for factor, slope in self.masses:
            if slope.keys is not None:
                keys = slope.keys.to(total)[:, None, None, slice(*cols)]
            else:
                assert slope.within is not None
                start, stop, relative = slope.within
                place = ahead if relative else j
                keys = ((place >= start) & (place < stop)).to(total)
            total += factor[:, :, r, None] * keys
        return total


def joined(
    call: Call, lse: Tensor, values: Mapping[Statistic, Tensor], grads: Sequence[Tensor | None], of_lse: Tensor | None
) -> tuple[RowGradients | None, Tensor | None]:
    """The gradient of the weights from those of statistics with these values, and that of the largest scores."""
    empty = lse == -torch.inf
    shift = torch.zeros_like(lse)
    sums: dict[str, Tensor] = {}
    masses, largest = [], None
    used = of_lse is not None and (not of_lse.is_cpu or bool(of_lse.any()))  # 0 where it cancels, as of largest scores
    if of_lse is not None and used:
        shift -= of_lse.masked_fill(empty, 0.0)
    for (statistic, value), grad in zip(values.items(), grads, strict=True):
        slope = statistic.slope
        if grad is None or slope is None:
            continue
        grad = grad.to(lse.dtype).masked_fill(empty, 0.0)
        if slope.largest:
            largest = grad
            continue
        used = True
        shift += grad * value.masked_fill(empty, 0.0)
        for name in ("logs", "distance"):
            if factor := getattr(slope, name):
                sums[name] = sums.get(name, 0.0) + factor * grad
        masses += _masses(grad, slope)
    if "logs" in sums:
        shift += sums["logs"] * (row_mass(call.rule, lse) - 1.0)
    return RowGradients(shift, sums.get("logs"), sums.get("distance"), masses) if used else None, largest


def _masses(factor: Tensor, slope: Slope) -> list[tuple[Tensor, Slope]]:
    parts = Slope(keys=slope.keys), Slope(within=slope.within)
    return [(factor, part) for part in parts if part != Slope()]


def statistics_of(call: Call, lse: Tensor) -> dict[Statistic, Tensor]:
    """The statistics of a call that have a `Slope`, computed from tiles."""
    wanted = {s: slope for s in call.statistics if (slope := s.slope) is not None}
    found = {s: torch.full_like(lse, -torch.inf if slope.largest else 0.0) for s, slope in wanted.items()}
    of = Matrix.of_all_keys(call.q.detach(), call.k.detach(), lse, call.rule)
    one, shift = torch.ones_like(lse), call.rule.grid.shift
    parts = {}
    for s, x in wanted.items():
        logs, distance = (one * factor if factor else None for factor in (x.logs, x.distance))
        parts[s] = RowGradients(one, logs, distance, _masses(one, x))
    for tile in TileReads().tiles(of) if wanted else ():
        rows = slice(*tile.rows)
        for s, slope in wanted.items():
            into = found[s][:, :, rows]
            if slope.largest:
                torch.maximum(into, tile.largest_log_weight + tile.lse, out=into)
            else:
                each = parts[s].of_tile(tile.log_weights, tile.rows, tile.cols, shift)
                into += (tile.weights * each.masked_fill_(tile.weights == 0, 0.0)).sum(-1)
    return found


class TermGradients:
    """Gradients of the scores' tensors, summed over the tiles; for those that are requested."""

    def __init__(self, terms: Terms, wanted: Sequence[bool], like: Tensor) -> None:
        self.terms = terms
        held = (terms.relative, terms.sinks, *terms.biases)
        self.relative, self.sinks, *self.biases = (
            torch.zeros_like(x, dtype=like.dtype) if x is not None and need else None
            for x, need in zip(held, wanted, strict=True)
        )

    def take_rows(self, row_lse: Tensor, delta: Tensor) -> None:
        """Add dsink = −p_sink · rowsum(dO ∘ O); the sink is a key whose value is 0."""
        if self.sinks is not None and self.terms.sinks is not None:
            mass = (self.terms.sinks[:, None] - row_lse).exp_()
            self.sinks -= (mass * delta.squeeze(-1)).sum((0, 2))

    def take_tile(self, d_scores: Tensor, rows: Span, cols: Span) -> None:
        """Add dS [b, h, r, c] of a tile, where S are the scores with all terms added."""
        if self.relative is not None:
            add_diagonals(self.relative, self.terms, d_scores, rows, cols)
        for bias in self.biases:
            if bias is not None:
                place = bias[cell(bias, rows, cols)]
                place += d_scores.sum_to_size(place.shape)

    def finish(self) -> list[Tensor | None]:
        """The gradients in the order and dtypes of the tensors."""
        found, held = (
            (self.relative, self.sinks, *self.biases),
            (self.terms.relative, self.terms.sinks, *self.terms.biases),
        )
        return [None if d is None or x is None else d.to(x.dtype) for d, x in zip(found, held, strict=True)]


def add_largest(
    call: Call, lse: Tensor, grad: Tensor, wanted: Sequence[bool], found: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients `found` of q, k, v and the rule's terms, and that of rows' largest scores [b, h, n], in place. Rows
    whose gradient is 0 are not computed: of the largest score of a head, all but one."""
    dq, dk, dv, *of_terms = found
    assert dq is not None
    assert dk is not None
    b, h, _, m = call.rule.grid
    q, k, cols = call.q.detach(), call.k.detach(), torch.arange(m, device=lse.device)
    terms, group = call.rule.terms(lse[..., :0]), h // call.k.shape[1]
    sums = TermGradients(terms, wanted, lse)
    learns = any(x is not None for x in (sums.relative, *sums.biases))
    for rows in grad.flatten(0, 1).any(0).nonzero()[:, 0].split(max(1, TILE_ELEMENTS // max(1, b * h * m))):
        slope = lse.new_empty(b, h, len(rows), m) if terms.soft_cap else None
        scores = score_tile(q[:, :, rows], k, call.rule.scale, terms.soft_cap, terms.added_at(rows, cols), slope=slope)
        scores.masked_fill_(~call.rule.mask.allowed(rows, cols, call.rule.grid), -torch.inf)
        ties = (scores == scores.amax(-1, keepdim=True)) & (grad[:, :, rows] != 0)[..., None]
        batch, head, r, j = ties.nonzero().unbind(1)
        i, share = rows[r], 1.0 / ties.sum(-1)[batch, head, r].to(lse)
        d_scores = grad[batch, head, i] * share
        if learns:
            dense = torch.zeros_like(scores).index_put_((batch, head, r, j), d_scores)
            for at, row in enumerate(rows.tolist()):
                sums.take_tile(dense[:, :, at : at + 1], Span(row, row + 1), Span(0, m))
        d_scores = d_scores * call.rule.scale * (1.0 if slope is None else slope[batch, head, r, j])
        keys, queries = k[batch, head // group, j], q[batch, head, i]
        dq.index_put_((batch, head, i), (d_scores[:, None] * keys).to(dq.dtype), accumulate=True)
        dk.index_put_((batch, head // group, j), (d_scores[:, None] * queries).to(dk.dtype), accumulate=True)
    pairs = zip(of_terms, sums.finish(), strict=True)
    return [dq, dk, dv, *(x if more is None or x is None else x + more for x, more in pairs)]
