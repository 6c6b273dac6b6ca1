"""The compiled kernel for the CPU, its reads of a map (weights, statistics, products, pictures), and small calls again.

Reads are calls as those of `passes.py`: any rule that has a `Lowered` form, the same bits for any number of threads. If
the log-sum-exp is in float64, each logit has the same bits in all of them.

A small call that comes again is one call of the library, with a request that is prepared once: it depends on shapes,
strides, dtypes and the rule of a call, and not on the addresses of its tensors.
"""

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from headwise.base.run import Progress
from headwise.kernels.call import Call, Declined, Result, are_plain, sum_finite
from headwise.kernels.cpu import binding, passes
from headwise.kernels.cpu.library import library
from headwise.kernels.gradients import Learned, learns
from headwise.kernels.joint import RowGradients
from headwise.kernels.kernel import Answer, Mapped, Prepared
from headwise.kernels.quantized import in_memory
from headwise.kernels.reads import Matrix, Reads, TileReads
from headwise.masks import Span
from headwise.rule import Rule
from headwise.rule.lowering import of_terms, requested
from headwise.rule.pooling import Squares
from headwise.rule.tiles import COMPUTING
from headwise.stats import COLUMN_MASS, Measure, Measurements, Statistic, TopKeys, TopWeights, measure
from headwise.stats.engine import Together, goes_together, value_of
from headwise.stats.statistic import Reduced, RowValue, ToReduce

LARGEST_PART = 1 << 18  # the most weights of a head that are computed at once to select columns from

Found = TypeVar("Found")


