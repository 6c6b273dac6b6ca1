"""Block sizes of the kernels, and which blocks of keys each block of queries visits.

Sizes are a fixed table, so that the same call always gives the same bits. Visits follow from the key ranges of each
query: for each range, a block of queries visits the blocks of keys from the earliest start to the latest stop; those
inside the range of every query need no mask. Both sets are intervals, so a plan has O(n) numbers.
"""

from typing import NamedTuple

import torch
from torch import Tensor

DECODE_QUERIES = 16  # the most queries that count as decoding: they share the keys of their group, and keys are split
SPLIT_KEYS = 512  # the fewest keys per split
PROGRAMS = 256  # about as many programs as occupy a large GPU


class Blocks(NamedTuple):
    """Queries and keys per tile, warps per program, and pipeline stages."""

    rows: int
    cols: int
    warps: int
    stages: int


def forward_blocks(d: int, d_v: int, dtype: torch.dtype, *, extras: bool) -> Blocks:
    """Tiles of the forward pass, by head size and dtype. `extras`: with a bias, a table, a boolean mask, a soft cap or
    dropout, which need more registers and shared memory."""
    wide = max(d, d_v)
    if dtype == torch.float32:  # no tensor cores: exact products
        return Blocks(64, 32, 4, 2) if wide <= 64 else Blocks(32, 32, 4, 1) if wide <= 128 else Blocks(16, 32, 4, 1)
    if extras:
        return Blocks(64, 32, 4, 2) if wide <= 128 else Blocks(32, 32, 4, 1)
    return Blocks(128, 64, 4, 3) if wide <= 64 else Blocks(128, 64, 8, 2) if wide <= 128 else Blocks(64, 32, 4, 2)


def backward_blocks(d: int, d_v: int, dtype: torch.dtype, *, extras: bool) -> Blocks:
    """Tiles of the backward passes and of the sweep over columns."""
    wide = max(d, d_v)
    if dtype == torch.float32:
        return Blocks(32, 32, 4, 1) if wide <= 128 else Blocks(16, 16, 4, 1)
    if extras:
        return Blocks(32, 32, 4, 1)
    return Blocks(64, 64, 4, 2) if wide <= 64 else Blocks(64, 32, 4, 2) if wide <= 128 else Blocks(32, 32, 4, 1)


def decode_blocks(d: int, d_v: int, dtype: torch.dtype, *, extras: bool) -> Blocks:
    """Tiles of the decoding pass: few rows, because there are few queries."""
    wide = max(d, d_v)
    if dtype == torch.float32:
        return Blocks(16, 32, 4, 2) if wide <= 128 else Blocks(16, 16, 4, 1)
    return Blocks(16, 64, 4, 1 if extras else 3) if wide <= 128 else Blocks(16, 32, 4, 1 if extras else 2)


