"""A GPT that is written by hand: its own attention, watched, and attached, in time and memory.

    python -m benchmarks.any_model                # a Markdown table; --quick for small sizes, which say nothing

Time is the median of calls turn by turn in one process; memory is the peak of a call in a process of its own.
"""

import argparse
import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from benchmarks.contestants import Skip
from benchmarks.machine import examine
from benchmarks.memory import Prepared, peak_of
from benchmarks.timing import medians

NAMES = ("its own", "F.scaled_dot_product_attention", "watched", "attached")
Size = tuple[int, int, int, int]  # layers, d_model, heads, n


class Attention(nn.Module):
    """One map for queries, keys and values, a causal buffer, softmax of masked scores; or the fused function. If it has
    `measures`, it computes them too, by its own call of `attend`."""

    measures: tuple[str, ...] = ()

    def __init__(self, d: int, heads: int, n: int, fused: bool) -> None:
        super().__init__()
        self.c_attn, self.c_proj, self.heads, self.fused = nn.Linear(d, 3 * d), nn.Linear(d, d), heads, fused
        self.register_buffer("mask", torch.ones(n, n, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> Tensor:
        """Causal self attention."""
        b, n, d = x.shape
        q, k, v = (y.view(b, n, self.heads, d // self.heads).transpose(1, 2) for y in self.c_attn(x).split(d, dim=2))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.mask[:n, :n] == 0, float("-inf"))
            y = F.softmax(att, dim=-1) @ v
        if self.measures:
            hw.attend(q, k, v, mask=hw.Causal(), measures=self.measures, return_map=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, n, d))


class Block(nn.Module):
    """A pre-norm block."""

    def __init__(self, d: int, heads: int, n: int, fused: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = Attention(d, heads, n, fused)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x: Tensor) -> Tensor:
        """One block."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


def made(size: Size, name: str, stack: ExitStack) -> tuple[nn.Module, Tensor]:
    """A model with the same weights whatever computes its attention, and its input."""
    layers, d, heads, n = size
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(d, heads, n, name == NAMES[1]) for _ in range(layers)))
    x = torch.randn(1, n, d)
    if name == "attached":
        stack.enter_context(hw.attach(model, batch=x[:, :64]))
    elif name == "watched":
        stack.enter_context(hw.watch(model, measures=["entropy", "max_logit"]))
    return model, x


def answer(model: nn.Module, x: Tensor) -> Tensor:
    """A forward pass without gradients."""
    with torch.no_grad():
        return model(x)


def train(model: nn.Module, x: Tensor) -> None:
    """A forward and a backward pass."""
    model.zero_grad()
    model(x).square().mean().backward()


STEPS: dict[str, Callable[[nn.Module, Tensor], Any]] = {"inference": answer, "training step": train}


def prepared(size: Size, name: str, what: str) -> Prepared:
    """The call whose memory is measured, after a small one."""
    model, x = made(size, name, ExitStack())  # open until the process ends
    STEPS[what](model, x[:, :64])
    return partial(STEPS[what], model, x), lambda result: 0 if result is None else result.nbytes


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that everything runs")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each row of times")
    args = parser.parse_args()
    size = (2, 64, 2, 128) if args.quick else (2, 256, 4, 8192)
    machine = examine(0.1 if args.quick else 1.0)
    print(f"{machine.cpu}, {machine.threads} threads, torch {machine.torch}")
    print(f"{size[0]} layers × {size[2]} heads, d_model {size[1]}, n = {size[3]}, batch 1, causal, float32.\n")
    print(f"| |{''.join(f' {name} |' for name in NAMES)}")
    print(f"| --- |{' ---: |' * len(NAMES)}", flush=True)
    for what, step in STEPS.items():
        with ExitStack() as stack:
            calls = {name: partial(step, *made(size, name, stack)) for name in NAMES}
            times, _ = medians(calls, estimate=1.0, seconds=args.seconds)
        print(f"| {what}, s |{''.join(f' {times[name]:.2f} |' for name in NAMES)}", flush=True)
        row = []
        for name in NAMES:
            try:
                row.append(f"{peak_of(partial(prepared, size, name, what), machine.threads) / 1e6:,.0f}")
            except Skip as reason:
                row.append(str(reason))
        print(f"| {what}, MB |{''.join(f' {one} |' for one in row)}", flush=True)
    if args.quick:
        print("\nSmall sizes: these times say nothing.")


if __name__ == "__main__":
    main()
