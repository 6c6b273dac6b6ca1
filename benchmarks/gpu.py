"""The Triton kernel compared with PyTorch's flash attention, cuDNN and FlexAttention, on one GPU.

    python -m benchmarks.gpu                             # about seven minutes; writes gpu.json too (--json PATH)
    TRITON_INTERPRET=1 python -m benchmarks.gpu --quick  # no GPU: tiny shapes, only that all of it runs and is right

At each size all results are first compared with float64, on the first head and the last. Then times: medians of CUDA
events, the calls turn by turn in one run, so that a clock that changes meets all of them alike. Each call starts on an
idle GPU, so what the host does beforehand counts: ours include the planning of the walk over blocks.

Most of the time is compilation, so after --seconds no new row is begun; the sizes that say most come first. Who fails
is left out, with the reason, and the others go on. The file is written again after every row. The exit status is 1 if
a result was wrong, or if ours failed. Where headwise is not installed: PYTHONPATH=src.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from benchmarks.gpu_calls import (
    BACKWARD,
    DECODE,
    FORWARD,
    KINDS,
    OURS,
    PEERS,
    WITH_STATISTICS,
    Calls,
    Inputs,
    Size,
    call_of,
)
from headwise.base.files import atomic_path
from headwise.kernels.triton_gpu import TritonGPU

COLUMNS = (OURS, WITH_STATISTICS, *PEERS)
# Relative errors of bfloat16 outputs and gradients; statistics are float32, of exact products.
LIMITS = {FORWARD: 6e-3, BACKWARD: 1.3e-2, DECODE: 6e-3}
STATISTICS_LIMIT = 2e-5
TOKENS, WIDTH = 16_384, 2048  # tokens in a batch, and heads · head size
ROW_MILLISECONDS = 8000  # a row whose calls are slow has fewer rounds
SIZES = [
    Size(TOKENS // n, WIDTH // d, n, d, causal)
    for n in (16_384, 4096, 8192) for causal in (True, False) for d in (128, 64)
]  # fmt: skip
QUICK_SIZES = [Size(1, 2, 37, 16, causal) for causal in (True, False)]


@dataclass
class Row:
    """One kind of call at one size; everything by the contestant's name.

    milliseconds: between two events on the GPU; host_milliseconds: until the call came back to Python.
    errors: relative, of each result against float64; wrong: those above the limit; failed: why others have no time.
    """

    size: Size
    what: str
    milliseconds: dict[str, float] = field(default_factory=dict)
    host_milliseconds: dict[str, float] = field(default_factory=dict)
    errors: dict[str, list[float]] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def line(self) -> str:
        """The row of the table."""
        cells = (f"{self.milliseconds[name]:.3f}" if name in self.milliseconds else "–" for name in COLUMNS)
        ratio = ""
        if OURS in self.milliseconds and "flash" in self.milliseconds:
            ratio = f"{self.milliseconds[OURS] / self.milliseconds['flash']:.2f}"
        widths = (max(9, len(name)) for name in COLUMNS)
        cells_line = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        return f"{self.size!s:<22} {self.what:<18} {cells_line}  {ratio:>7}"


def head_line() -> str:
    """The table's head."""
    names = "  ".join(name.rjust(max(9, len(name))) for name in COLUMNS)
    return f"{'b×h×n×d':<22} {'milliseconds':<18} {names}  {'/ flash':>7}"


def timed(call: Callable[[], object], device: str) -> tuple[float, float]:
    """Milliseconds on the GPU, and until the call came back; without a GPU both are the same."""
    if device == "cpu":
        begin = time.perf_counter()
        call()
        spent = 1e3 * (time.perf_counter() - begin)
        return spent, spent
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin = time.perf_counter()
    start.record()
    call()
    stop.record()
    host = 1e3 * (time.perf_counter() - begin)
    stop.synchronize()
    return start.elapsed_time(stop), host


