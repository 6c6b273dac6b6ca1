"""`hw.watch` of models that headwise has no adapter for: their attention is recognised while they run."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import headwise as hw

B, H, N, D = 2, 3, 5, 4
E = H * D


class Attention(nn.Module):
    """Attention of a tutorial, which keeps its weights."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(E, 3 * E), nn.Linear(E, E), nn.Dropout(p)

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        q, k, v = (y.view(*y.shape[:2], H, D).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        scores = q @ k.mT / math.sqrt(D)
        if real is not None:
            scores = scores.masked_fill(~real[:, None, None], -1e9)
        weights = F.softmax(scores, dim=-1)
        self.weights = weights.detach()
        return self.out((self.dropout(weights) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A residual connection, checkpointed if so wanted."""

    def __init__(self, p: float, again: str) -> None:
        super().__init__()
        self.attn, self.norm, self.again = Attention(p), nn.LayerNorm(E), again

    def forward(self, x: Tensor) -> Tensor:
        if self.again:
            return x + checkpoint(self.attn, self.norm(x), use_reentrant=self.again == "reentrant")
        return x + self.attn(self.norm(x))


def model_of(p: float = 0.0, again: str = "") -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(Block(p, again), Block(p, again))


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(B, N, E)


def modes() -> int:
    return torch._C._len_torch_function_stack()


def test_measures_and_maps_are_those_of_the_model_s_own_weights(x):
    model = model_of().double()
    expected = model(x.double())
    with hw.watch(model, measures=["entropy", "max_logit"], maps="lazy") as record:
        assert torch.equal(model(x.double()), expected)
    assert record.layers == tuple(record.maps) == tuple(record.modules()) == ("0.attn", "1.attn")
    assert record.unwatched == {}
    for i, name in enumerate(record.layers):
        weights = record.modules()[name].weights
        torch.testing.assert_close(record.maps[name][:], weights)
        entropy = -(weights * weights.log()).sum(-1).mean((0, 2))
        torch.testing.assert_close(record.latest["entropy"][i], entropy.float())
    assert modes() == 0


@pytest.mark.parametrize("again", ["", "reentrant", "other"])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_training_is_the_same_while_it_is_watched(p, again, x):
    """Outputs and gradients have the same bits, dropout the same numbers, and each call is seen once."""
    found = []
    for watched in (False, True):
        model = model_of(p, again).train()
        record = hw.watch(model, measures=["entropy"], maps="lazy")
        if watched:
            record.start()
        torch.manual_seed(2)
        y = model(x.requires_grad_())
        y.square().mean().backward()
        record.stop()
        found.append([y.detach(), *(p.grad for p in model.parameters())])
        if watched:
            assert record.ledger.steps == 1
            assert list(record.maps) == ["0.attn", "1.attn"]
            assert record.unwatched == {}
            if not again:  # else the weights are those of the repeated call
                torch.testing.assert_close(record.maps["1.attn"][:], model[1].attn.weights, rtol=1e-4, atol=1e-6)
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


@pytest.mark.parametrize("mode", ["autocast", "inference"])
def test_autocast_and_inference_mode(mode, x):
    model = model_of().eval()
    with torch.autocast("cpu", torch.bfloat16) if mode == "autocast" else torch.inference_mode():
        expected = model(x)
        with hw.watch(model, measures=["entropy"], maps="lazy") as record:
            assert torch.equal(model(x), expected)
    assert list(record.maps) == ["0.attn", "1.attn"]
    assert record.maps["0.attn"].q.dtype == (torch.bfloat16 if mode == "autocast" else torch.float32)
    assert not bool(record.latest["entropy"].isnan().any())


@pytest.mark.parametrize("inside", [True, False])
@torch.no_grad()
def test_a_compiled_model_is_watched(inside, x):
    model = model_of().eval()
    expected = model(x)
    compiled = torch.compile(model, backend="eager")
    if inside:
        compiled = nn.Sequential(*(torch.compile(block, backend="eager") for block in model))
    with hw.watch(compiled, measures=["entropy"]) as record:
        torch.testing.assert_close(compiled(x), expected)
    assert [name.replace("_orig_mod.", "") for name in record.layers] == ["0.attn", "1.attn"]
    torch.testing.assert_close(compiled(x), expected)


def test_a_report_is_made_of_a_record(x, tmp_path):
    model = model_of()
    with hw.watch(model, maps="lazy") as record:
        model(x)
    report = hw.report(record, tmp_path / "report.html")
    assert "2 layers, 6 heads" in repr(report)
    assert "0.attn" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_queries_that_are_padding_are_not_counted(x):
    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = Attention()

        def forward(self, x):
            return self.attn(x, torch.arange(N) < torch.tensor([[5], [2]]))

    model = Padded()
    with hw.watch(model, measures=["entropy"], maps="lazy") as record:
        model(x)
    assert torch.equal(record.maps["attn"].lse[1] == -torch.inf, (torch.arange(N) >= 2).expand(H, N))
    weights = model.attn.weights
    entropies = torch.special.entr(weights).sum(-1)
    expected = torch.cat((entropies[0], entropies[1, :, :2]), -1).mean(-1)
    torch.testing.assert_close(record.latest["entropy"][0], expected)


def test_the_mode_is_there_in_measured_forwards_only(x):
    seen = []
    model = model_of()
    model[0].attn.register_forward_pre_hook(lambda *_: seen.append(modes()))
    with hw.watch(model, every=2) as record:
        for _ in range(3):
            model(x)
    assert seen == [1, 0, 1]
    assert record.ledger.steps == 2


def test_the_mode_is_gone_after_an_error(x):
    class Broken(nn.Module):
        def forward(self, x):
            raise RuntimeError("broken")

    model = nn.Sequential(Attention(), Broken())
    with hw.watch(model) as record, pytest.raises(RuntimeError, match="broken"):
        model(x)
    assert modes() == 0
    assert record.layers == ()


def test_layers_are_chosen_by_name(x):
    model = model_of()
    with hw.watch(model, layers="1.*") as record:
        model(x)
    assert record.layers == ("1.attn",)
    with pytest.raises(hw.ConfigError, match=r"layers=\['nowhere\.\*'\]: Sequential has no module of that name"):
        hw.watch(model, layers=["nowhere.*"])
    with pytest.raises(hw.ConfigError, match=r"layers=\[1\]: the attention of Sequential is recognised while it runs"):
        hw.watch(model, layers=[1])


def test_a_model_without_attention_is_named_in_its_first_forward(x):
    model = nn.Sequential(nn.Linear(E, 7), nn.Softmax(-1))
    with (
        hw.watch(model) as record,
        pytest.raises(hw.ConfigError, match=r"watch\(model\): no attention in Sequential; .*nearest: 1: softmax of"),
    ):
        model(x)
    assert modes() == 0
    assert record.layers == ()
    assert model(x).shape == (B, N, 7)


def test_what_is_not_attention_is_listed_as_unwatched(x):
    class Gate(nn.Module):
        def forward(self, x):
            return x * F.softmax(x, -1)

    model = nn.Sequential(Attention(), Gate())
    with hw.watch(model) as record:
        model(x)
    assert record.layers == ("0",)
    assert list(record.unwatched) == ["1"]


def test_what_a_subscriber_raises_is_raised_through_the_model(x):
    def refuse(call):
        raise hw.ConfigError("refused")

    model = model_of()
    names = {module: name for name, module in model.named_modules()}
    with hw.watch(model), hw.models.observe(refuse, modules=names), pytest.raises(hw.ConfigError, match="refused"):
        model(x)
