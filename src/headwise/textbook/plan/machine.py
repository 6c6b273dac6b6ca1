"""Measurement of this machine with PyTorch's number of threads: FLOP/s, and bytes/s from memory."""

import ctypes
from collections.abc import Callable
from time import perf_counter

import torch

from headwise.costs import Machine
from headwise.kernels.cpu.library import library
from headwise.textbook.plan.words import term

SECONDS = 0.4  # for each of the two measurements with PyTorch
DTYPES = {"float32": 0, "bfloat16": 1}  # as native/headwise.h numbers them


def measured_machine(dtype: str = "float32") -> Machine:
    """Measure peak and bandwidth with the compiled kernels, or, if they are not built, with a PyTorch product of 1024³
    in that dtype and a copy of 128 MiB, the best of repeated calls. The peak is at least that of float32, in which
    dtypes without instructions of their own are computed."""
    return _compiled(dtype) or _torch(dtype)


def _compiled(dtype: str) -> Machine | None:
    handle = library().handle
    if handle is None or not hasattr(handle, "headwise_peak") or not hasattr(handle, "headwise_bandwidth"):
        return None
    handle.headwise_peak.restype = handle.headwise_bandwidth.restype = ctypes.c_double
    handle.headwise_peak.argtypes, handle.headwise_bandwidth.argtypes = [ctypes.c_int, ctypes.c_int], [ctypes.c_int]
    threads = torch.get_num_threads()
    peak = max(handle.headwise_peak(DTYPES.get(kind, 0), threads) for kind in {"float32", dtype})
    bandwidth = handle.headwise_bandwidth(threads)  # 0 if there is not enough memory
    return Machine(peak, bandwidth, term("by_kernels", threads=_threads())) if bandwidth else None


def _torch(dtype: str) -> Machine:
    n, count = 1024, 32 * 1024 * 1024
    product = min(_product(n, getattr(torch, kind)) for kind in {"float32", dtype})
    source, target = torch.ones(count), torch.ones(count)  # both are written, so that no page fault is measured
    copy = _best(lambda: target.copy_(source))
    by = term("by_torch", threads=_threads())
    return Machine(2 * n**3 / product, 2 * source.nbytes / copy, by)  # a copy reads and writes


def _threads() -> str:
    count = torch.get_num_threads()
    return term("one_thread") if count == 1 else term("threads", count=count)


def _product(n: int, dtype: torch.dtype) -> float:
    one, other, out = (torch.ones(n, n, dtype=dtype) for _ in range(3))
    return _best(lambda: torch.mm(one, other, out=out))


def _best(call: Callable[[], object]) -> float:
    """Seconds of the fastest call after one warm-up call."""
    call()
    best, begun = float("inf"), perf_counter()
    while best == float("inf") or perf_counter() - begun < SECONDS:
        start = perf_counter()
        call()
        best = min(best, perf_counter() - start)
    return best