def splits(m: int, programs: int) -> int:
    """The number of ranges into which the keys are split if there are few programs; depends only on the shape."""
    return max(1, min(-(-m // SPLIT_KEYS), PROGRAMS // max(programs, 1)))


def padded(size: int) -> int:
    """Round up to a power of two ≥ 16, as a matrix product on the GPU requires."""
    return max(16, 1 << (size - 1).bit_length())


_CELLS = 1 << 22  # the most cells of the blocks × blocks table in memory at once


class Plan(NamedTuple):
    """Half-open intervals of blocks without and with a mask, each int32 [b or 1, blocks, count, 2]."""

    full: Tensor
    mixed: Tensor

    def to(self, device: torch.device) -> "Plan":
        """Move the plan to a device."""
        return Plan(self.full.to(device), self.mixed.to(device))


def key_blocks(spans: Tensor, m: int, rows: int, cols: int, *, masked: bool) -> Plan:
    """The blocks of `cols` keys that each block of `rows` queries attends to. spans: int32 [b or 1, n, K, 2], of
    `Lowered`; masked: whether another mask applies as well, so that every block needs a mask."""
    b, n, count, _ = spans.shape
    at = torch.arange(-(-n // rows) * rows, device="cpu").clamp_(max=n - 1)
    ranges = spans.long()[:, at].view(b, -1, rows, count, 2)
    start, stop = ranges.unbind(-1)  # [b, blocks, rows, K]
    live = stop > start
    low = start.masked_fill(~live, m).amin(2) // cols
    high = -(-stop.masked_fill(~live, 0).amax(2) // cols)
    # Skip blocks that an earlier range has covered.
    covered = torch.cat((torch.zeros_like(high[..., :1]), high.cummax(-1).values[..., :-1]), -1)
    low = torch.maximum(low, covered)
    high = torch.maximum(high, low)
    inner_low = -(-start.amax(2) // cols)
    inner_high = stop.amin(2) // cols
    if masked:
        inner_high = torch.zeros_like(inner_high)
    inner_low = torch.minimum(torch.maximum(inner_low, low), high)
    inner_high = torch.maximum(torch.minimum(inner_high, high), inner_low)
    full = torch.stack((inner_low, inner_high), -1)
    mixed = torch.cat((torch.stack((low, inner_low), -1), torch.stack((inner_high, high), -1)), -2)
    return Plan(_trim(full), _trim(mixed))


def query_blocks(plan: Plan, key_count: int) -> Plan:
    """The inverse: for each of `key_count` blocks of keys, the interval of blocks of queries that attend to it. Those
    in between that do not are visited with the mask; the blocks without a mask form an interval only if they have no
    gap."""
    everything = torch.cat((plan.full, plan.mixed), -2)
    b, blocks = everything.shape[:2]
    seen_first, seen_last, _ = _extent(everything, key_count)
    full_first, full_last, full_count = _extent(plan.full, key_count)
    whole = full_count == full_last - full_first
    full_first = torch.where(whole, full_first, seen_first)
    full_last = torch.where(whole, full_last, seen_first)
    full = torch.stack((full_first, full_last), -1)[:, :, None]
    mixed = torch.stack((torch.stack((seen_first, full_first), -1), torch.stack((full_last, seen_last), -1)), -2)
    assert full.shape == (b, key_count, 1, 2)
    assert int(seen_last.max()) <= blocks
    return Plan(_trim(full), _trim(mixed))


def key_range(spans: Tensor, m: int, rows: int) -> Tensor:
    """First key and last key + 1 that each block of `rows` queries attends to, int32 [b or 1, blocks, 2]."""
    b, n, _, _ = spans.shape
    at = torch.arange(-(-n // rows) * rows, device="cpu").clamp_(max=n - 1)
    start, stop = spans[:, at].view(b, -1, rows, spans.shape[2], 2).flatten(2, 3).unbind(-1)
    first = start.masked_fill(stop <= start, m).amin(-1)
    return torch.stack((first, torch.maximum(first, stop.amax(-1))), -1).int().contiguous()


def _extent(intervals: Tensor, key_count: int) -> tuple[Tensor, Tensor, Tensor]:
    """First and last + 1 of the rows whose intervals contain a column, and their number: [b, key_count] each."""
    b, blocks, count, _ = intervals.shape
    column = torch.arange(key_count, device="cpu")
    first = torch.full((b, key_count), blocks, device="cpu")
    last = torch.zeros(b, key_count, dtype=torch.long, device="cpu")
    number = torch.zeros(b, key_count, dtype=torch.long, device="cpu")
    step = max(1, _CELLS // max(1, b * count * key_count))
    for begin in range(0, blocks, step):
        part = intervals[:, begin : begin + step, :, :, None].long()  # [b, r, count, 2, 1]
        inside = ((column >= part[..., 0, :]) & (column < part[..., 1, :])).any(2)  # [b, r, key_count]
        row = torch.arange(begin, begin + inside.shape[1], device="cpu")[:, None]
        first = torch.minimum(first, torch.where(inside, row, blocks).amin(1))
        last = torch.maximum(last, torch.where(inside, row + 1, 0).amax(1))
        number += inside.sum(1)
    return torch.minimum(first, last), last, number


def _trim(intervals: Tensor) -> Tensor:
    """Remove the slots that are empty everywhere; keep at least one."""
    used = (intervals[..., 1] > intervals[..., 0]).flatten(0, 1).any(0)
    used[0] |= not bool(used.any())
    return intervals[:, :, used].int().contiguous()
