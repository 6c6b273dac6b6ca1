"""From tensors to kernel launches: the forward pass, the sweep over columns and the backward pass."""
# mypy: disable-error-code="import-not-found"

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from headwise.kernels.triton_gpu.backward import (
    column_mass_kernel,
    delta_kernel,
    key_gradient_kernel,
    query_gradient_kernel,
)
from headwise.kernels.triton_gpu.blocks import (
    DECODE_QUERIES,
    Blocks,
    backward_blocks,
    decode_blocks,
    forward_blocks,
    padded,
    splits,
)
from headwise.kernels.triton_gpu.forward import attend_kernel, merge_kernel
from headwise.kernels.triton_gpu.plan import Plan, key_blocks, key_range, query_blocks
from headwise.kernels.triton_gpu.score_gradients import bias_gradient_kernel, relative_gradient_kernel
from headwise.kernels.triton_gpu.sums import MASSES, SHARES
from headwise.rule import sink_gradient

LOG2E = math.log2(math.e)
INTERPRETED = not isinstance(attend_kernel, triton.JITFunction)
DELTA_ROWS = 64
MERGE_ROWS = 16


class Wanted(NamedTuple):
    """The statistics to sum up beside the output.

    Attributes:
        ranges: (start, stop, relative) of each mass on a range of keys.
        classes: float32 [count, b or 1, m], contiguous: the weight of each key in each class.
        shift: position of query 0 on the key axis, from which distances are counted.
    """

    entropy: bool = False
    squares: bool = False
    distance: bool = False
    ranges: tuple[tuple[int, int, bool], ...] = ()
    classes: Tensor | None = None
    shift: int = 0

    @property
    def busy(self) -> bool:
        """Whether anything is asked for beside the output, the log-sum-exp and the maximum."""
        return self.entropy or self.squares or self.distance or bool(self.ranges) or self.classes is not None


@dataclass(frozen=True)
class Problem:
    """One attention as the kernels see it.

    q [b, h, n, d], k [b, h_kv, m, d], v [b, h_kv, m, d_v], any strides, on one device, where `dense`, `relative`,
    `bias` and `sinks` are too (forms as in `Lowered`). `spans` is on the CPU, where the walks are planned.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    spans: Tensor
    dense: Tensor | None = None
    soft_cap: float = 0.0
    relative: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    drop: float = 0.0
    seed: int = 0

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """b, h, h_kv, n, m"""
        b, h, n, _ = self.q.shape
        return b, h, self.k.shape[1], n, self.k.shape[2]

    @property
    def extras(self) -> bool:
        """Whether a score takes more than a product and a scale."""
        given = any(x is not None for x in (self.dense, self.relative, self.bias))
        return given or self.soft_cap > 0 or self.drop > 0

    def keys_of(self, rows: int, cols: int) -> Plan:
        """What blocks of `rows` queries walk over."""
        return key_blocks(self.spans, self.sizes[4], rows, cols, masked=self.dense is not None)


class Gradients(NamedTuple):
    """Of q, k, v; of what is added to the scores, where it was asked for; and δ = rowsum(dO ∘ O), [b, h, n].

    Σ_i δ_i of a head is the gradient of a factor on its output at 1: its importance (Michel et al. 2019).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    relative: Tensor | None
    bias: Tensor | None
    sinks: Tensor | None
    delta: Tensor


