"""The reference: the formula in float64, on the whole matrix. For small sizes and as a baseline for tests."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headwise.base.run import Progress
from headwise.kernels.call import Call, Result
from headwise.kernels.reads import Matrix, Reads, in_float64
from headwise.kernels.torch_blocks import TorchBlocks
from headwise.masks import Span, State
from headwise.rule import Rule, Terms, diagonal_sums, pooling
from headwise.rule.pooling import Squares
from headwise.rule.tiles import COMPUTING, Scratch, Tile
from headwise.stats import Statistic


class Reference:
    """softmax(cap(scale · q kᵀ) + biases + mask) v, computed literally (Vaswani et al. 2017, eq. 1)."""

    name = "reference"
    gives_delta = False
    by_autograd = True

    @property
    def reads(self) -> Reads:
        """All reads, from the stored matrix."""
        return _Stored()

    def refuse(self, call: Call) -> str | None:
        """Refuses only dropout, which is random: this kernel is for comparisons."""
        return "it does not support dropout" if call.dropout_p > 0 else None

    def run(self, call: Call) -> Result:
        weights, lse, allowed = weights_of(call)
        v = of_heads(call.v.double(), call.q.shape[1])  # [b, h, m, d_v]
        # A masked key does not affect a query's output, even if its value is NaN.
        clean = v.nan_to_num(0.0, 0.0, 0.0)
        poisoned = torch.matmul(allowed.double(), (~torch.isfinite(v)).double()) > 0
        out = torch.matmul(weights, clean).masked_fill(poisoned, torch.nan)
        return Result(out.to(call.q.dtype), lse.to(torch.promote_types(call.q.dtype, torch.float32)))

    def gradients(
        self, call: Call, out: Tensor, lse: Tensor, grad_out: Tensor, wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        """Computed by `TorchBlocks` in float64."""
        exact = replace(call, q=call.q.double(), keys=call.k.double(), values=call.v.double())
        result = TorchBlocks().run(exact)
        found = TorchBlocks().gradients(exact, result.out, result.lse, grad_out.double(), wanted)
        terms = call.rule.terms(lse[..., :0])
        given = (call.q, call.k, call.v, terms.relative, terms.sinks, *terms.biases)
        return [x if x is None or like is None else x.to(like.dtype) for x, like in zip(found, given, strict=True)]


class _Stored(Reads):
    def weights(self, of: Matrix, batch: range, heads: range, rows: range, cols: range) -> Tensor:
        return _matrix(of)[list(batch)][:, list(heads)][:, :, list(rows)][..., list(cols)].to(of.lse.dtype)

    def tile_inputs(self, of: Matrix) -> Matrix:
        """In float64."""
        return in_float64(of)

    def tiles(self, of: Matrix, progress: Progress | None = None) -> Iterator[Tile]:
        """Yield the whole matrix as one tile in float64, or its keys before a gap and those after it."""
        q, k, lse, rule, *_ = self.tile_inputs(of)
        grid = rule.grid
        if 0 in (grid.n, grid.m):
            return
        rows, logs, terms = Span(0, grid.n), _log_matrix(of), rule.terms(lse)
        states = [(cols, rule.mask.state(rows, cols, grid)) for cols in grid.sides()]
        seen = [(cols, state) for cols, state in states if state is not State.EMPTY]
        for cols, state in seen:
            tile = Tile(q, k[:, :, slice(*cols)], lse, rule, terms, rows, cols, state, Scratch())
            tile.first, tile.last = cols == seen[0][0], cols == seen[-1][0]
            tile.log_weights = logs[..., slice(*cols)]
            yield tile
        if progress is not None:
            progress(COMPUTING, grid.n, grid.n)

    def statistics(
        self, of: Matrix, wanted: tuple[Statistic, ...], progress: Progress | None = None
    ) -> dict[Statistic, Tensor]:
        """None: measures compute them from the tile."""
        return {}

    def times(self, of: Matrix, x: Tensor) -> Tensor:
        return torch.matmul(_matrix(of), of_heads(x.double(), of.rule.grid.h)).to(of.lse.dtype)

    def transposed_times(self, of: Matrix, y: Tensor) -> Tensor:
        return torch.matmul(_matrix(of).mT, y.double()).to(of.lse.dtype)

    def received(self, of: Matrix) -> Tensor:
        return _matrix(of).sum(-2).to(of.lse.dtype)

    def squares(self, of: Matrix, cell: int, progress: Progress | None = None) -> Squares:
        parts = pooling.in_squares(_matrix(of), cell)
        allowed = pooling.in_squares(_allowed(of.rule, of.q.device).double(), cell).sum((3, 5)).long()
        mean = parts.sum((3, 5)) / allowed.clamp_min(1)
        if progress is not None:
            progress(COMPUTING, of.rule.grid.n, of.rule.grid.n)
        return Squares(mean.to(of.lse.dtype), parts.amax((3, 5)).to(of.lse.dtype), allowed.expand(mean.shape).clone())

    def diagonals(self, of: Matrix) -> Tensor:
        return diagonal_sums(_matrix(of)).to(of.lse.dtype)

    def top(self, of: Matrix, count: int, progress: Progress | None = None) -> tuple[Tensor, Tensor]:
        logs, keys = _log_matrix(of).sort(dim=-1, descending=True, stable=True)
        logs, keys = logs[..., :count], keys[..., :count].masked_fill(logs[..., :count] == -torch.inf, -1)
        if progress is not None:
            progress(COMPUTING, of.rule.grid.n, of.rule.grid.n)
        bad = of.lse.isnan()[..., None]
        return logs.exp().to(of.lse.dtype).masked_fill(bad, torch.nan), keys.masked_fill(bad, -1)


def _matrix(of: Matrix) -> Tensor:
    """The weights in float64, [b, h, n, m]."""
    return _log_matrix(of).exp()


def _log_matrix(of: Matrix) -> Tensor:
    """S − lse in float64, [b, h, n, m]; −∞ where masked, and in rows of fully masked queries."""
    scores, _ = _scores(of.q, of.k, of.rule)
    lse = _Stored().tile_inputs(of).lse[..., None]
    logs = scores - lse.masked_fill(lse == -torch.inf, torch.inf)
    # Where not all keys are known it is rounded to float32. It may be NaN, and masked keys have weight 0 all the same.
    return logs.clamp_max(0.0).masked_fill(~_allowed(of.rule, of.q.device), -torch.inf)


def _allowed(rule: Rule, device: torch.device) -> Tensor:
    """[b or 1, h or 1, n, m]"""
    n, m = rule.grid.n, rule.grid.m
    return rule.mask.allowed(torch.arange(n, device=device), torch.arange(m, device=device), rule.grid)


def of_heads(k: Tensor, heads: int) -> Tensor:
    """Keys or values [b, h_kv, m, e], each head repeated for its query heads: [b, h, m, e]."""
    return k.repeat_interleave(heads // k.shape[1], dim=1)


def _scores(q: Tensor, k: Tensor, rule: Rule) -> tuple[Tensor, Terms]:
    """Scores in float64 before the mask, [b, h, n, m], and the rule's terms."""
    terms = rule.terms(q.double())
    return dense_scores(q.double(), k.double(), rule.scale, terms), terms


