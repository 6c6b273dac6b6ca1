"""Watching never changes what a model computes, nor whether it does: what cannot be measured is NaN, with a remark."""

import functools
import types
import warnings

import pytest
import torch
from torch import nn
from watched_models import mixed, x

import headwise as hw

MEASURES = ["entropy", "mean_distance", "max_logit"]


def llama(**config):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    given = {
        "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3,
        "num_key_value_heads": 3, "intermediate_size": 40, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 1,
    }  # fmt: skip
    kind = transformers.MistralForCausalLM if "sliding_window" in config else transformers.LlamaForCausalLM
    model = kind(kind.config_class(**given | config)).eval()
    model.set_attn_implementation("eager")
    return model


def ids(n=9):
    return torch.randint(2, 61, (2, n), generator=torch.Generator().manual_seed(1))


def expected(model, **given):
    """Entropy and mean distance of the weights of eager attention, each [layers, heads]."""
    found = []
    for p in model(ids(), output_attentions=True, **given).attentions:
        p = p.double()
        n = p.shape[-1]
        distance = (torch.arange(n)[:, None] - torch.arange(n)).abs()
        found.append(torch.stack([torch.special.entr(p).sum(-1).mean((0, 2)), (p * distance).sum(-1).mean((0, 2))]))
    return torch.stack(found, 1)


def measured(record):
    return torch.stack([record.latest[name] for name in ("entropy", "mean_distance")]).double()


@pytest.mark.parametrize("name", ["seq_idx", "some_new_feature"])
@torch.no_grad()
def test_an_argument_that_eager_attention_does_not_read_changes_nothing(name):
    model, more = llama(), {name: torch.zeros(2, 9, dtype=torch.int32)}
    want = model(ids(), **more).logits
    with hw.watch(model, measures=MEASURES) as record, hw.attach(model) as handle:
        found = model(ids(), **more).logits
        assert len(handle.attached) == 2
        assert not handle.skipped
    torch.testing.assert_close(found, want)
    assert not record.remarks
    torch.testing.assert_close(measured(record), expected(model), atol=1e-5, rtol=1e-5)


def doubled(read):
    """An eager attention function of a model that scales values by an argument; `read` from its rest of arguments."""

    def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, boost=None, **kwargs):
        boost = kwargs["further"] if read else boost
        scores = query @ key.mT * scaling * boost
        scores = scores if attention_mask is None else scores + attention_mask
        weights = torch.softmax(scores, -1)
        return (weights @ value).transpose(1, 2).contiguous(), weights

    return eager_attention_forward


@pytest.mark.parametrize(("name", "read"), [("boost", False), ("further", True)])
@torch.no_grad()
def test_a_call_that_only_the_model_can_compute_is_measured_by_its_weights(name, read, monkeypatch):
    model, more = llama(), {name: 1.7}
    forward = type(model.model.layers[0].self_attn).forward
    monkeypatch.setitem(getattr(forward, "__wrapped__", forward).__globals__, "eager_attention_forward", doubled(read))
    from headwise.models.adapters.huggingface import own

    own._named_in.cache_clear()
    want = model(ids(), **more).logits
    with hw.attach(model) as handle:
        with pytest.warns(UserWarning, match=r"layers\.[01]\.self_attn is computed by its own"):
            found = model(ids(), **more).logits
        assert torch.equal(found, want)
        assert handle.attached == ()
        assert name in handle.skipped["model.layers.1.self_attn"]
    with hw.watch(model, measures=[*MEASURES, "top1_mass"]) as record:
        assert torch.equal(model(ids(), **more).logits, want)
    torch.testing.assert_close(measured(record), expected(model, **more), atol=1e-5, rtol=1e-5)
    assert record.latest["max_logit"].isnan().all()  # its scores cannot be told from its weights
    own._named_in.cache_clear()


@pytest.mark.thorough_except("dynamic-kind0", "static-kind1")
@pytest.mark.parametrize("kind", [{}, {"sliding_window": 6}])
@pytest.mark.parametrize("cache", ["dynamic", "static", "sliding_window", "hybrid"])
@torch.no_grad()
def test_generation_with_every_cache_is_the_same(kind, cache):
    model, real = llama(**kind), torch.ones_like(ids())
    real[0, :4] = 0
    how = {"attention_mask": real, "max_new_tokens": 14, "do_sample": False, "cache_implementation": cache}
    want = model.generate(ids(), **how)
    with hw.watch(model, measures=MEASURES) as record:
        found = model.generate(ids(), **how)
    assert torch.equal(found, want)
    whole = torch.cat([real, torch.ones(2, 13, dtype=real.dtype)], 1)
    last = model(found[:, :-1], attention_mask=whole, output_attentions=True).attentions[0][:, :, -1].double()
    distance = (last * torch.arange(last.shape[-1] - 1, -1, -1)).sum(-1).mean(0)
    torch.testing.assert_close(record.latest["mean_distance"][0].double(), distance, atol=1e-5, rtol=1e-5)
    how |= {"return_dict_in_generate": True, "output_attentions": True}
    with hw.attach(model):
        steps = model.generate(ids(), **how).attentions
    for one, other in zip(steps, model.generate(ids(), **how).attentions, strict=True):
        torch.testing.assert_close(one[0][1] + 0, other[0][1], atol=1e-5, rtol=1e-5)


