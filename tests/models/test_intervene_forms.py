"""Edits of recognised attention in calls of a form that was not compared before: padded, under autocast, fused, …"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import headwise as hw
from headwise.interventions import Forbid, Scale

N = 7
REAL = torch.tensor([[True] * 5 + [False] * 2, [True] * N])


class Attention(nn.Module):
    """By hand, and fused for `fused=True`. `forbidden` [n, m] are hidden too."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 12)
        self.forbidden: Tensor | None = None

    def forward(self, x: Tensor, real: Tensor | None = None, fused: bool = False) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (3, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        allowed = None if real is None else real[:, None, None]
        if self.forbidden is not None:
            allowed = ~self.forbidden if allowed is None else allowed & ~self.forbidden
        if fused:
            out = scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        else:
            scores = q @ k.mT / 2
            if allowed is not None:
                scores = scores.masked_fill(~allowed, -math.inf)
            out = scores.softmax(-1) @ v
        return out.transpose(1, 2).flatten(2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Attention(), Attention()

    def forward(self, x: Tensor, repeated: bool = False, **how: Any) -> Tensor:
        for layer in (self.one, self.two):
            more = checkpoint(layer, x, use_reentrant=False, **how) if repeated else layer(x, **how)
            x = x + more.to(x.dtype)
        return x


def hidden(query: int, key: int) -> Tensor:
    return torch.arange(N)[:, None].eq(query) & torch.arange(N).eq(key)


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().double().train()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, N, 12, dtype=torch.float64)


def results(net: Net, x: Tensor, **how: Any) -> list[Tensor]:
    """The output, and the gradients of the input and the parameters."""
    x = x.clone().requires_grad_()
    y = net(x, **how)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *net.parameters()])]


FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded": {"real": REAL},
    "fused": {"fused": True},
    "fused, padded": {"fused": True, "real": REAL},
    "checkpointed": {"real": REAL, "repeated": True},
}


@pytest.mark.thorough
@pytest.mark.parametrize("first", ["plain", "padded", "fused"])
@pytest.mark.parametrize("form", FORMS)
def test_the_first_call_of_a_form_is_edited_with_its_gradients(net: Net, x: Tensor, first: str, form: str):
    net.one.forbidden = net.two.forbidden = hidden(4, 2)
    expected = results(net, x, **FORMS[form])
    net.one.forbidden = net.two.forbidden = None
    with hw.attach(net, batch={"x": x, **FORMS[first]}) as handle, hw.intervene(handle, Forbid(4, 2), unused="raise"):
        for _ in range(3):
            for mine, theirs in zip(results(net, x, **FORMS[form]), expected, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)


def test_the_first_call_under_autocast(net: Net, x: Tensor):
    net, x = net.float(), x.float()
    with hw.attach(net, batch=x) as handle, torch.autocast("cpu", dtype=torch.bfloat16):
        with hw.intervene(handle, Scale(0.0), unused="raise"):
            assert torch.equal(net(x), x)
        assert not torch.equal(net(x), x)


def test_the_first_call_of_a_function_of_another_package(flash: Any):
    class Flash(nn.Module):
        def forward(self, x: Tensor, causal: bool) -> Tensor:
            q = x.unflatten(-1, (3, 4))
            return flash.flash_attn_func(q, q, q, causal=causal).flatten(2)

    model, x = nn.ModuleDict({"a": Flash()}), torch.randn(1, N, 12)
    with hw.attach(model["a"], batch=(x, False)) as handle:
        plain = model["a"](x, False), model["a"](x, True)
        assert not torch.allclose(*plain)
    with hw.attach(model["a"], batch=(x, False)) as handle, hw.intervene(handle, Forbid(3, 1), unused="raise"):
        found = model["a"](x, True)
    assert (found - plain[1]).abs().amax(-1)[0].gt(1e-5).nonzero().flatten().tolist() == [3]


def test_watching_sees_the_first_call_once_and_as_it_was_edited(net: Net, x: Tensor):
    with hw.attach(net, batch=x) as handle, hw.watch(net, maps="lazy") as record:
        with hw.intervene(handle, Forbid(4, 2)):
            net(x, real=REAL)
        assert [*record.maps] == ["one", "two"]
        assert not record.maps["one"][:, :, 4, 2].any()
        assert not record.remarks


class Changed(Attention):
    """Which for padded batches reads its scores, or computes something that is not followed."""

    reads = False

    def forward(self, x: Tensor, real: Tensor | None = None, fused: bool = False) -> Tensor:
        if real is None:
            return super().forward(x)
        q, k, v = (layer(x).unflatten(-1, (3, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = q @ k.mT / 2
        weights = scores.softmax(-1)
        if self.reads:
            self.largest = float(weights.detach().max())
        else:
            weights = weights.sort(-1).values
        return (weights @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("reads", [True, False])
def test_a_call_that_its_own_code_computes_raises(net: Net, x: Tensor, reads: bool):
    net.one = Changed().double()
    net.one.reads = reads
    with hw.attach(net, batch=x) as handle:
        net(x)
        with hw.intervene(handle, Forbid(4, 2)):
            net(x)
        if reads:
            net(x, real=REAL)
        with hw.intervene(handle, Forbid(4, 2), layers="two"):
            net(x, real=REAL)
        with pytest.raises(hw.ConfigError, match="one was not edited, as its own code"), \
                hw.intervene(handle, Forbid(4, 2)):  # fmt: skip
            net(x, real=REAL)


def test_an_edit_that_reached_no_call_is_reported(net: Net, x: Tensor):
    own = nn.Sequential(hw.MultiHeadAttention(12, 3), hw.MultiHeadAttention(12, 3)).double()
    with pytest.raises(hw.ConfigError, match="no attention of its layers was called"), \
            hw.intervene(own, Forbid(0, 1), layers="1", unused="raise"):  # fmt: skip
        own[0](x)
    with pytest.warns(UserWarning, match="Forbid.*no attention of its layers was called"), \
            hw.intervene(own, Forbid(0, 1)):  # fmt: skip
        pass
    with hw.intervene(own, Forbid(0, 1), unused="ignore"):
        pass


class Blocks(nn.Module):
    """Full attention in blocks of queries, which no mask places."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (3, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        parts = [(part @ k.mT / 2).softmax(-1) @ v for part in q.split(4, 2)]
        return torch.cat(parts, 2).transpose(1, 2).flatten(2)


def test_queries_at_unknown_positions_cannot_be_named(x: Tensor):
    torch.manual_seed(0)
    model = Blocks().double()
    with hw.attach(model, batch=x) as handle:
        with pytest.raises(hw.ConfigError, match=r"queries=\[5\]: where the 4 queries of the model are .* not known"), \
                hw.intervene(handle, Forbid(5, 2)):  # fmt: skip
            model(x)
        with hw.intervene(handle, Scale(0.0), unused="raise"):
            assert not model(x).any()
