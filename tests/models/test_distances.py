"""Biases of hand-written attention that depend on distances only are kept as numbers of distances."""

import pytest
import torch
from torch import nn

import headwise as hw
from headwise.models.recognise import scores
from headwise.scores import Bias, RelativeBias

B, H, D = 2, 3, 5
SLOPES = torch.tensor([0.5, 0.3, 0.1], dtype=torch.float64)[:, None, None]


class Biased(nn.Module):
    """Attention of the last n of m tokens to all of them, with a bias."""

    def __init__(self, n, bias):
        super().__init__()
        self.qkv, self.n, self.bias = nn.Linear(H * D, 3 * H * D).double(), n, bias

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (H, D)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        self.weights = (q[:, :, x.shape[1] - self.n :] @ k.mT / 2 + self.bias).softmax(-1)
        return self.weights @ v


def distances(n, m):
    return (torch.arange(m) - torch.arange(m - n, m)[:, None]).double()


def hidden_after(n, m):
    return torch.where(distances(n, m) > 0, -torch.inf, 0.0)


def padded(n, m):
    return torch.where(torch.arange(m) >= m - torch.tensor([[0], [3]]), -1e9, 0.0)[:, None, None].double()


FORMS = {
    "away": lambda n, m: -SLOPES * distances(n, m).abs(),
    "signed": lambda n, m: SLOPES * distances(n, m),
    "one head": lambda n, m: 0.1 * distances(n, m),
    "causal": lambda n, m: SLOPES * distances(n, m) + hidden_after(n, m),
    "padding in it": lambda n, m: SLOPES * distances(n, m) + hidden_after(n, m) + padded(n, m),
    "buckets": lambda n, m: torch.randn(9, H).double()[(distances(n, m).long() // 2).clamp(-4, 4) + 4].movedim(-1, 0),
}


def map_of(model, x):
    with hw.watch(model, maps="lazy") as record, torch.no_grad():
        model(x)
    (amap,) = record.maps.values()
    tokens = (amap.lse > -torch.inf)[..., None]  # not the queries of padding
    torch.testing.assert_close(amap[:], model.weights * tokens, rtol=1e-9, atol=1e-11)
    return amap


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "cells"), [(17, 1 << 21), (7, 1 << 21), (17, 90)])  # in one block, or several
def test_a_bias_of_distances_is_one_number_a_distance(form, n, cells, monkeypatch):
    monkeypatch.setattr(scores, "CELLS", cells)
    torch.manual_seed(0)
    m = 17
    amap = map_of(Biased(n, FORMS[form](n, m)), torch.randn(B, m, H * D).double())
    (score,) = amap.rule.scores
    assert isinstance(score, RelativeBias)
    assert score.values.shape == (1 if form == "one head" else H, n + m - 1)


@pytest.mark.parametrize("at", [(0, 1, 0), (1, 9, 3), (2, 16, 15)])
def test_one_pair_that_differs_in_its_last_bit_keeps_a_bias_of_pairs(at, monkeypatch):
    monkeypatch.setattr(scores, "CELLS", 90)
    torch.manual_seed(0)
    bias = FORMS["causal"](17, 17)
    bias[at] = torch.nextafter(bias[at], torch.tensor(9.0).double())
    amap = map_of(Biased(17, bias), torch.randn(B, 17, H * D).double())
    (score,) = amap.rule.scores
    assert isinstance(score, Bias)


def test_a_bias_that_is_learned_for_each_pair_gets_the_gradient_of_each_pair():
    torch.manual_seed(0)
    model = Biased(7, nn.Parameter(FORMS["away"](7, 7)))
    x = torch.randn(B, 7, H * D).double()
    (expected,) = torch.autograd.grad(model(x).square().sum(), model.bias)
    with hw.models.attach(model):
        (gradient,) = torch.autograd.grad(model(x).square().sum(), model.bias)
    torch.testing.assert_close(gradient, expected)


def test_memory_is_linear_in_the_tokens():
    torch.manual_seed(0)
    sizes = []
    for n in (64, 128):
        amap = map_of(Biased(n, FORMS["causal"](n, n)), torch.randn(1, n, H * D).double())
        sizes.append(amap.nbytes)
    assert sizes[1] == pytest.approx(2 * sizes[0], rel=0.01)
