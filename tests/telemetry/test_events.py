"""One stream: every attention module publishes its calls in the same way, whoever made it and whatever runs around."""

import copy
from threading import Thread

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from watched_models import MIXED_LAYERS, mixed, x

import headwise as hw
from headwise.kernels import events, named
from headwise.publishing import AttentionCall, observe

MEASURES = ("entropy", "max_logit")


def layer(**options) -> hw.MultiHeadAttention:
    torch.manual_seed(3)
    return hw.MultiHeadAttention(24, 3, **options).eval()


def calls_of(model: nn.Module, *inputs: torch.Tensor, **options) -> list[AttentionCall]:
    calls: list[AttentionCall] = []
    with observe(calls.append, model=model, measures=MEASURES):
        model(*inputs, **options)
    return calls


def test_modules_of_all_makers_publish_in_the_order_of_their_calls():
    model = mixed(llama=True)
    with hw.attach(model):
        calls = calls_of(model, x())
    assert tuple(call.name for call in calls[:3]) == MIXED_LAYERS
    assert len(calls) == 5
    for call in calls:
        assert call.module is model.get_submodule(call.name)
        again = call.map.measure(*MEASURES)
        for name in MEASURES:
            assert_close(call.measured[name], again[name], rtol=1e-5, atol=1e-5)


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize("design", hw.nn.DESIGNS)
def test_a_design_publishes_once_the_map_that_it_returns(design):
    torch.manual_seed(2)
    module = hw.nn.DESIGNS[design].build(24, 4).eval()
    (call,) = calls_of(module, x())
    _, amap = module(x(), return_map=True)
    assert torch.equal(call.map.lse, amap.lse)
    assert torch.equal(call.map.to_dense(), amap.to_dense())


def test_what_a_callback_raises_ends_the_call_and_the_next_one_is_as_before():
    module, before = layer(), layer()(x())

    def stop(call: AttentionCall) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"), observe(stop, model=module):
        module(x())
    assert events.subscribers == ()
    assert events.here() == events.Here()
    assert torch.equal(module(x()), before)


def test_the_module_is_known_while_it_is_computed_and_not_to_its_subscribers(monkeypatch):
    module, inside, outside = layer(), [], []
    monkeypatch.setattr(module, "merge", lambda *given: inside.append(events.here().module) or merge(*given))
    merge = type(module).merge.__get__(module)
    with observe(lambda call: outside.append(events.here().module), model=module):
        module(x())
    module(x())
    assert (inside, outside) == ([module, None], [None])


def test_calls_of_other_threads_are_received_and_what_a_thread_sets_stays_in_it():
    module, calls, found = layer(), [], []

    def run() -> None:
        found.append((named("auto"), events.here().on_delta))
        module(x())

    with observe(calls.append, model=module), hw.use_kernel("torch_blocks"), events.listen(print):
        assert (named("auto"), events.here().on_delta) == ("torch_blocks", print)
        thread = Thread(target=run)
        thread.start()
        thread.join()
    assert found == [(named("auto"), None)]
    assert [call.module for call in calls] == [module]


def test_contexts_nest_and_end_in_their_order():
    with events.within(kernel="reference"):
        with events.within(progress=print), events.within(kernel="torch_blocks"):
            assert events.here() == events.Here(kernel="torch_blocks", progress=print)
        assert events.here() == events.Here(kernel="reference")
    assert events.here() == events.Here()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_calls_are_published_once_and_compute_the_same_gradients(reentrant):
    module, z = layer(), x().requires_grad_()
    module(z).square().sum().backward()
    expected, z.grad = z.grad, None
    calls: list[AttentionCall] = []
    with observe(calls.append, model=module, measures=MEASURES):
        checkpoint(module, z, use_reentrant=reentrant).square().sum().backward()
    assert len(calls) == 1
    assert_close(z.grad, expected)


def test_a_copy_of_an_observed_model_is_another_model():
    module, calls = layer(), []
    with observe(calls.append, model=module):
        copy.deepcopy(module)(x())
    assert calls == []


def test_in_cross_attention_too_a_caller_may_have_another_measure_of_the_same_name():
    module, context, own, calls = layer(), x(seed=2)[:, :4], hw.stats.SinkMass(2), []
    alone = module(x(), context, return_map=True, measures=[own])[1].measured["sink_mass"]
    theirs = module(x(), context, return_map=True, measures=["sink_mass", "entropy"])[1].measured
    assert not torch.equal(alone, theirs["sink_mass"])
    with observe(calls.append, model=module, measures=["entropy", "sink_mass"]):
        _, amap = module(x(), context, return_map=True, measures=[own])
    assert list(amap.measured) == ["sink_mass"]
    assert_close(amap.measured["sink_mass"], alone)
    assert list(calls[0].measured) == ["entropy", "sink_mass"]
    for name, value in theirs.items():
        assert_close(calls[0].measured[name], value)


