"""The cache of `quick.py` for calls that return a map: one call of the library computes output, log-sum-exp, statistics
and the measures of rows.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.events import here
from headwise.kernels.call import Call, sum_finite
from headwise.kernels.cpu import binding
from headwise.kernels.cpu.library import library
from headwise.kernels.cpu.passes import ROW, like
from headwise.kernels.cpu.rows import empty, row_values
from headwise.kernels.kernel import Kernel
from headwise.kernels.quantized import Vectors
from headwise.kernels.quick import KEPT, kept, kind, plain_tensors
from headwise.masks import Mask
from headwise.rule import Rule
from headwise.stats import Measure, Measurements, Statistic
from headwise.stats.together import Together, places_of, value_of
from headwise.stats.values import ToReduce

MOST = 64  # the most statistics and measures of a call: HEADWISE_MOST_KEPT in native/headwise.h


class _Measured(NamedTuple):
    """shape: of the output. again: headwise_again_measured. request, rows: its arguments, never modified.

    statistics: the number of those requested. measures, places, rule, refusals: of the results.
    held: the objects that the requests point to.
    """

    shape: tuple[int, ...]
    again: Callable[..., int]
    request: Any
    rows: Any
    statistics: int
    measures: tuple[Measure, ...]
    places: dict[str, int]
    rule: Rule
    refusals: dict[str, str]
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
    measures: Sequence[str | Measure],
) -> Again | None:  # fmt: skip
    """The results of a plain call that returns a map, like an earlier one; None for any other call. As `again`."""
    if here().progress is not None or not plain_tensors(q, k, v):
        return None
    assert isinstance(k, Tensor)
    assert isinstance(v, Tensor)
    try:
        found = _decided.get((*kind(q, k, v, mask, scale, kernel), _names(measures)))
    except TypeError:
        return None
    if found is None:
        return None
    shape, compiled, request, rows, statistics, wanted, places, rule, refusals, _ = found
    b, h, n, _ = shape
    out, lse = q.new_empty(shape), torch.empty(b, h, n, dtype=torch.float32, device="cpu")
    results = torch.empty(statistics, b, h, n, dtype=torch.float32, device="cpu")
    reduced = empty(len(wanted), b, h)
    status = compiled(
        request, rows, torch.get_num_threads(), q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(),
        lse.data_ptr(), results.data_ptr(), reduced.values.data_ptr(), reduced.sums.data_ptr(),
        reduced.nonfinite.data_ptr(),
    )  # fmt: skip
    if not (status == binding.FINITE or (status == binding.DONE and sum_finite(v.detach(), k.detach()))):
        return None  # the usual dispatch finds the reason, or counts the values that are not finite
    measured = Measurements(wanted, (), reduced.nonfinite, (Together(places, reduced),)) if wanted else None
    return Again(out, lse, rule, refusals, measured)


def keep_measured(
    call: Call, chosen: Kernel, mask: Mask | None, scale: float | None, kernel: str, given: Sequence[str | Measure],
    wanted: Sequence[Measure], refusals: Mapping[str, str],
) -> None:  # fmt: skip
    """Store the decisions for a call with a map that `chosen` has run, if `again_measured` supports it."""
    if not kept(call, chosen, scale) or max(len(wanted), len(call.statistics)) > MOST:
        return
    values = [value_of(measure, call.rule) for measure in wanted]
    entries = _row_entries(call.statistics)
    if entries is None or None in values:
        return
    b, h, n, _ = call.rule.grid
    order = [statistic for statistic, _ in entries]
    places = [order.index(x.statistic) if x is not None and x.statistic is not None else 0 for x in values]
    reduce = [
        ToReduce(x, None, getattr(measure, "reduce", "") == "max")
        for x, measure in zip(values, wanted, strict=True)
        if x is not None
    ]
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
        key = (*kind(call.q, call.k, call.v, mask, scale, kernel), _names(given))
    except TypeError:
        return
    _decided[key] = _Measured(
        shape, handle.headwise_again_measured, ctypes.byref(request), ctypes.byref(rows), len(entries), tuple(wanted),
        places_of(wanted), call.rule, dict(refusals), [request, rows, requested, of_rows, *held, *held_masks],
    )  # fmt: skip


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
    if not isinstance(measures, tuple | list):
        raise TypeError
    return tuple(x if type(x) is str else (type(x), *_settings(x)) for x in measures)


def _settings(measure: object) -> tuple[Any, ...]:
    held = tuple(vars(measure).items())
    if not isinstance(measure, Measure) or not all(isinstance(x, int | float | str | Statistic) for _, x in held):
        raise TypeError
    return held
