"""What the tests of the core share: random inputs of odd sizes, masks and scores of every kind."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headwise.kernels import KERNELS
from headwise.kernels.call import Call
from headwise.masks import (
    Causal,
    Dense,
    Documents,
    Everything,
    Forbidden,
    Grid,
    Lengths,
    Mask,
    Sinks,
    Window,
    WithGap as MaskWithGap,
)
from headwise.rule import Rule
from headwise.scores import ALiBi, Bias, RelativeBias, Score, SinkLogits, SoftCap, WithGap, t5_bias


def qkv(
    b: int = 2, h: int = 6, h_kv: int = 3, n: int = 37, m: int = 53, d: int = 8, e: int = 5, *, seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Queries, keys and values; sizes differ so that a swapped axis cannot pass."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (b, h, n, d), (b, h_kv, m, d), (b, h_kv, m, e)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v


# Made for a batch of b, n queries and m ≥ n keys.
MASKS: dict[str, Callable[[int, int, int], Mask]] = {
    "everything": lambda b, n, m: Everything(),
    "causal": lambda b, n, m: Causal(),
    "window": lambda b, n, m: Window(7, 3),
    "causal window": lambda b, n, m: Causal() & Window(11),
    "window and sinks": lambda b, n, m: Causal() & (Window(5) | Sinks(2)),
    "lengths": lambda b, n, m: Lengths([m - 2 * i for i in range(b)]),
    "padded left": lambda b, n, m: Lengths([m - 3 * i for i in range(b)], side="right") & Causal(),
    "nothing for some": lambda b, n, m: Lengths([0] + [m - 1] * (b - 1), [n // 2] + [n] * (b - 1)),
    "documents": lambda b, n, m: Documents(torch.arange(m) // 9) & Causal(),
    "documents and padding": lambda b, n, m: Documents(torch.where(torch.arange(m) < m - 5, torch.arange(m) // 13, -1)),
    "forbidden": lambda b, n, m: Forbidden(torch.arange(n) % 3 == 1, torch.arange(m) % (m // 5 + 2) == 4) & Causal(),
    "with a gap": lambda b, n, m: (
        MaskWithGap(Lengths([m + 4 - 3 * i for i in range(b)]) & Window(m // 2 + 5), 3, 5) & Causal()
    ),
    "dense": lambda b, n, m: Dense(torch.rand(b, 1, n, m, generator=torch.Generator().manual_seed(4)) > 0.7),
}


def _leaf(*shape: int, seed: int = 3) -> Tensor:
    """A float64 parameter, the same at each call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def _slopes(h: int) -> Tensor:
    return torch.linspace(0.02, 0.3, h, dtype=torch.float64).requires_grad_()


# Made for a grid of b × h × n × m; all but the cap hold parameters.
SCORES: dict[str, Callable[[int, int, int, int], tuple[Score, ...]]] = {
    "soft cap": lambda b, h, n, m: (SoftCap(0.8),),
    "alibi": lambda b, h, n, m: (ALiBi(_slopes(h)),),
    "relative": lambda b, h, n, m: (RelativeBias(_leaf(h, 9), -6),),
    "relative ahead, shared": lambda b, h, n, m: (RelativeBias(_leaf(1, 4), 2),),
    "t5": lambda b, h, n, m: (t5_bias(_leaf(10, h), bidirectional=True, max_distance=11),),
    "t5 decoder": lambda b, h, n, m: (t5_bias(_leaf(7, h), bidirectional=False, max_distance=11),),
    "bias": lambda b, h, n, m: (Bias(_leaf(b, h, n, m)),),
    "bias of keys": lambda b, h, n, m: (Bias(_leaf(b, 1, 1, m)),),
    "two biases": lambda b, h, n, m: (Bias(_leaf(1, h, n, 1)), Bias(_leaf(1, 1, n, m, seed=4))),
    "sinks": lambda b, h, n, m: (SinkLogits(_leaf(h)),),
    "all": lambda b, h, n, m: (
        SinkLogits(_leaf(h)), Bias(_leaf(b, 1, n, m)), SoftCap(1.3), ALiBi(_slopes(h)), RelativeBias(_leaf(h, 5), -3),
        RelativeBias(_leaf(1, 7, seed=5), -3),
    ),
}  # fmt: skip

# The same, with scores over m + 5 keys, five of which are left out.
GAPS: dict[str, Callable[[int, int, int, int], tuple[Score, ...]]] = {
    "alibi with a gap": lambda b, h, n, m: (WithGap(ALiBi(_slopes(h)), 1, 5),),
    "relative with a gap": lambda b, h, n, m: (WithGap(RelativeBias(_leaf(h, 19), -11), 2, 5),),
    "all with a gap": lambda b, h, n, m: (
        SinkLogits(_leaf(h)), Bias(_leaf(b, 1, n, m)), SoftCap(1.3), WithGap(ALiBi(_slopes(h)), 2, 5),
        WithGap(RelativeBias(_leaf(h, 23), -17), 2, 5), RelativeBias(_leaf(1, 7, seed=5), -3),
    ),
}  # fmt: skip


def dense_truth(q: Tensor, k: Tensor, mask: Mask, scale: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, allowed cells and scores in float64, [b, h, n, m], written apart from the library's own kernels."""
    b, h, n, d = q.shape
    m = k.shape[2]
    keys = k.double().repeat_interleave(h // k.shape[1], 1)
    scores = torch.einsum("bhnd,bhmd->bhnm", q.double(), keys) * (d**-0.5 if scale is None else scale)
    allowed = mask.to_dense(n, m, batch=b, heads=h).expand(b, h, n, m)
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1).masked_fill(~allowed, 0.0)
    return weights, allowed, scores


def kernels_here() -> list[str]:
    """The kernels that do a plain call on this machine."""
    q, k, v = qkv(e=8)
    grid = Grid(*q.shape[:3], k.shape[2])
    call = Call(q, k, v, Rule(Everything(), 1.0, grid))
    return [name for name, kernel in KERNELS.items() if kernel.refuse(call) is None]


def _relative(score: RelativeBias, logits: Tensor, positions: Tensor, keys: Tensor) -> Tensor:
    at = (keys - positions - score.first).clamp(0, score.values.shape[1] - 1)
    return logits + score.values.double()[:, at]


# What each class of scores makes of the logits [b, h, n, m], by its definition: scores, or those and logits of a sink.
FORMULAS_OF_SCORES: dict[type[Score], Callable[..., Any]] = {
    SoftCap: lambda one, logits, positions, keys: one.cap * (logits / one.cap).tanh(),
    ALiBi: lambda one, logits, positions, keys: logits - one.slopes.double()[:, None, None] * (positions - keys).abs(),
    RelativeBias: _relative,
    Bias: lambda one, logits, positions, keys: logits + one.values.double(),
    SinkLogits: lambda one, logits, positions, keys: (logits, one.logits.double()),
}
