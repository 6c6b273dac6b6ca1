"""Derivatives of attention in forward mode, and second derivatives, tile by tile: O(n) memory.

Letters: P weights, O = P V, ẋ the direction in which x moves, g a gradient of O, δ_i = Σ_c g_ic·O_ic. With the scores'
own direction Ṡ = slope ∘ scale·(q̇ kᵀ + q k̇ᵀ) + ḃ, whose factor is of low rank, forward mode is

    l̇se = Σ_k P∘Ṡ (+ p_sink·ṡink),    Ȯ = (P∘Ṡ) V − l̇se·O + P V̇

The backward pass consists of dV = Pᵀ g, dS = P∘(g Vᵀ − δ), dq = scale·(slope∘dS) k, dk = scale·(slope∘dS)ᵀ q. Moved in
the same direction, and with Ṗ = P∘(Ṡ − l̇se),

    dV̇ = Ṗᵀ g + Pᵀ ġ,    dṠ = dS∘(Ṡ − l̇se) + P∘(ġ Vᵀ + g V̇ᵀ − δ̇)

As the backward pass is itself the gradient of ⟨g, O⟩, its derivative in reverse mode is this derivative too, in the
direction of the incoming gradients (Pearlmutter 1994, "Fast exact multiplication by the Hessian"), and so is that of
forward mode in reverse mode. All are products of P with second factors (`headwise.rule.weighted`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headwise.errors import KernelError
from headwise.kernels.call import Call
from headwise.kernels.gradients import REMEDY, complete, each_entry
from headwise.kernels.reads import Matrix, TileReads
from headwise.kernels.torch_blocks import TermGradients, TorchBlocks
from headwise.rule import Rule, Terms, grouped, grouped_t, own_dtypes, raw_scores, sink_weight, without_masked_queries
from headwise.rule.tiles import Tile
from headwise.rule.weighted import LowRank, Weighted, without_masked

Given = Sequence[Tensor | None]
# The rule, from q, k, v, the relative term, sinks and biases, and the other tensors that a call has saved. KernelError
# if the kernel that ran has no second derivative.
RuleOf = Callable[[Given, Given], Rule]

THIRD = f"attention has no third derivative, nor forward mode applied to a Hessian-vector product; {REMEDY}"
TWICE_FORWARD = (
    f"attention has no second derivative of forward mode over forward mode (torch.func.jvp or jacfwd, applied twice); "
    f"use torch.func.hessian, jacfwd of jacrev; {REMEDY}"
)


class _Moving:
    """A call without dropout, in the dtype of its log-sum-exp, and the direction in which its tensors move."""

    def __init__(self, rule: Rule, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, moves: Given) -> None:
        """moves: of q, k, v, the relative term, sinks and biases; None for 0."""
        q, k, v, out = (x.to(lse.dtype) for x in (q, k, v, out))
        self.q, self.out = without_masked_queries(q, lse), out
        self.k, self.v = k.nan_to_num(0.0, 0.0, 0.0), v.nan_to_num(0.0, 0.0, 0.0)  # a NaN that is seen is in `out`
        self.lse, self.rule, self.terms = lse, rule, rule.terms(lse[..., :0])
        dq, self.dk, self.dv, relative, self.d_sinks, *biases = (None if x is None else x.to(lse.dtype) for x in moves)
        self.dq = None if dq is None else without_masked_queries(dq, lse)
        held = tuple(x for x in biases if x is not None)
        self.added = Terms(rule.grid.n, relative=relative, biases=held, split=self.terms.split)
        pairs = [(a, b) for a, b in ((self.dq, self.k), (self.q, self.dk)) if a is not None and b is not None]
        self.products = _joined([(a * rule.scale, b) for a, b in pairs])

    def weighted(self, factor: Callable[[Tile], Tensor]) -> Weighted:
        return Weighted(self.q, self.k, self.lse, self.rule, factor)

    def bend(self, tile: Tile) -> tuple[Tensor, Tensor] | None:
        """First and second derivative of the soft cap on a tile, [b, h, r, c]; None without one."""
        if not (cap := self.terms.soft_cap):
            return None
        q, k = self.q[:, :, slice(*tile.rows)], self.k[:, :, slice(*tile.cols)]
        bent = raw_scores(q, k, self.rule.scale / cap).tanh_()
        slope = without_masked(1.0 - bent.square(), tile)
        return slope, bent.mul_(slope).mul_(-2.0 / cap)

    def scores(self, tile: Tile, bend: tuple[Tensor, Tensor] | None = None, less: Tensor | None = None) -> Tensor:
        """Ṡ on a tile, [b, h, r, c], less a number for each query, [b, h, n]."""
        bend = bend if bend or self.products is None else self.bend(tile)
        if self.products is None:
            found = self.lse.new_zeros(tile.shape)
        elif bend is None:
            found, less = replace(self.products, c=less)(tile), None
        else:
            found = self.products(tile).mul_(bend[0])
        for term in self.added.added(tile.rows, tile.cols):
            found += term
        if less is not None:
            found -= less[:, :, slice(*tile.rows), None]
        return without_masked(found, tile)

    def results(self) -> tuple[Tensor, Tensor]:
        """The direction of the output [b, h, n, d_v] and of the log-sum-exp [b, h, n]."""
        d_out, d_lse = torch.zeros_like(self.out), torch.zeros_like(self.lse)
        for tile, weighted in self.weighted(self.scores).tiles():
            i, j = slice(*tile.rows), slice(*tile.cols)
            d_lse[:, :, i] += weighted.sum(-1)
            d_out[:, :, i] += grouped(weighted, self.v[:, :, j])
            if self.dv is not None:
                d_out[:, :, i] += grouped(tile.weights, self.dv[:, :, j])
        if self.terms.sinks is not None and self.d_sinks is not None:
            d_lse += sink_weight(self.terms.sinks, self.lse) * self.d_sinks[:, None]
        return d_out.sub_(d_lse[..., None] * self.out), d_lse

    def gradients(self, g: Tensor, dg: Tensor | None, wanted: Sequence[bool]) -> list[Tensor | None]:
        """The direction of the output, and of the gradients of q, k, v and the wanted terms, for a gradient g of the
        output that moves by dg, both [b, h, n, d_v]."""
        d_out, d_lse = self.results()
        g = without_masked_queries(g.to(self.lse.dtype), self.lse)
        dg = None if dg is None else without_masked_queries(dg.to(self.lse.dtype), self.lse)
        delta, d_delta = (g * self.out).sum(-1), (g * d_out).sum(-1)
        d_delta = d_delta if dg is None else d_delta + (dg * self.out).sum(-1)
        pairs = [(a, b) for a, b in ((dg, self.v), (g, self.dv)) if a is not None and b is not None]
        d_factor = _joined(pairs, d_delta)
        sums = TermGradients(self.terms, wanted, self.lse)
        shift = -d_lse if self.d_sinks is None else self.d_sinks[:, None] - d_lse
        sums.take_rows(self.lse.masked_fill(self.lse == -torch.inf, torch.inf), (shift * delta + d_delta)[..., None])
        found = [torch.zeros_like(x) for x in (self.q, self.k, self.v)]
        for tile, d_scores in self.weighted(LowRank(g, self.v, delta)).tiles():
            i, j = slice(*tile.rows), slice(*tile.cols)
            bend = self.bend(tile)
            moving = self.scores(tile, bend, d_lse)
            second = d_scores * moving
            if d_factor is None:
                second.sub_(without_masked(tile.weights * d_delta[:, :, i, None], tile))
            else:
                second.addcmul_(tile.weights, d_factor(tile))
            sums.take_tile(second, tile.rows, tile.cols)
            if bend is not None:
                second.mul_(bend[0])
                if self.products is not None:
                    second.add_(bend[1].mul_(self.products(tile)).mul_(d_scores))
                d_scores.mul_(bend[0])
            found[0][:, :, i] += grouped(second, self.k[:, :, j])
            found[1][:, :, j] += grouped_t(second, self.q[:, :, i], self.k.shape[1])
            if self.dk is not None:
                found[0][:, :, i] += grouped(d_scores, self.dk[:, :, j])
            if self.dq is not None:
                found[1][:, :, j] += grouped_t(d_scores, self.dq[:, :, i], self.k.shape[1])
            found[2][:, :, j] += grouped_t(moving.mul_(tile.weights), g[:, :, i], self.v.shape[1])
            if dg is not None:
                found[2][:, :, j] += grouped_t(tile.weights, dg[:, :, i], self.v.shape[1])
        return [d_out, found[0] * self.rule.scale, found[1] * self.rule.scale, found[2], *sums.finish()]


def _joined(pairs: Sequence[tuple[Tensor, Tensor]], minus: Tensor | None = None) -> LowRank | None:
    """The factor Σ A Bᵀ of some pairs; None without any."""
    if not pairs:
        return None
    left, right = (torch.cat(parts, -1) if len(pairs) > 1 else parts[0] for parts in zip(*pairs, strict=True))
    return LowRank(left, right, minus)


@dataclass(frozen=True)
class _OfCall:
    """Passes over a call, whose tensors are q, k, v, output, log-sum-exp, relative term, sinks, biases, and those that
    `rule_of` takes besides; in a direction, before these: moves of q, k, v, relative term, sinks and biases.

    biases: their number; wanted: which terms have gradients; lead: how many results of the backward pass precede these.
    """

    rule_of: RuleOf
    biases: int
    wanted: Sequence[bool] = ()
    lead: int = 0

    @property
    def inputs(self) -> int:
        """The number of moves."""
        return 5 + self.biases

    def rule(self, q: Tensor, k: Tensor, v: Tensor, rest: Given) -> Rule:
        terms = 2 + self.biases
        return self.rule_of((q, k, v, *rest[:terms]), rest[terms:])

    def moving(self, *given: Any) -> _Moving:
        """From moves and a call. Saturated weights are those of its log-sum-exp only where both have the same
        rounding."""
        q, k, v, out, lse, *rest = given[self.inputs :]
        rule = self.rule(q, k, v, rest)
        exact = TileReads().exact(Matrix.of_all_keys(q, k, lse, rule)).lse
        return _Moving(rule, q, k, v, out, exact, given[: self.inputs])

    def move_output(self, *given: Any) -> tuple[Tensor]:
        """The direction of the output, from moves and a call."""
        with own_dtypes(given[self.inputs]), torch.no_grad():
            return (self.moving(*given).results()[0].to(given[self.inputs].dtype),)

    def move_gradients(self, g: Tensor, dg: Tensor | None, *given: Any) -> tuple[Tensor | None, ...]:
        """The direction of the output and of all gradients, from that of the output, moves and a call."""
        with own_dtypes(g), torch.no_grad():
            d_out, *found = self.moving(*given).gradients(g, dg, self.wanted)
        q, k, v = given[self.inputs : self.inputs + 3]
        same = zip((d_out, *found[:3]), (q, q, k, v), strict=True)
        return *(None if x is None else x.to(like.dtype) for x, like in same), *found[3:]

    def gradients(self, g: Tensor, *given: Any) -> tuple[Tensor | None, ...]:
        """The gradients of a call, from that of the output."""
        q, k, v, out, lse, *rest = given
        with own_dtypes(g), torch.no_grad():
            call = Call(q, k, v, self.rule(q, k, v, rest))
            found = TorchBlocks().gradients(call, out, lse, g, self.wanted)
        return tuple(complete(found, rest[: 2 + self.biases], self.wanted))

    def placed(self, found: Given, count: int) -> tuple[Tensor | None, ...]:
        """Gradients of a call's `count` tensors, from those of its inputs."""
        return *found[:3], None, None, *found[3:], *[None] * (count - len(found) - 2)


