"""The cost of measuring a corpus: `measure_corpus` with and without passages, and the model's forward pass on the same
windows.

    OMP_NUM_THREADS=1 python -m benchmarks.corpus FILE --model DIR     # a Markdown row
    python -m benchmarks.corpus FILE --quick                           # a small size, which says nothing

They go in turns in one process; of one thread, CPU time is measured, which other programs change little. Measuring
reads, cuts and tokenises the files and writes the table; the forward is given its ids, and does nothing else.
"""

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import headwise as hw
from benchmarks.machine import examine
from benchmarks.timing import interleaved
from headwise.stats import shown_in


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="UTF-8 text")
    parser.add_argument("--model", help="as `headwise measure --model`; the embedded decoder if left out")
    parser.add_argument("--window", type=int, default=256, help="tokens")
    parser.add_argument("--batch", type=int, default=8, help="windows")
    parser.add_argument("--tokens", type=int, default=40_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that everything runs")
    args = parser.parse_args()
    window, tokens = (32, 500) if args.quick else (args.window, args.tokens)
    subject = hw.load_model(args.model)
    text = args.file.read_text(encoding="utf-8")[: 8 * tokens]
    spans = subject.read(text).spans
    text = text if len(spans) <= tokens else text[: spans[tokens][0]]  # `max_tokens` would read it twice
    ids = subject.read(text).ids
    batches = list(ids[: len(ids) // window * window].view(-1, window).split(args.batch))
    machine = examine(0.1)
    with tempfile.TemporaryDirectory() as folder:
        cut = Path(folder) / "corpus.txt"
        cut.write_text(text, encoding="utf-8")
        measured = partial(
            hw.corpus.measure_corpus, subject, [cut], Path(folder) / "out.csv", window=window, batch=args.batch,
            restart=True,
        )  # fmt: skip
        begun = time.perf_counter()
        found = measured()
        estimate = time.perf_counter() - begun
        plainly, forward = partial(measured, passages=0), partial(_forward, subject, batches)
        clock, unit = (time.process_time, "CPU ") if machine.threads == 1 else (time.perf_counter, "")
        times, _ = interleaved(
            {"forward": [forward], "measured": [measured], "without": [plainly]}, rounds=99, seconds=args.seconds,
            estimates=dict.fromkeys(("forward", "measured", "without"), estimate), clock=clock,
        )  # fmt: skip
    plain, whole, without = (min(times[name].seconds) for name in ("forward", "measured", "without"))
    spread = max(one.spread or 0.0 for one in times.values())
    rounds = len(times["forward"].seconds)
    print(f"{machine.cpu}, {machine.threads} threads, torch {machine.torch}; least {unit}time of {rounds} rounds.\n")
    print(f"{subject.about}; {len(ids):,} tokens, {len(shown_in('corpus'))} measures of {len(found.heads)} heads.\n")
    print("| window | batch | forward, tokens/s | measured, tokens/s | ratio | ratio without passages | spread |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    rates = f"{len(ids) / plain:,.0f} | {len(ids) / whole:,.0f}"
    print(f"| {window} | {args.batch} | {rates} | {whole / plain:.2f} | {without / plain:.2f} | {spread:.0%} |")
    if args.quick:
        print("\nSmall sizes: these times say nothing.")


@torch.no_grad()
def _forward(subject: hw.lm.LoadedModel, batches: list[Tensor]) -> None:
    for batch in batches:
        subject.model(batch)


if __name__ == "__main__":
    main()
