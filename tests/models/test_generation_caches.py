"""Caches of headwise in `generate` of transformers: what each head keeps, beside dense attention in float64."""

import copy
from functools import lru_cache
from typing import Any

import pytest
import torch
from model_families import FAMILIES, attention_mask, make, tokens
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, FalconH1Config
from transformers.masking_utils import eager_mask

import headwise as hw
from headwise.edit.budgets import Budget
from headwise.errors import ConfigError, DTypeError, ShapeError
from headwise.kernels.cpu.library import library
from headwise.kernels.quantized import QuantizedKV

FAMILY = {family.name: family for family in FAMILIES}
NAMES = ["Llama", "Mistral", "Qwen3", "Gemma 2", "Gemma 3"]
WINDOWS = ((3, None), (2, 4))
LONG = 23
RECKONED: dict[str, Any] = {}  # what `dense` masks: windows and sinks


def budget(windows: Any = WINDOWS, sinks: int = 2, model: str = "") -> Budget:
    return Budget(windows, tuple(torch.ones(4) for _ in windows), 3, sinks, 0.9, ((8, 8),) * len(windows), LONG, model)


def dense(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, softcap: Any = None, **_: Any):
    """Attention with n×n weights, where each KV head sees what its cache would keep."""
    group, n = q.shape[1] // k.shape[1], q.shape[2]
    scores = q @ k.repeat_interleave(group, 1).mT * scaling
    scores = (scores if softcap is None else softcap * torch.tanh(scores / softcap)) + mask
    distance = torch.arange(n)[:, None] - torch.arange(n)
    for head, window in enumerate(RECKONED["windows"][module.layer_idx]):
        if window is not None:
            dropped = (distance >= window) & (torch.arange(n) >= RECKONED["sinks"])
            scores[:, head * group : (head + 1) * group].masked_fill_(dropped, torch.finfo(scores.dtype).min)
    return (scores.softmax(-1) @ v.repeat_interleave(group, 1)).transpose(1, 2).contiguous(), None


AttentionInterface.register("dense", dense)
AttentionMaskInterface.register("dense", eager_mask)


@lru_cache(maxsize=16)
def expected(name: str, windows: Any = WINDOWS, sinks: int = 2) -> Tensor:
    """Logits of LONG tokens in float64, as float32."""
    model = copy.deepcopy(make(FAMILY[name])).double()
    model.set_attn_implementation("dense")
    RECKONED.update(windows=windows, sinks=sinks)
    with torch.no_grad():
        return model(tokens(LONG), use_cache=False).logits.float()


@torch.no_grad()
def logits(model: Any, cache: Any, split: Any, ids: Tensor | None = None, **given: Any) -> Tensor:
    parts = (tokens(LONG) if ids is None else ids).split(split, 1)
    return torch.cat([model(part, past_key_values=cache, **given).logits for part in parts], 1)


def generated(model: Any, cache: Any, **given: Any) -> Any:
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    return model.generate(tokens(11), past_key_values=cache, **{**options, **given})


# --- numbers


@pytest.mark.thorough_except("whole-Mistral")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("split", [[LONG], [9, 5, 1, 1, 1, 6], [1] * LONG], ids=["whole", "chunks", "steps"])
def test_each_head_attends_to_the_keys_that_it_keeps_and_to_no_others(name, split):
    model = make(FAMILY[name])
    with hw.attach(model):
        cache = hw.cache.for_transformers(model, budget())
        found = logits(model, cache, split)
    torch.testing.assert_close(found, expected(name), rtol=1e-5, atol=2e-5)
    assert cache.get_seq_length() == LONG
    held = [sum(part._k.length for _, part in one.parts) for one in cache.caches]
    assert held[1] == (2 + 1) + (2 + 3)
    assert held[0] == (2 + 2) + (2 + 4 if cache.caches[0].windows[1] else LONG)


@pytest.mark.thorough_except("Gemma 3")
@pytest.mark.parametrize("name", NAMES)
def test_without_a_budget_every_layer_keeps_what_its_own_cache_would(name):
    model = make(FAMILY[name])
    with hw.attach(model):
        cache, own = hw.cache.for_transformers(model), DynamicCache(config=model.config)
        found, theirs = (logits(model, one, [9, 5, 1, 8]) for one in (cache, own))
    torch.testing.assert_close(found, theirs, rtol=1e-5, atol=2e-5)
    assert cache.nbytes == sum(layer.keys.nbytes + layer.values.nbytes for layer in own.layers)


