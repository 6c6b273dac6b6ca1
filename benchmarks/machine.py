"""This machine and its measured peaks: multiply-adds and bytes read per second."""

import ctypes
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import headwise

FLAGS = (
    "sse4_2", "avx", "f16c", "fma", "avx2", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16",
    "amx_tile", "amx_bf16", "neon", "asimd", "asimddp", "bf16", "sve",
)  # fmt: skip
DTYPES = {"float32": 0, "bfloat16": 1}  # as native/headwise.h numbers them


@dataclass(frozen=True)
class Machine:
    """Printed above every table.

    Attributes:
        peak: dtype → floating-point operations a second; bandwidth: bytes read from memory a second.
        peak_by, bandwidth_by: what measured them.
        load: processes that were running when the measurement began (1 minute's mean): others disturb.
    """

    cpu: str
    cores: int
    flags: tuple[str, ...]
    threads: int
    load: float
    system: str
    python: str
    torch: str
    blas: str
    headwise: str
    peak: dict[str, float]
    peak_by: str
    bandwidth: float
    bandwidth_by: str

    def lines(self) -> list[str]:
        """A description in words."""
        peaks = ", ".join(f"{rate / 1e9:.3g} GFLOP/s {dtype}" for dtype, rate in self.peak.items())
        return [
            f"{self.cpu}, {self.cores} cores, {self.threads} threads used, load {self.load:.2f} at the start",
            f"instructions: {' '.join(self.flags) or 'unknown'}",
            f"torch {self.torch}, {self.blas}; headwise {self.headwise}; Python {self.python}; {self.system}",
            f"peak {peaks} ({self.peak_by}); memory read at {self.bandwidth / 1e9:.1f} GB/s ({self.bandwidth_by})",
        ]

    def best_peak(self, dtype: str) -> float:
        """The peak for inputs of this dtype; bfloat16 may be computed as float32."""
        return max(self.peak["float32"], self.peak[dtype])

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def examine(seconds: float = 1.0) -> Machine:
    """Measure the machine with PyTorch's current number of threads."""
    threads = torch.get_num_threads()
    peak = {dtype: _matmul_rate(getattr(torch, dtype), seconds) for dtype in DTYPES}
    bandwidth = _sum_rate(seconds)
    by = "the best torch matmul, so no more than a lower bound", "torch.sum over 1 GB, a lower bound"
    library = _library()
    if library is not None:
        # The larger of the two: each is reached, and on a disturbed machine either may come out too low.
        for dtype, number in DTYPES.items():
            rate = _highest(lambda number=number: library.headwise_peak(number, threads), seconds)
            peak[dtype] = max(peak[dtype], rate)
        bandwidth = max(bandwidth, _highest(lambda: library.headwise_bandwidth(threads), seconds))
        by = "the compiled kernels' loop or the best torch matmul", "their loop or torch.sum over 1 GB"
    return Machine(
        cpu=_cpu_name(), cores=_cores(), flags=_flags(), threads=threads,
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        system=f"{platform.system()} {platform.machine()}", python=platform.python_version(), torch=torch.__version__,
        blas=_blas(), headwise=_version(), peak=peak, peak_by=by[0], bandwidth=bandwidth, bandwidth_by=by[1],
    )  # fmt: skip


def _library() -> ctypes.CDLL | None:
    """The compiled kernels, if they are built and can measure."""
    try:
        from headwise.kernels.cpu.library import library
    except ImportError:
        return None
    handle = library().handle
    if handle is None or not hasattr(handle, "headwise_peak") or not hasattr(handle, "headwise_bandwidth"):
        return None
    handle.headwise_peak.restype = handle.headwise_bandwidth.restype = ctypes.c_double
    handle.headwise_peak.argtypes, handle.headwise_bandwidth.argtypes = [ctypes.c_int, ctypes.c_int], [ctypes.c_int]
    return handle


def _matmul_rate(dtype: torch.dtype, seconds: float) -> float:
    """Operations per second of the best square product; sizes increase while they fit in the time."""
    best = 0.0
    for n in (256, 512, 1024, 2048):
        if best and 2 * n**3 / best > seconds:
            break  # some dtypes have no fast product on some machines
        one, other = torch.randn(2, n, n).to(dtype)
        out = torch.empty(n, n, dtype=dtype)
        took = _best(lambda one=one, other=other, out=out: torch.mm(one, other, out=out), seconds / 4)
        best = max(best, 2 * n**3 / took)
    return best


def _sum_rate(seconds: float) -> float:
    """Bytes per second read by torch.sum."""
    x = torch.ones(1 << 28)
    return x.nbytes / _best(x.sum, seconds)


def _highest(rate: Callable[[], float], seconds: float) -> float:
    """The highest rate measured within the given time."""
    highest, begun = rate(), time.perf_counter()
    while time.perf_counter() - begun < seconds:
        highest = max(highest, rate())
    return highest


def _best(call: Callable[[], object], seconds: float) -> float:
    """The minimum time of one call, repeated for the given time."""
    best, begun = float("inf"), time.perf_counter()
    while time.perf_counter() - begun < seconds or best == float("inf"):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def _cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    if sys.platform == "darwin":
        done = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True)
        return done.stdout.strip() or platform.processor()
    return found[1] if found else platform.processor() or platform.machine()


def _flags() -> tuple[str, ...]:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    present = set(found[1].split()) if found else set()
    return tuple(flag for flag in FLAGS if flag in present)


def _blas() -> str:
    text = torch.__config__.show()
    blas = re.search(r"BLAS_INFO=([\w-]+)", text)
    dnn = re.search(r"MKL-DNN v([\d.]+)", text)
    used = re.search(r"CPU capability usage: (\w+)", text)
    parts = [f"BLAS {blas[1]}" if blas else "BLAS unknown", f"oneDNN {dnn[1]}" if dnn else ""]
    return ", ".join([part for part in parts if part] + ([f"torch uses {used[1]}"] if used else []))


def _version() -> str:
    """Its number, and the commit where it is a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return headwise.__version__
    return f"{headwise.__version__} ({done.stdout.strip()})" if done.returncode == 0 else headwise.__version__
