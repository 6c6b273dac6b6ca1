"""The next-token loss without storing all logits, which take most of the work at a vocabulary of 5,000 characters."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from headwise.lm.model import Decoder

ROWS = 1024  # tokens whose logits are stored at a time; they fit in the CPU's cache


def next_token_loss(hidden: Tensor, weight: Tensor, targets: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Mean cross-entropy of softmax(hidden weightᵀ) in nats per token, differentiable in hidden and weight.

    Args:
        hidden: [tokens, d]; weight: [vocab, d]; targets: [tokens] token ids.
        dtype: of the products; softmax and sums use float32.
    """
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _Loss.apply(hidden, weight, targets, dtype)
    total = hidden.new_zeros((), dtype=torch.float32)
    for rows, wanted in zip(hidden.split(ROWS), targets.split(ROWS), strict=True):
        logits = (rows.to(dtype) @ weight.to(dtype).T).float()
        total += nn.functional.cross_entropy(logits, wanted, reduction="sum")
    return total / len(targets)


def mean_loss(model: nn.Module, windows: Tensor, precision: str = "float32") -> Tensor:
    """Mean loss of a `Decoder` on windows [w, tokens + 1] in nats per token, differentiable if gradients are enabled.

    Args:
        precision: "bfloat16" computes products in bfloat16; or "float32".
    """
    assert isinstance(model, Decoder)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
        hidden, _ = model.hidden(windows[:, :-1])
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    return next_token_loss(hidden.flatten(0, 1), model.embedding.weight, windows[:, 1:].flatten(), dtype=dtype)


class _Loss(torch.autograd.Function):
    """Computes the gradients, p − onehot, in the forward pass, one block of rows at a time."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
        w = weight.to(dtype)
        d_hidden = torch.empty_like(hidden, dtype=torch.float32)
        d_weight = torch.zeros_like(weight, dtype=torch.float32)
        total = hidden.new_zeros((), dtype=torch.float32)
        blocks = zip(hidden.split(ROWS), targets.split(ROWS), d_hidden.split(ROWS), strict=True)
        for rows, wanted, d_rows in blocks:
            x = rows.to(dtype)
            logits = (x @ w.T).float()
            lse = logits.logsumexp(-1, keepdim=True)
            index = wanted[:, None]
            total += (lse - logits.gather(1, index)).sum()
            p = logits.sub_(lse).exp_()
            p.scatter_add_(1, index, torch.full_like(lse, -1.0))
            p = p.to(dtype)
            d_rows.copy_(p @ w)
            d_weight += p.T @ x
        d_hidden, d_weight = d_hidden.div_(len(targets)), d_weight.div_(len(targets))
        ctx.save_for_backward(d_hidden.to(hidden.dtype), d_weight.to(weight.dtype))
        return total / len(targets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        d_hidden, d_weight = ctx.saved_tensors
        return grad * d_hidden, grad * d_weight, None, None
