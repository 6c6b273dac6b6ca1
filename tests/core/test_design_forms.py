"""Other forms of multi-head attention are the same function; look-alikes are told apart."""

from typing import Any

import pytest
import torch
from design_samples import design, given
from torch import Tensor

from headwise.errors import ConfigError, ShapeError
from headwise.masks import Causal
from headwise.nn.base import AttentionLayer
from headwise.nn.block_diagonal import BlockDiagonalAttention
from headwise.nn.forms import ContractionAttention, PerHeadAttention, SingleHeadAttention
from headwise.nn.multi_head import MultiHeadAttention

SIZES: list[dict[str, Any]] = [
    {},
    {"num_kv_heads": 3, "bias": True},
    {"num_kv_heads": 1, "head_dim": 4, "value_dim": 7, "bias": True, "rotary": True},
    {"context_dim": 10, "head_dim": 5},
]


def gradients(module: AttentionLayer, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output and the gradient of the input."""
    x = x.clone().requires_grad_()
    y = module(x, context) if context is not None else module(x, mask=Causal())
    (y * torch.arange(12)).sum().backward()
    return y.detach(), x.grad


@pytest.mark.parametrize("form", [PerHeadAttention, ContractionAttention])
@pytest.mark.parametrize("sizes", SIZES)
def test_forms_have_the_same_outputs_and_gradients(form: Any, sizes: dict[str, Any]) -> None:
    whole = design("multi_head", sizes)
    apart = form.from_multi_head(whole)
    context = given(7, 10) if "context_dim" in sizes else None
    for one, other in zip(gradients(whole, given(), context), gradients(apart, given(), context), strict=True):
        torch.testing.assert_close(one, other)
    assert sum(p.numel() for p in apart.parameters()) == sum(p.numel() for p in whole.parameters())
    weights = {name: linear.weight.grad for name, linear in
               zip("qkvo", (whole.q_proj, whole.k_proj, whole.v_proj, whole.o_proj), strict=True)}  # fmt: skip
    as_heads = MultiHeadAttention(12, 6, **sizes)
    for name, weight in weights.items():
        getattr(as_heads, f"{name}_proj").weight.data.copy_(weight)
    for name, expected in as_heads.per_head_weights().items():
        held = getattr(apart, f"w_{name}")
        grads = [w.grad for w in held] if form is PerHeadAttention else list(held.grad.mT)
        torch.testing.assert_close(torch.stack(grads), expected.detach().double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", [PerHeadAttention, ContractionAttention])
@pytest.mark.parametrize("sizes", SIZES)
def test_there_and_back_is_the_same_module(form: Any, sizes: dict[str, Any]) -> None:
    whole = design("multi_head", sizes).train()
    back = form.from_multi_head(whole).to_multi_head()
    assert back.training
    assert whole.state_dict().keys() == back.state_dict().keys()
    assert all(torch.equal(back.state_dict()[key], value) for key, value in whole.state_dict().items())


def test_a_form_has_no_norm() -> None:
    with pytest.raises(ConfigError, match=r"does not support QK-norm, .*qk_norm=True"):
        PerHeadAttention.from_multi_head(design("multi_head", {"qk_norm": True}))


def test_a_single_head_is_as_wide_as_the_model() -> None:
    single = SingleHeadAttention.build(12, 6).double()
    x = given()
    q, k, v = (linear(x) for linear in (single.q_proj, single.k_proj, single.v_proj))
    torch.testing.assert_close(single(x), single.o_proj((q @ k.mT / 12**0.5).softmax(-1) @ v))
    assert sum(p.numel() for p in single.parameters()) == 4 * 12**2
    with pytest.raises(ConfigError, match="num_heads=6"):
        SingleHeadAttention(12, 6)


def test_a_single_head_is_built_beside_any_number_of_heads() -> None:
    """`build` takes the size that the other designs get, so it need not divide the width; but it must be a size."""
    for heads in (1, 6, 7):
        assert SingleHeadAttention.build(12, heads, value_dim=5).num_heads == 1
    for heads in (0, -2, 1.0):
        with pytest.raises(ConfigError, match=f"num_heads={heads}: expected a whole number of at least 1"):
            SingleHeadAttention.build(12, heads)


def test_a_block_diagonal_head_reads_its_slice_only() -> None:
    module, x = design("block_diagonal", {}), given()
    other = x.clone()
    other[..., :2] = 0.0
    concat, changed = (module(value, return_concat=True)[1] for value in (x, other))
    assert torch.equal(concat[..., 2:], changed[..., 2:])
    assert not torch.isclose(concat[..., :2], changed[..., :2]).any()
    standard = design("multi_head", {})
    concat, changed = (standard(value, return_concat=True)[1] for value in (x, other))
    assert not torch.isclose(concat, changed).any()  # every head of the standard one reads every channel


@pytest.mark.parametrize("sizes", [{}, {"context_dim": 18, "head_dim": 5, "value_dim": 3}])
def test_a_block_diagonal_layer_is_a_standard_one_with_zeros(sizes: dict[str, int]) -> None:
    module = design("block_diagonal", sizes)
    context = given(7, 18) if sizes else None
    torch.testing.assert_close(module.to_multi_head()(given(), context), module(given(), context))


def test_a_block_diagonal_map_has_an_hth_of_the_parameters() -> None:
    module = BlockDiagonalAttention(60, 5)
    assert [w.numel() for w in (module.w_q, module.w_k, module.w_v)] == [60 * 60 // 5] * 3
    with pytest.raises(ShapeError, match="context_dim=18"):
        BlockDiagonalAttention(60, 5, context_dim=18)
    with pytest.raises(ConfigError, match="num_kv_heads=1"):
        BlockDiagonalAttention(60, 5, num_kv_heads=1)
