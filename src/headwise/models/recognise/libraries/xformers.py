"""xFormers' `memory_efficient_attention`: [b, n, h, d], [b, n, g, h, d] of groups, and [b, n, d]."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headwise.masks import Causal, Documents, Mask
from headwise.models.recognise.libraries.base import FusedCall, Library, first_of, masked
from headwise.models.recognise.tracked import Tracked

_LETTERS = {
    3: ("bnd", "bmd", "bme", "bne"),
    4: ("bnhd", "bmhd", "bmhe", "bnhe"),
    5: ("bnghd", "bmghd", "bmghe", "bnghe"),
}


def _read(given: dict[str, Any], out: Any, function: Callable[..., Any], seen: Tracked) -> FusedCall:
    q, k, v = given["query"], given["key"], given["value"]
    made = first_of(out)
    scale, p, bias = given.get("scale"), float(given.get("p") or 0.0), given.get("attn_bias")
    steps: tuple[Any, ...] = (("mul", q.shape[-1] ** -0.5 if scale is None else scale),)
    if isinstance(bias, Tensor):
        steps = (*steps, ("add", bias))
    elif bias is not None:
        mask = _mask(bias, q.shape[1], k.shape[1], q.device)
        steps = (*steps, *(masked(mask) if isinstance(mask, Mask) else (("add", mask),)))
        extra = getattr(bias, "_bias", None)
        if isinstance(mask, Mask) and isinstance(extra, Tensor):
            steps = (*steps, ("add", extra))
    rest = {name: value for name, value in given.items() if name != "p"}
    output_dtype = given.get("output_dtype")
    return FusedCall(
        q, k, v, made, _LETTERS[q.ndim], steps, heads=q.ndim > 3, dropout_p=p,
        plain=lambda: first_of(function(**rest)),
        own="" if output_dtype in (None, q.dtype) else "its output_dtype is not that of its queries",
    )  # fmt: skip


def _mask(bias: Any, n: int, m: int, device: torch.device) -> Mask | Tensor:
    """The mask of a bias that needs no tensor, else its values [n, m]."""
    name = type(bias).__name__
    if name == "LowerTriangularFromBottomRightMask" or (name == "LowerTriangularMask" and n == m):
        return Causal()
    if name in ("BlockDiagonalMask", "BlockDiagonalCausalMask"):
        starts_q, starts_k = (getattr(bias, side).seqstart_py for side in ("q_seqinfo", "k_seqinfo"))
        if list(starts_q) == list(starts_k) and starts_q[-1] == n == m:
            starts = torch.tensor(list(starts_q))
            ids = torch.repeat_interleave(torch.arange(len(starts) - 1), starts.diff()).to(device)
            return Documents(ids) & Causal() if "Causal" in name else Documents(ids)
    values: Tensor = bias.materialize((n, m), dtype=torch.float32, device=device)
    return values


LIBRARIES = (
    Library("xformers.ops.fmha", ("memory_efficient_attention", "memory_efficient_attention_forward"), _read),
    Library("xformers.ops", ("memory_efficient_attention", "memory_efficient_attention_forward"), _read),
)