def measure(row: Row, calls: Calls, inputs: Inputs, rounds: int, device: str) -> None:
    """Compare the results, then time the contestants; errors are stored in the row."""
    able: Calls = {}
    for name, call in calls.items():
        try:
            errors = inputs.errors(row.what, call())  # waits for the GPU
        except Exception as reason:  # whatever compilers and drivers raise: the others go on
            row.failed[name] = in_short(reason)
            continue
        able[name], row.errors[name] = call, errors
        limits = [LIMITS[row.what]] * 3 if row.what == BACKWARD else [LIMITS[row.what], *[STATISTICS_LIMIT] * 2]
        bad = [f"{error:.1e} > {most:.0e}" for error, most in zip(errors, limits, strict=False) if not error <= most]
        if bad:
            row.wrong[name] = "relative error " + ", ".join(bad)
    try:
        once = sum(timed(call, device)[0] for call in able.values())  # warm by now: each has been compiled and run
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in able}
        for _ in range(min(rounds, max(3, int(ROW_MILLISECONDS / max(once, 1e-3))))):
            for name, call in able.items():
                times[name].append(timed(call, device))
    except Exception as reason:
        row.failed["timing"] = in_short(reason)
        return
    for name, pairs in times.items():
        row.milliseconds[name], row.host_milliseconds[name] = map(statistics.median, zip(*pairs, strict=True))


def in_short(reason: Exception) -> str:
    """The first nonempty line."""
    lines = [line.strip() for line in str(reason).splitlines() if line.strip()]
    return f"{type(reason).__name__}: {lines[0] if lines else ''}"[:200]


def run(
    sizes: Sequence[Size], peers: Sequence[str], rounds: int, seconds: float, device: str,
    write: Callable[[Sequence[Row], Sequence[str]], None],
) -> list[Row]:  # fmt: skip
    """All rows that can be started within `seconds`, printed immediately; `write` is called after each."""
    begin, rows, left_out = time.monotonic(), [], []
    print(head_line(), flush=True)
    for size in sizes:
        calls: Mapping[str, Calls] = {}
        for what in KINDS:
            row = Row(size, what)
            if time.monotonic() - begin > seconds:
                left_out.append(f"{size}, {what}")
                continue
            try:
                if not calls:
                    inputs = Inputs(size, device)
                    calls = inputs.calls(peers)
                with torch.set_grad_enabled(what == BACKWARD):
                    measure(row, calls[what], inputs, rounds, device)
            except Exception as reason:  # of the inputs: no memory, or a GPU that an earlier call has broken
                row.failed[OURS] = in_short(reason)
            rows.append(row)
            print(row.line(), flush=True)
            for kind in ("wrong", "failed"):
                for name, why in getattr(row, kind).items():
                    print(f"    {name} {kind}: {why}", flush=True)
            write(rows, left_out)
    if left_out:
        print(f"no time for: {'; '.join(left_out)} (--seconds gives more)")
    write(rows, left_out)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, time, print the table and write the JSON. Returns 1 if a result is wrong or headwise failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: whether all runs and is right, not how fast")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=400, help="after so long no new row is begun")
    parser.add_argument("--peer", action="append", choices=PEERS, help="only this one beside ours; may be repeated")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"))
    args = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not (args.quick and os.environ.get("TRITON_INTERPRET") == "1"):
        sys.exit("no GPU here: this compares times on one; TRITON_INTERPRET=1 and --quick check the numbers without it")
    example = torch.empty(1, 1, 1, 16, device=device)
    if reason := TritonGPU().refuse(call_of(example, example, example, False)):
        sys.exit(f"the kernel cannot run here: {reason}")
    import triton  # here it is installed

    machine = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU, interpreted: the times say nothing",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "dtype": "bfloat16",
        "quick": args.quick,
    }
    print(f"{machine['device']}; torch {torch.__version__}, triton {triton.__version__}, bfloat16", flush=True)

    def write(rows: Sequence[Row], left_out: Sequence[str]) -> None:
        report = {
            **machine,
            "rows": [{**asdict(row), "size": row.size._asdict()} for row in rows],
            "left_out": left_out,
        }
        with atomic_path(args.json) as temporary:
            temporary.write_text(json.dumps(report, indent=1, ensure_ascii=False), encoding="utf-8")

    sizes, rounds = (QUICK_SIZES, 1) if args.quick else (SIZES, args.rounds)
    rows = run(sizes, args.peer or PEERS, rounds, args.seconds, device, write)
    print(f"written: {args.json}")
    return int(any(row.wrong or {"timing", OURS, WITH_STATISTICS} & set(row.failed) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
