"""What watching a hand-written model costs, in which attention is recognised: n×n scores, mask, softmax, dropout.

    python -m benchmarks.recognised                    # Markdown tables; --quick for small sizes, which say nothing
    python -m benchmarks.recognised --long             # time and memory at n = 8,192; 23 GB of memory suffice

"Measures" is the time of `attend` with the measures on the same queries, keys and values, and "beyond" what else a
watched forward takes: following tensors, naming masks, and comparing outputs. Time is measured turn by turn in one
process, and with one thread it is CPU time; memory is the peak of a forward in a process of its own.
"""

import argparse
import math
import time
from collections.abc import Callable
from functools import partial
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import headwise as hw
from benchmarks.contestants import Skip
from benchmarks.machine import examine
from benchmarks.memory import peak_of
from benchmarks.timing import medians

Size = tuple[int, int, int]  # layers, d_model, heads
MEASURES = ("max_logit", "entropy", "effective_keys", "top1_mass", "sink_mass", "mean_distance")  # those of `watch`


class Attention(nn.Module):
    """Causal attention as tutorials write it."""

    def __init__(self, d: int, heads: int, longest: int, sdpa: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.heads, self.sdpa = nn.Linear(d, 3 * d), nn.Linear(d, d), heads, sdpa
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("mask", torch.ones(longest, longest, dtype=torch.bool).tril(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[b, n, d] → [b, n, d]."""
        b, n, d = x.shape
        q, k, v = (y.view(b, n, self.heads, -1).transpose(1, 2) for y in self.qkv(x).split(d, dim=2))
        if self.sdpa:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            scores = scores.masked_fill(self.mask[:n, :n] == 0, float("-inf"))
            y = self.dropout(F.softmax(scores, dim=-1)) @ v
        return self.out(y.transpose(1, 2).contiguous().view(b, n, d))


class Block(nn.Module):
    """A pre-norm block."""

    def __init__(self, d: int, heads: int, longest: int, sdpa: bool) -> None:
        super().__init__()
        self.norm, self.ff_norm = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attention = Attention(d, heads, longest, sdpa)
        self.ff = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x: Tensor) -> Tensor:
        """One block."""
        x = x + self.attention(self.norm(x))
        return x + self.ff(self.ff_norm(x))


def gpt(size: Size, longest: int, sdpa: bool = False) -> nn.Module:
    """A decoder without embeddings."""
    layers, d, heads = size
    torch.manual_seed(0)
    return nn.Sequential(*(Block(d, heads, longest, sdpa) for _ in range(layers))).eval()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that everything runs")
    parser.add_argument("--long", action="store_true", help="time and memory at n = 8,192 instead")
    parser.add_argument("--seconds", type=float, default=30.0, help="for each row of times")
    args = parser.parse_args()
    machine = examine(0.1 if args.quick else 1.0)
    print(f"{machine.cpu}, {machine.threads} threads, torch {machine.torch}; medians, turn by turn.")
    if args.long:
        _long((2, 64, 2) if args.quick else (4, 256, 4), 128 if args.quick else 8192, machine.threads, args.seconds)
        return
    size = (2, 64, 2) if args.quick else (12, 768, 12)
    print(
        f"{size[0]} layers × {size[2]} heads, d_model {size[1]}, batch 1, causal, float32; {len(MEASURES)} measures.\n"
    )
    print("| attention | n | forward, ms | watched, ms | measures, ms | beyond, ms | of the forward | spread |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    for n in (64, 128) if args.quick else (512, 1024):
        for sdpa in (False, True):
            _row(size, n, sdpa, args.seconds)


@torch.no_grad()
def _row(size: Size, n: int, sdpa: bool, seconds: float) -> None:
    nets = {name: gpt(size, n, sdpa) for name in ("plain", "watched")}
    x = torch.randn(1, n, size[1])
    calls = [(call.q, call.k, call.v) for call in hw.models.recognise(nets["plain"], x)]
    with hw.watch(nets["watched"]) as record:
        steps: dict[str, Callable[[], Any]] = {name: partial(net, x) for name, net in nets.items()}
        steps["measures"] = partial(_measures, calls)
        assert torch.equal(steps["plain"](), steps["watched"]())
        times = _turn_by_turn(steps, seconds)
        assert len(record.layers) == size[0]
    plain, watched, measures = (median(times[name]) * 1e3 for name in ("plain", "watched", "measures"))
    rounds = zip(*(times[name] for name in ("plain", "watched", "measures")), strict=True)
    beyond = median(two - one - three for one, two, three in rounds) * 1e3
    first, _, third = quantiles(times["plain"], n=4)
    spread = (third - first) / median(times["plain"])
    what = "F.scaled_dot_product_attention" if sdpa else "written out"
    print(
        f"| {what} | {n} | {plain:.4g} | {watched:.4g} | {measures:.4g} | {beyond:.3g} | {beyond / plain:.1%} | "
        f"{spread:.0%} |", flush=True,
    )  # fmt: skip


def _turn_by_turn(steps: dict[str, Callable[[], Any]], seconds: float) -> dict[str, list[float]]:
    """Seconds of each round. On a CPU with one thread they are of CPU time, as other programs may run too."""
    clock = time.perf_counter if torch.get_num_threads() > 1 else time.process_time
    times: dict[str, list[float]] = {name: [] for name in steps}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["plain"]) < 5:
        for name, step in steps.items():
            begun = clock()
            step()
            times[name].append(clock() - begun)
    return times


def _measures(calls: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    for q, k, v in calls:
        hw.attend(q, k, v, mask=hw.Causal(), measures=MEASURES, return_map=True)


def _long(size: Size, n: int, threads: int, seconds: float) -> None:
    """Time and memory of one long sequence."""
    print(f"{size[0]} layers × {size[2]} heads, d_model {size[1]}, batch 1, causal, float32, n = {n}; lazy maps.\n")
    print("| attention | | forward, s | peak, MB |")
    print("| --- | --- | ---: | ---: |", flush=True)
    for sdpa in (False, True):
        for watched in (False, True):
            what = "F.scaled_dot_product_attention" if sdpa else "written out"
            step, _ = prepared(size, n, sdpa, watched)
            begun = time.perf_counter()
            step()
            times, _ = medians({"it": step}, estimate=time.perf_counter() - begun, seconds=seconds)
            try:
                peak = f"{peak_of(partial(prepared, size, n, sdpa, watched), threads) / 1e6:,.0f}"
            except Skip as reason:
                peak = str(reason)
            print(f"| {what} | {'watched' if watched else ''} | {times['it']:.3g} | {peak} |", flush=True)


def prepared(size: Size, n: int, sdpa: bool, watched: bool) -> tuple[Callable[[], Any], Callable[[Any], int]]:
    """A forward for `benchmarks.memory.peak_of`; a small one is done before."""
    net, x = gpt(size, n, sdpa), torch.randn(1, n, size[1])
    if watched:
        hw.watch(net, maps="lazy").start()
    call = torch.no_grad()(partial(net, x))
    with torch.no_grad():
        net(x[:, :64])
    return call, lambda y: y.nbytes


if __name__ == "__main__":
    main()
