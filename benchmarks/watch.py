"""What watching costs: six measures of a 12-layer, 12-head model beside the same model with SDPA, unwatched.

    python -m benchmarks.watch                    # a Markdown table; --quick for small sizes, which say nothing

Time is measured turn by turn in one process; memory is what a record holds beside the model.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import headwise as hw
from benchmarks.machine import examine
from benchmarks.timing import interleaved


class Block(nn.Module):
    """A pre-norm block; attention is headwise's layer, or the same weights through SDPA."""

    def __init__(self, d: int, heads: int, sdpa: bool) -> None:
        super().__init__()
        self.norm, self.ff_norm = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attention = hw.MultiHeadAttention(d, heads)
        self.ff = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
        self.sdpa = sdpa

    def forward(self, x: Tensor) -> Tensor:
        """One block, causal."""
        z = self.norm(x)
        if self.sdpa:
            q, k, v = self.attention.project(z, z)
            heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.attention.output(heads.transpose(1, 2).flatten(2))
        else:
            x = x + self.attention(z, mask=hw.Causal())
        return x + self.ff(self.ff_norm(x))


def model(layers: int, d: int, heads: int, sdpa: bool) -> nn.Module:
    """The same weights whatever computes attention."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(d, heads, sdpa) for _ in range(layers)))


def step(net: nn.Module, x: Tensor, training: bool) -> Tensor:
    """An answer, or a training step without its optimiser."""
    if not training:
        with torch.no_grad():
            return net(x)
    net.zero_grad(set_to_none=True)
    y: Tensor = net(x)
    y.square().mean().backward()
    return y.detach()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that everything runs")
    parser.add_argument("--seconds", type=float, default=60.0, help="for inference, and for training")
    args = parser.parse_args()
    layers, d, heads, n = (2, 64, 2, 33) if args.quick else (12, 768, 12, 1024)
    machine = examine(0.1 if args.quick else 1.0)
    print(f"{machine.cpu}, {machine.threads} threads, torch {machine.torch}; medians, turn by turn.")
    print(f"{layers} layers × {heads} heads, d_model {d}, n = {n}, batch 1, causal, float32.\n")
    print("| what | SDPA, unwatched, ms | headwise, unwatched, ms | watched, ms | watched / SDPA | spread |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    x = torch.randn(1, n, d)
    peer, plain, watched = (model(layers, d, heads, sdpa) for sdpa in (True, False, False))
    with hw.watch(watched) as record:
        for training in (False, True):
            calls: dict[str, list[Callable[[], Any]]] = {
                name: [lambda net=net, training=training: step(net, x, training)]  # type: ignore[misc]
                for name, net in (("peer", peer), ("plain", plain), ("watched", watched))
            }
            begun = time.perf_counter()
            expected = calls["peer"][0]()
            seconds = time.perf_counter() - begun
            torch.testing.assert_close(calls["watched"][0](), expected, rtol=1e-3, atol=1e-3)
            found, _ = interleaved(
                calls, estimates=dict.fromkeys(calls, seconds), rounds=99, seconds=args.seconds
            )  # fmt: skip
            median = {name: times.median for name, times in found.items()}
            spread = max(times.spread or 0.0 for times in found.values())
            cells = (f"{median[name] * 1e3:.4g}" for name in ("peer", "plain", "watched"))
            what = "training step" if training else "inference"
            ratio = median["watched"] / median["peer"]
            print(f"| {what} | {' | '.join(cells)} | {ratio:.2f} | {spread:.0%} |", flush=True)
    with hw.watch(watched, maps="lazy") as lazy:
        step(watched, x, False)
    maps = sum(t.nbytes for amap in lazy.maps.values() for t in (amap.q, amap.k, amap.lse))  # type: ignore[union-attr]
    activations = layers * x.nbytes * (2 + 1 + 3 + 1 + 1 + 4 + 4)  # norms, q k v, heads, sum, both of the feed-forward
    each = record.history.nbytes / len(record.history)
    print(f"\nNumbers of a record: {record.nbytes - record.history.nbytes:,} bytes, and {each:,.0f} a step of history; "
          f"{record.nbytes / activations:.3%} of about {activations / 1e6:.0f} MB of activations.")  # fmt: skip
    print(f'maps="lazy" keeps {maps / 1e6:.1f} MB: {maps / activations:.1%} of them, which training keeps anyway.')
    if args.quick:
        print("\nSmall sizes: these times say nothing.")


if __name__ == "__main__":
    main()
