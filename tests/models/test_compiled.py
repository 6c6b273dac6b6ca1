"""Attached and watched models with torch.compile: what is compiled, what is not, and the errors of fullgraph=True;
those of transformers are in test_hf_compiled.py."""

from contextlib import ExitStack
from threading import Event, Thread

import hand_written as hand
import pytest
import torch

import headwise as hw

B, N = 2, 5


@pytest.fixture(autouse=True)
def _without_compiled_code():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def gradients(run, model, ids):
    model.zero_grad()
    run(ids)[0].square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.thorough
@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_module_that_was_compiled_is_attached_and_runs_uncompiled(fullgraph):
    torch.manual_seed(0)
    model, x = hand.Model(hand.CausalSelfAttention).double(), torch.randn(B, N, 12, dtype=torch.float64)
    compiled = torch.compile(model, backend="eager", fullgraph=fullgraph)
    expected, calls = gradients(lambda x: [compiled(x)], model, x), []
    with hw.attach(compiled, x) as handle, hw.models.observe(calls.append, model=model):
        found = gradients(lambda x: [compiled(x)], model, x)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    assert [call.name for call in calls] == ["attention.0", "attention.1"]
    assert len(handle.attached) == 0  # detached


@pytest.mark.thorough
def test_an_attached_model_that_is_compiled_to_one_graph_later_is_refused_with_the_way_out():
    model, x = hand.Model(hand.CausalSelfAttention), torch.randn(B, N, 12)
    expected = model(x)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with hw.attach(model, x) as handle:
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"give the module that torch\.compile returned"):
            compiled(x)
        torch.testing.assert_close(model(x), expected)
        assert handle.attached == ("attention.0", "attention.1")
    assert torch.equal(compiled(x), expected)


@pytest.mark.thorough
@torch.no_grad()
@pytest.mark.parametrize("kind", ["Llama", "nn.TransformerEncoder"])
def test_a_model_that_was_compiled_and_called_before_is_attached_from_within(kind):
    torch.manual_seed(0)
    if kind == "Llama":
        transformers = pytest.importorskip("transformers")
        sizes = {"vocab_size": 11, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3}
        model = transformers.LlamaModel(transformers.LlamaConfig(**sizes, intermediate_size=7))
        x = torch.randint(11, (B, N))
    else:
        layer = torch.nn.TransformerEncoderLayer(12, 3, 7, dropout=0.0)
        model, x = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(N, B, 12)
    compiled, calls = torch.compile(model, backend="eager"), []
    expected = compiled(x)[0]
    with hw.attach(model), hw.models.observe(calls.append, model=model):
        torch.testing.assert_close(compiled(x)[0], expected)
    assert len(calls) == 2
    assert torch.equal(compiled(x)[0], expected)
    assert len(calls) == 2


def compiled_calls(model, kind, backend="eager"):
    """What calls the model: compiled around it, in place, or a compiled function of the user that calls it."""
    if kind == "in place":
        model.compile(backend=backend)
        return model
    return torch.compile(model if kind == "around" else lambda x: model(x + 0) * 1, backend=backend)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("with_batch", [True, False])
@pytest.mark.parametrize("called_before", [True, False])
@pytest.mark.parametrize("kind", ["around", "in place", "from a function"])
def test_a_compiled_model_whose_attention_is_recognised_runs_uncompiled_from_within(kind, called_before, with_batch):
    torch.manual_seed(0)
    model, x = hand.Model(hand.CausalSelfAttention).double(), torch.randn(B, N, 12, dtype=torch.float64)
    expected, compiled, calls = model(x), compiled_calls(model, kind), []
    if called_before:
        compiled(x)
        if kind == "from a function":  # which contains the model's code without its hooks
            torch.compiler.reset()
    with hw.attach(model, x if with_batch else None) as handle, hw.models.observe(calls.append, model=model):
        for _ in range(2):
            torch.testing.assert_close(compiled(x), expected, rtol=1e-9, atol=1e-11)
        assert handle.attached == ("attention.0", "attention.1")
    assert len(calls) == (4 if with_batch else 2)  # the first forward without a batch is the model's own
    torch.testing.assert_close(compiled(x), expected)
    assert compiles(x)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("kind", ["around", "in place", "from a function"])
