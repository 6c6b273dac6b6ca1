"""The calls compared on a GPU: headwise's and PyTorch's attention at one size, with float64 references."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.kernels.call import Call
from headwise.kernels.gradients import run_kernel
from headwise.kernels.triton_gpu import TritonGPU
from headwise.masks import Causal, Everything, Grid
from headwise.rule import Rule
from headwise.stats import DISTANCE, DISTANCE_VARIANCE, ENTROPY, LARGEST, SQUARES, RangeMass

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Calls = dict[str, Callable[[], tuple[Tensor, ...]]]
STATISTICS = (
    LARGEST, ENTROPY, SQUARES, DISTANCE, DISTANCE_VARIANCE,
    RangeMass(0, 1, relative=False), RangeMass(-1, 0, relative=True),
)  # fmt: skip
OURS, WITH_STATISTICS = "headwise", "headwise + statistics"
FORWARD, BACKWARD, DECODE = "forward", "forward + backward", "decode, 1 query"
KINDS = (FORWARD, DECODE, BACKWARD)
PEERS = ("flash", "cudnn", "flex")
BEYOND = 1e30  # the error of what is not finite


class Size(NamedTuple):
    """Batch, heads, queries and keys, head size; whether attention is causal."""

    b: int
    h: int
    n: int
    d: int
    causal: bool

    def __str__(self) -> str:
        return f"{self.b}×{self.h}×{self.n}×{self.d} {'causal' if self.causal else 'full'}"


def call_of(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
    """Attention with the usual scale."""
    b, h, n, d = q.shape
    return Call(q, k, v, Rule(Causal() if causal else Everything(), d**-0.5, Grid(b, h, n, k.shape[2])))


def ours(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """The output of the kernel."""
    return run_kernel(TritonGPU(), call_of(q, k, v, causal)).out


def with_statistics(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, ...]:
    """Output, entropy and Σp², of a call with seven statistics."""
    result = run_kernel(TritonGPU(), replace(call_of(q, k, v, causal), statistics=STATISTICS))
    return result.out, result.statistics[ENTROPY], result.statistics[SQUARES]


def attentions(causal: bool, peers: Sequence[str]) -> dict[str, Attention]:
    """headwise and the selected peers of PyTorch."""
    from torch.nn.attention import SDPBackend

    known: dict[str, Callable[[], Attention]] = {
        "flash": lambda: partial(sdpa, SDPBackend.FLASH_ATTENTION, causal=causal),
        "cudnn": lambda: partial(sdpa, SDPBackend.CUDNN_ATTENTION, causal=causal),
        "flex": lambda: flex(causal),
    }
    return {OURS: partial(ours, causal=causal)} | {name: known[name]() for name in peers}


def sdpa(backend: object, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """PyTorch's attention with one backend."""
    from torch.nn.attention import sdpa_kernel

    with sdpa_kernel(backend):
        # A single query attends to all keys; PyTorch would align it to the first key.
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal and q.shape[2] > 1)


def flex(causal: bool) -> Attention:
    """FlexAttention, compiled for each shape, with block masks made beforehand."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # After some shapes it would go on without a compiler, n×n in memory: what was compiled for others is let go.
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    masks: dict[int, object] = {}

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n, m = q.shape[2], k.shape[2]
        if causal and n not in masks:
            masks[n] = create_block_mask(lambda b, h, i, j: i + (m - n) >= j, None, None, n, m, device=q.device)
        return compiled(q, k, v, block_mask=masks[n] if causal else None)

    return run


class Inputs:
    """Random bfloat16 inputs of one size, and the float64 reference of the first and the last head."""

    def __init__(self, size: Size, device: str) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.q, self.k, self.v, self.gradient = (
            torch.randn(size[:4], generator=generator, device=device).to(torch.bfloat16) for _ in range(4)
        )
        self.causal = size.causal
        self.heads = [(0, 0), (size.b - 1, size.h - 1)]
        parts = [self._exact(*head) for head in self.heads]
        self.exact = {what: [part[what] for part in parts] for what in KINDS}

    def _exact(self, batch: int, head: int) -> dict[str, tuple[Tensor, ...]]:
        """Of one head: output, entropy, Σp²; gradients of q, k, v; the output of the last query."""
        leaves = [x[batch, head].double().requires_grad_() for x in (self.q, self.k, self.v)]
        q, k, v = leaves
        scores = q @ k.T * q.shape[1] ** -0.5
        if self.causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu_(1), -torch.inf)
        p = scores.softmax(-1)
        out = p @ v
        gradients = torch.autograd.grad(out, leaves, self.gradient[batch, head].double())
        p, out = p.detach(), out.detach()
        return {
            FORWARD: (out, torch.special.entr(p).sum(-1), p.square().sum(-1)),
            BACKWARD: gradients,
            DECODE: (out[-1:],),
        }

    def errors(self, what: str, found: tuple[Tensor, ...]) -> list[float]:
        """Relative error of each tensor [b, h, …], the larger one of the two heads."""
        worst = [0.0] * len(found)
        for head, exact in zip(self.heads, self.exact[what], strict=True):
            for at, x in enumerate(found):
                truth = exact[at]
                error = float((x.detach()[head].double() - truth).norm() / truth.norm())
                worst[at] = max(worst[at], error) if error < BEYOND else BEYOND
        return worst

    def calls(self, peers: Sequence[str]) -> dict[str, Calls]:
        """The calls timed at this size."""
        one = self.q[:, :, -1:].contiguous()
        leaves = [x.clone().requires_grad_() for x in (self.q, self.k, self.v)]
        all_of_them = attentions(self.causal, peers)

        def forward(attention: Attention, q: Tensor) -> tuple[Tensor, ...]:
            return (attention(q, self.k, self.v),)

        def both(attention: Attention) -> tuple[Tensor, ...]:
            return torch.autograd.grad(attention(*leaves), leaves, self.gradient)

        return {
            FORWARD: {name: partial(forward, f, self.q) for name, f in all_of_them.items()}
            | {WITH_STATISTICS: partial(with_statistics, self.q, self.k, self.v, causal=self.causal)},
            DECODE: {name: partial(forward, f, one) for name, f in all_of_them.items()},
            BACKWARD: {name: partial(both, f) for name, f in all_of_them.items()},
        }
