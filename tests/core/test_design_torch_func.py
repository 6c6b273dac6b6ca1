"""Every head design under torch.func: gradients of its parameters, vmap over inputs, and gradients of each sample."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from design_samples import CASES, design, given
from torch import Tensor

import headwise as hw
from headwise.errors import ConfigError
from headwise.nn.registry import DESIGNS
from parameters import each_value

CHOOSING = ("sparse_mixture", "mixture_of_heads")
MORE: list[tuple[str, dict[str, Any]]] = [("sparse_mixture", {"keys": "chosen", "top_k": 2})]
MASKS = {"no mask": None, "causal": hw.Causal(), "causal and padding": hw.Causal() & hw.Lengths([13, 9])}
OF_EACH = ["no mask", "causal"]  # lengths are those of a batch


def calls(masks: Iterable[str]) -> list[Any]:
    """Designs, their options, and the masks that they take."""
    return each_value([
        (name, options, mask)
        for name, options in CASES + MORE
        for mask in masks
        if MASKS[mask] is None or DESIGNS[name].takes_mask
    ])  # fmt: skip


def loss_of(module: torch.nn.Module, mask: str) -> Any:
    options = {} if MASKS[mask] is None else {"mask": MASKS[mask]}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(module, parameters, (x,), options).square().sum()

    return loss


def made(name: str, options: dict[str, Any], mask: str) -> tuple[Any, dict[str, Tensor], Tensor]:
    module = design(name, options)
    return loss_of(module, mask), dict(module.named_parameters()), given()


def by_autograd(loss: Any, parameters: dict[str, Tensor], x: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(loss(parameters, x), [*parameters.values()], allow_unused=True)
    return [torch.zeros_like(p) if x is None else x for p, x in zip(parameters.values(), found, strict=True)]


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize(("name", "options", "mask"), calls(MASKS), ids=str)
def test_gradients_are_those_of_autograd(name: str, options: dict[str, Any], mask: str) -> None:
    loss, parameters, x = made(name, options, mask)
    found = torch.func.grad(loss)(parameters, x)
    for ours, theirs in zip(found.values(), by_autograd(loss, parameters, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize(("name", "options", "mask"), calls(OF_EACH), ids=str)
def test_gradients_of_each_sample(name: str, options: dict[str, Any], mask: str) -> None:
    loss, parameters, x = made(name, options, mask)
    each = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))
    if name in CHOOSING:
        with pytest.raises(ConfigError, match=r"does not support torch\.func\.vmap.*one entry after another"):
            each(parameters, x[:, None])
        return
    found = each(parameters, x[:, None])
    for at in range(len(x)):
        for ours, theirs in zip(found.values(), by_autograd(loss, parameters, x[at, None]), strict=True):
            torch.testing.assert_close(ours[at], theirs, rtol=1e-9, atol=1e-9)
