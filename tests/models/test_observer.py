"""Every attention call, seen as it happens."""

import pytest
import torch
from family_checks import output, switched
from model_families import FAMILIES, inputs, make
from torch import nn

import headwise as hw
from headwise.errors import ConfigError

X = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    hw.attach(encoder)
    return encoder


def test_calls_are_told_in_order_with_maps_and_measures(model):
    seen: list[hw.models.AttentionCall] = []
    before = model(X)
    with hw.models.observe(seen.append, model=model, measures=["entropy", "max_logit"]):
        after = model(X)
    model(X)
    torch.testing.assert_close(after, before)  # another kernel may compute the statistics too
    assert [observation.name for observation in seen] == ["layers.0.self_attn", "layers.1.self_attn"]
    for observation in seen:
        assert observation.module is model.get_submodule(observation.name)
        assert observation.map.shape == (3, 4, 7, 7)
        again = observation.map.measure("entropy", "max_logit")
        for name, value in again.items():
            torch.testing.assert_close(observation.measured[name], value)


def test_without_measures_nothing_is_measured_and_without_a_model_nothing_is_named(model):
    seen: list[hw.models.AttentionCall] = []
    with hw.models.observe(seen.append):
        model(X)
    assert [(observation.name, observation.measured) for observation in seen] == [("", None)] * 2


def test_only_the_modules_of_the_model_are_told(model):
    other = hw.MultiHeadAttention(16, 4)  # computes with attend, and is no adapter
    twin = nn.MultiheadAttention(16, 4, batch_first=True)
    hw.attach(twin)
    seen: list[hw.models.AttentionCall] = []
    with hw.models.observe(seen.append, model=twin):
        model(X)
        other(X)
        assert seen == []
        twin(X, X, X)
    assert len(seen) == 1


def test_observers_stack_and_each_gets_its_measures(model):
    outer: list[hw.models.AttentionCall] = []
    inner: list[hw.models.AttentionCall] = []
    with hw.models.observe(outer.append, measures=["entropy"]):
        with hw.models.observe(inner.append, measures=["entropy", "sink_mass"], model=model):
            model(X)
        model(X)
    assert (len(outer), len(inner)) == (4, 2)
    assert {"entropy", "sink_mass"} == set(inner[0].measured)
    assert {"entropy"} == set(outer[-1].measured)
    assert "entropy" in outer[0].measured


def test_two_measures_of_one_name_are_refused(model):
    with hw.models.observe(print, measures=[hw.stats.SinkMass(1)], model=model):
        with hw.models.observe(print, measures=[hw.stats.SinkMass(1)], model=model):
            pass
        with pytest.raises(ConfigError, match="sink_mass"), hw.models.observe(print, measures=[hw.stats.SinkMass(2)]):
            pass
        with hw.models.observe(print, measures=[hw.stats.SinkMass(2)], model=nn.Linear(2, 2)):
            pass
    with pytest.raises(ConfigError, match="nonsense"), hw.models.observe(print, measures=["nonsense"]):
        pass


def test_what_the_callback_raises_is_raised_and_the_observer_leaves(model):
    def stop(observation: hw.models.AttentionCall) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"), hw.models.observe(stop):
        model(X)
    model(X)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_calls_are_told_once(model, reentrant):
    seen: list[hw.models.AttentionCall] = []
    x = X.clone().requires_grad_()
    with hw.models.observe(seen.append, model=model):
        y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant)
        y.sum().backward()
    assert len(seen) == 2
    assert x.grad is not None


@pytest.mark.thorough_except("BART", "Whisper")
@pytest.mark.parametrize("family", [f for f in FAMILIES if f.name in ("T5", "BART", "Whisper")], ids=lambda f: f.name)
def test_layers_of_an_encoder_and_a_decoder_are_told_apart(family):
    """Their layer_idx would not do: it is the same in all three kinds of attention."""
    model, seen = make(family), []
    with torch.no_grad(), switched(model), hw.models.observe(seen.append, model=model, measures=["entropy"]):
        output(model, **inputs(family)[0])
    names = [observation.name for observation in seen]
    assert len(names) == len(set(names)) == 6
    assert all(observation.measured["entropy"].shape == (3, 3) for observation in seen)
    assert sum("encoder" in name.split(".") for name in names) == 2
