"""attend() beside PyTorch's scaled_dot_product_attention, and beside eager weights with the same statistics.

    python benchmarks/speed.py            # full sizes, about two minutes
    python benchmarks/speed.py --quick    # small sizes, seconds: that it runs, not how fast it is

Ratios are of medians measured turn by turn in one run; above 1 is slower than PyTorch's fused attention.
"""

import argparse

import torch
import torch.nn.functional as F

import headwise as hw
from timing import interleaved

SIX = ("max_logit", "entropy", "sink_mass", "mean_distance", "previous_mass", "top1_mass")


def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, ...]:
    """What people do today: all weights, then the six statistics from them."""
    n = q.shape[2]
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        scores.masked_fill_(torch.ones(n, n, dtype=torch.bool).triu_(1), -torch.inf)
    top = scores.amax((-2, -1))
    p = scores.softmax(-1)
    entropy = torch.special.entr(p).sum(-1).mean(-1)
    i = torch.arange(n)
    distance = (p * (i[:, None] - i).abs()).sum(-1).mean(-1)
    previous = p.diagonal(-1, dim1=-2, dim2=-1).mean(-1)
    return p @ v, top, entropy, p[..., 0].mean(-1), distance, previous, p.amax(-1).mean(-1)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32, medians")
    head = ("(b, h, n, d)", 18), ("mask", 7), ("sdpa ms", 9), ("attend", 7), ("+ map, six measures", 20)
    print(" ".join(word.rjust(width) for word, width in (*head, ("eager + six", 12), ("eager / ours", 13))))
    for n in (256, 512) if args.quick else (2048, 4096):
        q, k, v = torch.randn(3, 1, 12, n, 64)
        for causal in (False, True):
            mask = hw.Causal() if causal else None
            _check(q, k, v, causal)
            t = interleaved(
                {
                    "sdpa": lambda q=q, k=k, v=v, c=causal: F.scaled_dot_product_attention(q, k, v, is_causal=c),
                    "attend": lambda q=q, k=k, v=v, m=mask: hw.attend(q, k, v, mask=m),
                    "six": lambda q=q, k=k, v=v, m=mask: hw.attend(q, k, v, mask=m, return_map=True, measures=SIX),
                    "eager": lambda q=q, k=k, v=v, c=causal: eager(q, k, v, c),
                },
                rounds=args.rounds,
            )
            print(
                f"{(1, 12, n, 64)!s:>18} {'causal' if causal else 'full':>7} {t['sdpa'] * 1e3:9.2f} "
                f"{t['attend'] / t['sdpa']:7.2f} {t['six'] / t['sdpa']:20.2f} {t['eager'] / t['sdpa']:12.2f} "
                f"{t['eager'] / t['six']:13.2f}",
                flush=True,
            )


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> None:
    """The statistics compared are the same numbers."""
    _, amap = hw.attend(q, k, v, mask=hw.Causal() if causal else None, return_map=True, measures=SIX)
    _, top, entropy, sink, distance, previous, top1 = eager(q, k, v, causal)
    theirs = dict(zip(SIX, (top, entropy, sink, distance, previous, top1), strict=True))
    for name, value in theirs.items():
        torch.testing.assert_close(amap.measured[name], value, rtol=2e-4, atol=1e-5, msg=name)


if __name__ == "__main__":
    main()
