"""A cache of dispatch decisions for small repeated calls, such as those of the layers of a model.

Validation, the choice of a kernel and its request depend, for a plain call (no scores, dropout or gradients), only on
shapes, strides, dtypes, mask, scale, measures and the kernels to choose from, and not on the addresses. `keep` stores
them after a call has been dispatched, and `again` runs the next call like it in a tenth of the time of a dispatch;
`quick_maps.py` does the same for calls that return a map. Any other call is dispatched as usual.

One query that attends to all keys is a call like that with another number of keys: decoding steps have one key more
each.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.kernels import candidates
from headwise.kernels.call import Call
from headwise.kernels.cpu import binding
from headwise.kernels.cpu.library import library
from headwise.kernels.cpu.passes import like
from headwise.kernels.kernel import Kernel
from headwise.kernels.quantized import Vectors, in_memory
from headwise.masks import Mask, shows_whole_past

PAIRS = 1 << 21  # (query, key) pairs over all heads: in larger calls the time of dispatch is negligible
KEPT = 512  # the most decisions that are stored


class _Request(NamedTuple):
    """A call for m keys, never modified, and the objects that it points to."""

    m: int
    like: binding.ForwardCall
    held: Any


@dataclass
class _Decided:
    """shape: of the output; None: that of q. again: headwise_again. request: of the latest call, replaced as a whole
    where the next one may have another number of keys."""

    shape: tuple[int, ...] | None
    again: Callable[..., int]
    request: _Request


_decided: dict[Any, _Decided] = {}
_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def again(q: Tensor, k: Vectors, v: Vectors, mask: Mask | None, scale: float | None, kernel: str) -> Tensor | None:
    """Return the output [b, h, n, d_v] of a plain call like an earlier one; None for any other call.

    The arguments need not be validated. Must not be called while a graph is recorded.
    """
    memory = in_memory(k, v)
    if not plain_tensors(q, *memory):
        return None
    try:
        found = _decided.get(_kind(q, k, v, memory, mask, scale, kernel))
        if found is None:
            return None
    except (TypeError, IndexError, RuntimeError):  # an invalid argument: not hashable; a nested or sparse tensor
        return None
    (keys, values, *scales), m, request = memory, k.shape[2], found.request
    if m != request.m:
        request = found.request = _Request(m, *binding.of_all_keys(request.like, m))
    like = binding.with_scales(request.like, *scales) if scales else request.like
    out = torch.empty_like(q) if found.shape is None else q.new_empty(found.shape)  # empty_like takes half the time
    status = found.again(
        ctypes.byref(like), torch.get_num_threads(), q.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr()
    )
    if status in (binding.DONE, binding.FINITE):
        return out
    return None  # the usual dispatch finds the reason and another kernel


def keep(call: Call, chosen: Kernel, mask: Mask | None, scale: float | None, kernel: str) -> None:
    """Store the decisions for a call that `chosen` has run, if `again` supports it."""
    q, memory = call.q, in_memory(call.keys, call.values)
    k, v, *scales = memory
    if call.statistics or not kept(call, chosen, scale, k, v) or (scales and call.reads_floats):
        return
    b, h, n, m = call.rule.grid
    handle = library().handle
    assert handle is not None  # the kernel has run
    shape = (b, h, n, v.shape[3])
    request = _Request(m, *like(q, k, v, shape, call, scales))
    if len(_decided) >= KEPT:
        _decided.clear()
    _decided[_kind(q, call.keys, call.values, memory, mask, scale, kernel)] = _Decided(
        None if q.shape == shape and q.is_contiguous() else shape, handle.headwise_again, request
    )


def plain_tensors(*given: object) -> bool:
    """Whether these are ordinary tensors on the CPU for which no gradient is recorded."""
    if torch._C._len_torch_dispatch_stack():
        return False
    recorded = torch.is_grad_enabled()
    for x in given:  # with a flag for signs, the values in memory have the opposite ones
        if type(x) is not Tensor or not x.is_cpu or (recorded and x.requires_grad) or _wrapped(x) or x.is_neg():
            return False
    return True


def kept(call: Call, chosen: Kernel, scale: float | None, k: Vectors, v: Vectors) -> bool:
    """Whether decisions are stored for calls like this one, of which k and v are in memory."""
    q, rule = call.q, call.rule
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
    """The cache key of a plain call with a map."""
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype, mask, scale,
        candidates(kernel),
    )  # fmt: skip


def _kind(
    q: Tensor, k: Vectors, v: Vectors, memory: Sequence[Tensor], mask: Mask | None, scale: float | None, kernel: str
) -> tuple[Any, ...]:
    """The cache key of a plain call without a map, given `in_memory(k, v)`. It has the number of keys, unless there is
    one query, which attends to all."""
    of_q = q.shape
    of_k: tuple[int, ...] = k.shape
    of_v: tuple[int, ...] = v.shape
    if of_q[2] == 1 and 0 < of_k[2] == of_v[2] <= PAIRS and shows_whole_past(mask):
        of_k, of_v = (of_k[0], of_k[1], of_k[3]), (of_v[0], of_v[1], of_v[3])  # the strides show that there are four
    return (
        of_q, of_k, of_v, q.stride(), *map(Tensor.stride, memory), q.dtype, k.dtype, v.dtype, mask, scale,
        candidates(kernel),
    )  # fmt: skip