class CompiledReads(Reads):
    """All reads except tiles."""

    def weights(self, of: Matrix, batch: range, heads: range, rows: range, cols: range) -> Tensor:
        if 0 in map(len, (batch, heads, rows, cols)):
            _done(of, lambda _: None)
            return of.lse.new_empty(*map(len, (batch, heads, rows, cols)))
        if heads != range(of.q.shape[1]):
            alone = range(1)
            found = [[self.weights(of.head(b, h), alone, alone, rows, cols) for h in heads] for b in batch]
            return torch.cat([torch.cat(of_heads, 1) for of_heads in found])
        if batch != range(of.q.shape[0]):
            return torch.cat([self.weights(of.head(b), range(1), heads, rows, cols) for b in batch])
        if rows.step != 1 or cols.step != 1:
            return torch.cat(list(self._apart(of, batch, heads, rows, cols)), 2)
        part = self.exact(of.part(rows, cols))
        return _done(part, lambda call: _squares(call, part.lse, 1, "mean")[0])

    def suited(self, of: Matrix) -> Reads:
        """Reads in float64, tile by tile, where scores are sums of terms that cancel."""
        return TileReads() if of.cancels else self

    def exact(self, of: Matrix) -> Matrix:
        if not of.has_large_scores:
            return of
        return of._replace(lse=of.exact_lse(("cpu", of.q.dtype), _log_sums))

    def _apart(self, of: Matrix, batch: range, heads: range, rows: range, cols: range) -> Iterator[Tensor]:
        """Yield weights of non-contiguous rows or columns, selected from blocks of contiguous ones."""
        across = range(min(cols), max(cols) + 1)
        at = torch.tensor([j - across.start for j in cols], device=of.lse.device)
        height = max(1, LARGEST_PART // len(across)) if rows.step == 1 else 1
        for start in range(0, len(rows), height):
            some = rows[start : start + height]
            yield self.weights(of, batch, heads, range(some[0], some[-1] + 1), across)[..., at]

    def statistics(
        self, of: Matrix, wanted: tuple[Statistic, ...], progress: Progress | None = None
    ) -> dict[Statistic, Tensor]:
        """With `progress`, head by head; progress is reported in rows, as if all heads were computed together."""
        if progress is None or 0 in of.q.shape[:2]:
            return _done(of, lambda call: passes.forward(call)[2], statistics=wanted)
        b, h, _, _ = of.rule.grid
        found: dict[Statistic, list[Tensor]] = {statistic: [] for statistic in wanted}
        for batch, one in _heads(of, progress):
            here = {statistic: statistic.only(batch) for statistic in wanted}
            given = self.statistics(one, tuple(here.values()))
            for statistic in wanted:
                if here[statistic] in given:
                    found[statistic].append(given[here[statistic]])
        whole = {s: torch.cat(parts) for s, parts in found.items() if len(parts) == b * h}
        return {s: x.view(b, h, *x.shape[2:]) for s, x in whole.items()}

    def reduced(self, lse: Tensor, measures: Sequence[ToReduce]) -> Reduced | None:
        return passes.reduce_rows(lse, measures)

    def times(self, of: Matrix, x: Tensor) -> Tensor:
        """Attention with the values x."""
        return _done(of.with_keys_of(x), lambda call: passes.forward(call)[0], values=x)

    def transposed_times(self, of: Matrix, y: Tensor) -> Tensor:
        """The gradient of the values for that of the output."""
        # Keys are repeated; otherwise the result would be summed over the heads that share them.
        of = self.exact(of.with_keys_of(y))
        return _done(of, lambda call: passes.transposed(call, of.lse, y))

    def received(self, of: Matrix) -> Tensor:
        return self.statistics(of, (COLUMN_MASS,))[COLUMN_MASS]

    def squares(self, of: Matrix, cell: int, progress: Progress | None = None) -> Squares:
        """With `progress`, head by head."""
        if progress is None or 0 in of.q.shape[:2]:
            of = self.exact(of)
            return Squares(*_done(of, lambda call: _squares(call, of.lse, cell, "mean", "largest", "allowed")))
        b, h, _, _ = of.rule.grid
        parts = [self.squares(one, cell) for _, one in _heads(of, progress)]
        return Squares(*(torch.cat(x).view(b, h, *x[0].shape[2:]) for x in zip(*parts, strict=True)))

    def diagonals(self, of: Matrix) -> Tensor:
        of = self.exact(of)
        return _done(of, lambda call: diagonals(call, of.lse))

    def top(self, of: Matrix, count: int, progress: Progress | None = None) -> tuple[Tensor, Tensor]:
        if count > passes.MOST_NUMBERS:
            raise Declined(f"it supports at most {passes.MOST_NUMBERS} weights per row, got {count}")
        wanted = TopWeights(count), TopKeys(count)
        found = self.statistics(of, wanted, progress)
        return found[wanted[0]], found[wanted[1]]


def _log_sums(of: Matrix) -> Tensor:
    """The log-sum-exp of a matrix with all keys in float64, of the logits of the other reads."""
    lse = of.lse.double()
    found = lse + _done(of, lambda call: log_sums(call, lse))
    sinks = of.rule.terms(lse).sinks
    found = found if sinks is None else torch.logaddexp(found, sinks.detach()[:, None])
    return torch.where(found.isfinite(), found, lse)


def _done(
    of: Matrix, work: Callable[[Call], Found], *, values: Tensor | None = None, statistics: tuple[Statistic, ...] = ()
) -> Found:
    """Apply `work` to the matrix as a call, without values if `values` is None; raise Declined if it is refused."""
    call = Call(of.q, of.k, of.k[..., :0] if values is None else values, of.rule, statistics=statistics)
    if reason := passes.refusal(call):
        raise Declined(reason)
    return work(call)


def _heads(of: Matrix, progress: Progress) -> Iterator[tuple[int, Matrix]]:
    """Yield batch entry and matrix of each head, and report progress in rows, as of all heads together."""
    b, h, n, _ = of.rule.grid
    for batch in range(b):
        for head in range(h):
            yield batch, of.head(batch, head)
            progress(COMPUTING, (batch * h + head + 1) * n // (b * h), n)


STRIPE = 1024  # HEADWISE_STRIPE in native/headwise.h


def log_sums(call: Call, lse: Tensor) -> Tensor:
    """ln Σ_j exp(S_ij − lse_i) over the keys, [b, h, n] in float64: about 0 where lse is the log-sum-exp."""
    sums, tops = (x.double() for x in _squares(call, lse.double(), 1, "mean", "largest", stripe=STRIPE))
    return (tops * log(2.0) + sums.log()).logsumexp(-1)


def _squares(call: Call, lse: Tensor, cell: int, *wanted: str, stripe: int = 0) -> list[Tensor]:
    """The wanted ones of mean weight, largest weight and unmasked pairs in each square, [b, h, ⌈n/cell⌉, ⌈m/cell⌉]."""
    b, h, n, m = call.rule.grid
    q, k = passes.in_rows(call.q), passes.in_rows(call.k)
    request = binding.PoolCall(
        binding.CODES[q.dtype], torch.get_num_threads(), b, h, k.shape[1], n, m, q.shape[-1], *map(binding.view, (q, k))
    )
    request.cell, request.logs = cell, stripe > 0
    shape = b, h, -(-n // cell), -(-m // (stripe or cell))
    found = [
        torch.empty(shape, dtype=torch.int64, device="cpu") if name == "allowed" else passes.floats(*shape)
        for name in wanted
    ]
    for name, x in zip(wanted, found, strict=True):
        setattr(request, name, x.data_ptr())
    passes.send("headwise_pool", request, call, lse)
    return found


def diagonals(call: Call, lse: Tensor) -> Tensor:
    """Sums of the weights along diagonals, [b, h, n + m − 1]; pair (i, j) is on diagonal j − i + n − 1."""
    b, h, n, m = call.rule.grid
    q, k = passes.in_rows(call.q), passes.in_rows(call.k)
    mass = passes.floats(b, h, n + m - 1)
    request = binding.DiagonalsCall(
        binding.CODES[q.dtype], torch.get_num_threads(), b, h, k.shape[1], n, m, q.shape[-1], *map(binding.view, (q, k))
    )
    request.mass = mass.data_ptr()
    passes.send("headwise_diagonals", request, call, lse)
    return mass


class CPU:
    """Masks of a few key ranges or a boolean, all scores, float32, bfloat16 and float16."""

    name = "cpu"
    gives_delta = True
    by_autograd = False
    twice = True
    adds_rows = True
    reads = CompiledReads()

    def refuse(self, call: Call) -> str | None:
        """Check device, dtype, sizes, library and rule."""
        return passes.refusal(call)

    def run(self, call: Call) -> Result:
        return Result(*passes.forward(call))

    def prepared(self, call: Call, wanted: Sequence[Measure] | None, refusals: Mapping[str, str]) -> Prepared | None:
        """One call of the library; none for a subclass, which may run calls in another way."""
        if type(self) is not CPU:
            return None
        k, v, *scales = in_memory(call.keys, call.values)
        if wanted is not None:
            return None if scales else _of_map(call, wanted, refusals)
        if call.statistics or (scales and call.reads_floats):
            return None
        b, h, n, m = call.rule.grid
        shape, handle = (b, h, n, v.shape[3]), library().handle
        assert handle is not None  # the kernel has run
        strides = tuple(map(Tensor.stride, (k, v, *scales)))
        request = _Request(m, strides, *passes.like(call.q, k, v, shape, call, scales))
        same = call.q.shape == shape and call.q.is_contiguous()
        output = _Output(None if same else shape, handle.headwise_again, n == 1, request)
        if not learns(call):
            return output
        of = _Training(output, handle.headwise_again_backward)
        return None if scales else Learned(self, call.rule, of.forward, of.backward)

    def gradients(
        self, call: Call, out: Tensor, lse: Tensor, grad_out: Tensor, wanted: Sequence[bool],
        more: RowGradients | None = None,
    ) -> list[Tensor | None]:  # fmt: skip
        """Computed by the compiled backward pass."""
        terms = call.rule.terms(lse[..., :0])
        requests = requested(terms, wanted)
        *found, d_relative, d_bias, d_sinks, delta = passes.backward(call, out, lse, grad_out, requests, more)
        if call.on_delta is not None and delta is not None:
            call.on_delta(delta)
        d_relative, d_biases = of_terms(terms, wanted, d_relative, d_bias)
        return [*found, d_relative, d_sinks, *d_biases]


HERE = torch.device("cpu")
MOST = 64  # the most statistics and measures of a call: HEADWISE_MOST_KEPT in native/headwise.h


class _Request(NamedTuple):
    """A call for m keys at these strides, never modified, and the objects that it points to."""

    m: int
    strides: tuple[tuple[int, ...], ...]  # of keys and values, and of their scales
    like: binding.ForwardCall
    held: Any
    rule: Rule | None = None  # of the calls, for a map


@dataclass
class _Output:
    """shape: of the output; None: that of q. again: headwise_again. one: whether there is one query. request: of the
    latest call, replaced as a whole where the next one may then have another number of keys, on which strides depend in
    what torch.cat has joined."""

    shape: tuple[int, ...] | None
    again: Callable[..., int]
    one: bool
    request: _Request

    def run(
        self, q: Tensor, memory: Sequence[Tensor], m: int, gap: tuple[int, int] | None, lse: Tensor | None = None
    ) -> Answer | None:
        """As `Prepared.run`, with the log-sum-exp in `lse`."""
        (keys, values, *scales), request = memory, self.request
        if self.one:
            strides = tuple(map(Tensor.stride, memory))
            if m != request.m or strides != request.strides:
                request = self.request = _Request(m, strides, *binding.of_all_keys(request.like, m, strides))
        like = request.like
        if scales:
            like = binding.ForwardCall.from_buffer_copy(like)
            like.key_scales.data, like.value_scales.data = (x.data_ptr() for x in scales)
        out = torch.empty_like(q) if self.shape is None else q.new_empty(self.shape)  # empty_like takes half the time
        status = self.again(
            ctypes.byref(like), torch.get_num_threads(), q.data_ptr(), keys.data_ptr(), values.data_ptr(),
            out.data_ptr(), None if lse is None else lse.data_ptr(),
        )  # fmt: skip
        return (out, None) if status in (binding.DONE, binding.FINITE) else None


@dataclass
class _Training:
    """again: headwise_again_backward. latest: the kinds of tensors of the latest backward pass, and its request, which
    are replaced as a whole: gradients may have other strides, and hooks may change all that was saved."""

    output: _Output
    again: Callable[..., int]
    latest: tuple[list[Any], binding.BackwardCall] | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        """As `Learned.forward`."""
        lse = passes.floats(*q.shape[:3])
        found = self.output.run(q, (k, v), k.shape[2], None, lse)
        return None if found is None else (found[0], lse)

    def backward(self, *given: Tensor) -> tuple[Tensor, ...] | None:
        """As `Learned.backward`."""
        if not are_plain(HERE, *given):
            return None
        q, k, v, out, lse, grad_out = given
        kinds = [(x.shape, x.dtype, x.stride()) for x in given]
        latest = self.latest
        if latest is None or kinds != latest[0]:
            request = passes.like_backward(self.output.request.like, *given)
            if request is None:
                return None
            latest = self.latest = kinds, request
        dq, dk, dv = (torch.empty_like(x) if x.is_contiguous() else x.new_empty(x.shape) for x in (q, k, v))
        status = self.again(
            ctypes.byref(latest[1]), torch.get_num_threads(), q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(),
            grad_out.data_ptr(), dq.data_ptr(), dk.data_ptr(), dv.data_ptr(), lse.data_ptr(),
        )  # fmt: skip
        return (dq, dk, dv) if status == binding.DONE else None


@dataclass
class _Map:
    shape: tuple[int, ...]  # of the output
    again: Callable[..., int]  # headwise_again_measured
    request: _Request  # as in `_Output`
    rows: binding.RowsCall  # never modified
    statistics: tuple[Statistic, ...]  # those requested
    measures: tuple[Measure, ...]
    known: list[tuple[Measure, RowValue]]  # those of them that `rows` reduces
    refusals: dict[str, str]
    others: bool  # whether other measures, or a cache's gap, remain to be looked at
    held: list[Any]  # the objects that the requests point to

    def run(self, q: Tensor, memory: Sequence[Tensor], m: int, gap: tuple[int, int] | None) -> Answer | None:
        """As `Prepared.run`."""
        k, v = memory
        request, strides = self.request, tuple(map(Tensor.stride, memory))
        assert request.rule is not None
        rule = replace(request.rule, grid=replace(request.rule.grid, m=m)) if m != request.m else request.rule
        if m != request.m or strides != request.strides:
            known = [(one, value_of(one, rule)) for one, _ in self.known]
            if any(value is None or value.counted is not None for _, value in known) or known != self.known:
                return None
            request = self.request = _Request(m, strides, *binding.of_all_keys(request.like, m, strides), rule)
        b, h, n, _ = self.shape
        out, lse = q.new_empty(self.shape), torch.empty(b, h, n, dtype=torch.float32, device="cpu")
        results = torch.empty(len(self.statistics), b, h, n, dtype=torch.float32, device="cpu")
        reduced = passes.empty(len(self.known), b, h)
        status = self.again(
            ctypes.byref(request.like), ctypes.byref(self.rows), torch.get_num_threads(), q.data_ptr(), k.data_ptr(),
            v.data_ptr(), out.data_ptr(), lse.data_ptr(), results.data_ptr(), reduced.values.data_ptr(),
            reduced.sums.data_ptr(), reduced.nonfinite.data_ptr(),
        )  # fmt: skip
        if not (status == binding.FINITE or (status == binding.DONE and sum_finite(v.detach(), k.detach()))):
            return None  # values that are not finite are counted
        if gap is not None:
            rule = replace(rule, grid=replace(rule.grid, gap=Span(*gap)))
        wanted = self.measures
        if not (self.others and wanted):
            places = {one.name: i for i, (one, _) in enumerate(self.known)}
            measured = Measurements(wanted, (), reduced.nonfinite, (Together(places, reduced),)) if wanted else None
            return out, Mapped(lse, rule, CPU.name, self.refusals, measured)

        def tiles() -> NoReturn:
            raise _Others

        def found(lse: Tensor, given: Sequence[ToReduce]) -> Reduced:
            if [one.value.statistic for one in given] != [value.statistic for _, value in self.known]:
                raise _Others
            return reduced

        try:
            given = dict(zip(self.statistics, results, strict=True))
            measured = measure(tiles, lse, rule, wanted, found=given, reduce=found)
        except _Others:
            return None
        return out, Mapped(lse, rule, CPU.name, self.refusals, measured)


def _of_map(call: Call, wanted: Sequence[Measure], refusals: Mapping[str, str]) -> Prepared | None:
    if max(len(wanted), len(call.statistics)) > MOST:
        return None
    dropped = call.rule.grid.gap.size > 0
    known = [(one, value) for one in wanted if (value := value_of(one, call.rule)) is not None]
    entries = _row_entries(call.statistics)
    if entries is None or (len(known) < len(wanted) and not dropped):
        return None
    if any(not goes_together(one) or one.needs(call.rule) is None for one in wanted):
        return None
    b, h, n, m = call.rule.grid
    order = [statistic for statistic, _ in entries]
    places = [0 if x.statistic is None else order.index(x.statistic) for _, x in known]
    reduce = [ToReduce(x, None, getattr(one, "reduce", "") == "max") for one, x in known]
    handle = library().handle
    assert handle is not None  # the kernel has run
    shape = (b, h, n, call.values.shape[3])
    like, held = passes.like(call.q, call.k, call.v, shape, call)
    of_rows, held_masks = passes.row_values(reduce, places, b, n)
    arguments: list[Any] = [entry for _, entry in entries]
    requested = (binding.Wanted * len(entries))(*arguments)
    like.wanted_count, like.wanted = len(entries), requested
    strides = tuple(map(Tensor.stride, (call.k, call.v)))
    return _Map(
        shape, handle.headwise_again_measured, _Request(m, strides, like, held, call.rule),
        binding.RowsCall(b, h, n, None, len(reduce), of_rows), tuple(order), tuple(wanted), known, dict(refusals),
        dropped, [requested, of_rows, *held_masks],
    )  # fmt: skip


class _Others(Exception):
    """A measure requires other statistics than those of the earlier call."""


def _row_entries(statistics: Sequence[Statistic]) -> list[tuple[Statistic, tuple[Any, ...]]] | None:
    """headwise_wanted without results, sorted by code; None if one is not a number of each query, or has arguments."""
    codes = library().statistics
    found: list[tuple[Statistic, tuple[Any, ...]]] = []
    for statistic in statistics:
        compiled = statistic.compiled
        if compiled is None or not compiled.signature.endswith(passes.ROW) or compiled.signature not in codes:
            return None
        if compiled.keys is not None or compiled.queries is not None:
            return None
        found.append((statistic, (codes[compiled.signature], 1, None, compiled.numbers)))
    return sorted(found, key=lambda entry: entry[1][0])
