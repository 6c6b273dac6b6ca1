"""Gradients with respect to attention weights that a model returned: as eager's, or an error whose way out works."""

import inspect

import pytest
import torch
from torch import nn

import headwise as hw
from headwise.errors import ConfigError

transformers = pytest.importorskip("transformers")


def bert(implementation="eager"):
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 29}
    config = transformers.BertConfig(**sizes, vocab_size=53, attn_implementation=implementation)
    return transformers.BertForSequenceClassification(config).eval()


IDS = torch.randint(3, 53, (2, 11), generator=torch.Generator().manual_seed(1))


def forward(model):
    out = model(IDS, output_attentions=True)
    return out.logits[:, 1].sum(), out.attentions


def by_grad(model):
    loss, weights = forward(model)
    return torch.autograd.grad(loss, weights)


def by_grad_that_allows_none(model):
    loss, weights = forward(model)
    return torch.autograd.grad(loss, weights, allow_unused=True)


def by_grad_that_makes_zeros(model):
    loss, weights = forward(model)
    return torch.autograd.grad(loss, weights, materialize_grads=True)


def by_grad_of_weights_that_were_read(model):
    loss, weights = forward(model)
    assert all(bool((one + 0).isfinite().all()) for one in weights)
    return torch.autograd.grad(loss, weights)


def by_retain_grad(model):
    loss, weights = forward(model)
    for one in weights:
        one.retain_grad()
    loss.backward()
    return [one.grad for one in weights]


def by_register_hook(model):
    loss, weights = forward(model)
    found = {}
    for i, one in enumerate(weights):
        one.register_hook(lambda gradient, i=i: found.__setitem__(i, gradient))
    loss.backward()
    return [found[i] for i in range(len(weights))]


def by_backward_into_them(model):
    loss, weights = forward(model)
    loss.backward(inputs=list(weights))
    return [one.grad for one in weights]


WAYS = [
    by_grad, by_grad_that_allows_none, by_grad_that_makes_zeros, by_grad_of_weights_that_were_read, by_retain_grad,
    by_register_hook,
    pytest.param(by_backward_into_them, marks=pytest.mark.skipif(
        "has_torch_function" not in inspect.getsource(torch.autograd.backward), reason="PyTorch itself raises then"
    )),
]  # fmt: skip


@pytest.mark.thorough_beyond(4)
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_the_output_are_refused_and_eager_has_them(way, weights):
    expected = by_grad(bert())
    model = bert("sdpa")
    with hw.attach(model, weights=weights):
        with pytest.raises(ConfigError, match=r"call model\.set_attn_implementation\('eager'\) before the forward"):
            way(model)
        model.set_attn_implementation("eager")
        for found, wanted in zip(way(model), expected, strict=True):
            torch.testing.assert_close(found, wanted)


@pytest.mark.thorough
def test_the_way_out_works_for_watched_and_loaded_models():
    expected = by_grad(bert())
    loaded, watched = bert("headwise"), bert("sdpa")
    with pytest.raises(ConfigError, match=r"set_attn_implementation\('eager'\)"):
        by_retain_grad(loaded)
    loaded.set_attn_implementation("eager")
    torch.testing.assert_close(by_grad(loaded), expected)
    with hw.watch(watched):
        with pytest.raises(ConfigError, match=r"set_attn_implementation\('eager'\)"):
            by_register_hook(watched)
        watched.set_attn_implementation("eager")
        torch.testing.assert_close(by_grad(watched), expected)


def test_gradients_of_what_is_computed_from_the_weights_are_those_of_a_copy():
    with hw.attach(bert("sdpa")) as handle:
        _, (first, _) = forward(handle.model)
        with pytest.raises(ConfigError, match=r"use a copy of them: weights\.clone\(\)"):
            first.register_hook(print)
        copy, seen = first.clone(), []
        copy.retain_grad()
        copy.register_hook(seen.append)
        copy.square().sum().backward()
        torch.testing.assert_close(copy.grad, 2 * copy.detach())
        assert len(seen) == 1
        _, (first, _) = forward(handle.model)
        (found,) = torch.autograd.grad(first.square().sum(), first)
        torch.testing.assert_close(found, 2 * first.detach() + 0)


def test_weights_that_need_no_gradient_raise_what_tensors_raise():
    with hw.attach(bert("sdpa")) as handle, torch.no_grad():
        _, (first, _) = forward(handle.model)
    for ask in (lambda: first.retain_grad(), lambda: first.register_hook(print)):
        with pytest.raises(RuntimeError, match="require"):
            ask()


def test_the_weights_of_multihead_attention_behave_as_those_of_pytorch():
    """Its output is not computed from the tensor that it returns either."""
    torch.manual_seed(0)
    module, x = nn.MultiheadAttention(24, 3, batch_first=True).eval(), torch.randn(2, 5, 24)
    for averaged in (False, True):
        for around in (False, True):
            handle = hw.attach(module) if around else None
            out, weights = module(x, x, x, average_attn_weights=averaged)
            with pytest.raises(RuntimeError, match="not have been used in the graph"):
                torch.autograd.grad(out.sum(), weights, retain_graph=True)
            assert torch.autograd.grad(out.sum(), weights, allow_unused=True) == (None,)
            weights.retain_grad()
            weights.square().sum().backward()
            torch.testing.assert_close(weights.grad + 0, 2 * weights.detach() + 0)
            if handle is not None:
                handle.detach()
