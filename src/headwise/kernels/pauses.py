"""Long calls in blocks of queries, so that a progress callback can run between blocks and cancel the call.

    with within(progress=progress):     # called before each block and at the end, in this thread
        model(ids)                      # an exception raised by `progress` cancels the call

A query's row does not depend on the rows computed with it, so the result is that of the whole call. Only inference is
split: calls with gradients or dropout run in one piece, as do those whose kernel only supports the whole matrix.
"""

from dataclasses import replace

import torch
from torch import Tensor

from headwise.base.run import Progress
from headwise.kernels.call import Call, Result
from headwise.kernels.gradients import run_kernel
from headwise.kernels.kernel import Kernel
from headwise.masks import Span
from headwise.stats import Statistic
from headwise.tiles import COMPUTING

PAIRS = 1 << 26  # (query, key) pairs of a block over all heads, per thread: about 0.2 s of one core
ROWS = 64  # block sizes are multiples of this, as kernels compute several rows at a time


def in_blocks(kernel: Kernel, call: Call, progress: Progress) -> Result:
    """Run a call that the kernel does not refuse in blocks. Raises Declined as the kernel does."""
    rows, n = _rows_a_block(call), call.rule.grid.n
    blocks = [Span(start, min(n, start + rows)) for start in range(0, n, rows)]
    if len(blocks) < 2 or torch.is_grad_enabled() or call.dropout_p > 0:
        return run_kernel(kernel, call)
    parts: list[Result] = []
    found: list[dict[Statistic, Tensor]] = []
    for block in blocks:
        progress(COMPUTING, block.start, n)
        local = {statistic: statistic.rows(block) for statistic in call.statistics}
        part = replace(
            call, q=call.q[:, :, slice(*block)], rule=call.rule.rows(block), statistics=tuple(local.values())
        )
        if kernel.refuse(part) is not None:
            return kernel.run(call)
        parts.append(kernel.run(part))
        given = parts[-1].statistics
        found.append({statistic: given[here] for statistic, here in local.items() if here in given})
    progress(COMPUTING, n, n)
    statistics = {s: s.of_blocks([part[s] for part in found]) for s in found[0] if all(s in part for part in found)}
    return Result(torch.cat([part.out for part in parts], 2), torch.cat([part.lse for part in parts], 2), statistics)


def _rows_a_block(call: Call) -> int:
    b, h, _, m = call.rule.grid
    rows = PAIRS * torch.get_num_threads() // max(1, b * h * m)
    return max(ROWS, rows // ROWS * ROWS)
