"""The check of kernels."""

from collections.abc import Callable
from contextlib import suppress
from itertools import product

import torch
from torch import Tensor

from headwise.errors import KernelError
from headwise.map import AttentionMap
from headwise.map.attention import attend
from headwise.masks import Causal, Everything, Lengths, Window
from headwise.scores import ALiBi, Bias, Score, SinkLogits, SoftCap
from headwise.testing.failed import check, require, require_close
from headwise.testing.truth import HEAD_DIM, SIZES, VALUE_DIM, Formula, truth, vectors


@check
def check_kernel(name: str) -> None:
    """Check that a registered kernel computes what the formula says, or refuses.

    Outputs, log-sum-exps, gradients, statistics and reads of maps are compared with a softmax in float64, under masks
    and scores of every kind, in float32, bfloat16 and float64, with fully masked queries and large logits.

    Raises:
        CheckFailed: naming what it does not hold, or if it refuses every call.
    """
    masks = {
        "no mask": (Everything(), 29), "causal": (Causal(), 29), "fewer queries, causal": (Causal(), 17),
        "window": (Window(5, 2), 17), "lengths": (Lengths([0, 23], [17, 9]), 17),
    }  # fmt: skip
    scores: dict[str, tuple[tuple[Score, ...], Formula]] = {
        "": ((), lambda s, i, j: s),
        "soft cap": ((SoftCap(0.8),), lambda s, i, j: 0.8 * (s / 0.8).tanh()),
        "ALiBi": ((ALiBi(SLOPES),), lambda s, i, j: s - SLOPES.double()[:, None, None] * (i - j).abs()),
        "bias": ((Bias(BIAS),), lambda s, i, j: s + BIAS.double()),
        "sinks": ((SinkLogits(SLOPES),), lambda s, i, j: (s, SLOPES)),
    }
    limits = {torch.float32: 5e-6, torch.bfloat16: 1e-2, torch.float64: 5e-6}
    ran = 0
    for (of_mask, (mask, n)), (of_score, (score, formula)), (dtype, limit), factor in product(
        masks.items(), scores.items(), limits.items(), (1.0, 30.0)
    ):
        made = vectors((2, 6, n, 29), HEAD_DIM if n == 29 else VALUE_DIM)
        q, k, v = (x.detach().to(dtype).requires_grad_() for x in made)
        q = (q.detach() * factor).requires_grad_()
        what = f"{of_mask}, {of_score or 'no score'}, {dtype}, logits × {factor:g}"
        try:
            out, amap = attend(q, k, v, mask=mask, score=score, kernel=name, return_map=True)
        except KernelError:
            continue
        ran += 1
        require(amap.kernel == name, name, f"{what}: kernel {amap.kernel!r} ran instead")
        dense = mask.to_dense(n, 29, batch=2, heads=6).expand(2, 6, n, 29)
        exact = tuple(x.detach().double().requires_grad_() for x in (q, k, v))
        expected, weights, lse = truth(exact[0], exact[1], exact[2], formula, dense)
        require(out.dtype == dtype, name, f"{what}: the output is {out.dtype}")
        near = limit * max(1.0, factor / 5)
        require_close(out, expected, name, f"output, {what}", rtol=near, atol=near)
        require_close(amap.lse, lse, name, f"log-sum-exp, {what}", rtol=1e-5, atol=near)
        pull = torch.ones_like(expected) / 3
        grads = torch.autograd.grad((out * pull.to(dtype)).sum(), (q, k, v))
        for got, right in zip(grads, torch.autograd.grad((expected * pull).sum(), exact), strict=True):
            size = 1 + float(right.abs().max())
            require_close(got, right, name, f"gradient, {what}", rtol=10 * near, atol=10 * near * size)
        _check_reads(name, amap, weights.detach(), what, near)
    require(ran > 0, name, "refuses every call that was tried")
    q, k, v = (x.detach() for x in vectors(SIZES))
    with suppress(KernelError):
        empty = attend(q[:, :, :0], k, v, kernel=name)
        require(empty.shape == (2, 6, 0, VALUE_DIM), name, f"no queries: output of shape {tuple(empty.shape)}")


SLOPES = torch.linspace(0.1, 1.1, 6)
BIAS = torch.randn(1, 6, 1, 29, generator=torch.Generator().manual_seed(5))


def _check_reads(name: str, amap: AttentionMap, weights: Tensor, what: str, near: float) -> None:
    """What it reads of a map is the weights; what it does not support raises."""
    x = torch.randn(*weights.shape[:2], weights.shape[3], 2, generator=torch.Generator().manual_seed(6))
    reads: dict[str, tuple[Callable[[], Tensor], Tensor]] = {
        "weights": (lambda: amap[:], weights),
        "product": (lambda: amap @ x, weights @ x.double()),
        "received": (amap.received, weights.sum(-2)),
        "entropy": (lambda: amap.measure("entropy", rows=True).rows["entropy"], torch.special.entr(weights).sum(-1)),
    }
    for read, (compute, expected) in reads.items():
        try:
            found = compute()
        except KernelError:
            continue
        require_close(found, expected, name, f"{read} of its map, {what}", rtol=1e-4, atol=10 * near)
