"""Watching never changes what a model computes, nor whether it does: what cannot be measured is NaN, with a remark."""

import functools
import types
import warnings

import pytest
import torch
from torch import nn
from watched_models import mixed, x

import headwise as hw
from by_hand import ByHand

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


@pytest.mark.thorough_except("some_new_feature")
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


@pytest.mark.thorough_except("boost-False")
@pytest.mark.parametrize(("name", "read"), [("boost", False), ("further", True)])
@torch.no_grad()
def test_a_call_that_only_the_model_can_compute_is_measured_by_its_weights(name, read, monkeypatch):
    model, more = llama(), {name: 1.7}
    forward = type(model.model.layers[0].self_attn).forward
    monkeypatch.setitem(getattr(forward, "__wrapped__", forward).__globals__, "eager_attention_forward", doubled(read))
    from headwise.models.adapters.huggingface import attention as own

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


@pytest.mark.thorough
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
    """The mass of all keys, 1 in each row, which fails in one of its methods after some calls of that."""

    name, unit, range, source = "failing", "share", "0 to 1", "none"

    def __init__(self, how, after=0):
        self.how, self.after = how, after

    def _may_fail(self, how):
        if how == self.how:
            self.after -= 1
            if self.after < 0:
                raise ZeroDivisionError("no such measure")

    def start(self, grid, like, keep_rows=False):
        self._may_fail("start")
        return super().start(grid, like, keep_rows)

    def partial(self, tile):
        self._may_fail("partial")
        return tile.weights.sum(-1)

    def merge(self, one, other):
        self._may_fail("merge")
        return None if self.how == "no state" else super().merge(one, other)

    def finish(self, state):
        self._may_fail("finish")
        found = super().finish(state)
        return {"one head": found[:, :1], "no tensor": "none"}.get(self.how, found)


def written():
    torch.manual_seed(0)
    return nn.Sequential(ByHand(), ByHand())


@pytest.mark.thorough
@pytest.mark.parametrize(("how", "after"), [("start", 0), ("partial", 0), ("merge", 0), ("finish", 0), ("finish", 4)])
@pytest.mark.parametrize(("made", "d"), [(mixed, 24), (written, 6)])
def test_a_measure_that_fails_is_nan_and_the_others_are_not(made, d, how, after):
    model, given = made(), x(d=d)
    want = model(given)
    with hw.watch(model, measures=["entropy", "received_mass"]) as alone:
        model(given)
    asked = ["entropy", Failing(how, after), "received_mass"]
    record = hw.watch(model, measures=asked)
    with pytest.warns(UserWarning, match="failing is NaN.*no such measure"), record:
        found = [model(given) for _ in range(3)]
    torch.testing.assert_close(found, [want] * 3)
    assert record.layers == alone.layers
    for name in ("entropy", "received_mass"):
        torch.testing.assert_close(record.latest[name], alone.latest[name], equal_nan=True)
    assert record.latest["failing"].isnan().any()
    assert any("failing is NaN" in remark for remark in record.remarks.values())
    assert record.totals["failing"].isnan().any()


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["one head", "no tensor", "no state"])
def test_a_measure_whose_results_are_none_is_nan(how):
    model = mixed()
    record = hw.watch(model, measures=["entropy", Failing(how)])
    with pytest.warns(UserWarning, match="failing is NaN"), record:
        model(x())
    assert record.latest["failing"].isnan().all()
    assert record.totals["failing"].isnan().all()
    assert not record.latest["entropy"][0, :2].isnan().any()


@pytest.mark.thorough
def test_tensors_without_numbers_are_not_measured():
    model = encoder().to("meta")
    with pytest.warns(UserWarning, match="a call was not measured"), hw.watch(model) as record:
        assert model(torch.empty(2, 5, 16, device="meta")).shape == (2, 5, 16)
    assert record.latest.numbers.isnan().all()


def test_a_measure_that_fails_raises_where_that_is_wanted():
    model = mixed()
    asked = ["entropy", Failing("partial")]
    with hw.watch(model, measures=asked, on_error="raise"), pytest.raises(ZeroDivisionError):
        model(x())
    with pytest.raises(ZeroDivisionError), hw.models.observe(lambda call: None, model=model, measures=asked):
        model(x())
    with pytest.raises(hw.ConfigError, match="on_error='ignore'"):
        hw.watch(model, on_error="ignore")


