"""One attention call. `attend` validates it once; kernels do not check it again."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.kernels.events import OnDelta
from headwise.kernels.quantized import QuantizedKV, Vectors, decoded
from headwise.rule import Rule
from headwise.rule.lowering import Lowered, lower, lowered
from headwise.stats import Statistic


@dataclass(frozen=True)
class Call:
    """The arguments of a kernel. Only one that supports quantized KV reads `keys` and `values`; others `k` and `v`."""

    q: Tensor  # [b, h, n, d]
    keys: Vectors  # [b, h_kv, m, d]
    values: Vectors  # [b, h_kv, m, d_v]
    rule: Rule
    dropout_p: float = 0.0
    seed: int = 0  # of the dropout, so that the backward pass draws the same pattern
    statistics: tuple[Statistic, ...] = field(default=())  # requested; a kernel returns those that it supports
    on_delta: OnDelta | None = None  # called with δ by the backward pass
    differentiable: bool = False  # whether the log-sum-exp, and statistics with a `Slope`, have gradients

    @cached_property
    def k(self) -> Tensor:
        """The keys as floats."""
        return decoded(self.keys)

    @cached_property
    def v(self) -> Tensor:
        """The values as floats."""
        return decoded(self.values)

    @property
    def reads_floats(self) -> bool:
        """Whether quantized keys have been dequantized for it, or the keys are floats."""
        return isinstance(self.keys, Tensor) or "k" in self.__dict__

    @cached_property
    def values_finite(self) -> bool:
        """False if k or v contains NaN or infinity (or its sum overflows, which only costs time)."""
        if torch.compiler.is_compiling():
            return True  # traced without the operator; a branch on the data would break the graph
        held = [x.scales if isinstance(x, QuantizedKV) else x.detach() for x in (self.values, self.keys)]
        return sum_finite(*held)

    @cached_property
    def lowered(self) -> Lowered | str:
        """The rule as tensors, or the reason why it has no such form; see `lowering.lower`."""
        plain = not self.rule.scores and self.rule.mask.value  # it has no tensors on any device
        return lowered(self.rule) if plain or self.q.device.type == "cpu" else lower(self.rule, self.q.device)


def sum_finite(x: Tensor, y: Tensor) -> bool:
    """Whether neither tensor contains NaN or infinity, unless the sum overflows."""
    return bool(torch.isfinite(x.sum() + y.sum()))


class Result(NamedTuple):
    """The results of a kernel. lse: float32 (float64 for float64 inputs); −∞ for a fully masked query. All but the
    output are detached, unless the call is `differentiable`."""

    out: Tensor  # [b, h, n, d_v] in q's dtype
    lse: Tensor  # log-sum-exp [b, h, n], natural log
    statistics: Mapping[Statistic, Tensor] = {}  # those of `call.statistics` that the kernel computed


class Declined(Exception):
    """Raised by `run` if the data rule the kernel out: the next kernel runs, and the message is the reason."""


_PROXY = torch._C._TorchDispatchModeKey.PROXY


def traced() -> bool:
    """Whether torch.jit.trace or make_fx records the operations of this thread."""
    return torch._C._is_tracing() or torch._C._get_dispatch_mode(_PROXY) is not None


_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def are_plain(device: torch.device | None, *tensors: Tensor) -> bool:
    """Whether these are tensors in the memory of this device, and no mode records what is done with them. With a flag
    for signs, the values in memory have the opposite ones."""
    if torch._C._len_torch_dispatch_stack():
        return False
    for x in tensors:  # noqa: SIM110  (a generator takes a microsecond more)
        if type(x) is not Tensor or x.device != device or _wrapped(x) or x.is_neg():
            return False
    return True
