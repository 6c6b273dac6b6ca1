"""Gradients of statistics of rows, and of the log-sum-exp, in the same backward pass as those of the output.

A statistic x with a `Slope` has g_ij = ∂x_i/∂p_ij that a kernel can compute from what its backward pass recomputes.
With the gradients λ of statistics and of the log-sum-exp, and δ = rowsum(dO ∘ O), that pass becomes

    dS_ij = p_ij (dO_i·V_j + Σ_x λ_i g_ij − δ_i − D_i),    D_i = Σ_x λ_i Σ_k p_ik g_ik − λ_lse,i

and D is known before it, from the statistics themselves: the weights are recomputed once for all of them. Largest
scores have a gradient in few keys, which is added afterwards.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.kernels.call import Call
from headwise.kernels.reads import Matrix, TileReads
from headwise.masks import Span, State
from headwise.rule import Terms, add_diagonals, grouped, grouped_t
from headwise.rule.tiles import Scratch, Tile
from headwise.scores import cell
from headwise.stats.statistic import Slope, Statistic, row_mass

FEW = 4  # rows per head: of more, largest scores are computed in blocks of all heads


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
        if slope.keys is not None or slope.within is not None:
            masses.append((grad, slope))
    if "logs" in sums:
        shift += sums["logs"] * (row_mass(call.rule, lse) - 1.0)
    return RowGradients(shift, sums.get("logs"), sums.get("distance"), masses) if used else None, largest


def statistics_of(call: Call, lse: Tensor) -> dict[Statistic, Tensor]:
    """The statistics of a call that have a `Slope`, computed from tiles."""
    wanted = {s: slope for s in call.statistics if (slope := s.slope) is not None}
    found = {s: torch.full_like(lse, -torch.inf if slope.largest else 0.0) for s, slope in wanted.items()}
    of = Matrix.of_all_keys(call.q.detach(), call.k.detach(), lse, call.rule)
    one, shift = torch.ones_like(lse), call.rule.grid.shift
    for tile in TileReads().tiles(of) if wanted else ():
        rows = slice(*tile.rows)
        for s, slope in wanted.items():
            into = found[s][:, :, rows]
            if slope.largest:
                torch.maximum(into, tile.largest_log_weight + tile.lse, out=into)
            elif slope.logs:
                into -= slope.logs * tile.entropy
            else:
                alone = RowGradients(
                    one, None, one if slope.distance else None, [] if slope.distance else [(one, slope)]
                )
                into += (tile.weights * alone.of_tile(tile.log_weights, tile.rows, tile.cols, shift)).sum(-1)
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
        biases = [None if d is None else d.to(x.dtype) for d, x in zip(self.biases, self.terms.biases, strict=True)]
        return [self.relative, self.sinks, *biases]


def add_largest(
    call: Call, lse: Tensor, grad: Tensor, wanted: Sequence[bool], found: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients `found` of q, k, v and the rule's terms, and that of rows' largest scores [b, h, n], in place. Rows
    whose gradient is 0 are not computed: of the largest score of a head, all but one."""
    dq, dk, dv, *of_terms = found
    assert dq is not None
    assert dk is not None
    sums = TermGradients(call.rule.terms(lse[..., :0]), wanted, lse)
    h, m = call.rule.grid.h, call.rule.grid.m
    for batch, heads, kv_heads, rows in _blocks(call, grad):
        i = slice(*rows)
        rule = call.rule if heads == slice(None) else call.rule.only(batch.start, heads.start)
        rule = rule.rows(rows)
        q, k = call.q[batch, heads, i].detach(), call.k[batch, kv_heads].detach()
        here, cols = lse[batch, heads, i], Span(0, m)
        terms = rule.terms(here[..., :0])
        scores = Tile(q, k, here, rule, terms, Span(0, rows.size), cols, State.MIXED, Scratch()).scores
        ties = (scores == scores.amax(-1, keepdim=True)).to(lse)
        d_scores = ties * (grad[batch, heads, i] / ties.sum(-1).clamp_min(1))[..., None]
        if any(x is not None for x in (sums.relative, *sums.biases)):
            whole = d_scores
            if heads != slice(None):
                whole = lse.new_zeros(len(lse), h, rows.size, m)
                whole[batch, heads] = d_scores
            sums.take_tile(whole, rows, cols)
        if terms.soft_cap:
            bent = torch.tanh(grouped(q.to(lse.dtype), k.to(lse.dtype).mT) * (rule.scale / terms.soft_cap))
            d_scores = torch.where(ties > 0, d_scores * (1.0 - bent.square()), 0.0)
        d_scores *= rule.scale
        keys = k if call.values_finite else k.nan_to_num(0.0, 0.0, 0.0)
        queries = q.masked_fill((here == -torch.inf)[..., None], 0.0)
        dq[batch, heads, i] += grouped(d_scores, keys).to(dq.dtype)
        dk[batch, kv_heads] += grouped_t(d_scores, queries, keys.shape[1]).to(dk.dtype)
    pairs = zip(of_terms, sums.finish(), strict=True)
    return [dq, dk, dv, *(x if more is None or x is None else x + more for x, more in pairs)]


def _blocks(call: Call, grad: Tensor) -> Iterator[tuple[slice, slice, slice, Span]]:
    """Batch entries, heads, KV heads and rows with gradients: single rows of one head each, or blocks of all heads."""
    b, h, n, m = call.rule.grid
    group = h // call.k.shape[1]
    places = grad.nonzero()
    if len(places) <= FEW * b * h:
        for batch, head, i in places.tolist():
            kv = head // group
            yield slice(batch, batch + 1), slice(head, head + 1), slice(kv, kv + 1), Span(i, i + 1)
        return
    every, height = slice(None), max(1, (1 << 20) // max(1, b * h * m))
    for start in range(0, n, height):
        yield every, every, every, Span(start, min(n, start + height))
