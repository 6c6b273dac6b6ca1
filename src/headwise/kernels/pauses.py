"""Long calls in blocks of queries, so that someone may look in between how far they are, and end them.

    with pausing(progress):         # called before each block and at the end, in this thread
        model(ids)                  # an exception that it raises ends the call

A query's row is the same whatever rows are computed beside it: the blocks are the whole call. It is for reading: calls
with gradients or dropout are done in one piece, and so is what a kernel can do of whole matrices alone.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from headwise.kernels.autograd import done_by
from headwise.kernels.call import Call, Result
from headwise.kernels.kernel import Kernel
from headwise.masks import Span
from headwise.progress import Progress
from headwise.stats import Statistic
from headwise.tiles import COMPUTING

PAIRS = 1 << 26  # of query and key, all heads together, for each thread: some 0.2 s of one core
ROWS = 64  # a block has at least so many, and a multiple of it, as kernels compute several at a time

_here = threading.local()
_pausing = 0  # in all threads: one look at a number is all that a call pays while nobody does


def anyone() -> bool:
    """Whether calls of this thread are to pause."""
    return _pausing > 0 and getattr(_here, "look", None) is not None


@contextmanager
def pausing(progress: Progress) -> Iterator[None]:
    """Within it, long calls of `attend` in this thread report the rows done and the rows in all."""
    global _pausing
    before = getattr(_here, "look", None)
    _here.look = progress
    _pausing += 1
    try:
        yield
    finally:
        _pausing -= 1
        _here.look = before


def in_blocks(kernel: Kernel, call: Call) -> Result:
    """A call that the kernel does not refuse, with pauses. Raises Declined as the kernel does."""
    look, rows = _here.look, _rows_a_block(call)
    n = call.rule.grid.n
    blocks = [Span(start, min(n, start + rows)) for start in range(0, n, rows)]
    if len(blocks) < 2 or torch.is_grad_enabled() or call.dropout_p > 0:
        return done_by(kernel, call)
    parts: list[Result] = []
    found: list[dict[Statistic, Tensor]] = []
    for block in blocks:
        look(COMPUTING, block.start, n)
        local = {statistic: statistic.rows(block) for statistic in call.statistics}
        part = replace(
            call, q=call.q[:, :, slice(*block)], rule=call.rule.rows(block), statistics=tuple(local.values())
        )
        if kernel.refuse(part) is not None:
            return kernel.run(call)
        parts.append(kernel.run(part))
        told = parts[-1].statistics
        found.append({statistic: told[here] for statistic, here in local.items() if here in told})
    look(COMPUTING, n, n)
    statistics = {s: s.of_blocks([told[s] for told in found]) for s in found[0] if all(s in told for told in found)}
    return Result(torch.cat([part.out for part in parts], 2), torch.cat([part.lse for part in parts], 2), statistics)


def _rows_a_block(call: Call) -> int:
    b, h, _, m = call.rule.grid
    rows = PAIRS * torch.get_num_threads() // max(1, b * h * m)
    return max(ROWS, rows // ROWS * ROWS)
