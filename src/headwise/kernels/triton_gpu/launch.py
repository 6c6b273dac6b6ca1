"""From tensors to kernel launches: the forward pass and the sweep over columns."""

from typing import Any

import torch
from torch import Tensor

from headwise.kernels.triton_gpu.backward import column_mass_kernel
from headwise.kernels.triton_gpu.blocks import DECODE_QUERIES, decode_blocks, forward_blocks, padded, splits
from headwise.kernels.triton_gpu.forward import attend_kernel, merge_kernel
from headwise.kernels.triton_gpu.plan import query_blocks
from headwise.kernels.triton_gpu.problem import Problem, on, options, walk
from headwise.kernels.triton_gpu.sums import FORMULAS, MASSES, SHARES
from headwise.kernels.triton_gpu.wanted import Wanted

MERGE_ROWS = 16


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
    mass_count = len(wanted.table)
    g = 1 << (mass_count - 1).bit_length() if mass_count else 0
    rows = b * h * n
    out = torch.empty(b, h, n, d_v, dtype=q.dtype, device=q.device)
    results = torch.zeros(SHARES + mass_count, b, h, n, dtype=torch.float32, device=q.device)
    partial = results.new_empty(parts if parts > 1 else 0, MASSES + g, rows)
    partial_out = results.new_empty(parts if parts > 1 else 0, rows, d_v)
    table = torch.tensor(wanted.table, dtype=torch.int32, device=q.device)
    weights = torch.cat([x.to(q.device) for x in wanted.weights]).contiguous() if wanted.weights else None
    flags: dict[str, Any] = {
        "HAS_SINKS": problem.sinks is not None,
        "DROP": problem.drop > 0,
        **{flag: flag in wanted.flags for _, flag in FORMULAS.values() if flag},
        "G": g,
    }
    with on(q):
        attend_kernel[(programs, parts)](
            *problem.inputs, *problem.score_inputs, problem.sinks, problem.seed, problem.drop, *walk(plan),
            out, results, partial, partial_out, row_blocks, rows, -(-cols // parts),
            table, mass_count, weights, wanted.shift, **problem.constants(size), **flags,
            WEIGHTED=weights is not None, FOLD=fold, SPLIT=parts > 1, **options(size, busy=wanted.busy),
        )  # fmt: skip
        if parts > 1:
            merge_kernel[(-(-rows // MERGE_ROWS),)](
                partial, partial_out, out, results, problem.sinks, h, n, rows, parts, mass_count, problem.drop,
                DV=d_v, DVP=padded(d_v), BM=MERGE_ROWS, **flags, PRECISION=problem.precision, num_warps=4,
            )  # fmt: skip
    return out, results


def columns(problem: Problem, lse: Tensor) -> Tensor:
    """The weight that each key receives, Σ_i p_ij: float32 [b, h, m]."""
    b, h, _, _, m = problem.sizes
    size = problem.backward_size
    plan = query_blocks(problem.keys_of(size.rows, size.cols), -(-m // size.cols)).to(lse.device)
    received = torch.empty(b, h, m, dtype=torch.float32, device=lse.device)
    col_blocks = -(-m // size.cols)
    constants = problem.constants(size)
    del constants["DV"], constants["DVP"]
    with on(lse):
        column_mass_kernel[(col_blocks * b * h,)](
            problem.q, problem.k, *problem.q.stride(), *problem.k.stride(), *problem.sizes[1:],
            *problem.score_inputs, *walk(plan), lse, received, col_blocks, **constants, **options(size),
        )  # fmt: skip
    return received
