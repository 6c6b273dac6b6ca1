"""Peak memory of attend() beside its inputs and output, where the weights alone would not fit.

    python benchmarks/memory.py            # n = 32,768, 12 heads of 64: the weights would take 51.5 GB
    python benchmarks/memory.py --quick

Each case runs in a process of its own; memory is the peak resident size less what stood there before the call.
"""

import argparse
import resource
import subprocess
import sys

SIX = ("max_logit", "entropy", "sink_mass", "mean_distance", "previous_mass", "top1_mass")
CASES = {
    "attend": {},
    "attend, map, six measures": {"measures": SIX},
    "attend, window of 512 (torch_blocks)": {"window": 512},
}  # fmt: skip


def one(case: str, n: int) -> None:
    """Run one case here and print the bytes it took beside inputs and output."""
    import torch

    import headwise as hw

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> object:
        options = CASES[case]
        mask = hw.Causal() & hw.Window(options["window"]) if "window" in options else hw.Causal()
        measures = options.get("measures", ())
        with torch.no_grad():
            return hw.attend(q, k, v, mask=mask, return_map=bool(measures), measures=measures)

    run(*torch.randn(3, 1, 12, 700, 64))  # threads, libraries and code are there now
    q, k, v = torch.randn(3, 1, 12, n, 64)
    before = _peak()
    result = run(q, k, v)
    out = result[0] if isinstance(result, tuple) else result
    print(_peak() - before - out.numel() * out.element_size())


def _peak() -> int:
    """The highest resident size of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--case")
    args = parser.parse_args()
    n = 4096 if args.quick else 32_768
    if args.case:
        one(args.case, n)
        return
    print(f"(1, 12, {n}, 64) float32, causal; all weights would take {12 * n * n * 4 / 1e9:.1f} GB")
    for case in CASES:
        command = [sys.executable, __file__, "--case", case, *(["--quick"] if args.quick else [])]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        print(f"{case:<40} {int(done.stdout) / 1e6:8.1f} MB beside inputs and output", flush=True)


if __name__ == "__main__":
    main()
