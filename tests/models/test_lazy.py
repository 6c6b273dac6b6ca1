"""Tensors that are made when they are first used."""

import copy
import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import save
from transformers.masking_utils import bidirectional_mask_function, sliding_window_causal_mask_function

import headwise as hw
from headwise.models.adapters.huggingface.masks import make_mask
from headwise.models.adapters.torch import MultiheadAttention
from headwise.models.adapters.weights import AttentionWeights

B, H, N, M = 2, 3, 5, 7


def weights(*, averaged: bool = False, batched: bool = True, own_key: bool = False) -> AttentionWeights:
    """Weights that a module returned, untouched."""
    torch.manual_seed(2)
    module = MultiheadAttention(H * 4, H, batch_first=True, add_zero_attn=own_key).eval()
    x, y = torch.randn(B, N, H * 4), torch.randn(B, M, H * 4)
    x, y = (x, y) if batched else (x[0], y[0])
    with torch.no_grad():
        return module(x, y, y, average_attn_weights=averaged)[1]


def plain(lazy: AttentionWeights) -> torch.Tensor:
    """The same numbers as a tensor of PyTorch's own, by way of the map."""
    dense = lazy.map.to_dense()
    dense = dense.mean(1) if lazy.averaged else dense
    dense = dense.roll(-lazy.appended, -1)
    return dense if lazy.batched else dense[0]


KINDS = [{}, {"averaged": True}, {"batched": False}, {"averaged": True, "batched": False}, {"own_key": True}]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_shape_and_kind_are_known_without_the_numbers(kind):
    lazy = weights(**kind)
    shape = (*((B,) if kind.get("batched", True) else ()), *(() if kind.get("averaged") else (H,)), N, M)
    shape = (*shape[:-1], M + 1) if kind.get("own_key") else shape
    assert lazy.shape == lazy.size() == shape
    assert (lazy.ndim, len(lazy), lazy.numel()) == (len(shape), shape[0], np.prod(shape))
    assert lazy.dtype == torch.float32
    assert lazy.device == torch.device("cpu")
    assert isinstance(lazy, torch.Tensor)
    assert not lazy.requires_grad
    assert {lazy: 1}[lazy] == 1
    assert "not made yet" in repr(lazy)
    assert "AttentionMap" in repr(lazy)
    assert not lazy.made
    torch.testing.assert_close(lazy + 0, plain(lazy))
    assert lazy.made


FUNCTIONS = {
    "sum": lambda w: w.sum(-1),
    "plus": lambda w: w + 1,
    "from the right": lambda w: 1 - w,
    "matmul": lambda w: w @ torch.ones(M, 2),
    "einsum": lambda w: torch.einsum("...nm->...mn", w),
    "stack": lambda w: torch.stack([w, w]),
    "cat": lambda w: torch.cat([w, torch.zeros_like(w)], -1),
    "compare": lambda w: w > 0.1,
    "where": lambda w: torch.where(w > 0.1, w, 0.0),
    "to": lambda w: w.to(torch.float64),
    "half": lambda w: w.half(),
    "cpu": lambda w: w.cpu(),
    "detach": lambda w: w.detach(),
    "clone": lambda w: w.clone(),
    "view": lambda w: w.reshape(-1),
    "transpose": lambda w: w.mT,
    "unsqueeze": lambda w: w.unsqueeze(0),
    "index": lambda w: w[..., torch.tensor([0, 2])],
    "boolean index": lambda w: w[w > 0.1],
    "new axis": lambda w: w[None],
    "numpy": lambda w: torch.from_numpy(w.numpy()),
    "asarray": lambda w: torch.from_numpy(np.asarray(w)),
    "tolist": lambda w: torch.tensor(w.tolist()),
    "iterate": lambda w: torch.stack(list(w)),
    "unbind": lambda w: torch.stack(w.unbind(0)),
    "topk": lambda w: w.topk(2).values,
    "deepcopy": lambda w: copy.deepcopy(w),
    "out": lambda w: torch.add(w, 1, out=torch.empty(w.shape)),
    "in place": lambda w: w.clone().mul_(w),
    "dispatch": lambda w: torch.ops.aten.mul.Tensor(w, 2.0),
    "item": lambda w: torch.tensor(w.max().item()),
    "equal": lambda w: torch.tensor(torch.equal(w, w)),
}


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize("kind", KINDS[:4], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_torch_functions_give_what_they_give_for_the_dense_tensor(function, kind):
    lazy = weights(**kind)
    result, expected = function(lazy), function(plain(lazy))
    result = result + 0 if isinstance(result, AttentionWeights) else result  # as of detach()
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected)


