"""A cache of dispatch decisions for small repeated calls, such as those of the layers of a model.

Validation, the choice of a kernel and its request depend, for a plain call (no scores, dropout or gradients), only on
shapes, strides, dtypes, mask, scale, measures and the requested kernel, and not on the addresses. `keep` stores them
after a call has been dispatched, and `again` runs the next call like it in a tenth of the time of a dispatch;
`quick_maps.py` does the same for calls that return a map. Any other call is dispatched as usual.
"""

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.kernels import named
from headwise.kernels.call import Call
from headwise.kernels.cpu import binding
from headwise.kernels.cpu.library import library
from headwise.kernels.cpu.passes import like
from headwise.kernels.kernel import Kernel
from headwise.kernels.quantized import Vectors
from headwise.masks import Mask

PAIRS = 1 << 21  # (query, key) pairs over all heads: in larger calls the time of dispatch is negligible
KEPT = 512  # the most decisions that are stored


class _Decided(NamedTuple):
    """shape: of the output; None: that of q. again: headwise_again. request: its argument, never modified.
    held: the objects that the request points to."""

    shape: tuple[int, ...] | None
    again: Callable[..., int]
    request: Any
    held: list[Any]


_decided: dict[Any, _Decided] = {}
_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def again(q: Tensor, k: Vectors, v: Vectors, mask: Mask | None, scale: float | None, kernel: str) -> Tensor | None:
    """Return the output [b, h, n, d_v] of a plain call like an earlier one; None for any other call.

    The arguments need not be validated. Must not be called while a graph is recorded.
    """
    if not plain_tensors(q, k, v):
        return None
    assert isinstance(k, Tensor)
    assert isinstance(v, Tensor)
    try:
        found = _decided.get(kind(q, k, v, mask, scale, kernel))
    except (TypeError, RuntimeError):  # an invalid argument: not hashable; a nested or sparse tensor
        return None
    if found is None:
        return None
    shape, compiled, request, _ = found
    out = torch.empty_like(q) if shape is None else q.new_empty(shape)  # empty_like takes half the time
    threads = torch.get_num_threads()
    status = compiled(request, threads, q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr())
    if status in (binding.DONE, binding.FINITE):
        return out
    return None  # the usual dispatch finds the reason and another kernel


def keep(call: Call, chosen: Kernel, mask: Mask | None, scale: float | None, kernel: str) -> None:
    """Store the decisions for a call that `chosen` has run, if `again` supports it."""
    if call.statistics or not kept(call, chosen, scale):
        return
    q, k, v = call.q, call.k, call.v
    b, h, n, _ = call.rule.grid
    handle = library().handle
    assert handle is not None  # the kernel has run
    shape = (b, h, n, v.shape[3])
    request, held = like(q, k, v, shape, call)
    if len(_decided) >= KEPT:
        _decided.clear()
    _decided[kind(q, k, v, mask, scale, kernel)] = _Decided(
        None if q.shape == shape and q.is_contiguous() else shape,
        handle.headwise_again,
        ctypes.byref(request),
        [request, *held],
    )


def plain_tensors(q: Tensor, k: Vectors, v: Vectors) -> bool:
    """Whether these are ordinary tensors on the CPU for which no gradient is recorded."""
    if not (type(q) is Tensor and type(k) is Tensor and type(v) is Tensor and q.is_cpu and k.is_cpu and v.is_cpu):
        return False
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return False
    if torch._C._len_torch_dispatch_stack() or _wrapped(q) or _wrapped(k) or _wrapped(v):
        return False
    return not (q.is_neg() or k.is_neg() or v.is_neg())  # the values in memory have the opposite sign


def kept(call: Call, chosen: Kernel, scale: float | None) -> bool:
    """Whether decisions are stored for calls like this one."""
    q, k, v, rule = call.q, call.keys, call.values, call.rule
    b, h, n, m = rule.grid
    if chosen.name != "cpu" or b * h * n * m > PAIRS or call.dropout_p > 0 or rule.scores:
        return False
    if not (
        type(q) is Tensor
        and type(k) is Tensor
        and type(v) is Tensor
        and rule.mask.value
        and type(scale) in (float, type(None))
    ):
        return False
    return q.stride(3) == k.stride(3) == v.stride(3) == 1  # else the kernel received copies


def kind(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, scale: float | None, kernel: str) -> tuple[Any, ...]:
    """The cache key of a plain call."""
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype, mask, scale,
        named(kernel),
    )  # fmt: skip
