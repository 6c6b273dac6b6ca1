"""Compiled reads of a map from q, k and the log-sum-exp: weights, pictures, sums along diagonals.

As in `passes.py`, which sends the calls: any rule that has a `Lowered` form, the same bits for any number of threads.
If the log-sum-exp is in float64, each logit has the same bits in all of them.
"""

from math import log

import torch
from torch import Tensor

from headwise.kernels.call import Call
from headwise.kernels.cpu import binding
from headwise.kernels.cpu.passes import floats, in_rows, send

STRIPE = 1024  # HEADWISE_STRIPE in native/headwise.h


def weights(call: Call, lse: Tensor) -> Tensor:
    """The weights, [b, h, n, m]."""
    return _squares(call, lse, 1, "mean")[0]


def squares(call: Call, lse: Tensor, cell: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mean weight, largest weight and number of unmasked pairs in each square of `cell` × `cell`; all
    [b, h, ⌈n/cell⌉, ⌈m/cell⌉]."""
    mean, largest, allowed = _squares(call, lse, cell, "mean", "largest", "allowed")
    return mean, largest, allowed


def log_sums(call: Call, lse: Tensor) -> Tensor:
    """ln Σ_j exp(S_ij − lse_i) over the keys, [b, h, n] in float64: about 0 where lse is the log-sum-exp."""
    sums, tops = (x.double() for x in _squares(call, lse.double(), 1, "mean", "largest", stripe=STRIPE))
    return (tops * log(2.0) + sums.log()).logsumexp(-1)


def _squares(call: Call, lse: Tensor, cell: int, *wanted: str, stripe: int = 0) -> list[Tensor]:
    b, h, n, m = call.rule.grid
    q, k = in_rows(call.q), in_rows(call.k)
    request = binding.PoolCall(
        binding.CODES[q.dtype], torch.get_num_threads(), b, h, k.shape[1], n, m, q.shape[-1], *map(binding.view, (q, k))
    )
    held = binding.write_lse(request, lse)
    request.cell, request.logs = cell, stripe > 0
    shape = b, h, -(-n // cell), -(-m // (stripe or cell))
    found = [
        torch.empty(shape, dtype=torch.int64, device="cpu") if name == "allowed" else floats(*shape) for name in wanted
    ]
    for name, x in zip(wanted, found, strict=True):
        setattr(request, name, x.data_ptr())
    send("headwise_pool", request, call)
    del held
    return found


def diagonals(call: Call, lse: Tensor) -> Tensor:
    """Sums of the weights along diagonals, [b, h, n + m − 1]; pair (i, j) is on diagonal j − i + n − 1."""
    b, h, n, m = call.rule.grid
    q, k = in_rows(call.q), in_rows(call.k)
    mass = floats(b, h, n + m - 1)
    request = binding.DiagonalsCall(
        binding.CODES[q.dtype], torch.get_num_threads(), b, h, k.shape[1], n, m, q.shape[-1], *map(binding.view, (q, k))
    )
    held = binding.write_lse(request, lse)
    request.mass = mass.data_ptr()
    send("headwise_diagonals", request, call)
    del held
    return mass
