"""Repeated small calls, as from every layer of a model: from their arguments directly to compiled code.

Whether a plain call (no scores, dropout, statistics or gradients) is valid, its kernel and the kernel's arguments
follow from shapes, strides, dtypes, mask, scale and the requested kernel: all but the addresses. So `keep` stores the
decisions of a call, and `again` reuses them for the next one like it, in a tenth of the time. Any other call takes the
full path.
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

PAIRS = 1 << 21  # of query and key, over all heads: in larger calls the time to decide is negligible
KEPT = 512  # of calls that are stored


class _Decided(NamedTuple):
    """shape: of the output; None: as q. again: headwise_again. request: its argument, never changed. held: the memory
    that the request points to."""

    shape: tuple[int, ...] | None
    again: Callable[..., int]
    request: Any
    held: list[Any]


_decided: dict[Any, _Decided] = {}
_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def again(q: Tensor, k: Vectors, v: Vectors, mask: Mask | None, scale: float | None, kernel: str) -> Tensor | None:
    """The output [b, h, n, d_v] of a plain call like an earlier one; None for any other. Not for calls in a graph.

    The arguments have not been checked.
    """
    if not (type(q) is Tensor and type(k) is Tensor and type(v) is Tensor and q.is_cpu and k.is_cpu and v.is_cpu):
        return None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return None
    if torch._C._len_torch_dispatch_stack() or _wrapped(q) or _wrapped(k) or _wrapped(v):
        return None
    if q.is_neg() or k.is_neg() or v.is_neg():  # the memory has the other sign
        return None
    try:
        found = _decided.get(_kind(q, k, v, mask, scale, kernel))
    except TypeError:  # an invalid argument, which has no hash
        return None
    if found is None:
        return None
    shape, compiled, request, _ = found
    out = torch.empty_like(q) if shape is None else q.new_empty(shape)  # the first takes half the time
    threads = torch.get_num_threads()
    status = compiled(request, threads, q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr())
    if status in (binding.DONE, binding.FINITE):
        return out
    return None  # the full path determines why, and uses another kernel


def keep(call: Call, chosen: Kernel, mask: Mask | None, scale: float | None, kernel: str) -> None:
    """Store the decisions of a call that `chosen` has computed, if `again` can reuse them."""
    q, k, v, rule = call.q, call.keys, call.values, call.rule
    b, h, n, m = rule.grid
    if chosen.name != "cpu" or b * h * n * m > PAIRS or call.dropout_p > 0 or call.statistics or rule.scores:
        return
    if not (
        type(q) is Tensor
        and type(k) is Tensor
        and type(v) is Tensor
        and rule.mask.value
        and type(scale) in (float, type(None))
    ):
        return
    if not q.stride(3) == k.stride(3) == v.stride(3) == 1:  # the kernel got copies
        return
    handle = library().handle
    assert handle is not None  # the kernel has run
    shape = (b, h, n, v.shape[3])
    request, held = like(q, k, v, shape, call)
    if len(_decided) >= KEPT:
        _decided.clear()
    _decided[_kind(q, k, v, mask, scale, kernel)] = _Decided(
        None if q.shape == shape and q.is_contiguous() else shape,
        handle.headwise_again,
        ctypes.byref(request),
        [request, *held],
    )


def _kind(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, scale: float | None, kernel: str) -> tuple[Any, ...]:
    """All that determines a plain call."""
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype, mask, scale,
        named(kernel),
    )  # fmt: skip