class Failing(hw.stats.RowMeasure):
    """Fails on its first tile."""

    name, unit, range, source = "failing", "share", "0 to 1", "none"

    def partial(self, tile):
        raise ZeroDivisionError("no such measure")


def test_a_measure_that_fails_is_nan_and_the_model_runs():
    model = mixed()
    want = model(x())
    with pytest.warns(UserWarning, match="no such measure"), hw.watch(model, measures=["entropy", Failing()]) as record:
        torch.testing.assert_close(model(x()), want)
    assert record.latest["entropy"].isnan().any()
    assert any("no such measure" in remark for remark in record.remarks.values())
    with hw.watch(model, measures=["entropy", Failing()], on_error="raise"), pytest.raises(ZeroDivisionError):
        model(x())
    with pytest.raises(hw.ConfigError, match="on_error='ignore'"):
        hw.watch(model, on_error="ignore")


def test_an_alarm_still_raises():
    model = mixed()
    with (
        hw.watch(model, alarms=[hw.telemetry.MaxLogitAlarm(1e-3, then="raise")]),
        pytest.raises(Exception, match="max"),
    ):
        model(x())


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


def kept(module):
    module._old_forward = module.forward
    module.forward = types.MethodType(lambda self, *args, **kwargs: self._old_forward(*args, **kwargs), module)


def bound(module):
    module.forward = module.forward


def in_part(module):
    module.forward = functools.partial(module.forward, need_weights=False)


def closed(module):
    before = module.forward
    module.forward = lambda *args, **kwargs: before(*args, **kwargs)


@pytest.mark.parametrize("replace", [kept, bound, in_part])
@torch.no_grad()
def test_a_forward_kept_on_the_instance_is_computed(replace):
    model, x = encoder(), torch.randn(2, 5, 16)
    want = model(x)
    for layer in model.layers:
        replace(layer.self_attn)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with hw.attach(model) as handle:
            torch.testing.assert_close(model(x), want, atol=1e-5, rtol=1e-5)
            assert len(handle.attached) == 2
        with hw.watch(model, measures=["entropy"]) as record:
            model(x)
        assert record.latest["entropy"].shape == (2, 4)
        torch.testing.assert_close(model(x), want)  # with its own class again


@torch.no_grad()
def test_a_forward_that_cannot_be_reached_is_named():
    model, x = encoder(), torch.randn(2, 5, 16)
    closed(model.layers[1].self_attn)
    with hw.attach(model) as handle:
        with pytest.warns(UserWarning, match=r"layers\.1\.self_attn is computed by its own code"):
            model(x)
        assert handle.attached == ("layers.0.self_attn",)
        assert "replaced on the instance" in handle.skipped["layers.1.self_attn"]
    with pytest.warns(UserWarning, match=r"layers\.1\.self_attn: not watched"), hw.watch(model) as record:
        model(x)
    assert record.layers == ("layers.0.self_attn",)
    assert "replaced on the instance" in record.unwatched["layers.1.self_attn"]


@torch.no_grad()
def test_a_module_that_was_not_called_is_not_accused():
    model, x = encoder(), torch.randn(2, 5, 16)
    with warnings.catch_warnings(), hw.attach(model) as handle, hw.watch(model) as record:
        warnings.simplefilter("error")
        model.layers[0](x)
    assert len(handle._modules) == 0
    assert not record.unwatched


@torch.no_grad()
def test_every_handle_and_record_names_a_module_that_headwise_does_not_compute():
    model, other = llama(), llama().model.layers[0].self_attn
    name = "model.layers.0.self_attn"
    model.get_submodule(name).forward = other.forward
    with warnings.catch_warnings(), hw.attach(model) as handle:
        warnings.simplefilter("ignore")
        with hw.watch(model, measures=MEASURES) as one, hw.watch(model, measures=MEASURES) as two:
            model(ids())
        assert list(handle.skipped) == list(one.unwatched) == list(two.unwatched) == [name]
        assert name not in handle.attached
