"""The structures of native/headwise.h in ctypes."""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, addressof, c_float, c_int32, c_int64, c_uint64, c_void_p
from typing import Any

import torch
from torch import Tensor

from headwise.rule import Rule
from headwise.rule.lowering import Lowered

CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
DONE, NO_MEMORY, NOT_FINITE, TOO_MANY_QUERIES, FINITE, MASKED = range(6)


SIZES = [
    ("dtype", c_int32), ("threads", c_int32),
    ("b", c_int64), ("h", c_int64), ("h_kv", c_int64), ("n", c_int64), ("m", c_int64), ("d", c_int64),
]  # fmt: skip


class TensorView(ctypes.Structure):
    """headwise_tensor"""

    _fields_ = [("data", c_void_p), ("batch", c_int64), ("head", c_int64), ("row", c_int64)]


class Argument(ctypes.Structure):
    """headwise_argument"""

    _fields_ = [("data", c_void_p), ("batch", c_int64)]


class Wanted(ctypes.Structure):
    """headwise_wanted"""

    _fields_ = [
        ("code", c_int32), ("count", c_int32), ("result", c_void_p), ("numbers", c_int64 * 3),
        ("keys", Argument), ("queries", Argument),
    ]  # fmt: skip


class RowValue(ctypes.Structure):
    """headwise_row_value"""

    _fields_ = [
        ("x", c_void_p), ("counted", c_void_p), ("counted_batch", c_int64),
        ("formula", c_int32), ("largest", c_int32), ("place", c_int32),
    ]  # fmt: skip


class RowsCall(ctypes.Structure):
    """headwise_rows_call"""

    _fields_ = [
        ("b", c_int64), ("h", c_int64), ("n", c_int64), ("lse", c_void_p),
        ("count", c_int32), ("measures", POINTER(RowValue)),
        ("values", c_void_p), ("totals", c_void_p), ("counts", c_void_p), ("nonfinite", c_void_p),
    ]  # fmt: skip


class RuleView(ctypes.Structure):
    """headwise_rule"""

    _fields_ = [
        ("shift", c_int64), ("scale", c_float), ("soft_cap", c_float),
        ("spans", c_void_p), ("span_batch", c_int64), ("span_count", c_int32),
        ("dense", c_void_p), ("dense_batch", c_int64), ("dense_head", c_int64), ("dense_row", c_int64),
        ("relative", c_void_p), ("relative_head", c_int64),
        ("bias", c_void_p),
        ("bias_batch", c_int64), ("bias_head", c_int64), ("bias_row", c_int64), ("bias_col", c_int64),
        ("sinks", c_void_p),
    ]  # fmt: skip


class ForwardCall(ctypes.Structure):
    """headwise_forward_call"""

    _fields_ = [
        *SIZES,
        ("d_v", c_int64),
        ("q", TensorView), ("k", TensorView), ("v", TensorView), ("out", TensorView),
        ("rule", RuleView),
        ("dropout", c_float), ("seed", c_uint64),
        ("lse", c_void_p), ("wanted_count", c_int32), ("wanted", POINTER(Wanted)),
        ("key_scales", TensorView), ("value_scales", TensorView),
    ]  # fmt: skip


class MassGradient(ctypes.Structure):
    """headwise_mass_gradient"""

    _fields_ = [
        ("factor", c_void_p), ("keys", Argument), ("start", c_int64), ("stop", c_int64), ("relative", c_int32),
    ]  # fmt: skip


class BackwardCall(ctypes.Structure):
    """headwise_backward_call"""

    _fields_ = [
        *SIZES,
        ("d_v", c_int64),
        ("q", TensorView), ("k", TensorView), ("v", TensorView), ("out", TensorView), ("grad_out", TensorView),
        ("grad_q", TensorView), ("grad_k", TensorView), ("grad_v", TensorView),
        ("rule", RuleView),
        ("dropout", c_float), ("seed", c_uint64),
        ("lse", c_void_p), ("single", c_int32), ("delta", c_void_p),
        ("grad_relative", c_void_p), ("grad_relative_head", c_int64),
        ("grad_bias", c_void_p),
        ("grad_bias_batch", c_int64), ("grad_bias_head", c_int64), ("grad_bias_row", c_int64),
        ("grad_bias_col", c_int64),
        ("grad_sinks", c_void_p),
        ("shift", c_void_p), ("logs", c_void_p), ("distance", c_void_p),
        ("mass_count", c_int32), ("masses", POINTER(MassGradient)),
    ]  # fmt: skip


