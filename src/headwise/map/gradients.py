"""Gradients of what is read from a map: one rule for all reads and measures, tile by tile, O(n) memory.

A read f is a function of the log-weights ln p_ij = S_ij − lse_i, and perhaps of the log-sum-exp itself. What differs
between reads is their derivative ℓ_ij = ∂f/∂ln p_ij on a tile (`Shares`); the rest is the same for all of them:

    ∂f/∂S_ij = ℓ_ij + p_ij · g_i,    g_i = ∂f/∂lse_i − Σ_k ℓ_ik

With ℓ_ij = p_ij · ∂f/∂p_ij that is p_ij (∂f/∂p_ij − Σ_k p_ik ∂f/∂p_ik), the derivative of the softmax. A backward pass
computes each block of rows twice, first Σ_k ℓ_ik and then the gradients of q, k and the tensors of the scores, from
which the weights are recomputed as in the backward pass of attention (Dao et al. 2022, 2205.14135, alg. 4).
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from headwise.kernels.gradients import SavedRule, once
from headwise.kernels.joint import TermGradients
from headwise.masks import Span, State
from headwise.rule import KEY_BLOCK, Rule, Terms, grouped, grouped_t, own_dtypes, sink_weight, without_masked_queries
from headwise.rule.tiles import Scratch, Tile


@dataclass(frozen=True)
class Learned:
    """The tensors of a map with their graph: queries, keys, and the mask and scores; lse: the log-sum-exp, detached, in
    the dtype in which the gradients are computed."""

    q: Tensor
    k: Tensor
    rule: Rule
    lse: Tensor

    def head(self, batch: int, head: int) -> "Learned":
        """Those of one batch entry and head."""
        kv, one, at = head // (self.q.shape[1] // self.k.shape[1]), slice(batch, batch + 1), slice(head, head + 1)
        return Learned(self.q[one, at], self.k[one, kv : kv + 1], self.rule.only(batch, head), self.lse[one, at])

    def clone(self) -> "Learned":
        """Copies of q, k and the tensors of the scores, in the graph."""
        scores = tuple(score.mapped(Tensor.clone) for score in self.rule.scores)
        return Learned(self.q.clone(), self.k.clone(), replace(self.rule, scores=scores), self.lse)


class Leaf(Tile):
    """A tile whose log-weights, log-sum-exp and weight of a learned sink are the leaves of a graph of their own."""

    def __init__(self, *given: Any) -> None:
        arguments = *given, _Kept()
        super().__init__(*arguments)
        with torch.no_grad():
            _ = self.log_weights, self.sink_weight  # computed without a graph, and kept

    def leaves(self) -> list[Tensor]:
        """The log-weights [b, h, r, c], the log-sum-exp and the sink's weight [b, h, r]; from now on with a graph."""
        if not self.lse.requires_grad:
            self.lse = self.lse.detach().requires_grad_()
            self.log_weights.requires_grad_()
            self.sink_weight.requires_grad_()
        return [self.log_weights, self.lse, self.sink_weight]

    @property
    def scores(self) -> Tensor:
        return self.logits

    @property
    def among_keys(self) -> tuple[Tensor, Tensor]:
        top = self.log_weights.detach().amax(-1)  # a factor of rows, which no measure depends on
        return top, (self.log_weights - top.masked_fill(top == -torch.inf, 0.0)[..., None]).exp()

    @property
    def slope(self) -> Tensor | None:
        """The derivative of the soft cap, [b, h, r, c]; None without one."""
        if not self._terms.soft_cap:
            return None
        bent = torch.tanh(grouped(self._q, self._k.mT) * (self.rule.scale / self._terms.soft_cap))
        return 1.0 - bent.square()


class _Kept(Scratch):
    """No buffers: a graph keeps the tensors of a tile."""

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        return cast(Tensor, None)  # as `out=` of PyTorch's functions


class Share(NamedTuple):
    """The derivative of a read by the log-weights of a tile [b, h, r, c], and where it depends on these otherwise, by
    the log-sum-exp and by the sink's weight, [b, h, r]."""

    logs: Tensor | None
    lse: Tensor | None = None
    sink: Tensor | None = None


Sweep = Callable[[Span], Iterator[tuple[Leaf, ...]]]  # the tiles of a block of rows, of each map


