"""Reports which kernels run on this machine, which one "auto" selects and why, the compiled library, and versions.

`headwise doctor` prints the report; include `headwise doctor --json` in a bug report.
"""

import os
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch

import headwise.kernels.cpu.library as compiled
from headwise.errors import HeadwiseError, KernelError
from headwise.kernels import AUTOMATIC, KERNELS, choose
from headwise.kernels.call import Call
from headwise.kernels.cpu.measure import Timing, measure_targets
from headwise.kernels.triton_gpu.check import CHECKS, Check
from headwise.masks import Causal, Everything, Grid, Lengths, Mask, Window
from headwise.rule import Rule

PACKAGES = ("headwise", "torch", "numpy", "safetensors", "triton", "transformers", "scipy", "matplotlib")
# Instructions that each target uses, as named in Linux's /proc/cpuinfo; CMakeLists.txt has the compiler's names.
AVX2 = ("avx2", "fma", "f16c")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
BF16 = (*AVX512, "avx512_bf16")
NEEDS = dict(zip(compiled.TARGETS, ((), AVX2, AVX512, BF16, (*BF16, "amx_tile", "amx_bf16")), strict=True))


@dataclass(frozen=True)
class Target:
    """An instruction set: whether the library contains it, which features the CPU lacks (None: unknown), and why it
    does not run here (None: it does, or it is not compiled)."""

    name: str
    compiled: bool
    lacking: list[str] | None
    refusal: str | None = None


@dataclass(frozen=True)
class Native:
    """The compiled library. reason: why it is not loaded, or None. forced: the value of HEADWISE_TARGET."""

    path: str
    reason: str | None
    abi: int
    target: str | None
    forced: str | None
    targets: list[Target]


@dataclass(frozen=True)
class Choice:
    """A typical call: the kernel that "auto" selects (None: it raises), and why the others do not support the call."""

    call: str
    picked: str | None
    refusals: dict[str, str]


@dataclass(frozen=True)
class Examination:
    """The report of `headwise doctor`; `dataclasses.asdict` converts it to JSON. timings: None if not measured. checks:
    of the GPU kernels in this process; the typical calls on a GPU are checked."""

    versions: dict[str, str | None]
    machine: dict[str, str | int | None]
    native: Native
    automatic: list[str]
    named: list[str]
    choices: list[Choice]
    timings: list[Timing] | None = None
    checks: list[Check] = field(default_factory=list)


def examine(*, measure: bool = False) -> Examination:
    """Examine this process; nothing is written or downloaded, and with `measure` the compiled targets are timed."""
    choices = [_choice(words, call) for words, call in _typical_calls()]
    return Examination(
        versions={"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        machine=_machine(),
        native=_native(),
        automatic=list(AUTOMATIC),
        named=[name for name in KERNELS if name not in AUTOMATIC],
        choices=choices,
        timings=measure_targets() if measure else None,
        checks=list(CHECKS.values()),
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _machine() -> dict[str, str | int | None]:
    blas = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    settings = {
        name: value for name, value in sorted(os.environ.items()) if re.match(r"HEADWISE_(?!LANG)|(OMP|MKL)_NUM", name)
    }
    return {
        "system": platform.platform(),
        "CPU": _cpuinfo("model name") or platform.processor() or platform.machine(),
        "CPU cores": usable,
        "threads": torch.get_num_threads(),
        "PyTorch's vectors": torch.backends.cpu.get_cpu_capability(),
        "PyTorch's BLAS": blas[1] if blas else None,
        "GPU": ", ".join(gpus) or None,
        "environment": ", ".join(f"{name}={value}" for name, value in settings.items()) or None,
    }


def _native() -> Native:
    forced = os.environ.get(compiled.TARGET)
    try:
        found = compiled.library()
    except KernelError as error:
        return Native(str(compiled.path()), str(error), compiled.ABI, None, forced, [])
    inside = found.targets()
    flags = _cpuinfo("flags")
    targets = []
    for name, needed in NEEDS.items():
        lacking = [flag for flag in needed if flag not in flags.split()] if flags or not needed else None
        refusal = found.refusal(name) if name in inside else None
        targets.append(Target(name, name in inside, lacking, refusal))
    return Native(str(found.path), found.reason, compiled.ABI, found.target(), forced, targets)


def _cpuinfo(field: str) -> str:
    """The first line with this field in Linux's /proc/cpuinfo, or ""."""
    if sys.platform != "linux":
        return ""
    found = re.search(rf"^{field}\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else ""


def _choice(words: str, call: Call) -> Choice:
    try:
        refusals = {name: why for name, kernel in KERNELS.items() if (why := kernel.refuse(call))}
        return Choice(words, choose(call)[0].name, refusals)
    except HeadwiseError as error:
        return Choice(words, None, {"auto": str(error)})


def _typical_calls() -> Iterator[tuple[str, Call]]:
    full, causal = Everything(), Causal()
    yield "1024 tokens, float32", _call(1024, 1024, full)
    yield "causal, float32", _call(1024, 1024, causal)
    yield "causal, bfloat16", _call(1024, 1024, causal, torch.bfloat16)
    yield "causal, with gradients", _call(1024, 1024, causal, gradients=True)
    yield "causal, with gradients and dropout", _call(1024, 1024, causal, gradients=True, dropout_p=0.1)
    yield "causal, sliding window of 128", _call(1024, 1024, causal & Window(128))
    yield "padded sequences", _call(1024, 1024, Lengths(torch.tensor([700])))
    yield "one decoding step, 3 KV heads", _call(1, 1024, causal, h_kv=3)
    if torch.cuda.is_available():
        yield "causal, bfloat16, on the GPU", _call(1024, 1024, causal, torch.bfloat16, device="cuda")


def _call(
    n: int, m: int, mask: Mask, dtype: torch.dtype = torch.float32, *, h_kv: int = 12, gradients: bool = False,
    dropout_p: float = 0.0, device: str = "cpu",
) -> Call:  # fmt: skip
    """12 heads of 64: q [1, 12, n, 64], k and v [1, h_kv, m, 64]."""
    q = torch.zeros(1, 12, n, 64, dtype=dtype, device=device, requires_grad=gradients)
    k = torch.zeros(1, h_kv, m, 64, dtype=dtype, device=device, requires_grad=gradients)
    return Call(q, k, k, Rule(mask, 0.125, Grid(1, 12, n, m)), dropout_p)
