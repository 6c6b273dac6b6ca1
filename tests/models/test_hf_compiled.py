"""Attached and watched models of transformers in graphs of torch.compile and torch.export."""

import pytest
import torch
from torch._dynamo.utils import counters
from torch.export import Dim, export

import headwise as hw

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # torch.compile looks there for any argument of a frame
]
KINDS = ["Llama", "GPT2", "Bert"]


@pytest.fixture(autouse=True)
def _without_compiled_code():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def model_of(kind, causal=False, **more):
    sizes = {"vocab_size": 11, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3}
    if kind == "GPT2":
        sizes |= {"eos_token_id": 0, "bos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    elif kind == "Bert":
        sizes |= {"intermediate_size": 7, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    else:
        sizes |= {"intermediate_size": 7, "eos_token_id": None}
    torch.manual_seed(0)
    name, how = f"{kind}{'ForCausalLM' if causal else 'Model'}", {"add_pooling_layer": False} if kind == "Bert" else {}
    return getattr(transformers, name)(getattr(transformers, f"{kind}Config")(**sizes, **more), **how)


def batch(b, n, padded=None):
    mask = torch.ones(b, n, dtype=torch.long)
    if padded == "right":
        mask[0, n - 2 :] = 0
    elif padded == "left":
        mask[0, :2] = 0
    return {"input_ids": torch.randint(11, (b, n)), **({} if padded is None else {"attention_mask": mask})}


def gradients(run, model, inputs):
    model.zero_grad()
    out = run(**inputs)[0]
    out.square().mean().backward()
    return out.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.thorough
@pytest.mark.parametrize("padded", [None, "right", "left"], ids=["no mask", "right", "left"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_training_step_is_one_graph_with_the_numbers_of_the_uncompiled_one(kind, padded):
    model, inputs = model_of(kind), batch(2, 7, padded)
    with hw.attach(model) as handle:
        expected = gradients(model, model, inputs)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(gradients(compiled, model, inputs), expected)
        assert len(handle.attached) == 2
    assert (counters["stats"]["unique_graphs"], counters["graph_break"].total()) == (1, 0)
    detached = gradients(compiled, model, inputs)
    assert counters["stats"]["unique_graphs"] == 2  # its own attention, compiled anew
    real = torch.ones(2, 7, 1) if padded is None else inputs["attention_mask"][..., None]
    torch.testing.assert_close(detached[0] * real, expected[0] * real)  # eager attention differs in padding alone


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_lengths_and_caches_take_as_many_graphs_as_without_headwise(kind):
    model = model_of(kind, max_position_embeddings=64).eval()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    ids, mask = torch.randint(11, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[0, :2] = 0

    def steps(make):
        caches, at = (make(), make()), 0
        for size in (5, 1, 1, 2):
            given = {"input_ids": ids[:, at : at + size], "attention_mask": mask[:, : at + size]}
            found, expected = (
                run(**given, past_key_values=cache)[0] for run, cache in zip((compiled, model), caches, strict=True)
            )
            torch.testing.assert_close(found, expected)
            at += size

    def graphs():
        numbers = []
        for run in (
            lambda: [compiled(**batch(2, n, "right")) for n in (5, 7, 11, 4)],
            lambda: steps(lambda: transformers.DynamicCache(config=model.config)),
            lambda: steps(lambda: transformers.StaticCache(config=model.config, max_cache_len=16)),
        ):
            torch.compiler.reset()
            counters.clear()
            with torch.no_grad():
                run()
            assert not counters["graph_break"]
            numbers.append(counters["stats"]["unique_graphs"])
        return numbers

    own = graphs()
    with hw.attach(model):
        assert graphs() == own


@pytest.mark.thorough
@torch.no_grad()
def test_generation_with_a_cache_of_fixed_size_is_compiled():
    model, inputs = model_of("Llama", causal=True, max_position_embeddings=64).eval(), batch(2, 5, "left")
    how = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
    config = transformers.CompileConfig(backend="eager", fullgraph=True)
    config._compile_all_devices = True
    with hw.attach(model):
        expected = model.generate(**inputs, **how, disable_compile=True)
        assert torch.equal(model.generate(**inputs, **how, compile_config=config), expected)
    assert counters["stats"]["unique_graphs"] > 0
    assert not counters["graph_break"]


@pytest.mark.thorough
def test_a_training_step_of_inductor():
    model, inputs = model_of("Llama"), batch(2, 7, "right")
    with hw.attach(model):
        expected = gradients(model, model, inputs)
        compiled = torch.compile(model, fullgraph=True)
        torch.testing.assert_close(gradients(compiled, model, inputs), expected)
        with hw.watch(model) as eager:
            model(**inputs)
        with hw.watch(model, maps="lazy") as record:
            torch.testing.assert_close(gradients(torch.compile(model), model, inputs), expected)
        for name in eager.to_dict()["measures"]:
            torch.testing.assert_close(record.latest[name], eager.latest[name], equal_nan=True)
        for name, amap in record.maps.items():  # whose memory the graph has used again
            torch.testing.assert_close(amap.measure("entropy")["entropy"], amap.measured["entropy"])
            assert amap[0].sum(-1).max() < 1.001, name


@pytest.mark.thorough
@pytest.mark.parametrize("padded", [None, "right", "left"], ids=["no mask", "right", "left"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_watched_model_is_one_graph_with_the_statistics_of_the_uncompiled_one(kind, padded):
    model, inputs = model_of(kind), batch(2, 7, padded)
    with hw.watch(model) as eager:
        expected = gradients(model, model, inputs)
    compiled = torch.compile(model, backend="aot_eager")
    with hw.watch(model, every=2) as record:
        for _ in range(4):
            torch.testing.assert_close(gradients(compiled, model, inputs), expected)
        # At both ends of the calls of the model and of its children with attention, where a step may begin and end;
        # none in a layer. Steps that are not measured are another graph. BERT's encoder is such a child, and what is
        # around it in its model is split.
        graphs = counters["stats"]["unique_graphs"]
        assert graphs <= 9 if kind == "Bert" else graphs == 2, graphs
        assert {"Record._enter", "Record._leave"} == breaks()
    assert (record.ledger.steps, record.ledger.index, record.layers) == (2, 4, eager.layers)
    for name in eager.to_dict()["measures"]:
        torch.testing.assert_close(record.latest[name], eager.latest[name], equal_nan=True)


def breaks():
    """The functions of headwise at which graphs have ended."""
    found = set()
    for reason in counters["graph_break"]:
        found |= {name for name in ("Record._enter", "Record._leave", "published") if f"`{name}`" in reason}
    return found


@pytest.mark.thorough
def test_observers_are_in_one_graph_and_what_edits_calls_or_returns_weights_is_not():
    model, inputs, seen = model_of("Llama").eval(), batch(2, 7, "left"), []
    with hw.attach(model), torch.no_grad():
        with hw.models.observe(seen.append, model=model, measures=["entropy"]):
            model(**inputs)
            torch.compile(model, backend="eager", fullgraph=True)(**inputs)
        own, compiled = seen[:2], seen[2:]
        assert [call.name for call in compiled] == ["layers.0.self_attn", "layers.1.self_attn"]
        for one, other in zip(own, compiled, strict=True):
            assert repr(one.map.rule.mask) == repr(other.map.rule.mask)
            torch.testing.assert_close(one.measured["entropy"], other.measured["entropy"])
        expected = model(**inputs, output_attentions=True)
        found = torch.compile(model, backend="eager")(**inputs, output_attentions=True)
        for one, other in zip(expected.attentions, found.attentions, strict=True):
            torch.testing.assert_close(one + 0.0, other + 0.0)
        edit = hw.interventions.Forbid(queries=-1, keys=[0], heads=[1])
        with hw.intervene(model, edit), hw.watch(model) as record:
            expected, own = model(**inputs)[0], record.latest
            torch.testing.assert_close(torch.compile(model, backend="eager")(**inputs)[0], expected)
            torch.testing.assert_close(record.latest["entropy"], own["entropy"])
        torch.compiler.reset()  # or that code is used
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"weights \(output_attentions\) and edits"):
            torch.compile(model, backend="eager", fullgraph=True)(**inputs, output_attentions=True)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # strict=True is deprecated
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("padded", [None, "right"], ids=["no mask", "right"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_attached_model_is_exported_for_any_batch_and_length(kind, padded, strict):
    model, more = model_of(kind).eval(), {} if kind == "Bert" else {"use_cache": False}

    class Run(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, input_ids, attention_mask=None):
            return self.model(input_ids, attention_mask=attention_mask, **more)[0]

    sizes = {0: Dim("b", max=64), 1: Dim("n", max=64)}
    with hw.attach(model), torch.no_grad():
        given = batch(2, 5, padded)
        program = export(Run(), (), given, dynamic_shapes=dict.fromkeys(given, sizes), strict=strict).module()
        for b, n in ((2, 5), (3, 7), (1, 11)):
            given = batch(b, n, padded)
            torch.testing.assert_close(program(**given), Run()(**given))


@pytest.mark.thorough_except("False")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strict", [False, True])
def test_a_program_that_is_exported_under_observers_has_none(strict):
    model, seen = model_of("Llama").eval(), []

    class Run(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids):
            return self.model(input_ids=ids, use_cache=False)[0]

    ids = batch(2, 5, None)["input_ids"]
    with hw.attach(model), torch.no_grad(), hw.models.observe(seen.append, model=model, measures=["entropy"]):
        program = export(Run(), (ids,), strict=strict)
        assert seen == []
        operators = {str(node.target) for node in program.graph.nodes if "headwise" in str(node.target)}
        assert operators == {"headwise.attend.default"}
        torch.testing.assert_close(program.module()(ids), Run()(ids))
