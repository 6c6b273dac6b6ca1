"""The inputs of a case from a seed, equal in the timing and in the process that measures memory."""

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.cases import Case
from headwise.kernels.quantized import QuantizedKV
from headwise.masks import Causal, Mask, Window


@dataclass(frozen=True)
class Inputs:
    """q [b, h, n, d], k and v [b, h_kv, m, d]; for training also the gradient of the output, q's shape."""

    q: Tensor
    k: Tensor
    v: Tensor
    d_out: Tensor | None = None

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tensors that require gradients."""
        return self.q, self.k, self.v

    def d_loss(self, case: Case) -> list[Tensor]:
        """For training, the gradients of the output and of each statistic [b, h], a mean over queries."""
        assert self.d_out is not None
        b, h, n, _ = case.size
        return [self.d_out, *(torch.full((b, h), float(n)) for _ in case.statistics)]


def make(case: Case, seed: int) -> Inputs:
    """Standard normal numbers, rounded to the case's dtype."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def draw(size: tuple[int, ...], grad: bool = False) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype).requires_grad_(grad)

    q, k, v = (draw(size, case.backward) for size in (case.size, case.kv_size, case.kv_size))
    if case.stored:  # what floats there are stand for the same numbers
        k, v = QuantizedKV.of(k).decoded(), QuantizedKV.of(v).decoded()
    return Inputs(q, k, v, draw(case.size) if case.backward else None)


def mask(case: Case) -> Mask | None:
    """The case's mask as a `Mask` of headwise."""
    return {"full": None, "causal": Causal(), "window": Causal() & Window(case.window)}[case.mask]


def allowed(case: Case) -> Tensor | None:
    """The case's mask as a boolean [n, m], True = may attend, written out independently; None for "full"."""
    if case.mask == "full":
        return None
    n, m = case.size[2], case.kv_size[2]
    behind = torch.arange(m - n, m)[:, None] - torch.arange(m)
    return (behind >= 0) & (behind < (case.window if case.mask == "window" else m))
