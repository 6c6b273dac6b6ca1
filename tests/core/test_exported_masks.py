"""Masks and designs in graphs of torch.export and make_fx: in them whole, or refused by name."""

from typing import Any

import pytest
import torch
from design_samples import given
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import headwise as hw
from headwise.masks import Grid, Mask, State


class EvenKeys(Mask):
    """A mask of an unregistered class."""

    holds = {}

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        return (cols % 2 == 0).expand(len(rows), -1)[None, None]

    def state(self, rows: Any, cols: Any, grid: Grid) -> State:
        return State.MIXED


class Masked(nn.Module):
    """A layer with a mask of its own."""

    def __init__(self, layer: nn.Module, mask: Mask) -> None:
        super().__init__()
        self.layer, self.mask = layer, mask

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, mask=self.mask)


def exported(module: nn.Module, x: Tensor) -> Any:
    return torch.export.export(module, (x,), strict=False).module()


def made_fx(module: nn.Module, x: Tensor) -> Any:
    with torch.no_grad():
        return make_fx(module, tracing_mode="fake", _allow_non_fake_inputs=True)(x)


@pytest.mark.parametrize("recorded", [exported, made_fx])
def test_an_unregistered_mask_is_named_and_not_left_out(recorded: Any) -> None:
    module, x = Masked(hw.MultiHeadAttention(12, 2), EvenKeys() & hw.Causal()), given(dtype=torch.float32)
    with pytest.raises(
        hw.ConfigError, match=r"torch\.export or make_fx cannot contain the mask EvenKeys, as it is not"
    ):
        recorded(module, x)


@pytest.mark.parametrize("recorded", [exported, made_fx])
@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_k": 2, "keys": "chosen"}, {"top_k": 2, "per": "sequence"}])
def test_a_mixture_is_named(recorded: Any, options: dict[str, Any]) -> None:
    module, x = Masked(hw.nn.SparseHeadMixture(12, 6, **options), hw.Causal()), given(dtype=torch.float32)
    with pytest.raises(hw.ConfigError, match=r"SparseHeadMixture cannot be part of a graph of torch\.export"):
        recorded(module, x)