def test_bytes_are_those_of_the_budget():
    model, found = make(FAMILY["Llama"]), budget()
    with hw.attach(model):
        cache = hw.cache.for_transformers(model, found)
        logits(model, cache, [13, 10])
    assert cache.nbytes == found.cache_bytes(LONG, batch=3) < found.full_cache_bytes(LONG, batch=3)
    assert repr(cache) == f"GenerationCache(2 layers): 23 tokens seen, {cache.nbytes:,} bytes held"


@pytest.mark.parametrize("windows", [None, WINDOWS], ids=["all tokens", "budget"])
def test_int8_keys_reach_attention_as_they_are_stored(windows, monkeypatch):
    model = make(FAMILY["Qwen3"])
    given = None if windows is None else budget(windows)
    with hw.attach(model):
        cache = hw.cache.for_transformers(model, given, stored="int8")
        first = logits(model, cache, [20], tokens(LONG)[:, :20])
        if library().handle is None:
            pytest.skip("no compiled kernel")
        monkeypatch.setattr(QuantizedKV, "decoded", lambda self: pytest.fail("int8 keys were restored"))
        rest = logits(model, cache, 1, tokens(LONG)[:, 20:])
    monkeypatch.undo()
    whole = expected("Qwen3", windows or ((None, None),) * 2, 2 if windows else 0)
    assert (torch.cat((first, rest), 1) - whole).abs().max() < 0.03 * whole.abs().max()
    wide = hw.cache.for_transformers(model, given)
    with hw.attach(model):
        logits(model, wide, [LONG])
    assert cache.nbytes * 32 == wide.nbytes * 12  # 8 numbers of a byte and a scale of 4, of 8 numbers of 4


# --- generate


@pytest.mark.thorough_except("beams-Llama")
@pytest.mark.parametrize("name", ["Llama", "Gemma 3"])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"prefill_chunk_size": 4}, {"num_beams": 2, "num_return_sequences": 2},
     {"do_sample": True, "top_k": 5}],
    ids=["greedy", "beams", "chunked prefill", "two beams", "sampled"],
)  # fmt: skip
def test_generate_gives_the_tokens_of_its_own_cache(name, options):
    model = make(FAMILY[name])
    with hw.attach(model):
        found = []
        for cache in (hw.cache.for_transformers(model), DynamicCache(config=model.config)):
            torch.manual_seed(3)
            found.append(generated(model, cache, **options))
    assert torch.equal(found[0].sequences, found[1].sequences)
    torch.testing.assert_close(found[0].scores, found[1].scores, rtol=1e-4, atol=1e-4)


@pytest.mark.thorough_except("beams-Gemma 2")
@pytest.mark.parametrize("name", ["Llama", "Gemma 2"])
@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"prefill_chunk_size": 4}], ids=["greedy", "beams", "chunks"]
)
def test_generate_with_a_budget_scores_tokens_as_a_pass_over_the_kept_keys(name, options):
    model = make(FAMILY[name])
    with hw.attach(model):
        found = generated(model, hw.cache.for_transformers(model, budget()), **options)
        again = logits(model, hw.cache.for_transformers(model, budget()), [16], found.sequences[:, :16])
    if "num_beams" in options:
        chosen = again[:, 10:].log_softmax(-1).gather(-1, found.sequences[:, 11:, None])[..., 0].sum(-1)
        torch.testing.assert_close(found.sequences_scores, chosen / 6, rtol=1e-4, atol=1e-4)
    else:
        assert torch.equal(again[:, 10:].argmax(-1), found.sequences[:, 11:])


@pytest.mark.thorough
def test_prompts_of_other_lengths_are_computed_as_alone_if_all_tokens_are_kept():
    model, mask = make(FAMILY["Llama"]), attention_mask("left")
    ids = tokens() * mask
    with hw.attach(model):
        cache = hw.cache.for_transformers(model, budget(sinks=0))
        found = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=5, do_sample=False)
        for row, real in enumerate(mask.sum(1).tolist()):
            cache = hw.cache.for_transformers(model, budget(sinks=0))
            alone = model.generate(ids[row : row + 1, -real:], past_key_values=cache, max_new_tokens=5, do_sample=False)
            assert torch.equal(alone[0, real:], found[row, ids.shape[1] :])
        with pytest.raises(ConfigError, match=r"attention_mask: has padding, and the first tokens.*sinks=0"):
            model(ids, attention_mask=mask, past_key_values=hw.cache.for_transformers(model, budget()))