class PoolCall(ctypes.Structure):
    """headwise_pool_call"""

    _fields_ = [
        *SIZES,
        ("q", TensorView), ("k", TensorView), ("rule", RuleView),
        ("lse", c_void_p), ("single", c_int32), ("logs", c_int32),
        ("cell", c_int64), ("mean", c_void_p), ("largest", c_void_p), ("allowed", c_void_p),
    ]  # fmt: skip


class DiagonalsCall(ctypes.Structure):
    """headwise_diagonals_call"""

    _fields_ = [
        *SIZES,
        ("q", TensorView), ("k", TensorView), ("rule", RuleView),
        ("lse", c_void_p), ("single", c_int32), ("mass", c_void_p),
    ]  # fmt: skip


Request = ForwardCall | BackwardCall | PoolCall | DiagonalsCall


def view(x: Tensor) -> TensorView:
    """View of a [b, h, n, d] tensor whose last axis is contiguous."""
    batch, head, row, _ = x.stride()
    return TensorView(x.data_ptr(), batch, head, row)


def write_rule(view: RuleView, lowered: Lowered, rule: Rule) -> list[Any]:
    """Fill in headwise_rule. Returns the tensors that it points to; keep them alive while it is used."""
    b, h, n, m = rule.grid
    spans = lowered.spans
    held: list[Any] = [spans]
    view.shift, view.scale, view.soft_cap = rule.grid.shift, rule.scale, lowered.soft_cap
    view.spans, view.span_count = spans.data_ptr(), spans.shape[2]
    view.span_batch = spans.stride(0) if spans.shape[0] > 1 else 0
    if lowered.dense is not None:
        dense = lowered.dense if lowered.dense.stride(-1) == 1 else lowered.dense.contiguous()
        held.append(dense)
        view.dense = dense.data_ptr()
        view.dense_batch, view.dense_head, view.dense_row, _ = dense.expand(b, h, n, m).stride()
    if lowered.relative is not None:
        relative = lowered.relative.detach().float().contiguous()
        held.append(relative)
        view.relative = relative.data_ptr()
        view.relative_head = n + m - 1 if len(relative) > 1 else 0
    if lowered.bias is not None:
        bias = lowered.bias.detach().float()
        held.append(bias)
        view.bias = bias.data_ptr()
        view.bias_batch, view.bias_head, view.bias_row, view.bias_col = bias.expand(b, h, n, m).stride()
    if lowered.sinks is not None:
        sinks = lowered.sinks.detach().float().contiguous()
        held.append(sinks)
        view.sinks = sinks.data_ptr()
    return held


def write_lse(request: BackwardCall | PoolCall | DiagonalsCall, lse: Tensor) -> Tensor:
    """Set the log-sum-exp, and return the tensor that the request points to. One in float64 is exact for logits that do
    not depend on the shapes of a read; so these are requested too."""
    held = lse.double().contiguous()
    request.lse, request.single = held.data_ptr(), lse.dtype == torch.float64
    return held


def of_all_keys(like: ForwardCall, m: int, strides: Sequence[tuple[int, ...]]) -> tuple[ForwardCall, Any]:
    """The same request for m keys, all seen by its only query; and the array that it points to, to be kept alive.
    strides: of keys and values, and of their scales."""
    request, span = ForwardCall.from_buffer_copy(like), (c_int32 * 2)(0, m)
    views = request.k, request.v, request.key_scales, request.value_scales
    for view, (batch, head, *_) in zip(views, strides, strict=False):
        view.batch, view.head = batch, head
    request.m, request.rule.shift, request.rule.spans = m, m - 1, addressof(span)
    request.rule.span_batch, request.rule.span_count = 0, 1
    return request, span


def write_learned(view: BackwardCall, relative: Tensor | None, bias: Tensor | None, sinks: Tensor | None) -> None:
    """Set the outputs for the requested gradients of the rule's terms, contiguous float32 tensors in their shapes."""
    if relative is not None:
        view.grad_relative = relative.data_ptr()
        view.grad_relative_head = relative.stride(0) if len(relative) > 1 else 0
    if bias is not None:
        view.grad_bias = bias.data_ptr()
        steps = (0 if size == 1 else step for size, step in zip(bias.shape, bias.stride(), strict=True))
        view.grad_bias_batch, view.grad_bias_head, view.grad_bias_row, view.grad_bias_col = steps
    if sinks is not None:
        view.grad_sinks = sinks.data_ptr()
