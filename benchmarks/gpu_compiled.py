"""What Triton makes of the GPU kernels for a GPU that need not be here: registers, spills, shared memory, pipelining.

    python -m benchmarks.gpu_compiled          # compute capability 8.0, 8.9, 9.0 and 10.0; minutes
    python -m benchmarks.gpu_compiled --arch 90 --case 'bf16 128*'

Calls of the kernel are compiled to the machine code of these GPUs and not launched. This shows whether they compile and
fit, and what limits them, but neither whether their results are right nor how fast they are. The exit status is 1 if a
kernel does not compile or does not fit. It requires Triton, and no GPU.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

import headwise as hw
from benchmarks.gpu_calls import STATISTICS
from headwise.kernels.call import Call
from headwise.kernels.joint import joined
from headwise.masks import Grid, Mask
from headwise.rule import Rule
from headwise.scores import Score
from headwise.stats import COLUMN_MASS, DISTANCE, ENTROPY, KeyWeights, RangeMass

# Most bytes of shared memory of a block, by compute capability: CUDA C++ Programming Guide, technical specifications.
SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
USUAL = (80, 89, 90, 100)  # A100; L4 and RTX 40; H100 and H200; B200
B, H, N = 2, 4, 512
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Compiled:
    """One kernel of one call, compiled. registers: of a thread. spilled: bytes of a thread's stack. shared: bytes of a
    block. copies: instructions that copy to shared memory asynchronously; 0 where no loop is pipelined. products:
    instructions of tensor cores."""

    case: str
    arch: int
    kernel: str
    registers: int
    spilled: int
    shared: int
    warps: int
    copies: int
    products: int

    @property
    def wrong(self) -> str:
        """Why it cannot run on that GPU; empty if it can."""
        most = SHARED[self.arch]
        return f"{self.shared} bytes of shared memory, and a block has {most}" if self.shared > most else ""

    def line(self) -> str:
        """The row of the table."""
        cells = (self.registers, self.spilled, self.shared, self.warps, self.copies, self.products)
        return f"{self.case:<28} {self.arch:>4}  {self.kernel:<24}" + "".join(f"{cell:>10,}" for cell in cells)


def head_line() -> str:
    """The table's head."""
    names = ("registers", "spilled", "shared", "warps", "copies", "products")
    return f"{'call':<28} {'arch':>4}  {'kernel':<24}" + "".join(f"{name:>10}" for name in names)


def call_of(
    name: str, d: int, mask: Mask, *, scores: Sequence[Score] = (), drop: float = 0.0, statistics: bool = False,
    columns: bool = False, n: int = N, m: int = N, h_kv: int = H,
) -> Call:  # fmt: skip
    """A call whose tensors have no particular values."""
    dtype = DTYPES[name]
    q, k, v = (torch.zeros(B, heads, size, d, dtype=dtype) for heads, size in ((H, n), (h_kv, m), (h_kv, m)))
    wanted = (*(STATISTICS if statistics else ()), *((COLUMN_MASS,) if columns else ()))
    return Call(q, k, v, Rule(mask, d**-0.5, Grid(B, H, n, m), tuple(scores)), drop, 1, wanted)


def losses(name: str, d: int) -> Call:
    """A call with gradients of entropy, mean distance, a mass of keys and one of a range."""
    wanted = (ENTROPY, DISTANCE, KeyWeights(torch.ones(1, N)), RangeMass(-1, 0, relative=True))
    return replace(call_of(name, d, hw.Causal()), statistics=wanted, differentiable=True)


def everything(name: str, d: int) -> Call:
    """A call with every kind of score and mask."""
    scores = (
        hw.SoftCap(30.0), hw.ALiBi.standard(H), hw.Bias(torch.zeros(1, H, N, N)), hw.SinkLogits(torch.zeros(H)),
    )  # fmt: skip
    return call_of(name, d, hw.Dense(torch.ones(N, N).bool()), scores=scores, drop=0.1, statistics=True, columns=True)