def test_a_cache_is_continued_copied_reordered_reset_and_cropped():
    model = make(FAMILY["Llama"])
    with hw.attach(model):
        prompt = hw.cache.for_transformers(model, budget())
        logits(model, prompt, [13], tokens(LONG)[:, :13])
        other = copy.deepcopy(prompt)
        other.reorder_cache(torch.tensor([2, 0, 0]))
        found = logits(model, other, [10], tokens(LONG)[[2, 0, 0], 13:])
        torch.testing.assert_close(found, expected("Llama")[[2, 0, 0], 13:], rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(
            logits(model, prompt, [10], tokens(LONG)[:, 13:]), expected("Llama")[:, 13:], rtol=1e-5, atol=2e-5
        )
        other.batch_select_indices(torch.tensor([True, False, True]))
        other.batch_repeat_interleave(2)
        assert other.batch_size == 4
        with pytest.raises(ConfigError, match=r"crop\(length=20\).*were dropped"):
            prompt.crop(-3)
        prompt.reset()
        assert (prompt.get_seq_length(), prompt.nbytes, prompt.is_croppable) == (0, 0, False)
        whole = hw.cache.for_transformers(model)
        logits(model, whole, [LONG])
        with pytest.raises(ConfigError, match=r"crop\(3\): expected the negative number"):
            whole.crop(3)
        whole.crop(-5)
        assert whole.is_croppable
        again = logits(model, whole, [5], tokens(LONG)[:, -5:])
    torch.testing.assert_close(again, expected("Llama", ((None, None),) * 2, 0)[:, -5:], rtol=1e-5, atol=2e-5)


@torch.no_grad()
def test_maps_are_over_the_tokens_and_edits_reach_them():
    model = make(FAMILY["Llama"])
    with hw.attach(model):
        cache = hw.cache.for_transformers(model, budget())
        logits(model, cache, [20], tokens(LONG)[:, :20])
        seen: list[Any] = []
        with hw.models.observe(seen.append, model=model, measures=["mean_distance"]):
            found = logits(model, cache, [1], tokens(LONG)[:, 20:21])
        torch.testing.assert_close(found, expected("Llama")[:, 20:21], rtol=1e-5, atol=2e-5)
        out = model(tokens(LONG)[:, 21:22], past_key_values=cache, output_attentions=True)
        torch.testing.assert_close(out.attentions[0].sum(-1), torch.ones(3, 4, 1))
        with hw.intervene(model, hw.interventions.Scale(0.0, heads=[0])):
            edited = model(tokens(LONG)[:, 22:], past_key_values=copy.deepcopy(cache)).logits
        plain = model(tokens(LONG)[:, 22:], past_key_values=cache).logits
    assert not torch.allclose(edited, plain, atol=1e-3)
    weights = seen[1].map[:]  # of sinks 0 and 1, and up to 3 last tokens and the query, token 20
    positions = torch.tensor([0.0, 1.0, 17, 18, 19, 20])
    torch.testing.assert_close(seen[1].measured["mean_distance"], (weights * (20 - positions)).sum(-1)[..., 0])


def test_autocast_stores_what_attention_reads():
    model = make(FAMILY["Gemma 3"])
    with hw.attach(model), torch.autocast("cpu", torch.bfloat16):
        cache = hw.cache.for_transformers(model, budget())
        found = logits(model, cache, [9, 13, 1])
    assert cache.caches[0].parts[0][1]._k.read().dtype == torch.bfloat16
    assert (found.float() - expected("Gemma 3")).abs().max() < 0.05 * expected("Gemma 3").abs().max()


# --- what is refused


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_model_that_is_not_attached_is_refused(implementation):
    model = copy.deepcopy(make(FAMILY["Llama"]))
    model.set_attn_implementation(implementation)
    for stored in (None, "int8"):
        with pytest.raises(ConfigError, match=r"past_key_values: .*only headwise's attention can read.*hw\.attach"):
            model.generate(tokens(), past_key_values=hw.cache.for_transformers(model, stored=stored), max_new_tokens=2)


def test_a_model_that_was_moved_is_refused():
    model = copy.deepcopy(make(FAMILY["Llama"]))
    with hw.attach(model), torch.no_grad():
        cache = hw.cache.for_transformers(model, budget())
        model(tokens(), past_key_values=cache)
        with pytest.raises(DTypeError, match=r"bfloat16, the cached ones are torch\.float32; use a new cache"):
            model.to(torch.bfloat16)(tokens(1), past_key_values=cache)
        with pytest.raises(ShapeError, match="new cache"):
            model.float()(tokens(1)[:2], past_key_values=cache)
        assert cache.get_seq_length() == 13


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (budget(((3, None),)), r"made for a model of 1 layers; this one has 2"),
        (
            budget(model="Gemma with 7 parameters"),
            r"made for a Gemma with 7 parameters, and this is a LlamaForCausalLM",
        ),
        ("budget.json", r"budget='budget\.json'\): expected a budget.*read_budget"),
    ],
)
def test_a_budget_of_another_model_is_refused_by_name(given, words):
    with pytest.raises(ConfigError, match=words):
        hw.cache.for_transformers(make(FAMILY["Llama"]), given)


