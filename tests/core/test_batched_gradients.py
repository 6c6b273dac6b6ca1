"""Several gradients of one call at once: a batch of incoming gradients."""

import pytest
import torch
from samples import MASKS, qkv
from torch import Tensor
from torch.autograd.functional import jacobian

import headwise as hw
from headwise.kernels.events import listen
from headwise.scores import Bias, SinkLogits

KERNELS = ["cpu", "torch_blocks", "torch_fused", "reference"]


def learned() -> tuple[Tensor, ...]:
    return tuple(x.requires_grad_() for x in qkv(1, 4, 2, 5, 7, 8, 8))


def batch(out: Tensor, size: int = 3) -> Tensor:
    return torch.randn(size, *out.shape, generator=torch.Generator().manual_seed(5))


def one_by_one(out: Tensor, inputs: tuple[Tensor, ...], grads: Tensor) -> list[Tensor]:
    each = [torch.autograd.grad(out, inputs, grad, retain_graph=True) for grad in grads]
    return [torch.stack(parts) for parts in zip(*each, strict=True)]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("way", ["is_grads_batched", "vmap"])
def test_each_gradient_is_that_of_its_entry(kernel: str, way: str) -> None:
    q, k, v = inputs = learned()
    out = hw.attend(q, k, v, kernel=kernel)
    grads = batch(out)
    if way == "vmap":
        found = torch.vmap(lambda grad: torch.autograd.grad(out, inputs, grad, retain_graph=True))(grads)
    else:
        found = torch.autograd.grad(out, inputs, grads, is_grads_batched=True, retain_graph=True)
    for ours, each in zip(found, one_by_one(out, inputs, grads), strict=True):
        torch.testing.assert_close(ours, each, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mask", ["documents", "dense"])
@pytest.mark.parametrize(("kernel", "dropout_p"), [("cpu", 0.0), ("cpu", 0.3), ("torch_blocks", 0.3)])
def test_gradients_of_scores_and_under_dropout(mask: str, kernel: str, dropout_p: float) -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    sinks, bias = torch.linspace(-1, 1, 6, requires_grad=True), torch.ones(1, 6, 1, 53, requires_grad=True)
    score = SinkLogits(sinks), Bias(bias)
    out = hw.attend(q, k, v, mask=MASKS[mask](2, 37, 53), score=score, kernel=kernel, dropout_p=dropout_p)
    grads, inputs = batch(out), (q, k, v, sinks, bias)
    found = torch.autograd.grad(out, inputs, grads, is_grads_batched=True, retain_graph=True)
    for ours, each in zip(found, one_by_one(out, inputs, grads), strict=True):
        torch.testing.assert_close(ours, each, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kernel", KERNELS)
def test_batches_within_batches(kernel: str) -> None:
    q, k, v = inputs = learned()
    out = hw.attend(q, k, v, kernel=kernel)
    grads = batch(out, 6)

    def inner(some: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, inputs, some, is_grads_batched=True, retain_graph=True)

    expected = one_by_one(out, inputs, grads)
    for vmap in (torch._vmap_internals._vmap, torch.vmap):
        if vmap is torch.vmap:
            found = vmap(vmap(lambda grad: torch.autograd.grad(out, inputs, grad, retain_graph=True)))(
                grads.unflatten(0, (2, 3))
            )
        else:
            found = vmap(inner)(grads.unflatten(0, (2, 3)))
        for ours, each in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.flatten(0, 1), each, rtol=1e-6, atol=1e-7)


@pytest.mark.thorough
@pytest.mark.parametrize("kernel", KERNELS)
def test_jacobian_and_its_derivative(kernel: str) -> None:
    q, k, v = learned()

    def call(q: Tensor) -> Tensor:
        return hw.attend(q, k, v, kernel=kernel)

    found = jacobian(call, q, vectorize=True, create_graph=True)
    torch.testing.assert_close(found.detach(), jacobian(call, q), rtol=1e-6, atol=1e-7)
    (second,) = torch.autograd.grad(found.square().sum(), q)
    exact = jacobian(lambda q: hw.attend(q, k, v, kernel="reference"), q, create_graph=True)
    (expected,) = torch.autograd.grad(exact.square().sum(), q)
    torch.testing.assert_close(second, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernel", ["cpu", "torch_blocks"])
def test_importance_is_reported_for_each_entry(kernel: str) -> None:
    q, k, v = inputs = learned()
    reported: list[Tensor] = []
    with listen(reported.append):
        out = hw.attend(q, k, v, kernel=kernel)
    torch.autograd.grad(out, inputs, batch(out), is_grads_batched=True)
    expected = (batch(out) * out.detach()).sum(-1)
    torch.testing.assert_close(torch.stack(reported), expected, rtol=1e-5, atol=1e-6)