class Shares:
    """What distinguishes one read from another in a backward pass.

    Attributes:
        grad: the gradient of its result, in the dtype of the log-sum-exp, from `start` on.
        learned: the gradient of the read's operand, if it has one.
    """

    grad: Tensor
    learned: Tensor | None = None

    def start(self, grad: Tensor, operand: Tensor | None, blocks: Sequence[Span], sweep: Sweep) -> None:
        """Begin a backward pass."""
        self.grad = grad

    def reaches(self, rows: Span) -> bool:
        """Whether the read depends on these rows."""
        return True

    def rows(self, rows: Span, lse: Tensor, sweep: Sweep) -> Tensor | None:
        """Begin a block of rows. Returns the derivative by the log-sum-exp of the first map, [b, h, r], if any."""
        return None

    def of(self, tiles: tuple[Leaf, ...]) -> list[Share]:
        """The shares of a tile, for each map."""
        (tile,) = tiles
        g = self.by_weights(tile)
        return [Share(None if g is None else g * tile.weights)]

    def by_weights(self, tile: Leaf) -> Tensor | None:
        """The derivative by the weights, broadcasting to [b, h, r, c], of a read with no other `of`; None for 0."""
        raise NotImplementedError

    def add_operand(self, tile: Leaf) -> None:
        """Add to `learned` what a tile contributes."""

    def done(self) -> None:
        """End a backward pass; may raise."""

    def pull_back(self, sides: "Sequence[Side]", grad: Tensor, operand: Tensor | None) -> None:
        """Add to the gradients of all sides what `grad`, that of the read's result, contributes."""
        blocks, sweep = _tiles(sides)
        self.start(grad, operand, blocks, sweep)
        for rows in blocks:
            if not self.reaches(rows):
                continue
            i = slice(*rows)
            of_lse = [torch.zeros_like(side.lse[:, :, i]) for side in sides]
            of_sink = [torch.zeros_like(x) for x in of_lse]
            direct = self.rows(rows, sides[0].lse[:, :, i], sweep)
            if direct is not None:
                of_lse[0] += direct
            only: list[Share] | None = None  # of a block with one tile, which is not computed twice
            for tiles in sweep(rows):
                only = self.of(tiles)
                for at, share in enumerate(only):
                    if share.logs is not None:
                        of_lse[at] -= share.logs.masked_fill(tiles[at].log_weights == -torch.inf, 0.0).sum(-1)
                    if share.lse is not None:
                        of_lse[at] += share.lse
                    if share.sink is not None:
                        of_sink[at] += share.sink
            for at, side in enumerate(sides):
                if side.learns and side.terms.sinks is not None:
                    of_sink[at] *= sink_weight(side.terms.sinks, side.lse[:, :, i])  # the weight is exp(sink − lse)
                    of_lse[at] -= of_sink[at]
                    side.add_sinks(rows, of_lse[at], of_sink[at])
            for tiles in sweep(rows):
                found = only if tiles[0].first and tiles[0].last and only is not None else self.of(tiles)
                for at, (side, tile) in enumerate(zip(sides, tiles, strict=True)):
                    if side.learns:
                        side.add(tile, found[at].logs, of_lse[at])
                self.add_operand(tiles[0])
        self.done()


def attached(value: Tensor, shares: Shares, *maps: Learned, operand: Tensor | None = None) -> Tensor:
    """`value`, computed from these maps, as a node of the graph whose backward pass is that of `shares`."""
    if torch.compiler.is_dynamo_compiling():
        from headwise.kernels.dynamo import outside

        return cast(Tensor, outside(attached, value, shares, *maps, operand=operand))
    tensors: list[Tensor | None] = []
    rules, counts = [], []
    for one in maps:
        terms = one.rule.terms(one.lse[..., :0])
        saved, held = SavedRule.of(one.rule, terms.soft_cap, terms.split)
        rules.append(saved)
        counts.append((len(terms.biases), len(held)))
        tensors += (one.q, one.k, one.lse, terms.relative, terms.sinks, *terms.biases, *held)
    return cast(Tensor, _Read.apply(value.detach(), shares, rules, counts, operand, *tensors))


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: Tensor, shares: Shares, rules: list[SavedRule], counts: list[tuple[int, int]],
        operand: Tensor | None, *tensors: Tensor | None,
    ) -> Tensor:  # fmt: skip
        ctx.shares, ctx.rules, ctx.counts = shares, rules, counts
        ctx.save_for_backward(operand, *tensors)
        return value.view_as(value)

    @staticmethod
    @once(lambda ctx: "what is read from a map has no second derivative (create_graph=True, double backward)")
    def backward(ctx: Any, saved: tuple[Any, ...], grad_out: Tensor) -> tuple[Tensor | None, ...]:
        operand, *tensors = saved
        needed = list(ctx.needs_input_grad[5:])
        sides, places = [], []
        for rule, (biases, held) in zip(ctx.rules, ctx.counts, strict=True):
            q, k, lse, relative, sinks, *rest = tensors[: 5 + biases + held]
            of_terms = needed[3 : 5 + biases]
            places.append([needed[0], needed[1], False, *of_terms, *[False] * held])
            own = rule.rule(relative, sinks, rest[:biases], rest[biases:])
            sides.append(Side(q, k, lse, own, of_terms, any(places[-1])))
            del tensors[: 5 + biases + held], needed[: 5 + biases + held]
        shares = copy(ctx.shares)
        with own_dtypes(grad_out):
            shares.pull_back(sides, grad_out.to(sides[0].lse.dtype), operand)
        found: list[Tensor | None] = []
        for side, wanted in zip(sides, places, strict=True):
            given = side.finish()
            found += (given[at] if at < len(given) and want else None for at, want in enumerate(wanted))
        own_grad = shares.learned if operand is not None and ctx.needs_input_grad[4] else None
        return None, None, None, None, None if own_grad is None else own_grad.to(operand.dtype), *found