def test_a_budget_of_other_heads_is_refused_when_it_is_used():
    model = make(FAMILY["Llama"])
    with hw.attach(model), pytest.raises(ConfigError, match="made for layers of 3 KV heads; this model has 2"):
        model(tokens(), past_key_values=hw.cache.for_transformers(model, budget(((3, 3, 3),) * 2)))
    other = hw.cache.for_transformers(model.config, budget(model="Gemma with 7 parameters"))
    assert len(other.layers) == 2


def test_a_pass_that_failed_leaves_no_cache_to_go_on_with():
    model = make(FAMILY["Llama"])
    with hw.attach(model), torch.no_grad():
        cache = hw.cache.for_transformers(model)
        hook = model.model.layers[1].register_forward_pre_hook(lambda *_: pytest.fail("stopped"))
        with pytest.raises(pytest.fail.Exception):
            model(tokens(), past_key_values=cache)
        hook.remove()
        with pytest.raises(ConfigError, match=r"layer 0 has 13 tokens and should have 0.*make a new cache"):
            model(tokens(), past_key_values=cache)


def test_a_cache_of_another_model_is_refused():
    small, large = make(FAMILY["Llama"]), make(FAMILY["Gemma 2"])
    cache = hw.cache.for_transformers(small)
    cache.layers.pop()
    with hw.attach(large), pytest.raises(ConfigError, match=r"made for a model of 1 layers.*has a layer 1"):
        large(tokens(), past_key_values=cache)


def test_models_that_keep_something_else_are_refused_by_name():
    with pytest.raises(ConfigError, match="falcon_h1 has layers whose caches are LinearAttentionAndFullAttentionLayer"):
        hw.cache.for_transformers(FalconH1Config(num_hidden_layers=2))
    model = make(FAMILY["BART"])
    with hw.attach(model), torch.no_grad():
        ids = {"input_ids": tokens(), "decoder_input_ids": tokens()}
        with pytest.raises(ConfigError, match=r"BartAttention attends to another sequence|encoder-decoder models"):
            model(**ids, past_key_values=hw.cache.for_transformers(model))
    with pytest.raises(ConfigError, match="expected a model of transformers or its configuration, got Linear"):
        hw.cache.for_transformers(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="stored='int3'"):
        hw.cache.for_transformers(make(FAMILY["Llama"]), stored="int3")


@pytest.mark.thorough
def test_assisted_decoding_takes_tokens_back_or_is_refused_by_name():
    model, draft = make(FAMILY["Llama"]), copy.deepcopy(make(FAMILY["Llama"]))
    ids = tokens()[:1]
    with hw.attach(model):
        with pytest.raises(ConfigError, match=r"BudgetCache drops tokens for good, and assisted decoding"):
            model.generate(
                ids, past_key_values=hw.cache.for_transformers(model, budget()), assistant_model=draft, max_new_tokens=8
            )
        found = model.generate(ids, past_key_values=hw.cache.for_transformers(model), assistant_model=draft,
                               max_new_tokens=8, do_sample=False)  # fmt: skip
        plain = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(found, plain)


def test_continuous_batching_is_refused_by_name():
    model = make(FAMILY["Llama"])
    with hw.attach(model), pytest.raises(ValueError, match=r"headwise is not supported for continuous batching.*sdpa"):
        model.generate(tokens(), past_key_values=hw.cache.for_transformers(model), cache_implementation="paged")