def _cases() -> Iterator[tuple[str, Callable[[], Call], bool]]:
    for name in DTYPES:
        for d in (64, 128, 256):
            yield f"{name} {d} causal", lambda name=name, d=d: call_of(name, d, hw.Causal(), columns=True), True
            yield f"{name} {d} statistics", lambda name=name, d=d: call_of(name, d, hw.Causal(), statistics=True), False
            yield f"{name} {d} losses", lambda name=name, d=d: losses(name, d), True
            yield f"{name} {d} everything", lambda name=name, d=d: everything(name, d), True
        yield (
            f"{name} 80 window",
            lambda name=name: call_of(name, 80, hw.Causal() & (hw.Window(100) | hw.Sinks(4))),
            True,
        )
        yield f"{name} 128 decode", lambda name=name: call_of(name, 128, hw.Causal(), n=1, m=16_384, h_kv=2), False
        yield (
            f"{name} 128 decode statistics",
            lambda name=name: call_of(name, 128, hw.Causal(), n=1, m=16_384, h_kv=2, statistics=True),
            False,
        )


CASES: Mapping[str, tuple[Callable[[], Call], bool]] = {name: (make, train) for name, make, train in _cases()}


class Driver:
    """What Triton asks a GPU's driver for before it compiles."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> Any:
        """The GPU to compile for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        """A key of Triton's cache."""
        return self.arch

    def get_current_stream(self, device: int) -> int:
        """Nothing is launched on it."""
        return 0


@contextmanager
def recorded(arch: int) -> Iterator[list[tuple[str, Any]]]:
    """Context manager in which launches compile for `arch` and do nothing else; yields the names and kernels."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    run, found = JITFunction.run, []

    def compile_only(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(function, *args, grid=grid, warmup=True, **options)
        found.append((function.fn.__name__, kernel))
        return kernel

    driver.set_active(Driver(arch))
    JITFunction.run = compile_only
    try:
        yield found
    finally:
        JITFunction.run = run


def compiled(case: str, arch: int) -> list[Compiled]:
    """Compile the kernels of a case, each once."""
    from headwise.kernels.triton_gpu.launch import attend, gradients

    make, train = CASES[case]
    call = make()
    with recorded(arch) as kernels, torch.no_grad():
        result = attend(call)
        if train:
            learned = [
                term for score in call.rule.scores for term in vars(score).values() if isinstance(term, torch.Tensor)
            ]
            wanted = [bool(learned)] * (2 + len(call.rule.terms(result.lse[..., :0]).biases))
            grads = [result.lse] * len(call.statistics)
            more, _ = joined(call, result.lse, result.statistics, grads, None) if call.differentiable else (None, None)
            gradients(call, result.out, result.lse, result.out, wanted, more)
    return [_row(case, arch, name, kernel) for name, kernel in kernels]


def _row(case: str, arch: int, name: str, kernel: Any) -> Compiled:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(kernel.asm["cubin"])
        text = subprocess.run([tool, "--dump-resource-usage", file], check=True, capture_output=True, text=True).stdout
    used = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", text)}
    ptx, meta = kernel.asm["ptx"], kernel.metadata
    products = len(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b", ptx))
    return Compiled(
        case, arch, name, used["REG"], used["STACK"], meta.shared, meta.num_warps, ptx.count("cp.async.cg"), products
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, print the table, write the JSON if requested. Returns 1 if a kernel cannot run on one of the GPUs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, action="append", choices=SHARED, help="compute capability · 10; repeatable")
    parser.add_argument("--case", action="append", default=[], help="a name or pattern; repeatable")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("TRITON_INTERPRET=1: the interpreter compiles nothing; unset it")
    cases = [name for name in CASES if any(fnmatchcase(name, pattern) for pattern in args.case or ["*"])]
    if not cases:
        sys.exit(f"--case {' '.join(args.case)}: no such case; expected some of {', '.join(CASES)}")
    print(head_line(), flush=True)
    rows: list[Compiled] = []
    failed = 0
    for case in cases:
        for arch in args.arch or USUAL:
            try:
                found = compiled(case, arch)
            except Exception as reason:  # whatever compilers raise: the others go on
                failed += 1
                print(f"{case:<28} {arch:>4}  does not compile: {type(reason).__name__}: {reason}", flush=True)
                continue
            rows += found
            for row in found:
                failed += bool(row.wrong)
                print(row.line() + (f"  does not fit: {row.wrong}" if row.wrong else ""), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
