"""`headwise doctor`: which kernels run on this machine, and why.

Reports which kernels run on this machine, which one "auto" selects and why, the compiled library, and versions.
`headwise doctor` prints the report; include `headwise doctor --json` in a bug report.
"""

import os
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

import headwise.kernels.cpu.library as compiled
from headwise.errors import HeadwiseError, KernelError
from headwise.kernels import AUTOMATIC, KERNELS, choose
from headwise.kernels.call import Call
from headwise.kernels.cpu.passes import SHAPE, Timing, measure_targets
from headwise.kernels.triton_gpu.check import CHECKS, Check
from headwise.masks import Causal, Everything, Grid, Lengths, Mask, Window
from headwise.rule import Rule
from headwise.wording import LIST, in_language, joined, language, tr

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


# Of facts, calls and checks.
NAMES = (
    tr("system"), tr("CPU"), tr("CPU cores"), tr("threads"), tr("PyTorch's vectors"), tr("PyTorch's BLAS"), tr("GPU"),
    tr("environment"), tr("1024 tokens, float32"), tr("causal, float32"), tr("causal, bfloat16"),
    tr("causal, with gradients"), tr("causal, with gradients and dropout"), tr("causal, sliding window of 128"),
    tr("padded sequences"), tr("one decoding step, 3 KV heads"), tr("causal, bfloat16, on the GPU"), tr("decoding"),
    tr("shared KV heads"), tr("mask"), tr("several ranges"), tr("ranges of each entry"), tr("boolean mask"),
    tr("soft cap"), tr("distances"), tr("bias"), tr("sinks"), tr("statistics"), tr("gradients"),
    tr("gradients of statistics"),
)  # fmt: skip
# How the reasons of kernels begin; what follows is a name or a number.
REASONS = (
    tr("Triton is not installed"),
    tr("it does not support dropout"),
    tr("it does not support the scores "),
    tr("it supports no mask but Causal(), got "),
    tr("it requires tensors on the CPU, got "),
    tr("it requires an NVIDIA GPU (or TRITON_INTERPRET=1, for tests), got "),
    tr("it requires an NVIDIA GPU, got an AMD GPU"),
    tr("it computes in float32, got "),
    tr("there are no queries or no keys"),
    tr("its check on "),
)


def named(name: str) -> str:
    """A name of an examination in both languages; as it is if it has no Chinese one."""
    return next((words for words in NAMES if words == name), name)


def reason(text: str) -> str:
    """Why a kernel does not support a call, in both languages; as it is if it has no Chinese version."""
    begins = next((words for words in REASONS if text.startswith(words)), None)
    return text if begins is None else joined([begins, text.removeprefix(begins)], "")


def print_examination(found: Examination, console: Console) -> None:
    """Print versions, machine, the compiled library, and a row per typical call, in the user's language."""
    lang = language()
    facts: dict[str, str] = {name: version or tr("not installed") for name, version in found.versions.items()}
    facts |= {named(name): tr("none") if value is None else str(value) for name, value in found.machine.items()}
    facts |= native_facts(found.native)
    order, rest = joined(found.automatic, tr(", then ")), joined(found.named, LIST)
    facts[tr("kernels")] = tr("auto tries {automatic}; available by name only: {named}", automatic=order, named=rest)
    # A setting in the environment that no kernel supports affects every call, and is printed once.
    errors = {choice.refusals.get("auto") for choice in found.choices if choice.picked is None}
    everywhere = errors.pop() if len(errors) == 1 and all(choice.picked is None for choice in found.choices) else None
    if everywhere is not None and everywhere != found.native.reason:
        facts[tr("no call runs")] = everywhere
    shown = [(in_language(name, lang), in_language(value, lang)) for name, value in facts.items()]
    margin = max(cell_len(name) for name, _ in shown)
    for name, value in shown:
        left = " " * (margin - cell_len(name)) + name
        console.print(Text(f"{left}  ", style="dim") + Text(value), soft_wrap=True)
    if everywhere is not None:
        return
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1))
    table.add_column(in_language(tr("call"), lang))
    table.add_column(in_language(tr("selected"), lang), no_wrap=True)
    table.add_column(in_language(tr("why not the others"), lang), overflow="fold")
    for choice in found.choices:
        refusals = (tr("{kernel}: {why}", kernel=name, why=reason(why)) for name, why in choice.refusals.items())
        picked = in_language(choice.picked or tr("none"), lang)
        lines = Text("\n").join(Text(in_language(line, lang)) for line in refusals)
        table.add_row(Text(in_language(named(choice.call), lang)), Text(picked, style="bold"), lines)
    console.print()
    console.print(table)
    if found.checks:
        console.print()
        console.print(_check_table(found.checks, lang))
    for timing in found.timings or ():
        console.print()
        console.print(_timing_table(timing, lang))
        if timing.wrong:
            slow = tr(
                "The selected target is not the fastest here: set HEADWISE_TARGET={fastest} for {dtype}, and please "
                "report this output."
            )
            slow = slow.filled(fastest=timing.fastest, dtype=timing.dtype)
            console.print(in_language(slow, lang), style="yellow")


def _check_table(checks: Sequence[Check], lang: str) -> Table:
    """What has been checked on which device, how long that took, and with which result."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1))
    table.add_column(in_language(tr("checks of triton_gpu, against torch_blocks"), lang), overflow="fold")
    table.add_column(in_language(tr("ms"), lang), justify="right")
    table.add_column("", overflow="fold")
    for check in checks:
        kind = joined([check.device, *map(named, check.kind.split(", "))])
        result = tr("passed") if check.reason is None else reason(check.reason)
        table.add_row(in_language(kind, lang), f"{check.milliseconds:.0f}", Text(in_language(result, lang)))
    return table


def _timing_table(timing: Timing, lang: str) -> Table:
    """Targets by time, the fastest first."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1))
    head = tr("{dtype}, {shape}, forward", dtype=timing.dtype, shape=" × ".join(map(str, SHAPE)))
    table.add_column(in_language(head, lang), no_wrap=True)
    table.add_column(in_language(tr("ms"), lang), justify="right")
    table.add_column("")
    for name, milliseconds in sorted(timing.milliseconds.items(), key=lambda item: item[1]):
        table.add_row(name, f"{milliseconds:.1f}", in_language(tr("selected"), lang) if name == timing.selected else "")
    return table


def native_facts(native: Native) -> dict[str, str]:
    """The library as facts: its path, the target in use, and why faster targets are not."""
    facts: dict[str, str] = {tr("compiled kernels"): native.path}
    if native.reason is not None:
        return facts | {tr("not loaded"): native.reason}
    inside = ", ".join(target.name for target in native.targets if target.compiled)
    used = str(native.target) + (f" (HEADWISE_TARGET={native.forced})" if native.forced else "")
    facts |= {tr("ABI version"): str(native.abi), tr("targets"): inside, tr("target in use"): used}
    names = [target.name for target in native.targets]
    for target in native.targets[names.index(str(native.target)) + 1 :]:
        why: str
        if not target.compiled:
            why = tr("not compiled: built for another processor or with an older compiler")
        elif target.lacking:
            why = tr("the CPU lacks {flags}", flags=joined(target.lacking, LIST))
        elif target.refusal:
            why = reason(target.refusal)
        elif native.forced:
            why = tr("disabled by HEADWISE_TARGET")
        else:
            why = tr(
                "{used} is faster on this CPU; HEADWISE_TARGET={target} selects it all the same",
                used=str(native.target),
                target=target.name,
            )
        facts[tr("not {target}", target=target.name)] = why
    return facts
