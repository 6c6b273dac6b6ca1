"""One attention call, checked once at the edge; kernels trust it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.events import OnDelta
from headwise.kernels.quantized import QuantizedKV, Vectors, decoded
from headwise.lowering import Lowered, lower, lowered
from headwise.rule import Rule
from headwise.stats import Statistic


@dataclass(frozen=True)
class Call:
    """What a kernel is given: q [b, h, n, d], keys [b, h_kv, m, d], values [b, h_kv, m, d_v], the rule, dropout.

    Kernels read `k` and `v`, which are floats; only one that can do with eight bits looks at `keys` and `values`.
    `seed` drives the dropout, so that the backward pass draws the same pattern again. `statistics` are wanted beside
    the output; a kernel gives those that it can. The backward pass calls `on_delta` with δ (gates.py).
    """

    q: Tensor
    keys: Vectors
    values: Vectors
    rule: Rule
    dropout_p: float = 0.0
    seed: int = 0
    statistics: tuple[Statistic, ...] = field(default=())
    on_delta: OnDelta | None = None

    @cached_property
    def k(self) -> Tensor:
        """The keys as floats."""
        return decoded(self.keys)

    @cached_property
    def v(self) -> Tensor:
        """The values as floats."""
        return decoded(self.values)

    @cached_property
    def values_finite(self) -> bool:
        """False if k or v holds a NaN or infinity (or sums past the largest float, which only costs time)."""
        if torch.compiler.is_compiling():
            return True  # a graph without the operator, which a branch on the data would end
        held = [x.scales if isinstance(x, QuantizedKV) else x.detach() for x in (self.values, self.keys)]
        return bool(torch.isfinite(held[0].sum() + held[1].sum()))

    @cached_property
    def lowered(self) -> Lowered | str:
        """The rule as tensors, or why it has no such form; see `lowering.lower`."""
        plain = not self.rule.scores and self.rule.mask.value  # nothing of it lies on a device
        return lowered(self.rule) if plain or self.q.device.type == "cpu" else lower(self.rule, self.q.device)


class Result(NamedTuple):
    """What a kernel returns.

    out: [b, h, n, d_v] in q's dtype.
    lse: log-sum-exp [b, h, n], float32 (float64 for float64 inputs), natural log, detached; −∞ for a fully
        masked query.
    statistics: those of `call.statistics` that the kernel computed, detached.
    """

    out: Tensor
    lse: Tensor
    statistics: Mapping[Statistic, Tensor] = {}


class Declined(Exception):
    """Raised by `run` for what only the data show: the call goes to the next kernel, with this as the reason."""
