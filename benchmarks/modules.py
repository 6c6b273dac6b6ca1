"""Time whole modules: multi-head attention compared with PyTorch's, mixtures of heads, decoding steps.

    python -m benchmarks.modules                    # a Markdown table; --quick for small sizes, which say nothing
    python -m benchmarks.modules --only mixture

Each row compares two modules, turn by turn in one process, and gives the ratio of the medians beside what is aimed at.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import headwise as hw
from benchmarks.machine import examine
from benchmarks.timing import Times, interleaved

Call = Callable[[], Any]
FAMILIES = ("multi_head", "mixture", "decode", "pruned")


@dataclass(frozen=True)
class Row:
    """Two calls and the goal for the ratio of their times. Their results must agree unless they are different
    functions."""

    family: str
    name: str
    ours: str
    peer: str
    goal: float
    make: Callable[[], tuple[Call, Call]]
    equal: bool = True


def rows(quick: bool) -> list[Row]:
    """All modules, at full size or at a small size that only checks that they run."""
    found = []
    for batch, n, d in [(2, 16, 64), (1, 33, 128)] if quick else [(32, 128, 512), (8, 512, 768), (1, 2048, 1024)]:
        size, heads = f"({batch}, {n}, {d})", d // 64
        for training, what, goal in ((False, "forward", 1.05), (True, "training step", 1.0)):
            found.append(
                Row(
                    "multi_head", f"{what} {size}, {heads} heads", "MultiHeadAttention", "nn.MultiheadAttention", goal,
                    lambda batch=batch, n=n, d=d, training=training: _against_torch(batch, n, d, training),
                )
            )  # fmt: skip
    for n, heads in [(64, 8)] if quick else [(1024, 8), (2048, 16)]:
        for per, causal in (("sequence", False), ("token", False), ("token", True)):
            found.append(
                Row(
                    "mixture", f"a gate per {per}, {heads // 4} of {heads} heads, n = {n}{', causal' * causal}",
                    "SparseHeadMixture", "MultiHeadAttention", 0.25 + 0.2,
                    lambda n=n, heads=heads, per=per, causal=causal: _mixture(n, heads, per, causal), equal=False,
                )
            )  # fmt: skip
    b, n, heads = (2, 33, 4) if quick else (8, 512, 12)
    for keys, goal in (("all", 0.7), ("chosen", 0.35)):
        for training, what in ((False, "forward"), (True, "training step")):
            found.append(
                Row(
                    "mixture", f"{what} ({b}, {n}, {heads * 64}), keys={keys!r}, {heads // 4} of {heads} heads a token",
                    "SparseHeadMixture", "MultiHeadAttention", goal,
                    lambda keys=keys, training=training: _sparse(b, n, heads, keys, training), equal=False,
                )
            )  # fmt: skip
    size = {"cached": 100, "d": 128} if quick else {"cached": 16384, "d": 1024}
    found.append(
        Row("decode", f"a step, {size['cached']:,} cached", "MHA", "the same with SDPA", 1.1, lambda: _step(**size))
    )
    found.append(
        Row(
            "decode", f"a step, {size['cached']:,} cached", "GQA, a quarter of the KV heads", "MHA", 0.5,
            lambda: _grouped(**size), equal=False,
        )
    )  # fmt: skip
    for n, d, heads in [(40, 128, 4)] if quick else [(512, 768, 12), (2048, 768, 12)]:
        found.append(
            Row(
                "pruned", f"half of {heads} heads, n = {n}", "pruned", "whole", 1 / 1.7,
                lambda n=n, d=d, heads=heads: _pruned(n, d, heads), equal=False,
            )
        )  # fmt: skip
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that everything runs")
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--seconds", type=float, default=10.0, help="a row")
    args = parser.parse_args()
    torch.manual_seed(0)
    machine = examine(0.1 if args.quick else 1.0)
    print(
        f"{machine.cpu}, {machine.threads} threads, torch {machine.torch}; medians, turn by turn, spread in brackets.\n"
    )
    print("| | what | ours | ms | peer | ms | ratio | goal |")
    print("| --- | --- | --- | ---: | --- | ---: | ---: | ---: |")
    for row in rows(args.quick):
        if row.family in args.only:
            print(_measured(row, args.seconds), flush=True)
    if args.quick:
        print("\nSmall sizes: these times say nothing.")


def _measured(row: Row, seconds: float) -> str:
    ours, peer = row.make()
    with torch.set_grad_enabled("training" in row.name):
        estimates = {}
        answers = []
        for name, call in (("ours", ours), ("peer", peer)):
            answers.append(call())
            begun = time.perf_counter()
            call()
            estimates[name] = time.perf_counter() - begun
        if row.equal:
            torch.testing.assert_close(*answers, rtol=1e-3, atol=1e-4)
        times, _ = interleaved({"ours": [ours], "peer": [peer]}, estimates=estimates, rounds=99, seconds=seconds)
    one, other = times["ours"], times["peer"]
    cells = [
        row.family, row.name, row.ours, _milliseconds(one), row.peer, _milliseconds(other),
        f"{one.median / other.median:.2f}", f"≤ {row.goal:.2f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _milliseconds(times: Times) -> str:
    return f"{times.median * 1e3:.3g} ({(times.spread or 0) * 100:.0f} %)"


def _against_torch(batch: int, n: int, d: int, training: bool) -> tuple[Call, Call]:
    peer = nn.MultiheadAttention(d, d // 64, batch_first=True).train(training)
    ours = hw.MultiHeadAttention.from_torch(peer)
    x = torch.randn(batch, n, d, requires_grad=training)
    return (
        lambda: _stepped(ours, x, lambda: ours(x)),
        lambda: _stepped(peer, x, lambda: peer(x, x, x, need_weights=False)[0]),
    )


def _stepped(module: nn.Module, x: Tensor, y: Callable[[], Tensor]) -> Tensor | None:
    """The output, or the gradient of x after a backward pass if x requires one."""
    if not x.requires_grad:
        return y()
    module.zero_grad()
    x.grad = None
    y().square().mean().backward()
    return x.grad


def _sparse(b: int, n: int, heads: int, keys: str, training: bool) -> tuple[Call, Call]:
    x = torch.randn(b, n, heads * 64, requires_grad=training)
    dense = hw.MultiHeadAttention(heads * 64, heads).train(training)
    sparse = hw.nn.SparseHeadMixture(heads * 64, heads, top_k=heads // 4, keys=keys).train(training)
    return lambda: _stepped(sparse, x, lambda: sparse(x)), lambda: _stepped(dense, x, lambda: dense(x))


def _mixture(n: int, heads: int, per: str, causal: bool) -> tuple[Call, Call]:
    x, mask = torch.randn(1, n, heads * 64), hw.Causal() if causal else None
    dense = hw.MultiHeadAttention(heads * 64, heads).eval()
    sparse = hw.nn.SparseHeadMixture(heads * 64, heads, top_k=heads // 4, per=per).eval()
    return lambda: sparse(x, mask=mask), lambda: dense(x, mask=mask)


def _decoder(d: int, kv: int, k: Tensor, v: Tensor) -> tuple[nn.Module, hw.KVCache]:
    module, cache = hw.MultiHeadAttention(d, d // 64, num_kv_heads=kv).eval(), hw.KVCache()
    cache.append(k, v)
    return module, cache


def _step(cached: int, d: int) -> tuple[Call, Call]:
    """A step of the module, and the same written with SDPA and a buffer with room for one token."""
    heads = d // 64
    k, v = torch.randn(2, 1, heads, cached + 1, 64)
    module, cache = _decoder(d, heads, k[:, :, :-1], v[:, :, :-1])
    x = torch.randn(1, 1, d)

    def by_hand() -> Tensor:
        q, k_new, v_new = (
            F.linear(x, linear.weight).view(1, 1, heads, 64).transpose(1, 2)
            for linear in (module.q_proj, module.k_proj, module.v_proj)
        )
        k[:, :, -1:], v[:, :, -1:] = k_new, v_new
        return F.linear(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2), module.o_proj.weight)

    return lambda: module(x, mask=hw.Causal(), cache=cache), by_hand


def _grouped(cached: int, d: int) -> tuple[Call, Call]:
    steps = []
    for kv in (d // 64 // 4 or 1, d // 64):
        module, cache = _decoder(d, kv, *torch.randn(2, 1, kv, cached, 64))
        steps.append(lambda module=module, cache=cache: module(torch.ones(1, 1, d), mask=hw.Causal(), cache=cache))
    return steps[0], steps[1]


def _pruned(n: int, d: int, heads: int) -> tuple[Call, Call]:
    whole = hw.MultiHeadAttention(d, heads).eval()
    half = hw.edit.prune(whole, range(0, heads, 2), copy=True).model
    x = torch.randn(1, n, d)
    return lambda: half(x, mask=hw.Causal()), lambda: whole(x, mask=hw.Causal())


if __name__ == "__main__":
    main()