@pytest.mark.thorough
def test_an_alarm_goes_off_beside_a_measure_that_fails():
    model, alarm = mixed(), hw.telemetry.MaxLogitAlarm(1e-3, then="raise")
    record = hw.watch(model, measures=[Failing("finish")], alarms=[alarm])
    with pytest.warns(UserWarning, match="no such measure"), record, pytest.raises(hw.telemetry.AttentionAlarm):
        model(x())


def test_a_caller_has_its_own_measures_beside_one_that_fails():
    layer = hw.MultiHeadAttention(24, 4)
    record = hw.watch(layer, measures=[Failing("partial"), "entropy"])
    with pytest.warns(UserWarning, match="no such measure"), record:
        _, amap = layer(x(), return_map=True, measures=["entropy", "max_logit"])
    assert list(amap.measured) == ["entropy", "max_logit"]
    torch.testing.assert_close(record.latest["entropy"], amap.measured["entropy"].mean(0, keepdim=True))


def test_heads_that_cannot_be_told_are_nan(monkeypatch):
    def unread(*_):
        raise hw.ConfigError("which heads these are cannot be read")

    monkeypatch.setattr("headwise.publishing.held_by", unread)
    model = encoder()
    want = model(x(d=16))
    with pytest.warns(UserWarning, match="cannot be read"), hw.watch(model) as record:
        torch.testing.assert_close(model(x(d=16)), want, atol=1e-5, rtol=1e-5)
    assert record.latest.numbers.isnan().all()
    with hw.watch(model, on_error="raise"), pytest.raises(hw.ConfigError, match="cannot be read"):
        model(x(d=16))


def test_a_layer_that_gets_other_heads_is_remarked():
    model = nn.Sequential(hw.MultiHeadAttention(24, 4), hw.MultiHeadAttention(24, 4))
    with hw.watch(model, measures=["entropy"]) as record:
        model(x())
        hw.edit.prune(model, {1: [0]})
        with pytest.warns(UserWarning, match="had 4 heads when it was first watched, and has 3 heads now"):
            model(x())
    assert not record.latest["entropy"][0].isnan().any()
    assert record.latest["entropy"][1].isnan().all()
    with hw.watch(model, on_error="raise"):
        model(x())
        hw.edit.prune(model, {0: [0]})
        with pytest.raises(hw.ConfigError, match="when it was first watched"):
            model(x())


def test_a_picture_that_fails_leaves_the_numbers(monkeypatch):
    def torn(amap):
        raise MemoryError("no picture")

    monkeypatch.setattr("headwise.telemetry.record.picture", torn)
    model = mixed()
    with pytest.warns(UserWarning, match="no picture"), hw.watch(model, maps="pooled") as record:
        model(x())
    assert not record.maps
    assert not record.latest["entropy"][0, :2].isnan().any()


@pytest.mark.parametrize("maps", ["none", "pooled"])
def test_a_remark_on_the_numbers_is_no_failure_of_them(maps):
    layer = hw.MultiHeadAttention(24, 4)
    with torch.no_grad():
        layer.q_proj.weight *= 1e6
        by_tiles = hw.stats.row_measure("of tiles", lambda tile: tile.weights.sum(-1))
        record = hw.watch(layer, measures=[by_tiles, "max_logit"], maps=maps).start()
        with pytest.raises(UserWarning, match="float32 resolves"):  # as warnings are errors here
            layer(x())
        layer(x())
        record.stop()
    assert record.ledger.steps == 2
    assert not record.totals.numbers.isnan().any()
    assert "float32 resolves" in record.remarks[""]


@pytest.mark.thorough
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


@pytest.mark.thorough_except("kept", "bound")
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
def test_a_layer_that_was_not_watched_is_watched_again_once_it_can_be():
    model, x = encoder(), torch.randn(2, 5, 16)
    closed(model.layers[1].self_attn)
    record = hw.watch(model, measures=["entropy"])
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"layers\.1\.self_attn: not watched"), record:
            model(x)
        assert record.layers == ("layers.0.self_attn",)
    del model.layers[1].self_attn.forward
    with record:
        model(x)
    assert record.layers == ("layers.0.self_attn", "layers.1.self_attn")
    assert not record.unwatched
    assert record.latest["entropy"].shape == (2, 4)


@torch.no_grad()
def test_a_module_that_was_not_called_is_not_accused():
    model, x = encoder(), torch.randn(2, 5, 16)
    with warnings.catch_warnings(), hw.attach(model) as handle, hw.watch(model) as record:
        warnings.simplefilter("error")
        model.layers[0](x)
    assert len(handle._modules) == 0
    assert not record.unwatched


@pytest.mark.thorough
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
