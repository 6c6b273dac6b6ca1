"""What watching a hand-written model costs, in which attention is recognised: n×n scores, mask, softmax, dropout.

    python -m benchmarks.recognised                    # Markdown tables; --quick for small sizes, which say nothing

"By hand" is the same model with a line in each layer that calls `attend` with the measures on the queries, keys and
values there. "Beyond" is what a watched forward takes in addition to that: following tensors, naming masks, comparing
outputs, and keeping the record. Times are the shortest of many rounds, turn by turn in one process, since other
programs only add to them; "spread" is the interquartile range over the median. With one thread they are CPU time.
`benchmarks.any_model` has long sequences, and memory.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from statistics import median, quantiles
from typing import Any

import torch

import headwise as hw
from benchmarks.any_model import NAMES, Attention, made
from benchmarks.machine import examine

Size = tuple[int, int, int]  # layers, d_model, heads
MEASURES = ("max_logit", "entropy", "effective_keys", "top1_mass", "sink_mass", "mean_distance")  # those of `watch`


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that everything runs")
    parser.add_argument("--seconds", type=float, default=30.0, help="for each row of times")
    args = parser.parse_args()
    machine = examine(0.1 if args.quick else 1.0)
    print(f"{machine.cpu}, {machine.threads} threads, torch {machine.torch}; the shortest of many rounds.")
    size = (2, 64, 2) if args.quick else (12, 768, 12)
    print(
        f"{size[0]} layers × {size[2]} heads, d_model {size[1]}, batch 1, causal, float32; {len(MEASURES)} measures.\n"
    )
    print("| attention | n | forward, ms | by hand, ms | watched, ms | beyond, ms | of the forward | spread |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    for n in (64, 128) if args.quick else (512, 1024):
        for sdpa in (False, True):
            _row(size, n, sdpa, args.seconds)
    if args.quick:
        print("\nSmall sizes: these times say nothing.")


@torch.no_grad()
def _row(size: Size, n: int, sdpa: bool, seconds: float) -> None:
    nets = {}
    for name in ("plain", "by hand", "watched"):
        nets[name], x = made((*size, n), NAMES[sdpa], ExitStack())
    for module in nets["by hand"].modules():
        if isinstance(module, Attention):
            module.measures = MEASURES
    with hw.watch(nets["watched"]) as record:
        steps = {name: partial(net, x) for name, net in nets.items()}
        assert torch.equal(steps["plain"](), steps["watched"]())
        times = _turn_by_turn(steps, seconds)
        assert len(record.layers) == size[0]
    plain, by_hand, watched = (min(times[name]) * 1e3 for name in nets)
    beyond = watched - by_hand
    first, _, third = quantiles(times["plain"], n=4)
    spread = (third - first) / median(times["plain"])
    what = "F.scaled_dot_product_attention" if sdpa else "written out"
    print(
        f"| {what} | {n} | {plain:.4g} | {by_hand:.4g} | {watched:.4g} | {beyond:.3g} | {beyond / plain:.1%} | "
        f"{spread:.0%} |", flush=True,
    )  # fmt: skip


def _turn_by_turn(steps: Mapping[str, Callable[[], Any]], seconds: float) -> dict[str, list[float]]:
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


if __name__ == "__main__":
    main()
