"""Block sizes of the kernels: a fixed table, so that the same call always gives the same bits."""

from typing import NamedTuple

import torch

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
    """Tiles of the forward pass, by head size and dtype.

    `extras`: with a bias, a table, a boolean mask, a soft cap or dropout, which need more registers and shared memory.
    """
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
