"""The Triton kernel beside PyTorch's flash attention, cuDNN's and FlexAttention, on one GPU.

    python benchmarks/gpu.py                          # minutes; writes gpu.json too (--json PATH)
    TRITON_INTERPRET=1 python benchmarks/gpu.py --quick   # no GPU: tiny shapes, only that the numbers are right

First all results are compared with float64. Then times: medians of CUDA events, the calls turn by turn in one run, so
that a clock that changes meets all of them alike. Ours include the planning of the walk over blocks.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.kernels.call import Call, Result
from headwise.kernels.triton_gpu import TritonGPU
from headwise.masks import Causal, Everything, Grid
from headwise.rule import Rule
from headwise.statistics import DISTANCE, DISTANCE_VARIANCE, ENTROPY, LARGEST, SQUARES, RangeMass

Calls = dict[str, Callable[[], object]]
STATISTICS = (
    LARGEST, ENTROPY, SQUARES, DISTANCE, DISTANCE_VARIANCE,
    RangeMass(0, 1, relative=False), RangeMass(-1, 0, relative=True),
)  # fmt: skip
TOKENS, WIDTH = 16_384, 2048  # tokens in a batch, and heads · head size
LIMITS = {torch.float32: 2e-6, torch.bfloat16: 6e-3}


def call_of(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
    """Attention with the usual scale."""
    b, h, n, d = q.shape
    return Call(q, k, v, Rule(Causal() if causal else Everything(), d**-0.5, Grid(b, h, n, k.shape[2])))


def ours(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The output of the kernel."""
    return TritonGPU().run(call_of(q, k, v, causal)).out


def with_statistics(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Result:
    """Output and statistics."""
    return TritonGPU().run(replace(call_of(q, k, v, causal), statistics=STATISTICS))


def check(device: str, dtype: torch.dtype, causal: bool) -> None:
    """Outputs, statistics, gradients and decoding against float64; exits with the error if one is off."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 83, 16, generator=generator).to(dtype) for heads in (4, 2, 2))
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(2, 1) for x in leaves[1:])
    scores = leaves[0] @ keys.mT / 4.0
    if causal:
        scores = scores.masked_fill(torch.ones(83, 83).triu_(1).bool(), -torch.inf)
    p = scores.softmax(-1)
    expected = p @ values
    gradient = torch.randn(expected.shape, generator=generator).to(dtype)
    exact = torch.autograd.grad(expected, leaves, gradient.double())
    given = [x.to(device).requires_grad_() for x in (q, k, v)]
    result = with_statistics(*given, causal)
    out = result.out
    found = torch.autograd.grad(out, given, gradient.to(device))
    one = ours(*(x[:, :, -1:] if at == 0 else x for at, x in enumerate(given)), causal)
    entropy = torch.special.entr(p).sum(-1)
    limit = LIMITS[dtype]
    results = [("output", out, expected, limit), ("decoding", one, expected[:, :, -1:], limit)]
    results += [
        ("entropy", result.statistics[ENTROPY], entropy, 1e-5),
        ("Σp²", result.statistics[SQUARES], p.square().sum(-1), 1e-5),
    ]
    results += [(f"d{n}", a, b, 2 * limit + 3e-6) for n, a, b in zip("qkv", found, exact, strict=True)]
    for name, got, truth, most in results:
        error = float((got.detach().cpu().double() - truth.detach()).norm() / truth.detach().norm())
        if not error <= most:
            sys.exit(f"{name} ({dtype}, {'causal' if causal else 'full'}): relative error {error:.1e} > {most:.0e}")


def flex_calls() -> Callable[[Tensor, Tensor, Tensor, bool], Tensor] | None:
    """FlexAttention, compiled, with block masks made beforehand; None if this PyTorch cannot."""
    try:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    except ImportError:
        return None
    compiled = torch.compile(flex_attention)
    masks: dict[tuple[int, int], object] = {}

    def run(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        size = q.shape[2], k.shape[2]
        if causal and size not in masks:
            shift = size[1] - size[0]
            masks[size] = create_block_mask(lambda b, h, i, j: i + shift >= j, None, None, *size, device=q.device)
        return compiled(q, k, v, block_mask=masks[size] if causal else None)

    return run


def peers(causal: bool) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """PyTorch's own, by name."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def sdpa(backend: SDPBackend) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                # One query at the end sees everything; PyTorch would put it at the start.
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal and q.shape[2] > 1)

        return run

    found = {"flash": sdpa(SDPBackend.FLASH_ATTENTION), "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION)}
    if flex := flex_calls():
        found["flex"] = lambda q, k, v: flex(q, k, v, causal)
    return found


def able(calls: Calls) -> Calls:
    """Without those that this machine cannot run; says which."""
    found: Calls = {}
    for name, call in calls.items():
        try:
            call()
            torch.cuda.synchronize()
            found[name] = call
        except (RuntimeError, torch._dynamo.exc.TorchDynamoException) as reason:
            print(f"  {name} left out: {str(reason).splitlines()[0][:120]}", file=sys.stderr)
    return found


def interleaved(calls: Calls, rounds: int) -> dict[str, float]:
    """Median milliseconds of each call between two CUDA events; every round runs all of them."""
    for call in list(calls.values()) * 3:
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop))
    return {name: statistics.median(values) for name, values in times.items()}


