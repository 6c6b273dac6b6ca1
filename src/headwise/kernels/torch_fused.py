"""PyTorch's fused attention for the CPU, which also returns the log-sum-exp of each row.

It is the operator that `F.scaled_dot_product_attention` runs, so the output has the same bits, with or without a map.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.kernels.call import Call, Declined, Result
from headwise.kernels.reads import Matrix, Reads
from headwise.masks import Causal
from headwise.rule import compute


class Products(Reads):
    """Only `times`: the operator returns no weights."""

    def times(self, of: Matrix, x: Tensor) -> Tensor:
        """Attention with the values x."""
        of = of.with_keys_of(x)
        call, kernel = Call(of.q, of.k, x, of.rule), TorchFused()
        if reason := kernel.refuse(call):
            raise Declined(reason)
        return kernel.run(call).out


class TorchFused:
    """Full and causal attention on a CPU, without dropout and scores."""

    name = "torch_fused"
    gives_delta = False
    by_autograd = False
    twice = True
    reads = Products()

    def refuse(self, call: Call) -> str | None:
        """The operator supports two masks, one head size, one device, no dropout and no score but the scale."""
        grid = call.rule.grid
        if call.q.device.type != "cpu":
            return f"it requires tensors on the CPU, got {call.q.device.type}"
        if call.dropout_p > 0:
            return "it does not support dropout"
        if call.rule.scores:
            return f"it does not support the scores {', '.join(map(repr, call.rule.scores))}"
        if call.v.shape[-1] != call.q.shape[-1]:
            return f"the value size {call.v.shape[-1]} differs from the key size {call.q.shape[-1]}"
        if 0 in (grid.b, grid.h, grid.n, grid.m):
            return "there are no queries or no keys"
        if not call.rule.is_full():
            if call.rule.mask != Causal():
                return f"it supports no mask but Causal(), got {call.rule.mask!r}"
            if grid.n != grid.m or not grid.at_end:
                return f"it aligns causal queries to the start of the keys ({grid.n} queries, {grid.m} keys)"
            if call.rule.scale < torch.finfo(_wide(call)).tiny:
                return f"it masks before it scales, and −∞ times a scale of {call.rule.scale:g} masks no key"
            if not call.values_finite:
                return "a masked key or value is not finite and would affect the rows that it is masked for"
        return None

    def run(self, call: Call) -> Result:
        b, h, n, d = call.q.shape
        full = call.rule.is_full()
        q, k, v = _grouped(call, full)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, not full, scale=call.rule.scale
        )
        # No query is fully masked here. For a row whose scores are all NaN or −∞ the operator may return an output and
        # a log-sum-exp of 0, as for a fully masked one; in 16 bits it may return finite outputs for NaN scores.
        suspect = lse == 0 if lse.dtype == q.dtype else (lse == 0) | ~torch.isfinite(lse)
        if not torch.compiler.is_compiling() and bool(suspect.any()) and not _scores_are_finite(call):
            raise Declined("scores are NaN or infinite, for which it may return finite outputs")
        return Result(out.reshape(b, h, n, d), lse.reshape(b, h, n))

    def gradients(
        self, call: Call, out: Tensor, lse: Tensor, grad_out: Tensor, wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        """Computed by PyTorch's backward operator; the rule has no terms."""
        full = call.rule.is_full()
        q, k, v = _grouped(call, full)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out.reshape(q.shape), q, k, v, out.reshape(q.shape), lse.reshape(q.shape[:-1]), 0.0, not full,
            scale=call.rule.scale,
        )  # fmt: skip
        shared = (
            x.reshape(*like.shape[:2], -1, *like.shape[2:])
            for x, like in zip(grads, (call.q, call.k, call.v), strict=True)
        )
        dq, dk, dv = (x.sum(2) for x in shared)
        return [dq, dk, dv, None, None]


def _wide(call: Call) -> torch.dtype:
    """The dtype of the scores."""
    return compute(call.q[..., :0]).dtype


def _scores_are_finite(call: Call) -> bool:
    """Whether no score can be NaN or infinite, from the largest entries of q and k."""
    if call.q.shape[-1] == 0:
        return True
    largest = (
        float(call.q.abs().amax()) * float(call.k.abs().amax()) * call.q.shape[-1] * max(1.0, abs(call.rule.scale))
    )
    return largest < torch.finfo(_wide(call)).max


def _grouped(call: Call, full: bool) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as the operator requires them, one KV head per query head."""
    b, h, n, d = call.q.shape
    h_kv, m = call.k.shape[1], call.k.shape[2]
    group = h // h_kv
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (call.q, call.k, call.v))
    if group > 1 and full:
        # Without a mask, rows do not depend on their position: a group's queries become rows of one head, and keys are
        # read once.
        q = q.reshape(b, h_kv, group * n, d)
    elif group > 1:
        # One batch entry per KV head, with its query heads as heads; keys are expanded with stride 0, not copied.
        q = q.reshape(b * h_kv, group, n, d)
        k = k.reshape(b * h_kv, 1, m, d).expand(-1, group, -1, -1)
        v = v.reshape(b * h_kv, 1, m, d).expand(-1, group, -1, -1)
    return q, k, v
