"""Time the analyses of headwise.analysis, compared with the forward pass that computes the maps.

    python -m benchmarks.questions                  # 12 layers × 12 heads, 2,048 tokens; --quick for a small model

Prints a Markdown table: seconds, and the ratio to one forward pass of the same model with twelve measures. The sum that
is aimed at, roles, likeness and information of all heads, is at most three forward passes.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import headwise as hw
from benchmarks.cases import ROWS
from benchmarks.machine import examine

GOAL = 3.0
COUNTED = ("roles", "outputs: cosine, CKA, mutual information", "maps: Jensen–Shannon, 256 rows", "information")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model, to see that everything runs")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    layers, d_model, heads, n = (2, 64, 4, 128) if args.quick else (12, 768, 12, 2048)
    machine = examine(0.1 if args.quick else 1.0)
    print(
        f"{machine.cpu}, {machine.threads} threads, torch {machine.torch}; {layers} layers × {heads} heads, n = {n:,};"
    )
    print(f"medians of {args.rounds} rounds.\n")
    print("| question | s | forward passes |\n| --- | ---: | ---: |")
    torch.manual_seed(0)
    blocks = nn.ModuleList(
        hw.TransformerBlock(hw.MultiHeadAttention(d_model, heads), 4 * d_model) for _ in range(layers)
    )
    x = torch.randn(1, n, d_model)
    with torch.no_grad():
        times = _measured(blocks.eval(), x, args.rounds)
    base = times.pop("forward with 12 measures")
    for name, seconds in {"forward with 12 measures": base, **times}.items():
        print(f"| {name} | {seconds:.2f} | {seconds / base:.2f} |", flush=True)
    total = sum(times[name] for name in COUNTED)
    print(f"| **roles, likeness, information together** | {total:.2f} | {total / base:.2f} (goal: < {GOAL:.0f}) |")
    if args.quick:
        print("\nA small model: these times say nothing.")


def _measured(blocks: nn.ModuleList, x: Tensor, rounds: int) -> dict[str, float]:
    """Analysis → median seconds; every round runs all of them."""
    maps, outputs = _forward(blocks, x)
    tokens = torch.randint(0, 500, (x.shape[1],))
    weights = [site.weights() for site in hw.find_heads(blocks)]
    questions: dict[str, Callable[[], Any]] = {
        "forward with 12 measures": lambda: _forward(blocks, x),
        "roles": lambda: hw.analysis.roles(maps, tokens=tokens, pieces=["a.b c"[i % 5] for i in range(x.shape[1])]),
        "outputs: cosine, CKA, mutual information": lambda: hw.analysis.output_similarities(
            outputs, ("cosine", "cka", "mutual_information")
        ),
        "maps: Jensen–Shannon, 256 rows": lambda: hw.analysis.map_divergence(maps),
        "information": lambda: hw.analysis.head_information(outputs),
        "spectra of the maps": lambda: [hw.analysis.map_spectrum(amap) for amap in maps],
        "circuits: QK and OV": lambda: [hw.analysis.circuit_similarity(weights, kind) for kind in ("qk", "ov")],
        "rollout, one row": lambda: hw.analysis.rollout(maps).row(-1),
    }
    times: dict[str, list[float]] = {name: [] for name in questions}
    for _ in range(rounds):
        for name, ask in questions.items():
            begun = time.perf_counter()
            ask()
            times[name].append(time.perf_counter() - begun)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def _forward(blocks: nn.ModuleList, x: Tensor) -> tuple[list[hw.AttentionMap], list[Tensor]]:
    maps = []
    with hw.models.record_heads(hw.find_heads(blocks)) as outputs:
        for block in blocks:
            x, amap = block(x, mask=hw.Causal(), return_map=True, measures=ROWS)
            maps.append(amap)
    return maps, list(outputs)


if __name__ == "__main__":
    main()