class Side:
    """One map of a backward pass, and its gradients."""

    def __init__(
        self, q: Tensor, k: Tensor, lse: Tensor, rule: Rule, wanted: Sequence[bool], learns: bool = False
    ) -> None:
        """wanted: of which tensors of the scores; learns: whether any gradient is."""
        self.dtypes, self.learns = (q.dtype, k.dtype), learns
        self.q, self.k, self.lse, self.rule = q.to(lse.dtype), k.to(lse.dtype), lse, rule
        self.terms: Terms = rule.terms(lse[..., :0])
        if learns:
            self.sums = TermGradients(self.terms, wanted, lse)
            self.dq, self.dk = torch.zeros_like(self.q), torch.zeros_like(self.k)

    def sees(self, rows: Span, cols: Span) -> bool:
        """Whether a tile is not fully masked."""
        return self.rule.mask.state(rows, cols, self.rule.grid) is not State.EMPTY

    def leaf(self, rows: Span, cols: Span) -> Leaf:
        """A tile."""
        i, j = slice(*rows), slice(*cols)
        state = self.rule.mask.state(rows, cols, self.rule.grid)
        return Leaf(self.q[:, :, i], self.k[:, :, j], self.lse[:, :, i], self.rule, self.terms, rows, cols, state)

    def add(self, tile: Leaf, logs: Tensor | None, of_lse: Tensor) -> None:
        """Add what a tile contributes, from the derivatives by log-weights and the log-sum-exp."""
        d_scores = tile.weights.detach() * of_lse[..., None]
        if logs is not None:
            d_scores += logs
        d_scores.masked_fill_(tile.log_weights == -torch.inf, 0.0)  # 0 · NaN must not spread
        self.sums.take_tile(d_scores, tile.rows, tile.cols)
        if (slope := tile.slope) is not None:
            d_scores *= slope.masked_fill_(tile.log_weights == -torch.inf, 0.0)
        d_scores *= self.rule.scale
        i, j = slice(*tile.rows), slice(*tile.cols)
        self.dq[:, :, i] += grouped(d_scores, self.k[:, :, j].nan_to_num(0.0, 0.0, 0.0))
        self.dk[:, :, j] += grouped_t(
            d_scores, without_masked_queries(self.q[:, :, i], self.lse[:, :, i]), self.k.shape[1]
        )

    def add_sinks(self, rows: Span, of_lse: Tensor, of_sink: Tensor) -> None:
        """Add what a block of rows contributes to the gradient of learned sinks: keys whose share is `of_sink`."""
        if self.sums.sinks is not None and self.terms.sinks is not None:
            weight = sink_weight(self.terms.sinks, self.lse[:, :, slice(*rows)])
            self.sums.sinks += (of_sink + weight * of_lse.masked_fill(weight == 0, 0.0)).sum((0, 2))

    def finish(self) -> list[Tensor | None]:
        """The gradients of q, k, lse (none), and the tensors of the scores."""
        if not self.learns:
            return []
        return [self.dq.to(self.dtypes[0]), self.dk.to(self.dtypes[1]), None, *self.sums.finish()]


def _tiles(sides: Sequence[Side]) -> tuple[list[Span], Sweep]:
    """Blocks of rows, and what yields the tiles of one: of each map, where one of them is not fully masked."""

    def sweep(rows: Span) -> Iterator[tuple[Leaf, ...]]:
        grid = sides[0].rule.grid
        every = (
            Span(at, min(at + KEY_BLOCK, end)) for start, end in grid.sides() for at in range(start, end, KEY_BLOCK)
        )
        seen = [cols for cols in every if any(side.sees(rows, cols) for side in sides)]
        for at, cols in enumerate(seen):
            tiles = tuple(side.leaf(rows, cols) for side in sides)
            for tile in tiles:
                tile.first, tile.last = at == 0, at == len(seen) - 1
            yield tiles

    wide = max(sides, key=lambda side: side.lse.shape[1])
    return list(wide.rule.row_blocks()), sweep


def row_values(of: Any, maps: Sequence[Learned]) -> Tensor:
    """The value of a function of rows (see `RowFunctions`) over the tiles of some maps, [b, h, n]; its `check` sees
    what its partials add up to."""
    sides = [Side(one.q, one.k, one.lse, one.rule, ()) for one in maps]
    blocks, sweep = _tiles(sides)
    found = torch.zeros_like(sides[0].lse)
    totals: Tensor | None = None
    for rows in blocks:
        i, total = slice(*rows), None
        for tiles in sweep(rows):
            part = of.partial(*tiles)
            total = part if total is None else of.combine(total, part)
        if total is not None:
            lse = sides[0].lse[:, :, i]
            found[:, :, i] = of.value(total, lse).masked_fill(~of.counted(total, lse), 0.0)
            totals = found.new_zeros(*found.shape, total.shape[-1]) if totals is None else totals
            totals[:, :, i] = total
    if totals is not None:
        of.check(totals, sides[0].lse)
    return found