def forward(problem: Problem, wanted: Wanted) -> tuple[Tensor, Tensor]:
    """Output [b, h, n, d_v] in q's dtype, and float32 [planes, b, h, n] in the order of `sums.LSE` and following."""
    b, h, h_kv, n, m = problem.sizes
    q, v = problem.q, problem.v
    d_v = v.shape[-1]
    fold = n <= DECODE_QUERIES
    size = (decode_blocks if fold else forward_blocks)(q.shape[-1], d_v, q.dtype, extras=problem.extras)
    row_blocks = -(-(h // h_kv * n) // size.rows) if fold else -(-n // size.rows)
    programs = row_blocks * b * (h_kv if fold else h)
    parts = splits(m, programs) if fold else 1
    cols = -(-m // size.cols)
    plan = problem.keys_of(n if fold else size.rows, size.cols).to(q.device)
    class_count = 0 if wanted.classes is None else len(wanted.classes)
    mass_count = len(wanted.ranges) + class_count
    g = 1 << (mass_count - 1).bit_length() if mass_count else 0
    rows = b * h * n
    out = torch.empty(b, h, n, d_v, dtype=q.dtype, device=q.device)
    results = torch.zeros(SHARES + mass_count, b, h, n, dtype=torch.float32, device=q.device)
    partial = results.new_empty(parts if parts > 1 else 0, MASSES + g, rows)
    partial_out = results.new_empty(parts if parts > 1 else 0, rows, d_v)
    ranges = torch.tensor(wanted.ranges, dtype=torch.int32, device=q.device).reshape(-1, 3)
    classes = wanted.classes
    flags: dict[str, Any] = {
        "HAS_SINKS": problem.sinks is not None,
        "DROP": problem.drop > 0,
        "ENT": wanted.entropy,
        "SQ": wanted.squares,
        "DIST": wanted.distance,
        "G": g,
    }
    with _on(q):
        attend_kernel[(programs, parts)](
            *_inputs(problem), *_score_inputs(problem), problem.sinks, problem.seed, problem.drop, *_walk(plan),
            out, results, partial, partial_out, row_blocks, rows, -(-cols // parts),
            ranges, len(wanted.ranges), classes, _stride(classes, 1), _stride(classes, 0), class_count, wanted.shift,
            **_constants(problem, size), **flags,
            HAS_CLASSES=classes is not None, FOLD=fold, SPLIT=parts > 1, **_launch(size, busy=wanted.busy),
        )  # fmt: skip
        if parts > 1:
            merge_kernel[(-(-rows // MERGE_ROWS),)](
                partial, partial_out, out, results, problem.sinks, h, n, rows, parts, mass_count, problem.drop,
                DV=d_v, DVP=padded(d_v), BM=MERGE_ROWS, **flags, PRECISION=_precision(q), num_warps=4,
            )  # fmt: skip
    return out, results


def columns(problem: Problem, lse: Tensor) -> Tensor:
    """Σ_i p_ij, float32 [b, h, m]: what each key receives."""
    b, h, _, _, m = problem.sizes
    size = _backward_size(problem)
    plan = query_blocks(problem.keys_of(size.rows, size.cols), -(-m // size.cols)).to(lse.device)
    received = torch.empty(b, h, m, dtype=torch.float32, device=lse.device)
    col_blocks = -(-m // size.cols)
    constants = _constants(problem, size)
    del constants["DV"], constants["DVP"]
    with _on(lse):
        column_mass_kernel[(col_blocks * b * h,)](
            problem.q, problem.k, *problem.q.stride(), *problem.k.stride(), *problem.sizes[1:],
            *_score_inputs(problem), *_walk(plan), lse, received, col_blocks, **constants, **_launch(size),
        )  # fmt: skip
    return received


def backward(
    problem: Problem, out: Tensor, lse: Tensor, d_out: Tensor, *, score_gradients: tuple[bool, bool, bool]
) -> Gradients:
    """All gradients; `score_gradients` says whether relative, bias and sinks need theirs."""
    b, h, h_kv, n, m = problem.sizes
    q, v = problem.q, problem.v
    d, d_v = q.shape[-1], v.shape[-1]
    size = _backward_size(problem)
    plan = problem.keys_of(size.rows, size.cols)
    rows, cols = -(-n // size.rows), -(-m // size.cols)
    back = query_blocks(plan, cols).to(q.device)
    plan = plan.to(q.device)
    delta = torch.empty(b, h, n, dtype=torch.float32, device=q.device)
    dq = torch.empty(b, h, n, d, dtype=q.dtype, device=q.device)
    dk = torch.empty(b, h_kv, m, d, dtype=q.dtype, device=q.device)
    dv = torch.empty(b, h_kv, m, d_v, dtype=q.dtype, device=q.device)
    common = (*_inputs(problem), *_score_inputs(problem), problem.seed, problem.drop)
    given = (d_out, *d_out.stride(), lse, delta)
    flags = {**_constants(problem, size), "DROP": problem.drop > 0, **_launch(size)}
    with _on(q):
        delta_kernel[(-(-delta.numel() // DELTA_ROWS),)](
            out, d_out, delta, *d_out.stride(), h, n, delta.numel(), DV=d_v, DVP=padded(d_v), BM=DELTA_ROWS
        )
        query_gradient_kernel[(rows * b * h,)](*common, *_walk(plan), *given, dq, rows, problem.scale, **flags)
        key_gradient_kernel[(cols * b * h_kv,)](*common, *_walk(back), *given, dk, dv, cols, problem.scale, **flags)
        want_relative, want_bias, want_sinks = score_gradients
        relative = _relative_gradient(problem, size, common, given, flags) if want_relative else None
        bias = _bias_gradient(problem, size, common, given, flags) if want_bias else None
        assert problem.sinks is not None or not want_sinks
        sinks = sink_gradient(problem.sinks, lse, delta) if problem.sinks is not None and want_sinks else None
    return Gradients(dq, dk, dv, relative, bias, sinks, delta)


def _relative_gradient(
    problem: Problem, size: Blocks, common: tuple[Any, ...], given: tuple[Any, ...], flags: dict[str, Any]
) -> Tensor:
    """Of the table [h or 1, n + m − 1]; the halves of neighbouring bands overlap and are added here."""
    b, h, _, n, m = problem.sizes
    assert problem.relative is not None
    height = size.rows
    bands = -(-(n + m - 1) // height) + 1
    parts = torch.empty(h, bands, 2 * height, dtype=torch.float32, device=problem.q.device)
    seen = key_range(problem.spans, m, height).to(problem.q.device)
    flags = {name: value for name, value in flags.items() if name != "BN"}
    relative_gradient_kernel[(h * bands,)](
        *common, seen, _stride(seen, 0), *given, parts, b, -(-n // height), bands, **flags
    )
    sums = parts.new_zeros(h, bands + 1, height)
    sums[:, :-1] += parts[..., :height]
    sums[:, 1:] += parts[..., height:]
    table = sums.view(h, -1)[:, height - 1 : height - 1 + n + m - 1]
    return table if len(problem.relative) == h else table.sum(0, keepdim=True)


def _bias_gradient(
    problem: Problem, size: Blocks, common: tuple[Any, ...], given: tuple[Any, ...], flags: dict[str, Any]
) -> Tensor:
    """Of the bias [b|1, h|1, n|1, m|1]: summed over the axes along which it is broadcast."""
    b, h, _, n, m = problem.sizes
    assert problem.bias is not None
    result = torch.empty(problem.bias.shape, dtype=torch.float32, device=problem.q.device)
    own_b, own_h, own_n, own_m = result.shape
    rows, cols = -(-n // size.rows), -(-m // size.cols)
    row_blocks, row_steps = (1, rows) if own_n == 1 else (rows, 1)
    col_blocks, col_steps = (1, cols) if own_m == 1 else (cols, 1)
    seen = key_range(problem.spans, m, size.rows).to(problem.q.device)
    bias_gradient_kernel[(own_b * own_h * row_blocks * col_blocks,)](
        *common, seen, _stride(seen, 0), *given, result, *result.stride(), b // own_b, h // own_h,
        row_steps, col_steps, row_blocks, col_blocks, ALL_ROWS=own_n == 1, ALL_COLS=own_m == 1, **flags,
    )  # fmt: skip
    return result


def _backward_size(problem: Problem) -> Blocks:
    return backward_blocks(problem.q.shape[-1], problem.v.shape[-1], problem.q.dtype, extras=problem.extras)


def _inputs(problem: Problem) -> tuple[Any, ...]:
    q, k, v = problem.q, problem.k, problem.v
    return q, k, v, *q.stride(), *k.stride(), *v.stride(), *problem.sizes[1:]


def _score_inputs(problem: Problem) -> tuple[Any, ...]:
    cap, dense, bias, relative = problem.soft_cap, problem.dense, problem.bias, problem.relative
    spans = problem.spans.to(problem.q.device)
    return (
        problem.scale / cap if cap else problem.scale * LOG2E, cap * LOG2E, relative, _stride(relative, 0),
        bias, *(_stride(bias, axis) for axis in range(4)),
        spans, _stride(spans, 0), spans.shape[2], dense, *(_stride(dense, axis) for axis in range(4)),
    )  # fmt: skip


def _stride(x: Tensor | None, axis: int) -> int:
    """0 along an axis that is broadcast."""
    return 0 if x is None or x.shape[axis] == 1 else x.stride(axis)


def _walk(plan: Plan) -> tuple[Any, ...]:
    return tuple(x for part in plan for x in (part, _stride(part, 0), part.shape[2]))


def _constants(problem: Problem, size: Blocks) -> dict[str, Any]:
    d, d_v = problem.q.shape[-1], problem.v.shape[-1]
    return {
        "D": d,
        "DP": padded(d),
        "DV": d_v,
        "DVP": padded(d_v),
        "BM": size.rows,
        "BN": size.cols,
        "HAS_CAP": problem.soft_cap > 0,
        "HAS_REL": problem.relative is not None,
        "HAS_BIAS": problem.bias is not None,
        "HAS_DENSE": problem.dense is not None,
        "PRECISION": _precision(problem.q),
    }


def _precision(q: Tensor) -> str:
    """How `product` multiplies."""
    if q.dtype == torch.float32:
        return "ieee"
    return "upcast" if q.dtype == torch.bfloat16 and INTERPRETED else "tf32"  # the latter concerns float32 alone


def _launch(size: Blocks, *, busy: bool = False) -> dict[str, Any]:
    """How a kernel is compiled; one that sums up statistics has more to hold, so it gets more warps."""
    # Contraction to fused multiply-adds is asked for by name: Triton's default is about to change.
    warps = max(size.warps, 8) if busy else size.warps
    return {"num_warps": warps, "num_stages": size.stages, "enable_fp_fusion": True}


def _on(x: Tensor) -> AbstractContextManager[object]:
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