def test_what_is_written_into_it_stays():
    lazy = weights()
    expected = plain(lazy)
    lazy[0, 1] = 3.0
    lazy.mul_(2.0)
    expected[0, 1] = 3.0
    torch.testing.assert_close(lazy + 0, expected * 2.0)


def test_files_hold_the_numbers():
    lazy, file = weights(), io.BytesIO()
    torch.save(lazy, file)
    file.seek(0)
    torch.testing.assert_close(torch.load(file), plain(lazy))
    assert len(save({"weights": lazy.contiguous()})) > lazy.numel() * 4


PART = st.one_of(
    st.integers(-2, 1),
    st.builds(slice, st.none() | st.integers(-8, 8), st.none() | st.integers(-8, 8), st.none() | st.integers(1, 3)),
)


@pytest.mark.thorough
@settings(deadline=None, max_examples=150)
@given(st.sampled_from(KINDS), st.lists(PART, max_size=4), st.none() | st.integers(0, 4))
def test_tiles_are_those_of_the_dense_tensor(kind, parts, dots):
    lazy = weights(**kind)
    parts = parts[: lazy.ndim]
    if dots is not None:
        parts.insert(min(dots, len(parts)), ...)
    index = tuple(parts)
    try:
        expected = plain(lazy)[index]
    except IndexError:
        with pytest.raises(IndexError):
            lazy[index]
        return
    tile = lazy[index]
    torch.testing.assert_close(tile, expected)
    assert lazy.made == bool(kind.get("own_key"))  # keys stand elsewhere then, and all of it is made


@pytest.mark.parametrize("index", [(0,) * 5, 9, slice(None, None, -1), "first", 1.5])
def test_wrong_index_raises_what_a_tensor_raises(index):
    lazy = weights()
    with pytest.raises(Exception) as expected:  # noqa: PT011 - whatever PyTorch raises
        plain(lazy)[index]
    with pytest.raises(type(expected.value)):
        lazy[index]


def test_gradients_flow_through_weights_when_they_are_used():
    torch.manual_seed(2)
    ours, theirs = MultiheadAttention(12, 3, batch_first=True), torch.nn.MultiheadAttention(12, 3, batch_first=True)
    theirs.load_state_dict(ours.state_dict())
    x, target = torch.randn(2, 5, 12), torch.eye(5)
    gradients = []
    for module in (ours, theirs):
        module.zero_grad()
        _, found = module(x, x, x)
        assert found.requires_grad
        (found - target).square().sum().backward()
        gradients.append(module.in_proj_weight.grad)
    torch.testing.assert_close(*gradients)
    assert float(gradients[0].abs().max()) > 1e-3


def test_looking_at_a_tile_while_training_makes_nothing():
    module = MultiheadAttention(12, 3, batch_first=True)
    x = torch.randn(2, 5, 12)
    found = module(x, x, x)[1]
    with torch.no_grad():
        tile = found[0, 2]
        assert not found.made
    torch.testing.assert_close(tile, found.detach()[0, 2])
    assert not found.made
    torch.testing.assert_close(tile, found[0, 2].detach())
    assert found.made
    assert found[0, 2].requires_grad


def test_weights_of_a_call_without_gradients_have_none():
    module = MultiheadAttention(12, 3, batch_first=True)
    x = torch.randn(2, 5, 12)
    with torch.no_grad():
        found = module(x, x, x)[1]
    assert not found.requires_grad
    assert not (found + 0).requires_grad


def test_mask_tensor_is_the_floating_mask_it_stands_for():
    lazy = make_mask(2, 5, 8, 2, mask_function=sliding_window_causal_mask_function(3))  # in a cache of a fixed size
    expected = torch.full((2, 1, 5, 8), torch.finfo(torch.float32).min)
    expected[..., :7].masked_fill_((hw.Causal() & hw.Window(3)).to_dense(5, 7), 0.0)
    assert lazy.shape == (2, 1, 5, 8)
    assert (lazy.dtype, lazy.ndim, lazy.made) == (torch.float32, 4, False)
    assert "Window" in repr(lazy)
    assert torch.equal(lazy + 0, expected)
    assert torch.equal(lazy[:, :, :, :5], expected[:, :, :, :5])
    assert torch.equal(torch.where(lazy == 0.0, 0.0, -1.0), torch.where(expected == 0.0, 0.0, -1.0))
    assert not make_mask(2, 5, 8, mask_function=bidirectional_mask_function).any()