def cases(n: int, d: int, causal: bool) -> dict[str, Calls]:
    """What is timed at one size."""
    b, h = TOKENS // n, WIDTH // d
    q, k, v = torch.randn(3, b, h, n, d, device="cuda", dtype=torch.bfloat16)
    one = q[:, :, -1:].contiguous()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    gradient = torch.randn_like(q)
    others = peers(causal)

    def both(attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(attention(*leaves), leaves, gradient)

    mine = {"headwise": lambda q, k, v: ours(q, k, v, causal), **others}
    return {
        "forward": {name: (lambda f=f: f(q, k, v)) for name, f in mine.items()}
        | {"headwise + statistics": lambda: with_statistics(q, k, v, causal)},
        "forward + backward": {name: both(f) for name, f in mine.items()},
        "decode, 1 query": {name: (lambda f=f: f(one, k, v)) for name, f in mine.items()},
    }


def main() -> None:
    """Check, time, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only compare with float64")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path, default=Path("gpu.json"))
    args = parser.parse_args()
    if not torch.cuda.is_available() and not (args.quick and os.environ.get("TRITON_INTERPRET") == "1"):
        sys.exit("no GPU here: this compares times on one; TRITON_INTERPRET=1 and --quick check the numbers without it")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    example = torch.empty(1, 1, 1, 16, device=device)
    if reason := TritonGPU().refuse(call_of(example, example, example, False)):
        sys.exit(f"the kernel cannot run here: {reason}")
    for dtype in LIMITS:
        for causal in (False, True):
            check(device, dtype, causal)
    print("outputs, statistics, gradients and decoding agree with float64", flush=True)
    if args.quick:
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16, milliseconds")
    rows: list[dict[str, object]] = []
    for d in (64, 128):
        for n in (4096, 8192, 16_384):
            for causal in (False, True):
                for what, calls in cases(n, d, causal).items():
                    with torch.set_grad_enabled(what == "forward + backward"):
                        times = interleaved(able(calls), args.rounds)
                    shape = (TOKENS // n, WIDTH // d, n, d)
                    rows.append({"shape": shape, "causal": causal, "what": what, "milliseconds": times})
                    line = "  ".join(f"{name} {time:.3f}" for name, time in times.items())
                    print(f"{shape!s:>22} {'causal' if causal else 'full':>6} {what:<18} {line}", flush=True)
    report = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "dtype": "bfloat16", "rows": rows}
    args.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    print(f"written: {args.json}")


if __name__ == "__main__":
    main()
