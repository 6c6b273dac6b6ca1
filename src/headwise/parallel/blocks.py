"""Attention computed in rectangles of queries × keys; outputs, statistics and gradients are combined exactly.

For two sets of keys with log-sum-exps L₁ and L₂, a query's row has L = ln(e^L₁ + e^L₂), and the share of each set is
e^(L_s − L). Outputs, masses and distances are sums weighted by the shares, Σp² by their squares, and entropy is
Σ_s share_s · (H_s − ln share_s) (Milakov & Gimelshein 2018, 1805.02867, for the sums; the chain rule of entropy).
Each statistic declares how it is combined (`headwise.stats.Join`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headwise.errors import ConfigError
from headwise.kernels import KERNELS, run
from headwise.kernels.call import Call
from headwise.masks import Everything, Span, State
from headwise.rule import Rule, Terms, compute, own_dtypes, sink_gradient
from headwise.scores import cell
from headwise.stats import Join, Part, Statistic


@dataclass(frozen=True)
class Way:
    """The options shared by all rectangles.

    Attributes:
        rule: of the whole matrix.
        kernel: "auto", or the name of a kernel.
        seed: of the dropout; the seed of each rectangle is derived from it.
        statistics: computed for every row in addition to the output.
    """

    rule: Rule
    kernel: str = "auto"
    dropout_p: float = 0.0
    seed: int = 0
    statistics: tuple[Statistic, ...] = ()

    def allows(self, rows: Span, cols: Span) -> bool:
        """Whether the mask allows any of these keys for any of these queries."""
        if rows.start == rows.stop or cols.start == cols.stop:
            return False
        return self.rule.mask.state(rows, cols, self.rule.grid) is not State.EMPTY

    def call(self, q: Tensor, k: Tensor, v: Tensor, rows: Span, cols: Span) -> Call:
        """The rectangle as a call of its own."""
        # The odd constant spreads the positions over all seeds, so that no two rectangles have the same dropout.
        place = rows.start * self.rule.grid.m + cols.start + 1
        seed = (self.seed + place * 0x9E3779B97F4A7C15) % (1 << 40)
        return Call(q, k, v, self._part(rows, cols), self.dropout_p, seed)

    def _part(self, rows: Span, cols: Span) -> Rule:
        """The rule of a rectangle; full blocks without distances drop their position, as more kernels support that."""
        part = self.rule.part(rows, cols)
        placed = any(score.placed for score in part.scores) or any(x.placed for x in self.statistics)
        if placed or not part.is_full():
            return part
        return replace(part, mask=Everything(), grid=replace(part.grid, first=None))


class Rows:
    """The accumulated results of a run of queries over the keys processed so far.

    Attributes:
        out: [b, h, r, d_v] and lse: [b, h, r], in the accumulating dtype; final after all keys.
        found: the statistics [b, h, r] in float64 that all kernels returned. missing: those that a kernel did not.
        kernels: the kernel of each rectangle, by its keys. refusals: why others do not support it.
    """

    def __init__(self, q: Tensor, rows: Span, way: Way, value_dim: int) -> None:
        self.q, self.rows, self.way = q, rows, way
        like = compute(q[..., :0])
        self.lse = like.new_full(q.shape[:-1], -torch.inf)
        self.out = like.new_zeros(*q.shape[:-1], value_dim)
        needed = [other for statistic in way.statistics for other in _join(statistic).beside]
        self.found: dict[Statistic, Tensor] = {
            statistic: torch.full_like(self.lse, _join(statistic).empty, dtype=torch.float64)
            for statistic in dict.fromkeys((*way.statistics, *needed))
        }
        self.missing: set[Statistic] = set()
        self.kernels: dict[Span, str] = {}
        self.refusals: dict[str, str] = {}

    def meet(self, k: Tensor, v: Tensor, cols: Span) -> None:
        """Accumulate keys [b, h_kv, c, d] and values at the positions `cols`, unless all are masked."""
        if not self.way.allows(self.rows, cols):
            return
        here = {statistic: statistic.at(cols) for statistic in self.found if statistic not in self.missing}
        wanted = tuple(dict.fromkeys(local for local in here.values() if local is not None))
        call = replace(self.way.call(self.q, k, v, self.rows, cols), statistics=wanted)
        result, kernel, refusals = run(call, self.way.kernel)
        self.kernels[cols] = kernel.name
        self.refusals.update(refusals)
        nothing = torch.zeros_like(self.lse, dtype=torch.float64)
        values = {
            statistic: nothing if local is None else result.statistics[local].double()
            for statistic, local in here.items()
            if local is None or local in result.statistics
        }
        values = {s: x for s, x in values.items() if all(other in values for other in _join(s).beside)}
        self.missing.update(statistic for statistic in here if statistic not in values)
        self._join(result.out, result.lse, values)

    def _join(self, out: Tensor, lse: Tensor, values: Mapping[Statistic, Tensor]) -> None:
        both = torch.logaddexp(self.lse, lse)
        base = both.masked_fill(both == -torch.inf, 0.0)  # a fully masked row so far
        one, other = self.lse - base, lse - base
        self.out.mul_(one.exp()[..., None]).addcmul_(compute(out), other.exp()[..., None])
        before, there = Part(one.double(), self.found), Part(other.double(), values)
        self.found |= {statistic: _join(statistic).both(statistic, before, there) for statistic in values}
        self.lse = both

    def finish(self, sinks: Tensor | None) -> None:
        """After all keys: add the share of the learned sinks [h], and drop incomplete statistics."""
        for statistic in self.missing:
            self.found.pop(statistic, None)
        if sinks is None:
            return
        masked = self.lse == -torch.inf
        both = torch.where(masked, self.lse, torch.logaddexp(self.lse, sinks.detach()[:, None]))
        share = (self.lse - both).masked_fill(masked, 0.0)
        self.out.mul_(share.exp()[..., None])
        self.found = {s: _join(s).beside_sink(x, share.double()) for s, x in self.found.items()}
        self.lse = both


class RowGradients:
    """The backward pass of `Rows`: the gradient of the queries, and their contribution to those of keys and values.

    Args:
        out, lse: of these rows over all keys, sinks included; grad_out: [b, h, r, d_v].
    """

    def __init__(
        self, q: Tensor, rows: Span, way: Way, kernels: Mapping[Span, str], out: Tensor, lse: Tensor, grad_out: Tensor
    ) -> None:
        self.q, self.rows, self.way, self.kernels = q, rows, way, kernels
        self.out, self.lse, self.grad_out = out, lse, grad_out
        self.dq = torch.zeros_like(q, dtype=lse.dtype)

    def meet(self, k: Tensor, v: Tensor, cols: Span, sums: "ScoreSums", dk: Tensor, dv: Tensor) -> None:
        """Process keys and values as in the forward pass, in any order; adds to dk and dv in the accumulating dtype."""
        if cols not in self.kernels:
            return
        call = self.way.call(self.q, k, v, self.rows, cols)
        name, rows = self.kernels[cols], (self.out, self.lse, self.grad_out)
        if name == "reference":
            # Its backward pass does not support rows with keys in other rectangles; torch_blocks does, also in float64.
            name, rows = "torch_blocks", (self.out.double(), self.lse.double(), self.grad_out.double())
            call = replace(call, q=call.q.double(), keys=call.k.double(), values=call.v.double())
        with torch.no_grad(), own_dtypes(self.q):
            found = KERNELS[name].gradients(call, *rows, sums.wanted)
        for total, part in zip((self.dq, dk, dv), found[:3], strict=True):
            assert part is not None  # q, k and v always have gradients
            total += part
        sums.take(found[3], found[5:], self.rows, cols)

    def sinks(self, sinks: Tensor) -> Tensor:
        """The gradient of the learned sinks [h]."""
        return sink_gradient(sinks, self.lse, (compute(self.grad_out) * compute(self.out)).sum(-1))


class ScoreSums:
    """The contribution of these rows to the gradients of the scores' tensors over the whole matrix.

    Attributes:
        wanted: whether (relative, sinks, *biases) need gradients, as passed to kernels; no rectangle has sinks.
    """

    def __init__(self, terms: Terms, wanted: Sequence[bool], like: Tensor) -> None:
        of_relative, _, *of_biases = wanted
        self.terms, self.wanted = terms, (of_relative, False, *of_biases)
        self.relative, *self.biases = (
            torch.zeros_like(x, dtype=like.dtype) if x is not None and want else None
            for x, want in zip((terms.relative, *terms.biases), (of_relative, *of_biases), strict=True)
        )

    def take(self, relative: Tensor | None, biases: Sequence[Tensor | None], rows: Span, cols: Span) -> None:
        """Add the gradients of a rectangle."""
        if self.relative is not None and relative is not None:
            strips = [where for _, where in self.terms.strips(rows, cols)]
            lengths = [where.stop - where.start for where in strips]
            for where, part in zip(strips, relative.split(lengths, -1), strict=True):
                self.relative[:, where] += part
        for total, part in zip(self.biases, biases, strict=True):
            if total is not None and part is not None:
                total[cell(total, rows, cols)] += part


def _join(statistic: Statistic) -> Join:
    if statistic.joins is None:
        raise ConfigError(f"statistic {statistic.name!r}: the numbers of two sets of keys do not determine it")
    return statistic.joins
