"""recognise, certify and find_heads of a model that is attached: they follow its own code, and it stays attached."""

from threading import Thread

import hand_written as hand
import pytest
import torch
from torch import nn

import headwise as hw
from headwise.errors import ConfigError

B, N, E = 2, 5, 12


def made(kind=hand.Packed):
    torch.manual_seed(0)
    return hand.Model(kind).double().eval()


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(B, N, E, dtype=torch.float64)


def recognised(model, x):
    found = hw.models.recognise(model, x)
    return repr(found), [call.map[:] for call in found], found.output


def certified(model, x):
    found = hw.models.certify(model, x)
    return [(one.name, one.same, one.function, one.difference, one.remarks) for one in found], [], found.output


def heads(model, x):
    return [(site.name, site.num_heads, site.layout().missing) for site in hw.find_heads(model, x)], [], model(x)


WAYS = {"recognise": recognised, "certify": certified, "find_heads": heads}


@pytest.mark.thorough_except("recognise")
@pytest.mark.parametrize("way", WAYS)
def test_an_attached_model_gives_the_same_as_a_detached_one(way, x):
    said, maps, output = WAYS[way](made(), x)
    model = made()
    with hw.attach(model, batch=x) as handle:
        for _ in range(2):
            again, those, out = WAYS[way](model, x)
            assert again == said
            torch.testing.assert_close(those, maps, rtol=0, atol=0)
            if way != "find_heads":
                assert torch.equal(out, output)  # the bits of its own code
            assert_attached(model, handle, x)


def assert_attached(model, handle, x):
    """headwise computes both layers, from the next forward on."""
    calls = []
    with hw.models.observe(calls.append, model=model):
        model(x)
    assert [call.name for call in calls] == list(handle.attached) == ["attention.0", "attention.1"]


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
def test_they_do_so_in_a_thread_while_others_run_the_attached_model(way, x):
    said, _, _ = WAYS[way](made(), x)
    model, found, wrong = made(), [], []

    def look():
        found.extend(WAYS[way](model, x)[0] == said for _ in range(3))

    with hw.attach(model, batch=x) as handle:
        expected = model(x)
        thread = Thread(target=look)
        if way != "find_heads":  # which sets the model's state for a moment
            thread.start()
            while thread.is_alive():
                wrong.append(float((model(x) - expected).abs().max().detach()))
        else:
            thread.start()
        thread.join()
        assert found == [True] * 3
        assert not any(wrong)
        assert_attached(model, handle, x)


class Failing(nn.Module):
    """Raises in its second part if the input says so."""

    def __init__(self):
        super().__init__()
        self.model = made()

    def forward(self, x):
        y = self.model(x)
        if bool(x.isnan().any()):
            raise ArithmeticError("not a number")
        return y


@pytest.mark.parametrize("way", WAYS)
def test_the_attachment_works_again_after_the_model_raised(way, x):
    model = Failing()
    with hw.attach(model, batch=x):
        expected = model(x)
        with pytest.raises(ArithmeticError, match="not a number"):
            WAYS[way](model, torch.full_like(x, torch.nan))
        calls = []
        with hw.models.observe(calls.append, model=model):
            assert torch.equal(model(x), expected)
        assert [call.name for call in calls] == ["model.attention.0", "model.attention.1"]


def test_a_model_that_is_attached_and_watched_is_recognised_too(x):
    model = made()
    with hw.attach(model, batch=x), hw.watch(model, measures=["entropy"]) as record, torch.no_grad():
        model(x)
        before = record.latest["entropy"]
        assert len(hw.models.recognise(model, x)) == 2
        torch.testing.assert_close(record.latest["entropy"], before)


@pytest.mark.parametrize("way", ["recognise", "certify"])
def test_converted_layers_of_pytorch_are_recognised_by_their_own_code(way, x):
    layer = nn.TransformerEncoderLayer(E, 3, 20, batch_first=True, dtype=torch.float64)
    said, _, _ = WAYS[way](layer, x)
    with hw.attach(layer) as handle:
        assert WAYS[way](layer, x)[0] == said
        assert handle.attached == ("self_attn",)
        assert isinstance(layer.self_attn(x, x, x)[1], hw.models.adapters.weights.AttentionWeights)


@pytest.mark.thorough_except("recognise")
@pytest.mark.parametrize("way", ["recognise", "certify"])
def test_attention_that_headwise_computes_by_an_interface_is_named_as_that(way):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=12, intermediate_size=7, num_hidden_layers=2, num_attention_heads=3
    )
    model, ids = transformers.LlamaModel(config).eval(), torch.tensor([[1, 2, 3, 5, 7]])
    said, _, _ = WAYS[way](model, ids)
    with hw.attach(model), pytest.raises(ConfigError, match=r"headwise computes the attention of .*detach it first$"):
        WAYS[way](model, ids)
    assert WAYS[way](model, ids)[0] == said
