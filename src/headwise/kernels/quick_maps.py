"""The cache of `quick.py` for calls that return a map: one call of the library computes output, log-sum-exp, statistics
and the measures of rows.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from headwise.events import here
from headwise.kernels.call import Call, sum_finite
from headwise.kernels.cpu import binding
from headwise.kernels.cpu.library import library
from headwise.kernels.cpu.passes import ROW, empty, like, row_values
from headwise.kernels.kernel import Kernel
from headwise.kernels.quantized import Vectors
from headwise.kernels.quick import KEPT, kept, kind, plain_tensors
from headwise.masks import Mask, Span
from headwise.rule import Rule
from headwise.stats import Measure, Measurements, Statistic, measure
from headwise.stats.together import Together, goes_together, places_of, value_of
from headwise.stats.values import Reduced, ToReduce

MOST = 64  # the most statistics and measures of a call: HEADWISE_MOST_KEPT in native/headwise.h


class _Measured(NamedTuple):
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


class Again(NamedTuple):
    """Results of a call that returns a map. measured: None without measures."""

    out: Tensor
    lse: Tensor
    rule: Rule
    refusals: dict[str, str]
    measured: Measurements | None


_decided: dict[Any, _Measured] = {}


def again_measured(
    q: Tensor, k: Vectors, v: Vectors, mask: Mask | None, scale: float | None, kernel: str,
    measures: Sequence[str | Measure], gap: tuple[int, int] | None = None,
) -> Again | None:  # fmt: skip
    """The results of a plain call that returns a map, like an earlier one; None for any other call. As `again`.

    The end of a gap is no part of what a call is: a cache drops one more token in each step.
    """
    if here().progress is not None or not plain_tensors(q, k, v):
        return None
    assert isinstance(k, Tensor)
    assert isinstance(v, Tensor)
    try:
        start = None if gap is None else gap[0]
        found = _decided.get((*kind(q, k, v, mask, scale, kernel), _names(measures), start))
        if found is None or (gap is not None and not (len(gap) == 2 and gap[0] < gap[1])):
            return None
    except (TypeError, IndexError, RuntimeError):  # an invalid argument
        return None
    shape, compiled, request, rows, statistics, wanted, places, rule, refusals, kept_statistics, _ = found
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
        return None  # the usual dispatch finds the reason, or counts the values that are not finite
    if gap is not None:
        rule = replace(rule, grid=replace(rule.grid, gap=Span(*gap)))
    if kept_statistics is None or not wanted:
        measured = Measurements(wanted, (), reduced.nonfinite, (Together(places, reduced),)) if wanted else None
        return Again(out, lse, rule, refusals, measured)
    known = dict(zip(statistics, results, strict=True))
    same = partial(_reduced, kept_statistics, reduced)
    try:
        return Again(out, lse, rule, refusals, measure(_none, lse, rule, wanted, found=known, reduce=same))
    except _Others:
        return None


def keep_measured(
    call: Call, chosen: Kernel, mask: Mask | None, scale: float | None, kernel: str, given: Sequence[str | Measure],
    wanted: Sequence[Measure], refusals: Mapping[str, str],
) -> None:  # fmt: skip
    """Store the decisions for a call with a map that `chosen` has run, if `again_measured` supports it."""
    if not kept(call, chosen, scale, call.keys, call.values) or max(len(wanted), len(call.statistics)) > MOST:
        return
    gap = call.rule.grid.gap
    dropped = gap.size > 0
    known = [(one, value) for one in wanted if (value := value_of(one, call.rule)) is not None]
    entries = _row_entries(call.statistics)
    if entries is None or (len(known) < len(wanted) and not dropped):
        return
    if mask is not None and mask.of_step:
        return  # no call like it comes again
    if any(not goes_together(one) or one.needs(call.rule) is None for one in wanted):
        return
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
    if len(_decided) >= KEPT:
        _decided.clear()
    try:
        key = (*kind(call.q, call.k, call.v, mask, scale, kernel), _names(given), gap.start if dropped else None)
    except TypeError:
        return
    _decided[key] = _Measured(
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


def _names(measures: Sequence[str | Measure]) -> tuple[Any, ...]:
    """The measures as a cache key; TypeError if they have more than numbers and names, or can be read only once."""
    if isinstance(measures, str):
        return (measures,)
    if not isinstance(measures, (tuple, list)):
        raise TypeError
    return tuple(x if type(x) is str else (type(x), *_settings(x)) for x in measures)


def _settings(measure: object) -> tuple[Any, ...]:
    held = tuple(vars(measure).items())
    if not isinstance(measure, Measure) or not all(isinstance(x, (int, float, str, Statistic)) for _, x in held):
        raise TypeError
    return held
