"""One attention call, checked once at the edge; kernels trust it."""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from headwise.rule import Rule


@dataclass(frozen=True)
class Call:
    """What a kernel is given: q [b, h, n, d], k [b, h_kv, m, d], v [b, h_kv, m, d_v], the rule, dropout.

    `seed` drives the dropout, so that the backward pass draws the same pattern again.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    rule: Rule
    dropout_p: float = 0.0
    seed: int = 0

    @cached_property
    def values_finite(self) -> bool:
        """False if k or v holds a NaN or infinity (or sums past the largest float, which only costs time)."""
        if torch.compiler.is_compiling():
            return True  # a data-dependent branch would break the graph
        return bool(torch.isfinite(self.v.detach().sum() + self.k.detach().sum()))


class Kernel(Protocol):
    """A way to compute attention. All of them meet the same contract and the same tests."""

    name: str

    def refuse(self, call: Call) -> str | None:
        """Why this kernel cannot do the call, or None if it can."""

    def run(self, call: Call) -> tuple[Tensor, Tensor]:
        """Output [b, h, n, d_v] in q's dtype, differentiable, and log-sum-exp [b, h, n] (float32, natural
        log, detached; −inf where a query sees nothing)."""