class Doubled(type(hw.stats.resolve(["received_mass"])[0])):
    """Another measure of that name, which is not made of rows."""

    def finish(self, state):
        return 2.0 * super().finish(state)


@pytest.mark.parametrize("mask", [None, hw.Lengths([7, 3])])
def test_a_caller_may_have_another_measure_that_is_not_made_of_rows(mask):
    module, own, calls = layer(), Doubled(), []
    alone = module(x(), mask=mask, return_map=True, measures=[own])[1].measured["received_mass"]
    with observe(calls.append, model=module, measures=["received_mass"]):
        module(x(), mask=mask)
        _, amap = module(x(), mask=mask, return_map=True, measures=[own])
    assert_close(amap.measured["received_mass"], alone)
    assert_close(calls[1].measured["received_mass"], calls[0].measured["received_mass"])
    assert not torch.equal(calls[0].measured["received_mass"], alone)


@pytest.mark.parametrize("name", ["entropy", "received_mass", "sink_mass"])
def test_the_caller_gets_its_measures_and_subscribers_theirs(name):
    module, calls = layer(), []
    own = hw.stats.SinkMass(2) if name == "sink_mass" else name
    with observe(calls.append, model=module, measures=[name, "self_mass"]):
        _, amap = module(x(), return_map=True, measures=[own])
        _, plain = module(x(), return_map=True)
    assert list(amap.measured) == [name]
    assert plain.measured is None
    assert_close(amap.measured[name], amap.measure(own)[name])
    for call in calls:
        assert {name, "self_mass"} <= set(call.measured)
        assert_close(call.measured[name], amap.measure(name)[name])


@pytest.mark.parametrize("maker", ["headwise", "torch"])
def test_padded_queries_are_masked_in_what_is_published_and_nowhere_else(maker):
    lengths, z = torch.tensor([11, 7]), x()
    if maker == "headwise":
        module, given = layer(), {"mask": hw.Lengths(lengths)}
        before = module(z, **given)
        calls = calls_of(module, z, **given)
        after, amap = module(z, return_map=True, **given)
        assert amap.lse.isfinite().all()
    else:
        module = nn.MultiheadAttention(24, 3, batch_first=True).eval()
        with hw.attach(module):
            given = {"key_padding_mask": torch.arange(11) >= lengths[:, None]}
            before = module(z, z, z, **given)[0]
            calls = calls_of(module, z, z, z, **given)
            after = module(z, z, z, **given)[0]
    assert_close(after, before)
    (call,) = calls
    assert (call.map.lse == -torch.inf).sum((1, 2)).tolist() == [0, 3 * 4]
    assert_close(call.measured["entropy"], call.map.measure("entropy")["entropy"])


def test_padding_of_a_context_hides_no_query():
    module, z = layer(context_dim=24), x()
    (call,) = calls_of(module, z, x(n=7, seed=2), mask=hw.Lengths([7, 4]))
    assert call.map.lse.isfinite().all()


def test_two_listeners_receive_the_same_gates():
    module = layer()
    with hw.telemetry.gate_gradients(module) as one, hw.telemetry.gate_gradients(module) as two:
        module(x()).square().mean().backward()
    assert one.passes == two.passes == {"": 1}
    assert one.importance().column.flat.tolist() == two.importance().column.flat.tolist()


@pytest.mark.thorough
def test_a_graph_is_whole_while_another_model_is_observed():
    torch.compiler.reset()
    compiled, other, calls = torch.compile(layer(), backend="eager", fullgraph=True), layer(), []
    with observe(calls.append, model=other, measures=MEASURES):
        y = compiled(x())
        other(x())
    assert_close(y, layer()(x()))
    assert len(calls) == 1
    torch.compiler.reset()


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile looks there for any argument of a frame
def test_a_compiled_layer_publishes():
    torch.compiler.reset()
    module, z = layer(), x()
    compiled, before, calls = torch.compile(module, backend="eager"), module(z), []
    compiled(z)
    with observe(calls.append, model=module, measures=MEASURES):
        assert_close(compiled(z), before)
    assert_close(compiled(z), before)
    assert [call.name for call in calls] == [""]
    torch.compiler.reset()