def waves(*shape):
    return torch.arange(float(np.prod(shape))).view(shape).sin()


STREAMED = {
    "sum of keys": lambda w: w.sum(-1), "sum of queries": lambda w: w.sum(-2), "sum of both": lambda w: w.sum((-2, -1)),
    "sum of all": lambda w: w.sum(), "kept": lambda w: w.sum(dim=-2, keepdim=True),
    "double": lambda w: w.sum(-1, dtype=torch.float64),
    "sum of all but keys": lambda w: torch.sum(w, dim=list(range(w.ndim - 1))),
    "mean of queries": lambda w: torch.mean(w, -2), "mean of all": lambda w: w.mean(),
    "amax": lambda w: w.amax(-1), "amin of all": lambda w: torch.amin(w), "max of all": lambda w: w.max(),
    "max": lambda w: w.max(-1), "max kept": lambda w: w.max(dim=w.ndim - 1, keepdim=True),
    "min": lambda w: torch.min(w, -1).values, "argmax": lambda w: w.argmax(-1),
    "topk": lambda w: w.topk(3), "least": lambda w: torch.topk(w, 2, largest=False),
    "product": lambda w: w @ torch.arange(w.shape[-1] * 4.0).view(-1, 4).cos(),
    "product of each": lambda w: torch.matmul(w, waves(*w.shape[:-2], w.shape[-1], 2)),
    "from the left": lambda w: waves(3, N) @ w, "float": lambda w: w.float().amax((-1, -2)),
    "detached": lambda w: w.detach().sum(-2),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("name", STREAMED)
def test_reductions_and_products_do_not_compute_the_dense_tensor(name, kind, monkeypatch):
    monkeypatch.setattr("headwise.models.adapters.weights.MOST", 40)  # blocks of one row or two
    lazy = weights(**kind)
    found, expected = STREAMED[name](lazy), STREAMED[name](plain(lazy))
    assert type(found) is type(expected)
    for one, other in zip(*((x if isinstance(x, tuple) else (x,)) for x in (found, expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    by_column = kind.get("own_key", False) and name not in (
        "sum of keys",
        "sum of both",
        "sum of all",
        "double",
        "mean of all",
    )
    assert lazy.made == by_column


def test_mean_over_heads_is_lazy_too():
    lazy = weights()
    mean = lazy.mean(1)
    torch.testing.assert_close(mean.sum(-2), plain(lazy).mean(1).sum(-2))
    assert not mean.made
    torch.testing.assert_close(mean + 0, plain(lazy).mean(1))
    assert not lazy.made


@pytest.mark.parametrize("function", [
    lambda w: w.sum(1), lambda w: w.amax(-2), lambda w: w.max(-2), lambda w: w.topk(2, dim=-2), lambda w: w.argmax(),
    lambda w: torch.maximum(w, w), lambda w: torch.max(w, torch.zeros(M)), lambda w: w @ torch.ones(M),
    lambda w: w @ w.mT,
])  # fmt: skip
def test_other_functions_compute_it(function):
    lazy = weights()
    torch.testing.assert_close(function(lazy), function(plain(lazy)))
    assert lazy.made


@pytest.mark.parametrize(
    "function", [lambda w: w.sum(5), lambda w: w.amax((-1, -1)), lambda w: w.topk(9), lambda w: w @ torch.ones(3, 3)]
)
def test_wrong_arguments_raise_what_a_tensor_raises(function):
    with pytest.raises((IndexError, RuntimeError)) as expected:
        function(plain(weights()))
    with pytest.raises(type(expected.value)):
        function(weights())


def test_what_is_written_into_a_detached_tensor_is_seen():
    lazy = weights()
    lazy.detach().zero_()
    assert float(lazy.sum()) == 0.0


def test_sums_carry_gradients_in_training():
    torch.manual_seed(2)
    module = MultiheadAttention(H * 4, H, batch_first=True)
    x = torch.randn(B, N, H * 4, requires_grad=True)
    lazy = module(x, x, x)[1]
    (lazy.sum(-2).square().sum()).backward()
    assert x.grad is not None
    assert float(x.grad.abs().sum()) > 0
