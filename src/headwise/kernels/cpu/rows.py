"""Measures of rows, reduced by the compiled library in one call."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.kernels.cpu import binding
from headwise.kernels.cpu.library import library
from headwise.stats.rows import Reduced, ToReduce

FORMULAS = {"same": 0, "inverse": 1, "share": 2, "logit": 3, "log_sum": 4}  # as in native/headwise.h


def reduce_rows(lse: Tensor, measures: Sequence[ToReduce]) -> Reduced | None:
    """Reduce measures over the rows of each head, given the log-sum-exp [b, h, n] and their statistics; None if the
    library does not support one of them, or a tensor."""
    handle = library().handle
    given = [lse, *(one.x for one in measures if one.x is not None)]
    if handle is None or not all(_fits(x, lse) for x in given):
        return None
    if any(one.value.formula.name not in FORMULAS for one in measures):
        return None
    b, h, n = lse.shape
    entries, held = row_values(measures, [0] * len(measures), b, n)
    for entry, one in zip(entries, measures, strict=True):
        entry.x = None if one.x is None else one.x.data_ptr()
    result = empty(len(measures), b, h)
    request = binding.RowsCall(
        b, h, n, lse.data_ptr(), len(measures), entries, result.values.data_ptr(), result.sums[0].data_ptr(),
        result.sums[1].data_ptr(), result.nonfinite.data_ptr(),
    )  # fmt: skip
    handle.headwise_rows(ctypes.byref(request))
    del held
    return result


def row_values(measures: Sequence[ToReduce], places: Sequence[int], b: int, n: int) -> tuple[Any, list[Any]]:
    """An array of headwise_row_value without the statistics, and the tensors that it points to.

    Args:
        places: of each measure's statistic among those that a call requests.
    """
    held: list[Any] = []
    entries: list[Any] = []
    for one, place in zip(measures, places, strict=True):
        counted = one.value.counted
        if counted is not None:
            counted = counted.expand(-1, 1, n).contiguous()
            held.append(counted)
        entries.append((
            None, None if counted is None else counted.data_ptr(), n if counted is not None and len(counted) > 1 else 0,
            FORMULAS[one.value.formula.name], int(one.largest), place,
        ))  # fmt: skip
    return (binding.RowValue * len(entries))(*entries), held


def empty(count: int, b: int, h: int) -> Reduced:
    """A result to be written."""
    values = torch.empty(count, b, h, dtype=torch.float32, device="cpu")
    sums = torch.empty(2, count, b, h, dtype=torch.float64, device="cpu")
    return Reduced(values, sums, torch.empty(b, h, dtype=torch.int64, device="cpu"))


def _fits(x: Tensor, lse: Tensor) -> bool:
    return type(x) is Tensor and x.is_cpu and x.dtype == torch.float32 and x.is_contiguous() and x.shape == lse.shape
