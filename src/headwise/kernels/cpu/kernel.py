"""The compiled kernel for CPUs: output, log-sum-exp and row statistics in one pass over the keys.

The C++ lies in `native/`; its first page of each file says how it works. It follows `torch.get_num_threads()`, runs
on the threads that PyTorch has, and gives the same bits for any number of them.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from headwise.errors import KernelError
from headwise.kernels.call import Call, Declined, Result
from headwise.kernels.cpu import binding
from headwise.kernels.cpu.library import library
from headwise.kernels.torch_blocks import Blocks
from headwise.lowering import Lowered
from headwise.rule import compute
from headwise.statistics import (
    COLUMN_MASS,
    DISTANCE,
    DISTANCE_VARIANCE,
    ENTROPY,
    LARGEST,
    SQUARES,
    KeyWeights,
    RangeMass,
    Statistic,
)

# Statistics with a place of their own in the call.
FIELDS = {LARGEST: "largest", ENTROPY: "entropy", SQUARES: "squares", DISTANCE: "distance",
          DISTANCE_VARIANCE: "variance"}  # fmt: skip


class CPU:
    """Any mask of a few key ranges or a boolean, any score, float32, bfloat16 and float16."""

    name = "cpu"

    def refuse(self, call: Call) -> str | None:
        """What the machine, the dtype, dropout or the rule stand in the way of."""
        if torch.compiler.is_compiling():
            return "torch.compile cannot look into compiled code"
        q, grid = call.q, call.rule.grid
        if q.device.type != "cpu":
            return f"the tensors are on {q.device.type}, and it is for the CPU"
        if q.dtype not in binding.CODES:
            return f"it computes in float32, and this is {q.dtype}"
        if not all(map(_has_memory, (q, call.k, call.v))):
            return "a tensor has no memory of its own (vmap, fake tensors or a subclass)"
        if 0 in (grid.b, grid.n, grid.m):
            return "there are no queries or no keys"
        if call.dropout_p > 0 and torch.is_grad_enabled() and (q.requires_grad or call.k.requires_grad):
            return "its gradients know no dropout"
        found = library()
        if found.reason:
            return found.reason
        return call.lowered if isinstance(call.lowered, str) else None

    def run(self, call: Call) -> Result:
        terms = call.rule.terms(compute(call.q[..., :0, :]))
        statistics: dict[Statistic, Tensor] = {}
        out, lse = _Fused.apply(
            call.q, call.k, call.v, (call, statistics), terms.soft_cap, terms.relative, terms.sinks, *terms.biases
        )
        return Result(out, lse, statistics)


class _Fused(Blocks):
    """The compiled forward pass."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, given: tuple[Call, dict[Statistic, Tensor]], soft_cap: float,
        relative: Tensor | None, sinks: Tensor | None, *biases: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        call, statistics = given
        out, lse, found = forward(call)
        statistics.update(found)
        ctx.save_for_backward(q, k, v, out, lse, relative, sinks, *biases)
        ctx.call, ctx.soft_cap = call, soft_cap
        ctx.mark_non_differentiable(lse)
        return out, lse


def forward(call: Call) -> tuple[Tensor, Tensor, dict[Statistic, Tensor]]:
    """Output, log-sum-exp and those of the call's statistics that the kernel knows.

    Raises:
        Declined: if a key or value is not finite and some query may not see it.
    """
    handle, lowered = library().handle, call.lowered
    assert handle is not None  # refuse() has asked
    assert isinstance(lowered, Lowered)
    q, k, v = (x.detach() if x.stride(-1) == 1 or x.shape[-1] < 2 else x.detach().contiguous()
               for x in (call.q, call.k, call.v))  # fmt: skip
    b, h, n, d = q.shape
    h_kv, m = k.shape[1], k.shape[2]
    out = torch.empty(b, h, n, v.shape[-1], dtype=q.dtype)
    lse = torch.empty(b, h, n)
    request = binding.ForwardCall(
        binding.CODES[q.dtype], torch.get_num_threads(), b, h, h_kv, n, m, d, v.shape[-1],
        binding.view(q), binding.view(k), binding.view(v), binding.view(out),
    )  # fmt: skip
    request.lse = lse.data_ptr()
    request.dropout, request.seed = call.dropout_p, call.seed
    held = binding.write_rule(request.rule, lowered, call.rule)
    statistics = _ask(request, call, held)
    status = handle.headwise_forward(ctypes.byref(request))
    if status == binding.NOT_FINITE:
        raise Declined("a key or value that some query may not see is not finite, and would poison its row")
    if status == binding.NO_MEMORY:
        raise KernelError("kernel='cpu' could not get the memory to work in; give it fewer or shorter sequences")
    return out, lse, statistics


def _ask(request: binding.ForwardCall, call: Call, held: list[Any]) -> dict[Statistic, Tensor]:
    """Put the statistics into the request, and what has to outlive it into `held`."""
    b, h, n, m = call.rule.grid
    found: dict[Statistic, Tensor] = {}
    ranges = [s for s in call.statistics if isinstance(s, RangeMass)]
    weights = [s for s in call.statistics if isinstance(s, KeyWeights)]
    for statistic in call.statistics:
        if field := FIELDS.get(statistic):
            found[statistic] = torch.empty(b, h, n)
            setattr(request, field, found[statistic].data_ptr())
        elif statistic == COLUMN_MASS and call.dropout_p == 0:
            found[statistic] = torch.empty(b, h, m)
            request.column_mass = found[statistic].data_ptr()
    if ranges:
        masses = torch.empty(len(ranges), b, h, n)
        found.update(zip(ranges, masses, strict=True))
        request.ranges = (binding.Range * len(ranges))(*(binding.Range(s.start, s.stop, s.relative) for s in ranges))
        request.range_count, request.range_mass = len(ranges), masses.data_ptr()
    if weights:
        masses = torch.empty(len(weights), b, h, n)
        found.update(zip(weights, masses, strict=True))
        classes = torch.stack([s.weights.detach().float().expand(b, m) for s in weights]).contiguous()
        held.append(classes)
        request.class_count, request.classes, request.class_mass = len(weights), classes.data_ptr(), masses.data_ptr()
        request.class_stride, request.class_batch = b * m, m
    return found


def _has_memory(x: Tensor) -> bool:
    if type(x) not in (Tensor, torch.nn.Parameter):
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(x)
