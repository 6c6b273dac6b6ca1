"""The Transformer block is the formula, and PyTorch's own layer where that knows the same."""

from typing import Any

import pytest
import torch
from design_samples import design, given
from torch import nn

from headwise.cache import KVCache
from headwise.errors import ConfigError, HeadwiseError, ShapeError
from headwise.masks import Causal
from headwise.nn.block import TransformerBlock
from headwise.nn.convolution import ConvolutionAttention
from headwise.nn.multi_head import MultiHeadAttention
from headwise.nn.registry import DESIGNS


def block(name: str = "multi_head", **options: Any) -> TransformerBlock:
    attention = design(name, {})
    torch.manual_seed(2)
    made = TransformerBlock(attention, 19, **options).double().eval()
    with torch.no_grad():  # norms that are not all ones
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return made


@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("order", ["pre", "post"])
def test_it_is_pytorchs_encoder_layer(order: str, activation: str) -> None:
    """An independent peer, with the same weights, outputs and gradients."""
    torch.manual_seed(4)
    peer = nn.TransformerEncoderLayer(
        12, 3, 19, dropout=0.0, activation=activation, batch_first=True, norm_first=order == "pre"
    ).double()  # fmt: skip
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    ours = TransformerBlock(
        MultiHeadAttention.from_torch(peer.self_attn), 19, order=order, norm="layer", activation=activation, bias=True
    ).double()  # fmt: skip
    pairs = {"attention_norm": "norm1", "ff_norm": "norm2", "ff_in": "linear1", "ff_out": "linear2"}
    for mine, theirs in pairs.items():
        getattr(ours, mine).load_state_dict(getattr(peer, theirs).state_dict())
    x, again = given().requires_grad_(), given().requires_grad_()
    later = torch.ones(13, 13, dtype=torch.bool).triu(1)
    y, expected = ours(x, mask=Causal()), peer(again, src_mask=later)
    torch.testing.assert_close(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(x.grad, again.grad)
    torch.testing.assert_close(ours.ff_in.weight.grad, peer.linear1.weight.grad)
    torch.testing.assert_close(ours.attention_norm.bias.grad, peer.norm1.bias.grad)


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize("order", ["pre", "post"])
@pytest.mark.parametrize("name", DESIGNS)
def test_every_design_fits_in(name: str, order: str) -> None:
    made, x = block(name, order=order), given()
    mask = {"mask": Causal()} if made.attention.takes_mask else {}
    y, amap = made(x, **mask, return_map=True, measures=("entropy",))

    def norm(layer: Any, z: torch.Tensor) -> torch.Tensor:
        eps = torch.finfo(z.dtype).eps
        return z / (z.square().mean(-1, keepdim=True) + eps).sqrt() * layer.weight

    def feed_forward(z: torch.Tensor) -> torch.Tensor:
        inner = z @ made.ff_in.weight.T
        return inner * 0.5 * (1 + torch.erf(inner / 2**0.5)) @ made.ff_out.weight.T

    if order == "pre":
        z = x + made.attention(norm(made.attention_norm, x), **mask)
        expected = z + feed_forward(norm(made.ff_norm, z))
    else:
        z = norm(made.attention_norm, x + made.attention(x, **mask))
        expected = norm(made.ff_norm, z + feed_forward(z))
    torch.testing.assert_close(y, expected)
    assert torch.equal(made(x, **mask), y)
    assert set(amap.measured) == {"entropy"}


def test_it_takes_a_cache_and_a_context() -> None:
    made, x, cache = block(), given(), KVCache()
    parts = [made(part, mask=Causal(), cache=cache) for part in x.split([6, 1, 6], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), made(x, mask=Causal()))
    other = given(7, seed=8)
    assert not torch.allclose(made(x, other), made(x))
    # Nothing but the context is mixed in; products of other sizes may be rounded otherwise.
    torch.testing.assert_close(made(x, other)[:, 3:5], made(x[:, 3:5], other), rtol=1e-12, atol=1e-12)


def test_dropout_is_on_the_branches_only_and_in_training_only() -> None:
    made, x = block(dropout=0.5), given()
    assert torch.equal(made(x), made(x))
    made.train()
    assert not torch.equal(made(x), made(x))
    with torch.no_grad():
        made.attention.get_parameter("o_proj.weight").zero_()
        made.ff_out.weight.zero_()
    assert torch.equal(made(x), x)  # of the residual stream itself nothing is dropped
    inner = block(inner_dropout=0.5).train()
    assert not torch.equal(inner(x), inner(x))


def test_parameters_are_those_of_the_docstring() -> None:
    attention = sum(p.numel() for p in design("multi_head", {}).parameters())
    assert sum(p.numel() for p in block().parameters()) == attention + 2 * 12 * 19 + 2 * 12
    with_all = block(bias=True, norm="layer")
    assert sum(p.numel() for p in with_all.parameters()) == attention + 2 * 12 * 19 + 19 + 12 + 4 * 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"d_ff": 0}, "d_ff=0"),
        ({"order": "both"}, "order='both': .*expected 'pre' or 'post'"),
        ({"norm": "batch"}, "norm='batch'"),
        ({"activation": "tanh"}, "activation='tanh'"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"inner_dropout": -0.1}, "inner_dropout=-0.1"),
    ],
)
def test_options_that_cannot_be_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TransformerBlock(MultiHeadAttention(12, 3), **({"d_ff": 5} | options))


def test_what_the_design_refuses_and_what_does_not_fit_is_told() -> None:
    with pytest.raises(ConfigError, match="ConvolutionAttention does not support `mask`"):
        block("convolution")(given(), mask=Causal())
    with pytest.raises(ShapeError, match=r"attention: ConvolutionAttention returns \(2, 13, 5\) for x \(2, 13, 12\)"):
        TransformerBlock(ConvolutionAttention(12, 3, out_dim=5), 7)(given(dtype=torch.float32))
    with pytest.raises(HeadwiseError, match=r"x: .*\(2, 13, 10\)"):
        TransformerBlock(MultiHeadAttention(12, 3), 7, order="post")(given(d=10, dtype=torch.float32))