def test_a_watched_model_runs_uncompiled_from_within_in_measured_forwards(kind, every):
    torch.manual_seed(0)
    model, x = hand.Model(hand.CausalSelfAttention).double(), torch.randn(B, N, 12, dtype=torch.float64)
    with hw.watch(model, measures=["entropy"]) as whole:
        expected = model(x)
    ran = []

    def backend(graph, example_inputs):
        return lambda *inputs: ran.append(len(graph.graph.nodes)) or graph.forward(*inputs)

    compiled, nodes = compiled_calls(model, kind, backend), []

    def run():
        ran.clear()
        torch.testing.assert_close(compiled(x), expected)
        nodes.append(sum(ran))

    with hw.watch(model, measures=["entropy"], every=every) as record:
        with pytest.warns(UserWarning, match=r"Model is (compiled|called by compiled code)\. .* runs uncompiled"):
            run()
        for _ in range(2):  # it is said once
            run()
    assert record.layers == ("attention.0", "attention.1")
    assert (record.ledger.steps, record.ledger.index) == (3 if every == 1 else 2, 3)
    torch.testing.assert_close(record.totals["entropy"], whole.latest["entropy"])
    assert nodes[0] == nodes[2] < 10
    assert nodes[1] == nodes[0] if every == 1 else nodes[1] > 20  # the attention too
    torch.testing.assert_close(compiled(x), expected)
    assert compiles(x)


@pytest.mark.thorough
def test_gradients_of_heads_are_accumulated_in_a_model_that_compiled_code_calls():
    torch.manual_seed(0)
    model, x = hand.Model(hand.CausalSelfAttention).double(), torch.randn(B, N, 12, dtype=torch.float64)
    with hw.telemetry.gate_gradients(model) as own:
        model(x).square().mean().backward()
    compiled = compiled_calls(model, "from a function")
    with hw.telemetry.gate_gradients(model) as gates, pytest.warns(UserWarning, match="is called by compiled code"):
        compiled(x).square().mean().backward()
    assert gates.layers == own.layers == ("attention.0", "attention.1")
    torch.testing.assert_close(gates.importance().column, own.importance().column)
    assert compiles(x)


@pytest.mark.thorough
@pytest.mark.parametrize("watching", [hw.watch, hw.telemetry.gate_gradients])
def test_a_watched_model_in_one_graph_is_refused_with_the_way_out(watching):
    model, x = hand.Model(hand.CausalSelfAttention), torch.randn(B, N, 12)
    compiled = torch.compile(lambda x: model(x), backend="eager", fullgraph=True)
    refused = pytest.raises(torch._dynamo.exc.Unsupported, match=r"give the module that torch\.compile returned")
    with watching(model), refused:
        compiled(x)


def compiles(x):
    """Whether torch.compile compiles now, rather than to run a function as it is."""
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    torch.compile(lambda x: x + 1, backend=backend, fullgraph=True)(x)
    return len(graphs) == 1


@pytest.mark.parametrize("attached_first", [True, False])
def test_torch_compile_compiles_after_a_model_was_attached_and_watched(attached_first):
    model, x = hand.Model(hand.CausalSelfAttention), torch.randn(B, N, 12)
    both = [lambda: hw.attach(model, x), lambda: hw.watch(model, measures=["entropy"])]
    with ExitStack() as stack:
        for enter in both if attached_first else both[::-1]:
            stack.enter_context(enter())
        model(x)
        assert compiles(x)
    assert compiles(x)


class Waiting(torch.nn.Module):
    """A model whose forward sets an event and ends only after another one is set."""

    def __init__(self):
        super().__init__()
        self.model, self.runs, self.may_end = hand.Model(hand.CausalSelfAttention), Event(), Event()

    def forward(self, x):
        y = self.model(x)
        self.runs.set()
        assert self.may_end.wait(30)
        return y


@pytest.mark.parametrize("before", ["default", "eager_on_recompile"])
@pytest.mark.parametrize("ended_first", [0, 1])
def test_the_stance_of_torch_compile_is_what_it_was_after_forwards_of_two_threads(ended_first, before):
    x, models = torch.randn(B, N, 12), [Waiting(), Waiting()]
    threads = [Thread(target=hw.models.recognise, args=(model, x)) for model in models]
    with torch.compiler.set_stance(before):
        for model, thread in zip(models, threads, strict=True):
            thread.start()
            assert model.runs.wait(30)
        for i in (ended_first, 1 - ended_first):
            assert torch._dynamo.eval_frame._stance.stance == "force_eager"
            models[i].may_end.set()
            threads[i].join()
        assert torch._dynamo.eval_frame._stance.stance == before
    assert compiles(x)


def test_contexts_of_heads_that_end_in_any_order_leave_the_stance_as_it_was():
    layer = hw.MultiHeadAttention(8, 2)
    sites = hw.find_heads(layer)
    outer, inner = hw.models.record_heads(sites), hw.models.scale_heads(sites, [torch.ones(2)])
    outer.__enter__()
    inner.__enter__()
    layer(torch.randn(1, 3, 8))
    assert torch._dynamo.eval_frame._stance.stance == "force_eager"
    outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    assert torch._dynamo.eval_frame._stance.stance == "default"