def weights_of(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Weights [b, h, n, m] and log-sum-exp [b, h, n] in float64, and the boolean mask [b or 1, h or 1, n, m]."""
    allowed = _allowed(call.rule, call.q.device)
    scores, terms = _scores(call.q, call.k, call.rule)
    weights, lse = dense_weights(scores, allowed, terms.sinks)
    return weights, lse.detach(), allowed


def dense_scores(q: Tensor, k: Tensor, scale: float, terms: Terms) -> Tensor:
    """Scores before the mask in the dtype of q and k, [b, h, n, m]."""
    scores = torch.matmul(q, of_heads(k, q.shape[1]).mT) * scale
    if terms.soft_cap > 0.0:
        scores = terms.soft_cap * torch.tanh(scores / terms.soft_cap)
    for term in whole_terms(terms, k.shape[2], q.device):
        scores = scores + term
    return scores


def whole_terms(terms: Terms, m: int, device: torch.device) -> tuple[Tensor, ...]:
    """What is added to the scores of all queries and m keys, each [b or 1, h or 1, n or 1, m or 1]."""
    if terms.relative is None:
        return terms.biases
    i, j = torch.arange(terms.n, device=device), torch.arange(m, device=device)
    return terms.relative[:, terms.entries(i[:, None], j)][None], *terms.biases


def dense_weights(scores: Tensor, allowed: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights [b, h, n, m] and log-sum-exp [b, h, n], 0 and −inf for fully masked queries. With a learned sink, the
    softmax includes one more key, whose weight is dropped."""
    m, scores = scores.shape[-1], scores.masked_fill(~allowed, -torch.inf)
    empty = (scores == -torch.inf).all(-1)  # fully masked queries
    safe = scores.masked_fill(empty[..., None], 0.0)
    if sinks is not None:
        safe = torch.cat((safe, sinks[:, None, None].expand(*safe.shape[:3], 1)), -1)
    weights = safe.softmax(-1)[..., :m].masked_fill(~allowed | empty[..., None], 0.0)
    return weights, safe.logsumexp(-1).masked_fill(empty, -torch.inf)
