"""Small calls that come again: one call of the library, with a request that is prepared once.

A request depends on shapes, strides, dtypes and the rule of a call, and not on the addresses of its tensors.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from headwise.kernels.call import Call, sum_finite
from headwise.kernels.cpu import binding
from headwise.kernels.cpu.library import library
from headwise.kernels.cpu.passes import ROW, empty, like, row_values
from headwise.kernels.kernel import Answer, Mapped, Prepared
from headwise.kernels.quantized import in_memory
from headwise.masks import Span
from headwise.rule import Rule
from headwise.stats import Measure, Measurements, Statistic, measure
from headwise.stats.engine import Together, goes_together, places_of, value_of
from headwise.stats.statistic import Reduced, ToReduce

NAME = "cpu"
MOST = 64  # the most statistics and measures of a call: HEADWISE_MOST_KEPT in native/headwise.h


class _Request(NamedTuple):
    """A call for m keys, never modified, and the objects that it points to."""

    m: int
    like: binding.ForwardCall
    held: Any


@dataclass
class _Output:
    """shape: of the output; None: that of q. again: headwise_again. request: of the latest call, replaced as a whole
    where the next one may have another number of keys."""

    shape: tuple[int, ...] | None
    again: Callable[..., int]
    request: _Request

    def run(self, q: Tensor, memory: Sequence[Tensor], m: int, gap: tuple[int, int] | None) -> Answer | None:
        """As `Prepared.run`."""
        (keys, values, *scales), request = memory, self.request
        if m != request.m:
            request = self.request = _Request(m, *binding.of_all_keys(request.like, m))
        like = binding.with_scales(request.like, *scales) if scales else request.like
        out = torch.empty_like(q) if self.shape is None else q.new_empty(self.shape)  # empty_like takes half the time
        status = self.again(
            ctypes.byref(like), torch.get_num_threads(), q.data_ptr(), keys.data_ptr(), values.data_ptr(),
            out.data_ptr(),
        )  # fmt: skip
        return (out, None) if status in (binding.DONE, binding.FINITE) else None


class _Map(NamedTuple):
    """shape: of the output. again: headwise_again_measured. request, rows: its arguments, never modified.

    statistics: those requested. measures, places, rule, refusals: of the results; places: of those that `rows` reduces.
    reduced: the statistic of each of these, if the others, or the gap of a cache, remain to be looked at.
    held: the objects that the requests point to.
    """

    shape: tuple[int, ...]
    again: Callable[..., int]
    request: Any
    rows: Any
    statistics: tuple[Statistic, ...]
    measures: tuple[Measure, ...]
    places: dict[str, int]
    rule: Rule
    refusals: dict[str, str]
    reduced: list[Statistic | None] | None
    held: list[Any]

    def run(self, q: Tensor, memory: Sequence[Tensor], m: int, gap: tuple[int, int] | None) -> Answer | None:
        """As `Prepared.run`."""
        k, v = memory
        shape, compiled, request, rows, statistics, wanted, places, rule, refusals, kept_statistics, _ = self
        b, h, n, _ = shape
        out, lse = q.new_empty(shape), torch.empty(b, h, n, dtype=torch.float32, device="cpu")
        results = torch.empty(len(statistics), b, h, n, dtype=torch.float32, device="cpu")
        reduced = empty(len(places), b, h)
        status = compiled(
            request, rows, torch.get_num_threads(), q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(),
            lse.data_ptr(), results.data_ptr(), reduced.values.data_ptr(), reduced.sums.data_ptr(),
            reduced.nonfinite.data_ptr(),
        )  # fmt: skip
        if not (status == binding.FINITE or (status == binding.DONE and sum_finite(v.detach(), k.detach()))):
            return None  # values that are not finite are counted
        if gap is not None:
            rule = replace(rule, grid=replace(rule.grid, gap=Span(*gap)))
        if kept_statistics is None or not wanted:
            measured = Measurements(wanted, (), reduced.nonfinite, (Together(places, reduced),)) if wanted else None
            return out, Mapped(lse, rule, NAME, refusals, measured)
        known = dict(zip(statistics, results, strict=True))
        same = partial(_reduced, kept_statistics, reduced)
        try:
            measured = measure(_none, lse, rule, wanted, found=known, reduce=same)
        except _Others:
            return None
        return out, Mapped(lse, rule, NAME, refusals, measured)


def prepared(call: Call, wanted: Sequence[Measure] | None, refusals: Mapping[str, str]) -> Prepared | None:
    """`Kernel.prepared` of a call that has run."""
    k, v, *scales = in_memory(call.keys, call.values)
    if wanted is not None:
        return None if scales else _of_map(call, wanted, refusals)
    if call.statistics or (scales and call.reads_floats):
        return None
    b, h, n, m = call.rule.grid
    shape, handle = (b, h, n, v.shape[3]), library().handle
    assert handle is not None  # the kernel has run
    request = _Request(m, *like(call.q, k, v, shape, call, scales))
    same = call.q.shape == shape and call.q.is_contiguous()
    return _Output(None if same else shape, handle.headwise_again, request)


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
    b, h, n, _ = call.rule.grid
    order = [statistic for statistic, _ in entries]
    places = [0 if x.statistic is None else order.index(x.statistic) for _, x in known]
    reduce = [ToReduce(x, None, getattr(one, "reduce", "") == "max") for one, x in known]
    handle = library().handle
    assert handle is not None  # the kernel has run
    shape = (b, h, n, call.values.shape[3])
    request, held = like(call.q, call.k, call.v, shape, call)
    of_rows, held_masks = row_values(reduce, places, b, n)
    arguments: list[Any] = [entry for _, entry in entries]
    requested = (binding.Wanted * len(entries))(*arguments)
    request.wanted_count, request.wanted = len(entries), requested
    rows = binding.RowsCall(b, h, n, None, len(reduce), of_rows)
    return _Map(
        shape, handle.headwise_again_measured, ctypes.byref(request), ctypes.byref(rows), tuple(order), tuple(wanted),
        places_of([one for one, _ in known]), call.rule, dict(refusals),
        [x.statistic for _, x in known] if dropped else None, [request, rows, requested, of_rows, *held, *held_masks],
    )  # fmt: skip


class _Others(Exception):
    """A measure requires other statistics than those of the earlier call."""


def _none() -> NoReturn:
    raise _Others


def _reduced(
    statistics: list[Statistic | None], found: Reduced, lse: Tensor, given: Sequence[ToReduce]
) -> Reduced:  # fmt: skip
    """What the library has reduced; raises if it is of other statistics."""
    if [one.value.statistic for one in given] != statistics:
        raise _Others
    return found


def _row_entries(statistics: Sequence[Statistic]) -> list[tuple[Statistic, tuple[Any, ...]]] | None:
    """headwise_wanted without results, sorted by code; None if one is not a number of each query, or has arguments."""
    codes = library().statistics
    found: list[tuple[Statistic, tuple[Any, ...]]] = []
    for statistic in statistics:
        compiled = statistic.compiled
        if compiled is None or not compiled.signature.endswith(ROW) or compiled.signature not in codes:
            return None
        if compiled.keys is not None or compiled.queries is not None:
            return None
        found.append((statistic, (codes[compiled.signature], 1, None, compiled.numbers)))
    return sorted(found, key=lambda entry: entry[1][0])
