"""Block sizes of the kernels, and which blocks of keys each block of queries visits.

Sizes are a fixed table, so that the same call always gives the same bits. Visits follow from the key ranges of each
query: for each range, a block of queries visits the blocks of keys from the earliest start to the latest stop; those
inside the range of every query need no mask. Both sets are intervals, so a plan has O(n) numbers.
"""

from collections.abc import Callable, Hashable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

DECODE_QUERIES = 16  # the most queries that count as decoding: they share the keys of their group, and keys are split
SPLIT_KEYS = 512  # the fewest keys per split
PROGRAMS = 256  # about as many programs as occupy a large GPU


class Blocks(NamedTuple):
    """Queries and keys per tile, warps per program, and pipeline stages."""

    rows: int
    cols: int
    warps: int
    stages: int


LARGE_SHARED = 200 << 10  # bytes of shared memory of a block: 9.0 and 10.0 have 227 KB, 8.0 has 163, others have 99


def forward_blocks(d: int, d_v: int, dtype: torch.dtype, *, extras: bool, shared: int = 0) -> Blocks:
    """Tiles of the forward pass, by head size and dtype. `extras`: with a bias, a table, a boolean mask, a soft cap or
    dropout, which need more registers and shared memory. shared: bytes of shared memory of a block; more of it holds
    more stages of the pipeline, which change no result."""
    wide = max(d, d_v)
    if dtype == torch.float32:  # no tensor cores: exact products
        return Blocks(64, 32, 4, 2) if wide <= 64 else Blocks(32, 32, 4, 1) if wide <= 128 else Blocks(16, 32, 4, 1)
    if extras:
        return Blocks(64, 32, 4, 2) if wide <= 128 else Blocks(32, 32, 4, 1)
    if wide <= 64:
        return Blocks(128, 64, 4, 3)
    return Blocks(128, 64, 8, 3 if shared >= LARGE_SHARED else 2) if wide <= 128 else Blocks(64, 32, 4, 2)


def backward_blocks(
    d: int, d_v: int, dtype: torch.dtype, *, extras: bool, shared: int = 0, joint: bool = False
) -> Blocks:
    """Tiles of the backward passes and of the sweep over columns; shared as for `forward_blocks`. Tensor cores of 9.0
    need 64 rows and columns, for which other GPUs have too few registers at head sizes above 64. joint: with gradients
    of statistics, which need more registers, so that there are more warps."""
    wide = max(d, d_v)
    if dtype == torch.float32:
        return Blocks(32, 32, 4, 1) if wide <= 128 else Blocks(16, 16, 4, 1)
    if extras:
        return Blocks(32, 32, 4, 1)
    large = shared >= LARGE_SHARED
    if joint and wide <= 128:
        return Blocks(64, 64 if large and wide <= 64 else 32, 8, 2)
    if wide <= 64:
        return Blocks(64, 64, 4, 3 if large else 2)
    return Blocks(64, 64 if large else 32, 4, 2) if wide <= 128 else Blocks(32, 32, 4, 1)


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


class Plan(NamedTuple):
    """Half-open intervals of blocks without and with a mask, each int32 [b or 1, blocks, count, 2]."""

    full: Tensor
    mixed: Tensor


_placed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # by the spans, which calls with the same mask share
_captured: list[object] = []  # graphs of CUDA read these whenever they are replayed


def placed(
    spans: Tensor, device: torch.device, key: Hashable, make: Callable[[], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """What `make` computes on the CPU, on a device. It is kept as long as the spans are, since all layers of a model
    and all its steps walk over the same blocks; key: of all else that it depends on."""
    kept = _placed.setdefault(spans, {})
    if (found := kept.get((device, key))) is None:
        found = kept[device, key] = tuple(x.to(device) for x in make())
    used(found, device)
    return found


def used(tensors: tuple[Tensor, ...], device: torch.device) -> None:
    """Keep tensors on a device for as long as the kernels that are launched now read them."""
    if not tensors or device.type != "cuda":
        return
    if torch.cuda.is_current_stream_capturing():
        _captured.append(tensors)
    else:
        stream = torch.cuda.current_stream(device)
        for x in tensors:
            x.record_stream(stream)


def key_blocks(spans: Tensor, m: int, rows: int, cols: int, *, masked: bool) -> Plan:
    """The blocks of `cols` keys that each block of `rows` queries attends to. spans: int32 [b or 1, n, K, 2], of
    `Lowered`; masked: whether another mask applies as well, so that every block needs a mask."""
    b, n, count, _ = spans.shape
    if b == n == count == 1 and not masked:  # a decoding step: each has another number of keys
        start, stop = spans.flatten().tolist()
        low, high = start // cols, -(-stop // cols)
        inner_low = min(-(-start // cols), high)
        inner_high = max(stop // cols, inner_low)
        parts = [x for x in ((low, inner_low), (inner_high, high)) if x[1] > x[0]]
        return Plan(_blocks([(inner_low, inner_high)]), _blocks(parts or [(low, low)]))
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
    b, blocks = intervals.shape[:2]
    first, last = np.full((b, key_count), blocks), np.zeros((b, key_count), np.int64)
    change = np.zeros((b, key_count + 1), np.int64)
    for batch, rows in enumerate(intervals.tolist()):
        visited = [(row, low, high) for row, ranges in enumerate(rows) for low, high in ranges if high > low]
        for row, low, high in visited:
            last[batch, low:high] = row + 1
            change[batch, low] += 1
            change[batch, high] -= 1
        for row, low, high in reversed(visited):
            first[batch, low:high] = row
    number = change.cumsum(1)[:, :-1]
    return torch.from_numpy(np.minimum(first, last)), torch.from_numpy(last), torch.from_numpy(number)


def _blocks(intervals: list[tuple[int, int]]) -> Tensor:
    return torch.tensor([[intervals]], dtype=torch.int32, device="cpu")


def _trim(intervals: Tensor) -> Tensor:
    """Remove the slots that are empty everywhere; keep at least one."""
    used = (intervals[..., 1] > intervals[..., 0]).flatten(0, 1).any(0)
    used[0] |= not bool(used.any())
    return intervals[:, :, used].int().contiguous()
