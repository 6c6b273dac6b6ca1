"""Nested and sparse tensors, which attention does not support: one error that names the argument and the way out."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.errors import DTypeError

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "nested": lambda x: torch.nested.nested_tensor(list(x)),
    "jagged": lambda x: torch.nested.nested_tensor([part[:1] for part in x], layout=torch.jagged),
    "sparse": lambda x: x.to_sparse(),
    "csr": lambda x: x[0, 0].to_sparse_csr(),
}
WAYS_OUT = {"nested": "Lengths.*Documents", "jagged": "Lengths.*Documents", "sparse": "to_dense", "csr": "to_dense"}
pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR"),
    pytest.mark.parametrize("name", LAYOUTS),
]


@pytest.mark.parametrize("options", [{}, {"return_map": True}, {"is_causal": True, "kernel": "torch_fused"}], ids=str)
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("place", ["q", "k", "v"])
def test_attend(name: str, place: str, learns: bool, options: dict[str, object]) -> None:
    inputs = {one: torch.randn(2, 3, 5, 8) for one in "qkv"}
    hw.attend(**inputs, **options)  # so that calls of these shapes are known
    inputs[place] = LAYOUTS[name](inputs[place]).requires_grad_(learns)
    with pytest.raises(DTypeError, match=f"^{place}: expected a dense tensor.*{WAYS_OUT[name]}"):
        hw.attend(**inputs, **options)


@pytest.mark.parametrize("design", ["multi_head", "talking_heads", "sparse_mixture"])
def test_layers(name: str, design: str) -> None:
    layer, x = hw.nn.DESIGNS[design](8, 2), torch.randn(2, 1, 5, 8)
    x = LAYOUTS[name](x if name == "csr" else x[:, 0])
    for options in ({}, {"mask": torch.ones(5, 5, dtype=torch.bool)}):
        with pytest.raises(DTypeError, match=f"^x: expected a dense tensor.*{WAYS_OUT[name]}"):
            layer(x, **options)
