import copy
import gc
import pickle
import weakref
from contextlib import contextmanager
from threading import Thread

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from watched_models import MIXED_LAYERS, ids, largest, mixed, transformers_model, x

import headwise as hw
from headwise.telemetry import ledger
from headwise.telemetry.ledger import KEPT


def hooks(model):
    return [hook for m in model.modules() for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]


class HandWritten(nn.Module):
    """Attention that is recognised, not known."""

    def __init__(self):
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(24, 24) for _ in "qkv")

    def forward(self, x):
        q, k, v = (one(x).unflatten(-1, (4, 6)).transpose(1, 2) for one in self.projections)
        return ((q @ k.mT / 6**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)


def latest(record, layer, name):
    """A measure of a layer's heads in the last step, [heads] float32."""
    return record.latest.table.layer(layer).column(name).float()


@pytest.mark.thorough_except("bert", "llama", "qwen3")
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "qwen3", "gemma3"])
def test_model_of_transformers_gives_the_largest_logits_of_every_head(name):
    model = transformers_model(name)
    before = model(ids())[0]
    with hw.watch(model, maps="lazy") as record:
        watched = model(ids())[0]
    assert_close(watched, before, rtol=1e-4, atol=1e-5)
    assert len(record.layers) == 2
    assert list(record.maps) == list(record.latest.layers)
    for layer in record.layers:
        assert_close(
            latest(record, layer, "max_logit").double(),
            largest(record, layer),
            rtol=1e-5,
            atol=1e-5,
        )
        entropy = record.maps[layer].measure("entropy")["entropy"].mean(0)
        assert_close(latest(record, layer, "entropy"), entropy, rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
def test_mixed_model_is_watched_in_every_part_in_the_order_of_the_calls():
    model = mixed(llama=True)
    with hw.watch(model, maps="lazy") as record:
        model(x())
    assert record.layers[:3] == MIXED_LAYERS
    assert len(record.layers) == 5
    assert tuple(record.maps) == record.latest.layers == record.layers
    assert record.latest["max_logit"].shape == (5, 4)
    assert record.latest["max_logit"][0, 2:].isnan().all()  # the first layer has two heads
    assert not record.unwatched
    for layer in record.layers:
        assert_close(
            latest(record, layer, "max_logit").double(),
            largest(record, layer),
            rtol=1e-5,
            atol=1e-5,
        )


@pytest.mark.thorough
def test_nothing_is_left_of_a_record_that_has_stopped():
    model = mixed(llama=True).train()
    before = model(x())
    before.sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    state = {name: type(module) for name, module in model.named_modules()}
    there = hooks(model)
    with hw.watch(model, maps="pooled"):
        model(x())
        assert len(hooks(model)) > len(there)
    assert hooks(model) == there
    assert {name: type(module) for name, module in model.named_modules()} == state
    assert model.llama.config._attn_implementation == "sdpa"
    model.zero_grad()
    after = model(x())
    after.sum().backward()
    assert torch.equal(after, before)
    assert all(
        torch.equal(a, b)
        for a, b in zip(gradients, (p.grad for p in model.parameters() if p.grad is not None), strict=True)
    )


def test_what_the_user_has_turned_to_headwise_stays_so():
    model = nn.TransformerEncoderLayer(8, 2, 9, batch_first=True)
    hw.attach(model)
    with hw.watch(model):
        pass
    assert type(model.self_attn).__module__ == "headwise.models.adapters.torch"
    other = transformers_model("llama")
    hw.attach(other)
    with hw.watch(other):
        pass
    assert other.config._attn_implementation == "headwise"


def test_a_record_and_a_handle_end_in_any_order():
    for first in ("record", "handle"):
        model = nn.TransformerEncoderLayer(8, 2, 9, batch_first=True)
        record = hw.watch(model).start()
        handle = hw.attach(model)
        ends = {"record": record.stop, "handle": handle.detach}
        ends.pop(first)()
        assert type(model.self_attn) is not nn.MultiheadAttention
        next(iter(ends.values()))()
        assert type(model.self_attn) is nn.MultiheadAttention


@pytest.mark.thorough
def test_two_records_of_one_model_end_in_any_order():
    model = mixed()
    first, second = hw.watch(model).start(), hw.watch(model, measures=["entropy", "self_mass"]).start()
    model(x())
    first.stop()
    model(x())
    second.stop()
    assert first.ledger.steps == 1
    assert second.ledger.steps == 2
    assert_close(first.latest["entropy"], second.latest["entropy"], equal_nan=True)
    assert hooks(model) == []
    assert type(model.encoder.self_attn) is nn.MultiheadAttention


@pytest.mark.thorough
def test_each_nth_forward_is_measured():
    model = mixed()
    with hw.watch(model, every=3) as record:
        for seed in range(8):
            model(x(seed=seed))
    assert record.history.steps == [0, 3, 6]
    assert repr(record) == "Record(3 layers; 3 of 8 steps measured; not watching)"
    with hw.watch(model) as alone:
        model(x(seed=6))
    assert torch.equal(alone.latest.numbers, record.latest.numbers)


@pytest.mark.thorough
def test_layers_and_heads_are_chosen():
    model = mixed()
    with hw.watch(model, layers=["blocks.*", -1], heads=[1]) as record:
        model(x())
    assert record.layers == MIXED_LAYERS
    assert record.latest.places == tuple((layer, 1) for layer in MIXED_LAYERS)
    with hw.watch(model) as whole:
        model(x())
    assert_close(record.latest["entropy"][:, 1], whole.latest["entropy"][:, 1])
    with hw.watch(model, layers=[1]) as record:
        assert type(model.encoder.self_attn) is nn.MultiheadAttention  # not needed, not touched
        model(x())
    assert record.latest.layers == ("blocks.1.attention",)


def test_heads_that_a_layer_does_not_have_are_named():
    record = hw.watch(mixed(), heads=[3])
    with record, pytest.raises(hw.ConfigError, match=r"heads=3: blocks.0.attention has the heads 0 to 1"):
        record.model(x())


@pytest.mark.thorough
def test_micro_batches_of_a_step_are_one_batch():
    model = mixed()
    with hw.watch(model, steps="manual") as record:
        for part in x(b=6).split((1, 3, 2)):
            model(part)
        summary = record.step()
        assert record.step() is None  # nothing has run since
    assert repr(record) == "Record(3 layers; 1 of 2 steps measured; not watching)"  # there was none to be ended
    with hw.watch(model) as whole:
        model(x(b=6))
    assert summary is record.latest
    assert_close(summary.numbers, whole.latest.numbers, rtol=1e-5, atol=1e-6)
    assert torch.equal(summary.column("max_logit"), whole.latest.column("max_logit"))


def test_maxima_begin_anew_with_every_step_and_stay_in_the_totals():
    model = mixed()
    with hw.watch(model, measures=["max_logit"]) as record:
        model(3 * x(seed=1))
        high = record.latest.numbers
        model(0.1 * x(seed=2))
        low = record.latest.numbers
    with hw.watch(model, measures=["max_logit"]) as alone:
        model(0.1 * x(seed=2))
    assert torch.equal(low, alone.latest.numbers)
    assert not torch.equal(low, high)
    assert torch.equal(record.totals.numbers, torch.maximum(low, high))


@pytest.mark.thorough
def test_totals_are_the_mean_over_all_rows():
    model = mixed()
    with hw.watch(model) as record:
        model(x(b=2, seed=1))
        model(x(b=5, seed=2))
    with hw.watch(model) as whole:
        model(torch.cat((x(b=2, seed=1), x(b=5, seed=2))))
    assert_close(record.totals.numbers, whole.latest.numbers, rtol=1e-5, atol=1e-6)
    assert record.table().about["steps"] == 2


@pytest.mark.thorough
def test_numbers_do_not_depend_on_when_they_are_read():
    def watched(read_every):
        model, seen = mixed(), []
        with hw.watch(model, history=90, heads=[0, 1]) as record:
            for step in range(2 * KEPT + 9):
                if step == 70:
                    model.blocks[0].attention.q_proj.weight.data[0] = torch.inf
                if step == 73:
                    model.blocks[0].attention.q_proj.weight.data[0] = 0.25
                model(x(seed=step))
                assert len(record.ledger._ended) < KEPT
                if not (step + 1) % read_every:
                    seen.append((record.latest, record.totals))
                    assert record.latest.step == record.history.steps[-1] == step
                    assert record.totals.steps == record.ledger.steps == step + 1
        return [record.latest, record.totals, *record.history], seen

    (at_the_end, _), (often, seen) = watched(1000), watched(3)
    assert any(bool(summary.nonfinite.any()) for summary in at_the_end)
    assert seen[-1][1].step == 2 * KEPT + 8 - (2 * KEPT + 9) % 3
    for one, other in zip(at_the_end, often, strict=True):
        assert (one.step, one.steps, one.places) == (other.step, other.steps, other.places)
        assert torch.equal(one.numbers.view(torch.int32), other.numbers.view(torch.int32))
        assert torch.equal(one.nonfinite, other.nonfinite)
        assert one.numbers.untyped_storage().nbytes() == one.numbers.nbytes


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("defaults", [lambda: torch.device("meta"), lambda: default_dtype(torch.float64)])
def test_numbers_do_not_depend_on_the_defaults_where_they_are_read(defaults):
    model = mixed()
    with hw.watch(model, measures=["entropy"]) as record, hw.watch(model, measures=["entropy"]) as other:
        for _ in range(3):
            model(x())
        with defaults():
            found = [record.latest.numbers, record.totals.numbers, record.latest["entropy"], record.history["entropy"]]
            assert hw.watch(model).totals.numbers.dtype == torch.float32
    expected = [other.latest.numbers, other.totals.numbers, other.latest["entropy"], other.history["entropy"]]
    assert {(one.dtype, one.device.type) for one in found} == {(torch.float32, "cpu")}
    assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("broken", ["tables", "columns"])
def test_steps_that_could_not_be_read_wait_for_the_next_read(monkeypatch, broken):
    works, calls = getattr(ledger, broken), []

    def failing(*given):
        calls.append(given)
        if len(calls) > 1:  # the first two steps are alike, and are added up together
            raise MemoryError
        return works(*given)

    model = mixed()
    with hw.watch(model, measures=["entropy"]) as record, hw.watch(model, measures=["entropy"]) as other:
        for _ in range(2):
            model(x())
        model.encoder(x())
        monkeypatch.setattr(ledger, broken, failing)
        for _ in range(2):
            with pytest.raises(MemoryError):
                record.latest  # noqa: B018
        monkeypatch.undo()
        model(x())
    assert record.history.steps == other.history.steps == [0, 1, 2, 3]
    assert record.totals.steps == 4
    assert torch.equal(record.totals.numbers, other.totals.numbers)


def test_totals_are_of_the_same_steps_while_another_thread_ends_some(monkeypatch):
    model = mixed()
    with hw.watch(model, measures=["entropy"], steps="manual") as record:
        model(x())
        record.step()
        model(x())
        fold, others = record.ledger.fold, []

        def meanwhile():
            fold()
            if not others:
                others.append(Thread(target=record.ledger.end_step))
                others[0].start()
                others[0].join(0.2)

        monkeypatch.setattr(record.ledger, "fold", meanwhile)
        totals = record.totals
        assert (totals.step, totals.steps) == (0, 1)
        others[0].join()
        assert record.ledger.steps == 2


def test_a_writer_receives_each_step_when_it_ends():
    class Writer:
        target, steps = "here", ()

        def write(self, summary):
            self.steps = (*self.steps, summary.step)

    writer = Writer()
    with hw.watch(mixed()) as record:
        for step in range(4):
            record.model(x(seed=step))
            assert writer.steps == tuple(range(2, step + 1))
            if step == 1:
                record.write_to(writer)


def test_a_step_under_way_ends_when_the_watching_does():
    model = mixed()
    with hw.watch(model, steps="manual") as record:
        model(x(seed=1))
        record.step()
        model(x(seed=2))
    assert record.ledger.index == record.totals.steps == len(record.history) == 2
    record.start().stop()
    assert record.ledger.index == 2


def test_tables_have_four_digits_in_every_cell():
    with hw.watch(mixed()) as record:
        record.model(x())
    cells = [cell for line in repr(record.table()).splitlines()[2:] for cell in line.split()[3:]]
    assert len(cells) == 9 * len(record.table())
    assert all(len(cell.replace(".", "").lstrip("-0")) == 4 or float(cell) == 0 for cell in cells)


@pytest.mark.thorough_except("left")
@pytest.mark.parametrize("side", ["right", "left"])
def test_padded_queries_are_not_counted(side):
    model = transformers_model("bert")
    short, n = ids(b=1, n=7), 11
    padding = torch.zeros(1, n - 7, dtype=torch.long)
    tokens = torch.cat((short, padding) if side == "right" else (padding, short), 1)
    places = torch.arange(7) if side == "right" else torch.arange(n - 7, n)
    positions = torch.zeros(1, n, dtype=torch.long)
    positions[:, places] = torch.arange(7)
    with hw.watch(model, measures=["max_logit", "entropy", "normalized_entropy"]) as record:
        model(tokens, attention_mask=(tokens > 0).long(), position_ids=positions)
    with hw.watch(model, measures=["max_logit", "entropy", "normalized_entropy"]) as alone:
        model(short)
    assert_close(record.latest.numbers, alone.latest.numbers, rtol=1e-5, atol=1e-5)
    model.encoder.layer[0].attention.self.query.weight.data *= 2
    with hw.watch(model) as changed:
        model(short)
    assert not torch.equal(changed.latest["max_logit"], alone.latest["max_logit"])


def test_padding_of_the_other_sequence_hides_no_query_of_cross_attention():
    torch.manual_seed(3)
    layer = nn.TransformerDecoderLayer(16, 2, 19, batch_first=True, dropout=0.0).eval()
    target, memory = x(d=16, n=7), x(d=16, n=7, seed=2)
    padded = torch.zeros(2, 7, dtype=torch.bool)
    padded[:, 4:] = True
    with hw.watch(layer, maps="lazy", measures=["entropy"]) as record:
        layer(target, memory, memory_key_padding_mask=padded)
    rows = record.maps["multihead_attn"].measure("entropy", rows=True).rows["entropy"]  # [b, h, 7]
    assert_close(latest(record, "multihead_attn", "entropy"), rows.mean((0, 2)), rtol=1e-5, atol=1e-6)


def test_learned_sinks_are_no_logits():
    layer, sink = hw.MultiHeadAttention(16, 2).eval(), torch.tensor([50.0, -3.0])
    with hw.watch(layer, measures=["max_logit", "learned_sink_mass"], maps="lazy") as record:
        layer(x(d=16), mask=hw.Causal(), score=hw.SinkLogits(sink))
    assert record.latest["max_logit"].max() < 40
    assert_close(latest(record, "", "max_logit").double(), largest(record, ""), rtol=1e-4, atol=1e-4)
    assert record.latest["learned_sink_mass"][0, 0] > 0.99


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize("design", sorted(hw.nn.DESIGNS))
def test_every_design_is_watched_and_answers_the_same(design):
    torch.manual_seed(2)
    layer = hw.nn.DESIGNS[design].build(24, 4).eval()
    before = layer(x())
    with hw.watch(layer, maps="lazy") as record:
        y = layer(x())
        again, amap = layer(x(), return_map=True)
    assert_close(y, before, rtol=1e-4, atol=1e-5)
    assert torch.equal(y, again)
    assert amap.shape == record.maps[""].shape
    rows = amap.measure("entropy", rows=True).rows["entropy"].sum((0, 2))
    counted = (amap.lse > -torch.inf).sum((0, 2)).clamp_min(1)  # a head of a mixture need not be chosen
    assert_close(latest(record, "", "entropy"), rows / counted, rtol=1e-5, atol=1e-6)


def test_caller_of_a_layer_gets_what_it_asked_for():
    layer = hw.MultiHeadAttention(16, 2).eval()
    z = x(d=16)
    with hw.watch(layer, measures=["entropy"]):
        y, amap, concat = layer(z, return_map=True, measures="self_mass", return_concat=True)
        y2, concat2 = layer(z, return_concat=True)
    assert torch.equal(y, y2)
    assert torch.equal(concat, concat2)
    assert_close(amap.measured["self_mass"], amap.measure("self_mass")["self_mass"])


@pytest.mark.thorough
def test_pictures_are_small_and_true():
    model = mixed()
    with hw.watch(model, maps="pooled") as record, torch.no_grad():
        model(x(b=1, n=131))
    picture = record.maps["blocks.1.attention"]
    assert picture.mean.shape == picture.largest.shape == (1, 3, 44, 44)
    assert picture.shape == (1, 3, 131, 131)
    with hw.watch(model, maps="lazy") as lazy, torch.no_grad():
        model(x(b=1, n=131))
    assert_close(picture.largest, lazy.maps["blocks.1.attention"].pool(64, "max"))
    assert "131 queries" in repr(picture)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_without_gradients_add_up_with_those_with(mode):
    model = mixed()
    with hw.watch(model) as record:
        with mode():
            model(x())
        model(x())
        with mode():
            model(x())
    assert record.totals.steps == 3
    assert_close(record.totals.numbers, record.latest.numbers, rtol=1e-6, atol=1e-6)


@pytest.mark.thorough
def test_bytes_of_a_record_include_its_maps():
    model = mixed()
    sizes = {}
    for maps in ("none", "pooled", "lazy"):
        with hw.watch(model, maps=maps) as record:
            model(x())
        sizes[maps] = record.nbytes
    assert sizes["none"] < min(sizes["pooled"], sizes["lazy"])
    assert sizes["lazy"] >= sizes["none"] + max(amap.nbytes for amap in record.maps.values())


@pytest.mark.parametrize("steps", ["forward", "manual"])
def test_gradients_of_torch_func_are_watched(steps):
    model = mixed()
    weights = dict(model.named_parameters())

    def loss(weights, x):
        return torch.func.functional_call(model, weights, (x,)).square().mean()

    want = torch.func.grad(loss)(weights, x())
    how = {"measures": ["max_logit", "entropy"], "maps": "lazy", "steps": steps}
    with hw.watch(model, **how, on_error="raise") as record:
        model(x())
        model(x())
        record.step() if steps == "manual" else None
        expected = record.latest
        found = torch.func.grad(loss)(weights, x())
        torch.func.grad(loss)(weights, x())
        record.step() if steps == "manual" else None
        assert record.latest.step > expected.step
        assert record.nbytes > 0
        with pytest.raises(hw.ConfigError, match=r"torch\.func\.vmap has batched the call"):
            torch.vmap(lambda x: model(x[None]))(x())
    torch.testing.assert_close(record.latest.numbers, expected.numbers)
    torch.testing.assert_close(record.totals.numbers, expected.numbers)
    torch.testing.assert_close(found, want)
    assert record.maps["blocks.0.attention"].measure("entropy")["entropy"].shape == (2, 2)


def test_autocast_leaves_statistics_in_float32():
    model = mixed()
    with hw.watch(model, maps="lazy") as record, torch.autocast("cpu", dtype=torch.bfloat16):
        model(x())
    layer = MIXED_LAYERS[0]
    assert record.maps[layer].q.dtype == torch.bfloat16
    assert_close(
        latest(record, layer, "max_logit").double(),
        largest(record, layer),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.thorough_except("auto-True")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kernel", ["auto", "torch_blocks"])
def test_checkpointed_calls_are_counted_once(reentrant, kernel):
    model = mixed()

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, z):
            for block in model.blocks:
                z = checkpoint(lambda y, block=block: block(y, mask=hw.Causal()), z, use_reentrant=reentrant)
            return checkpoint(model.encoder, z, use_reentrant=reentrant)

    z = x().requires_grad_()
    with hw.watch(model) as plain, hw.use_kernel(kernel):
        model(z).sum().backward()
    expected, z.grad = z.grad, None
    with hw.watch(Checkpointed(), maps="lazy") as record, hw.use_kernel(kernel):
        record.model(z).sum().backward()
    assert_close(z.grad, expected)
    assert record.ledger.index == 1
    assert len(record.maps) == 3
    assert torch.equal(record.totals.numbers, plain.totals.numbers)
    rows = [layer.pooled.numbers[1, 1] for layer in record.ledger.states[1].layers.values()]
    assert all(torch.equal(count, torch.full_like(count, 22)) for count in rows)  # 2 entries of 11 queries, once


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile looks there for any argument of a frame
@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled_model_is_watched_without_compiling_over_and_over(when):
    model = mixed(heads=(3,))
    with hw.watch(model) as plain:
        expected = model(x())
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager")
    if when == "after":
        compiled(x())
    counters = torch._dynamo.utils.counters["stats"]
    graphs = []
    with hw.watch(model, every=2) as record:
        for _ in range(6):
            y = compiled(x().requires_grad_())
            y.sum().backward()
            graphs.append(counters["unique_graphs"])
    assert_close(y, expected, rtol=1e-5, atol=1e-5)
    assert record.history.steps == [0, 2, 4]
    assert_close(record.latest.numbers, plain.latest.numbers, rtol=1e-5, atol=1e-6)
    assert graphs[1:] == graphs[1:2] * 5
    assert_close(compiled(x()), expected, rtol=1e-5, atol=1e-5)
    torch.compiler.reset()


def test_copy_of_a_watched_model_is_not_watched():
    model = mixed()
    with hw.watch(model) as record:
        twin = copy.deepcopy(model)
        for parameter in twin.parameters():
            parameter.data *= 2
        y = twin(x())
    assert record.ledger.index == 0
    assert torch.equal(y, twin(x())) or torch.allclose(y, twin(x()), atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("forwards", [0, 2])
def test_a_copy_is_not_watched_whenever_it_is_made(forwards):
    model = mixed()
    with hw.watch(model, maps="lazy") as record:
        for _ in range(forwards):
            model(x())
        twin = copy.deepcopy({"model": model, "record": record})
        assert twin["record"] is record
        twin["model"](x())
        assert record.ledger.index == forwards
        model(x())
    assert record.ledger.index == forwards + 1
    assert hw.kernels.events.subscribers == ()
    twin["model"](x())
    assert hw.kernels.events.subscribers == ()
    later = copy.deepcopy(record)  # with a model of its own
    with later:
        later.model(x())
    assert (later.ledger.index, record.ledger.index) == (forwards + 2, forwards + 1)


@pytest.mark.thorough_except("<lambda>-recognised")
@pytest.mark.parametrize("make", [mixed, HandWritten], ids=["known", "recognised"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_watched_model_holds_nothing_of_it(make, copied):
    model = make()
    size = len(pickle.dumps(model))
    with hw.watch(model, maps="lazy", values=make is mixed) as record:
        model(x())
        twin = copied(model)
        twin(x())
    assert record.ledger.index == 1
    assert len(pickle.dumps(twin)) < 1.1 * size + 4096
    original = weakref.ref(model)
    del model, record
    gc.collect()
    assert original() is None
    assert twin(x()) is not None


def test_an_active_record_cannot_be_pickled_and_says_so():
    model = nn.Sequential(hw.MultiHeadAttention(24, 4))
    with hw.watch(model) as record:
        model(x())
        for made in (pickle.dumps, copy.copy):
            with pytest.raises(hw.ConfigError, match=r"the record is active.*: stop it before you copy or pickle it"):
                made(record)
    assert pickle.loads(pickle.dumps(record)).ledger.steps == 1


def test_forward_that_fails_counts_for_nothing_and_the_next_one_does():
    model = mixed()
    with hw.watch(model) as record:
        with pytest.raises(RuntimeError):
            model.encoder.linear1(x(d=5))
        model.encoder.norm2.normalized_shape = (5,)
        with pytest.raises(RuntimeError):
            model(x())
        model.encoder.norm2.normalized_shape = (24,)
        assert record.ledger.index == 0
        try:
            raise KeyError
        except KeyError:
            model(x())  # an error that is being handled is not the forward's
    assert record.ledger.steps == 1


def test_part_that_is_called_by_itself_is_a_step_of_its_own():
    model = mixed()
    with hw.watch(model) as record:
        model.encoder(x())
    assert record.latest.layers == ("encoder.self_attn",)


@pytest.mark.parametrize(("during", "steps"), [("always", 2), ("training", 1), ("evaluation", 1)])
def test_only_training_or_evaluation_is_a_step(during, steps):
    model = mixed()
    with hw.watch(model, during=during) as record:
        model.train()(x())
        model.eval()(x())
    assert record.ledger.index == steps


def test_stopped_record_goes_on_where_it_was():
    model = mixed()
    record = hw.watch(model)
    for _ in range(2):
        record.start().start()
        model(x())
        record.stop()
        model(x())
    assert record.totals.steps == 2
    record.clear()
    assert record.totals.steps == 0
    assert len(record.history) == 0


def test_manual_step_that_is_under_way_ends_with_the_record():
    with hw.watch(mixed(), steps="manual") as record:
        record.model(x())
        assert not record.latest.steps
    assert record.latest.steps == 1


def test_own_measures_are_watched():
    even = hw.stats.row_measure("even", lambda tile: tile.weights[..., tile.keys % 2 == 0].sum(-1))
    with hw.watch(mixed(), measures=[even, "entropy", "received_mass"], maps="lazy") as record:
        record.model(x(b=1))
    amap = record.maps[MIXED_LAYERS[1]]
    assert_close(
        latest(record, MIXED_LAYERS[1], "even"),
        amap[0, :, :, ::2].sum(-1).mean(-1),
        rtol=1e-5,
        atol=1e-6,
    )
    assert_close(
        latest(record, MIXED_LAYERS[1], "received_mass"),
        amap.measure("received_mass")["received_mass"][0],
    )


def test_what_cannot_be_watched_is_named():
    class OddAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q = nn.Linear(8, 8)

        def forward(self, z):
            return z

    class Special(nn.MultiheadAttention):
        pass

    model = nn.Sequential(hw.MultiHeadAttention(8, 2), OddAttention())
    model.add_module("special", Special(8, 2))
    record = hw.watch(model)
    assert record.layers == ("0",)
    assert set(record.unwatched) == {"1", "special"}
    assert "OddAttention computes its attention by itself" in record.unwatched["1"]
    assert "2 that cannot be watched" in repr(record)
    with hw.watch(model[1:2]) as record, pytest.raises(hw.ConfigError, match=r"no attention in Sequential"):
        record.model(torch.randn(1, 3, 8))


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every=0: expected an integer of at least 1"),
        ({"every": True}, "every=True"),
        ({"history": 0}, "history=0"),
        ({"maps": "all"}, "maps='all': expected one of 'none', 'lazy', 'pooled'"),
        ({"steps": "batch"}, "steps='batch'"),
        ({"during": "test"}, "during='test'"),
        ({"heads": []}, "heads="),
        ({"heads": [1, 1]}, "each once"),
        ({"heads": [-1]}, "from 0 on"),
        ({"layers": ["nowhere.*"]}, "layers='nowhere.*': no such layer among the 3"),
        ({"layers": [3]}, "layers=3"),
        ({"measures": ["nothing"]}, "measure='nothing': "),
        ({"measures": ["induction_mass"]}, "requires the tokens"),
        ({"measures": ["entropy", "entropy"]}, "requested twice"),
        ({"measures": []}, "give at least one"),
        ({"alarms": ["loud"]}, "expected alarms such as"),
    ],
)
def test_arguments_that_will_not_do_are_named(options, message):
    with pytest.raises(hw.ConfigError) as error:
        hw.watch(mixed(), **options)
    assert message in str(error.value)


def test_no_module_at_all_is_told():
    for layers in ([], 2.5, [0, 1.5], True, [None], {}):
        with pytest.raises(hw.ConfigError, match=r"layers=.*: expected names of attention modules or their indices"):
            hw.watch(hw.MultiHeadAttention(12, 3), layers=layers)
    with pytest.raises(hw.ConfigError, match=r"expected an nn\.Module, got str"):
        hw.watch("model")
