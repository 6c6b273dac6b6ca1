"""`headwise::attend` by operators of PyTorch, for programs that run where headwise is not installed.

`ExportedProgram.run_decompositions()` replaces the operator by this, and so do torch.onnx.export, OpenVINO and
ExecuTorch. A call becomes `F.scaled_dot_product_attention`, with the scores that are added as its mask; with a soft cap
or learned sinks it becomes the formula itself. Masked keys have weight 0, but 0 times a value that is not finite is
NaN, which the kernels leave out. Masks and scores other than none and causal are n×m tensors here.
"""

from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from headwise.kernels.reference import dense_scores, dense_weights, of_heads, whole_terms
from headwise.masks import Causal, Everything, Grid, Mask, conjuncts
from headwise.rule import Terms, compute


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, terms: Terms, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; operators of what is not used leave the graph."""
    b, h, n, m = *q.shape[:3], k.shape[2]
    allowed = _allowed(mask, Grid(b, h, n, m), q.device)
    wide = compute(q)
    weights, lse = dense_weights(dense_scores(wide, compute(k), scale, terms), allowed, terms.sinks)
    added = whole_terms(terms, m, q.device)
    if terms.soft_cap > 0.0 or terms.sinks is not None or (added and q.dtype != wide.dtype):
        weights = F.dropout(weights, dropout_p) if dropout_p > 0.0 else weights
        out = torch.matmul(weights, of_heads(compute(v), h)).to(q.dtype)
        return out.contiguous(), lse
    k, v = of_heads(k, h), of_heads(v, h)  # OpenVINO does not know `enable_gqa`
    options: dict[str, Any] = {"scale": scale, "dropout_p": dropout_p}
    causal = mask == Causal() and statically_known_true(n == m)
    if not added and (causal or mask == Everything()):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, **options).contiguous(), lse
    if added:
        given = reduce(torch.add, added).to(q.dtype).masked_fill(~allowed, -torch.inf)
        empty = (given == -torch.inf).all(-1, keepdim=True)
        given = given.masked_fill(empty, 0.0)
    else:
        empty = ~allowed.any(-1, keepdim=True)
        given = allowed | empty
    # Runtimes differ in what they return for a fully masked query.
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=given, **options)
    return out.masked_fill(empty, 0.0).contiguous(), lse


def _allowed(mask: Mask, grid: Grid, device: torch.device) -> Tensor:
    """Boolean [b or 1, h or 1, n, m]."""
    i, j = torch.arange(grid.n, device=device), torch.arange(grid.m, device=device)
    parts = [one.allowed(i, j, grid) if one.boolean is None else one.boolean.to(device) for one in conjuncts(mask)]
    return reduce(torch.logical_and, parts)