class OfBackward(_OfCall):
    """The derivatives of a backward pass: its tensors are the output's gradient and those of the call."""

    def pull(self, tensors: Given, needed: Sequence[bool], grads: Given) -> tuple[Tensor | None, ...]:
        """In reverse mode: the gradients of its tensors."""
        moves = grads[self.lead : self.lead + self.inputs]
        if not any(x is not None for x in moves):
            return (None,) * len(tensors)
        g, *call = tensors
        at = replace(self, wanted=needed[6 : 8 + self.biases])
        d_out, *found = each_entry(at.move_gradients, THIRD, g, None, *moves, *call)
        return d_out, *self.placed(found, len(call))

    def push(self, tensors: Given, moves: Given) -> tuple[Tensor | None, ...]:
        """In forward mode: the direction of its results."""
        g, *call = tensors
        dg, dq, dk, dv, _, _, *terms = moves[: 3 + self.inputs]
        _, *found = each_entry(self.move_gradients, THIRD, g, dg, dq, dk, dv, *terms, *call)
        return *[None] * self.lead, *found


class OfForward(_OfCall):
    """The derivatives of `move_output`: its tensors are moves and those of the call."""

    def pull(self, tensors: Given, needed: Sequence[bool], grads: Given) -> tuple[Tensor | None, ...]:
        """In reverse mode: the gradients of its tensors."""
        (g,), moves, call = grads, tensors[: self.inputs], tensors[self.inputs :]
        if g is None:
            return (None,) * len(tensors)
        first = replace(self, wanted=needed[3 : self.inputs])
        of_moves = each_entry(first.gradients, OfBackward(self.rule_of, self.biases, first.wanted), g, *call)
        second = replace(self, wanted=needed[self.inputs + 5 : 2 * self.inputs + 2])
        _, *found = each_entry(second.move_gradients, THIRD, g, None, *moves, *call)
        return *of_moves, *self.placed(found, len(call))

    def push(self, tensors: Given, moves: Given) -> tuple[Tensor | None, ...]:
        raise KernelError(TWICE_FORWARD)
