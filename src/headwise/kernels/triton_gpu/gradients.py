"""From tensors to kernel launches: the backward pass."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.kernels.triton_gpu.backward import delta_kernel, key_gradient_kernel, query_gradient_kernel
from headwise.kernels.triton_gpu.blocks import Blocks, padded
from headwise.kernels.triton_gpu.plan import key_range, query_blocks
from headwise.kernels.triton_gpu.problem import Problem, on, options, stride, walk
from headwise.kernels.triton_gpu.score_gradients import bias_gradient_kernel, relative_gradient_kernel
from headwise.rule import sink_gradient

DELTA_ROWS = 64


class Gradients(NamedTuple):
    """Gradients of q, k, v; of the terms added to the scores, where requested; and δ = rowsum(dO ∘ O), [b, h, n].

    Σ_i δ_i of a head is the gradient with respect to a factor ξ = 1 on its output: its importance (Michel et al. 2019).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    relative: Tensor | None
    bias: Tensor | None
    sinks: Tensor | None
    delta: Tensor


def backward(
    problem: Problem, out: Tensor, lse: Tensor, d_out: Tensor, *, score_gradients: tuple[bool, bool, bool]
) -> Gradients:
    """Compute all gradients; `score_gradients`: whether relative, bias and sinks require theirs."""
    b, h, h_kv, n, m = problem.sizes
    q, v = problem.q, problem.v
    d, d_v = q.shape[-1], v.shape[-1]
    size = problem.backward_size
    plan = problem.keys_of(size.rows, size.cols)
    rows, cols = -(-n // size.rows), -(-m // size.cols)
    back = query_blocks(plan, cols).to(q.device)
    plan = plan.to(q.device)
    delta = torch.empty(b, h, n, dtype=torch.float32, device=q.device)
    dq = torch.empty(b, h, n, d, dtype=q.dtype, device=q.device)
    dk = torch.empty(b, h_kv, m, d, dtype=q.dtype, device=q.device)
    dv = torch.empty(b, h_kv, m, d_v, dtype=q.dtype, device=q.device)
    common = (*problem.inputs, *problem.score_inputs, problem.seed, problem.drop)
    given = (d_out, *d_out.stride(), lse, delta)
    flags = {**problem.constants(size), "DROP": problem.drop > 0, **options(size)}
    with on(q):
        delta_kernel[(-(-delta.numel() // DELTA_ROWS),)](
            out, d_out, delta, *d_out.stride(), h, n, delta.numel(), DV=d_v, DVP=padded(d_v), BM=DELTA_ROWS
        )
        query_gradient_kernel[(rows * b * h,)](*common, *walk(plan), *given, dq, rows, problem.scale, **flags)
        key_gradient_kernel[(cols * b * h_kv,)](*common, *walk(back), *given, dk, dv, cols, problem.scale, **flags)
        want_relative, want_bias, want_sinks = score_gradients
        relative = _relative_gradient(problem, size, common, given, flags) if want_relative else None
        bias = _bias_gradient(problem, size, common, given, flags) if want_bias else None
        assert problem.sinks is not None or not want_sinks
        sinks = sink_gradient(problem.sinks, lse, delta) if problem.sinks is not None and want_sinks else None
    return Gradients(dq, dk, dv, relative, bias, sinks, delta)


def _relative_gradient(
    problem: Problem, size: Blocks, common: tuple[Any, ...], given: tuple[Any, ...], flags: dict[str, Any]
) -> Tensor:
    """Gradient of the table [h or 1, n + m − 1]. The halves of neighbouring bands overlap and are added here."""
    b, h, _, n, m = problem.sizes
    assert problem.relative is not None
    height = size.rows
    bands = -(-(n + m - 1) // height) + 1
    parts = torch.empty(h, bands, 2 * height, dtype=torch.float32, device=problem.q.device)
    seen = key_range(problem.spans, m, height).to(problem.q.device)
    flags = {name: value for name, value in flags.items() if name != "BN"}
    relative_gradient_kernel[(h * bands,)](
        *common, seen, stride(seen, 0), *given, parts, b, -(-n // height), bands, **flags
    )
    sums = parts.new_zeros(h, bands + 1, height)
    sums[:, :-1] += parts[..., :height]
    sums[:, 1:] += parts[..., height:]
    table = sums.view(h, -1)[:, height - 1 : height - 1 + n + m - 1]
    return table if len(problem.relative) == h else table.sum(0, keepdim=True)


def _bias_gradient(
    problem: Problem, size: Blocks, common: tuple[Any, ...], given: tuple[Any, ...], flags: dict[str, Any]
) -> Tensor:
    """Gradient of the bias [b|1, h|1, n|1, m|1], summed over the axes along which it is broadcast."""
    b, h, _, n, m = problem.sizes
    assert problem.bias is not None
    result = torch.empty(problem.bias.shape, dtype=torch.float32, device=problem.q.device)
    own_b, own_h, own_n, own_m = result.shape
    rows, cols = -(-n // size.rows), -(-m // size.cols)
    row_blocks, row_steps = (1, rows) if own_n == 1 else (rows, 1)
    col_blocks, col_steps = (1, cols) if own_m == 1 else (cols, 1)
    seen = key_range(problem.spans, m, size.rows).to(problem.q.device)
    bias_gradient_kernel[(own_b * own_h * row_blocks * col_blocks,)](
        *common, seen, stride(seen, 0), *given, result, *result.stride(), b // own_b, h // own_h,
        row_steps, col_steps, row_blocks, col_blocks, ALL_ROWS=own_n == 1, ALL_COLS=own_m == 1, **flags,
    )  # fmt: skip
    return result
