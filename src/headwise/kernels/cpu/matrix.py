"""Compiled reads of a map from q, k and the log-sum-exp: weights, pictures, sums along diagonals.

As in `passes.py`, which sends the calls: any rule that has a `Lowered` form, the same bits for any number of threads. If
the log-sum-exp is in float64, each logit has the same bits in all of them.
"""

from math import log

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


def log_sums(call: Call, lse: Tensor) -> Tensor:
    """ln Σ_j exp(S_ij − lse_i) over the keys, [b, h, n] in float64: about 0 for the log-sum-exp, if there is no sink."""
    logs = _squares(call, lse.double(), 1, "mean", logs=True)[0]
    top = logs.amax(-1, keepdim=True)
    base = top.masked_fill(top == -torch.inf, 0.0)
    return base[..., 0].double() * log(2.0) + logs.sub_(base).exp2_().sum(-1, dtype=torch.float64).log_()


def _squares(call: Call, lse: Tensor, cell: int, *wanted: str, logs: bool = False) -> list[Tensor]:
    b, h, n, m = call.rule.grid
    q, k = in_rows(call.q), in_rows(call.k)
    request = binding.PoolCall(
        binding.CODES[q.dtype], torch.get_num_threads(), b, h, k.shape[1], n, m, q.shape[-1], *map(binding.view, (q, k))
    )
    held = binding.write_lse(request, lse)
    request.cell, request.logs = cell, logs
    shape = b, h, -(-n // cell), -(-m // cell)
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
