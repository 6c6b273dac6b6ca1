"""Compiled reads of a map from q, k and the log-sum-exp: weights, pictures, sums along diagonals.

As in `passes.py`, which sends the calls: any rule that has a `Lowered` form, the same bits for any number of threads.
"""

import torch
from torch import Tensor

from headwise.kernels.call import Call
from headwise.kernels.cpu import binding
from headwise.kernels.cpu.passes import floats, in_rows, send


def weights(call: Call, lse: Tensor) -> Tensor:
    """The weights, [b, h, n, m]."""
    return _squares(call, lse, 1, "mean")[0]


def squares(call: Call, lse: Tensor, cell: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mean weight, largest weight and number of unmasked pairs in each square of `cell` × `cell`; all
    [b, h, ⌈n/cell⌉, ⌈m/cell⌉]."""
    mean, largest, allowed = _squares(call, lse, cell, "mean", "largest", "allowed")
    return mean, largest, allowed


def _squares(call: Call, lse: Tensor, cell: int, *wanted: str) -> list[Tensor]:
    b, h, n, m = call.rule.grid
    q, k, lse = in_rows(call.q), in_rows(call.k), lse.contiguous()
    request = binding.PoolCall(
        binding.CODES[q.dtype], torch.get_num_threads(), b, h, k.shape[1], n, m, q.shape[-1], *map(binding.view, (q, k))
    )
    request.lse, request.cell = lse.data_ptr(), cell
    shape = b, h, -(-n // cell), -(-m // cell)
    found = [
        torch.empty(shape, dtype=torch.int64, device="cpu") if name == "allowed" else floats(*shape) for name in wanted
    ]
    for name, x in zip(wanted, found, strict=True):
        setattr(request, name, x.data_ptr())
    send("headwise_pool", request, call)
    return found


def diagonals(call: Call, lse: Tensor) -> Tensor:
    """Sums of the weights along diagonals, [b, h, n + m − 1]; pair (i, j) is on diagonal j − i + n − 1."""
    b, h, n, m = call.rule.grid
    q, k, lse = in_rows(call.q), in_rows(call.k), lse.contiguous()
    mass = floats(b, h, n + m - 1)
    request = binding.DiagonalsCall(
        binding.CODES[q.dtype], torch.get_num_threads(), b, h, k.shape[1], n, m, q.shape[-1], *map(binding.view, (q, k))
    )
    request.lse, request.mass = lse.data_ptr(), mass.data_ptr()
    send("headwise_diagonals", request, call)
    return mass
