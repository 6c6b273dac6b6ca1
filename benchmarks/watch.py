"""What watching costs: six measures of a 12-layer, 12-head model beside the same model with SDPA, unwatched.

    python -m benchmarks.watch                    # Markdown tables; --quick for small sizes, which say nothing

And a decoding step of a 4-layer Llama of transformers: with SDPA, attached, watched with two measures.

Time is measured turn by turn in one process; memory is the peak of a step in a process of its own. A decoding step is
the fastest of all rounds at its number of keys, as it is short, the mean over some numbers of keys.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import mean, median
from typing import Any

import torch

import headwise as hw
from benchmarks.contestants import Skip
from benchmarks.machine import examine
from benchmarks.memory import peak_of
from benchmarks.timing import medians
from benchmarks.watched import OF_WEIGHTS, Size, answer, blocks, generated, gpt2, llama, prepared, train, with_weights

STEPS, WARM = 24, 4  # decoding steps of a round, and the first ones, which do not count


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that everything runs")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each row of times")
    args = parser.parse_args()
    size, n = ((2, 64, 2), 33) if args.quick else ((12, 768, 12), 1024)
    machine = examine(0.1 if args.quick else 1.0)
    print(f"{machine.cpu}, {machine.threads} threads, torch {machine.torch}; medians, turn by turn.")
    print(f"{size[0]} layers × {size[2]} heads, d_model {size[1]}, batch 1, causal, float32; six measures.\n")
    print("| what | n | SDPA, unwatched, ms | headwise, unwatched, ms | watched, ms | watched / SDPA | spread |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    _layers(size, n, args.seconds)
    ratios = [_library(size, length, args.seconds) for length in (n, 2 * n)]
    print("\n| GPT-2 of transformers | n | watched, ms | output_attentions and statistics, ms | ratio |")
    print("| --- | ---: | ---: | ---: | ---: |")
    print("\n".join(ratios))
    print(f"\n{len(OF_WEIGHTS)} of the six measures can be computed from weights; the largest logit cannot.\n")
    _memory(size, n, machine.threads, 1 if args.quick else 5)
    _decoding((2, 48, 2) if args.quick else (4, 768, 12), (9,) if args.quick else (64, 2048), args.seconds)
    if args.quick:
        print("\nSmall sizes: these times say nothing.")


def _layers(size: Size, n: int, seconds: float) -> None:
    """headwise's own layers, answering and training."""
    x = torch.randn(1, n, size[1])
    nets = {name: blocks(size, name == "peer") for name in ("peer", "plain", "watched")}
    with hw.watch(nets["watched"]):
        for what, step in (("inference", answer), ("training step", train)):
            median, spread = _timed({name: partial(step, net, x) for name, net in nets.items()}, seconds)
            _print_row(what, n, median, spread)


def _library(size: Size, n: int, seconds: float) -> str:
    """GPT-2; what is printed later is its watched forward beside the stored weights."""
    ids = torch.randint(1000, (1, n))
    nets = {name: gpt2(size, n, "eager" if name == "weights" else "sdpa") for name in ("peer", "watched", "weights")}
    calls: dict[str, Callable[[], Any]] = {name: partial(answer, net, ids) for name, net in nets.items()}
    calls["weights"] = partial(with_weights, nets["weights"], ids)
    with ExitStack() as watching:
        record = watching.enter_context(hw.watch(nets["watched"]))
        median, spread = _timed(calls, seconds)
    exact = calls["weights"]()
    for layer, expected in enumerate(exact):
        for name in OF_WEIGHTS:
            got = record.latest[name][layer].double()
            torch.testing.assert_close(got, expected[name][0].double(), rtol=1e-3, atol=1e-4)
    _print_row("GPT-2 of transformers, inference", n, median, spread)
    watched, stored = median["watched"] * 1e3, median["weights"] * 1e3
    return f"| inference | {n} | {watched:.4g} | {stored:.4g} | {stored / watched:.1f} |"


def _timed(calls: dict[str, Callable[[], Any]], seconds: float) -> tuple[dict[str, float], float]:
    """Medians, and the widest spread; peer and watched give the same."""
    begun = time.perf_counter()
    expected = calls["peer"]()
    estimate = time.perf_counter() - begun
    torch.testing.assert_close(calls["watched"](), expected, rtol=1e-3, atol=1e-3)
    return medians(calls, estimate=estimate, seconds=seconds)


def _print_row(what: str, n: int, median: dict[str, float], spread: float) -> None:
    cells = [f"{median[name] * 1e3:.4g}" if name in median else "" for name in ("peer", "plain", "watched")]
    print(
        f"| {what} | {n} | {' | '.join(cells)} | {median['watched'] / median['peer']:.2f} | {spread:.0%} |", flush=True
    )


def _memory(size: Size, n: int, threads: int, runs: int) -> None:
    """Peak memory of a step with and without a watch, each the median over processes."""
    print("| peak of a step, MB | unwatched | watched | more |")
    print("| --- | ---: | ---: | ---: |")
    for what, training in (("inference", False), ("training step", True)):
        try:
            peaks = ((peak_of(partial(prepared, size, n, on, training), threads) for _ in range(runs)) for on in (0, 1))
            plain, watched = map(median, peaks)
        except Skip as reason:
            print(f"| {what} | {reason} | | |")
            continue
        print(f"| {what} | {plain / 1e6:.1f} | {watched / 1e6:.1f} | {watched / max(plain, 1) - 1:+.2%} |", flush=True)


def _decoding(size: Size, lengths: Sequence[int], seconds: float) -> None:
    """Steps after different numbers of tokens in the cache, some of which are discarded as warm-up."""
    print("\n| decoding step, keys | SDPA, ms | attached / SDPA | watched / SDPA | watched, more a layer, µs |")
    print("| ---: | ---: | ---: | ---: | ---: |", flush=True)
    nets = {name: llama(size, max(1, size[2] // 3)) for name in ("peer", "attached", "watched")}
    with hw.watch(nets["watched"], measures=["max_logit", "entropy"]):
        attached = hw.attach(nets["attached"])
        for n in lengths:
            ids, rounds = torch.randint(1000, (1, n)), dict[str, list[list[float]]]()
            begun = time.perf_counter()
            while time.perf_counter() < begun + seconds or not rounds:
                logits = {}
                for name, net in nets.items():
                    logits[name], times = generated(net, ids, STEPS)
                    rounds.setdefault(name, []).append(times[WARM:])
                for name in ("attached", "watched"):
                    torch.testing.assert_close(logits[name], logits["peer"], rtol=1e-3, atol=1e-3)
            peer, plain, watched = (mean(map(min, zip(*rounds[name], strict=True))) for name in nets)
            more = (watched - peer) / size[0] * 1e6
            print(f"| {n} | {peer * 1e3:.4g} | {plain / peer:.2f} | {watched / peer:.2f} | {more:.0f} |", flush=True)
        attached.detach()


if __name__ == "__main__":
    main()
