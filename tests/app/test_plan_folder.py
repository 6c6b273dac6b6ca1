"""`headwise plan --config FOLDER`: the sizes of a model of transformers by its config.json, and of a checkpoint."""

import json
from pathlib import Path

import pytest

import headwise
from headwise.errors import CheckpointError, ConfigError
from headwise.lm.checkpoint import save_model
from headwise.lm.model import Decoder, DecoderConfig
from headwise.lm.tokenizer import CharTokenizer
from headwise.textbook.plan import plan_from_options

transformers = pytest.importorskip("transformers", minversion="5")
LLAMA = {
    "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
    "intermediate_size": 77, "vocab_size": 101, "max_position_embeddings": 211,
}  # fmt: skip
MORE = {"llama": {"attention_bias": True}, "mistral": {"sliding_window": 13, "head_dim": 16},
        "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2}, "qwen2": {}, "qwen3": {"head_dim": 16},
        "gemma": {"head_dim": 16}}  # fmt: skip
CASES = {
    **{kind: {**LLAMA, **more} for kind, more in MORE.items()},
    "gpt2": {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 211, "vocab_size": 101},
    "bert": {key: size for key, size in LLAMA.items() if key != "num_key_value_heads"},
}


def folder_of(path: Path, kind: str, **sizes: object) -> str:
    (path / "config.json").write_text(json.dumps({"model_type": kind, **sizes}), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("kind", CASES)
def test_a_folder_is_planned_with_the_parameters_of_its_model(kind, tmp_path):
    folder = folder_of(tmp_path, kind, **CASES[kind])
    plan = plan_from_options(config=folder, sizes={}, seq=17)
    auto = transformers.AutoModel if kind == "bert" else transformers.AutoModelForCausalLM
    model = auto.from_config(transformers.AutoConfig.from_pretrained(folder))
    assert plan.table("parameters").rows[-1][1] == sum(p.numel() for p in model.parameters())
    assert dict(plan.facts)["source"] == str(tmp_path / "config.json")


def test_the_cache_has_the_kv_heads_of_the_folder(tmp_path):
    plan = plan_from_options(config=folder_of(tmp_path, "llama", **CASES["llama"]), sizes={}, seq=17, batch=1)
    memory = {row[0]: row[1] for row in plan.table("memory").rows}
    assert memory["cache, all tokens"] == 17 * 3 * 2 * (2 * 8) * 2


def test_what_is_not_understood_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"model_type='gpt_neox'.*llama.*--design"):
        plan_from_options(config=folder_of(tmp_path, "gpt_neox"), sizes={})
    with pytest.raises(ConfigError, match="parameters, and one of these sizes"):
        plan_from_options(config=folder_of(tmp_path, "llama", **LLAMA, mlp_bias=True), sizes={})
    windows = {"use_sliding_window": True, "sliding_window": 13, "max_window_layers": 1}
    with pytest.raises(ConfigError, match="attends in windows in some layers"):
        plan_from_options(config=folder_of(tmp_path, "qwen2", **LLAMA, **windows), sizes={})
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        plan_from_options(config=str(tmp_path), sizes={})


def test_the_source_states_no_number_of_a_folder(tmp_path):
    plan = plan_from_options(config=folder_of(tmp_path, "llama", **CASES["llama"]), sizes={}, seq=17)
    note = str(plan.table("parameters").note)
    assert "built from the source has" in note
    assert "states" not in note


def pruned(heads):
    config = transformers.AutoConfig.for_model("llama", **{**CASES["llama"], "num_key_value_heads": 6})
    return headwise.edit.prune(transformers.LlamaForCausalLM(config), heads).model


def test_a_model_pruned_alike_in_all_layers_is_planned(tmp_path):
    model = pruned({0: [0, 1], 1: [2, 3], 2: [0, 5]})
    headwise.edit.save_pruned(model, tmp_path / "pruned")
    plan = plan_from_options(config=str(tmp_path / "pruned"), sizes={}, seq=17)
    assert plan.table("parameters").rows[-1][1] == sum(p.numel() for p in model.parameters())


def test_a_model_pruned_in_one_layer_is_refused(tmp_path):
    headwise.edit.save_pruned(pruned({1: [2, 3]}), tmp_path / "pruned")
    with pytest.raises(ConfigError, match=r"was pruned: model\.layers\.1\.self_attn"):
        plan_from_options(config=str(tmp_path / "pruned"), sizes={})


@pytest.mark.parametrize(
    ("design", "options", "order"),
    [("multi_head", {}, "pre"), ("multi_head", {"head_dim": 6}, "post"), ("sparse_mixture", {"top_k": 2}, "pre")],
)
def test_a_checkpoint_of_headwise_is_planned(design, options, order, tmp_path):
    tokenizer = CharTokenizer("一百单八将")
    config = DecoderConfig(tokenizer.vocab_size, 24, 2, 4, d_ff=40, design=design, options=options, order=order)
    decoder = Decoder(config)
    save_model(tmp_path / "model.safetensors", decoder, tokenizer, {})
    for path in (tmp_path, tmp_path / "model.safetensors"):
        plan = plan_from_options(config=str(path), sizes={}, seq=17)
        assert plan.table("parameters").rows[-1][1] == sum(p.numel() for p in decoder.parameters())


def test_a_checkpoint_with_different_layers_is_refused(tmp_path):
    tokenizer = CharTokenizer("一百单八将")
    decoder = Decoder(DecoderConfig(tokenizer.vocab_size, 24, 2, 4, d_ff=40))
    headwise.edit.prune(decoder, {1: [0]})
    save_model(tmp_path / "model.safetensors", decoder, tokenizer, {})
    with pytest.raises(ConfigError, match="layers have different sizes"):
        plan_from_options(config=str(tmp_path), sizes={})


def test_an_encoder_has_no_cache():
    with pytest.raises(ConfigError, match=r"--cache: bert-base is an encoder"):
        plan_from_options(config="bert-base", sizes={}, cache="int8")


def test_experts_that_tokens_share_are_read_once():
    def feed_forward(batch):
        plan = plan_from_options(config="mixtral-8x7b", sizes={}, seq=64, batch=batch)
        assert "chosen equally often" in str(plan.notes[-1])
        return {row[0]: row[3] for row in plan.table("step").rows}["feed-forward"]

    one, width = 3 * 4096 * 14336, 2 * (4096 + 2 * 14336) * 2
    for batch in (1, 2, 8):
        experts = 8 * (1 - (6 / 8) ** batch)
        assert feed_forward(batch) == pytest.approx(32 * (2 * (experts * one + 8 * 4096) + batch * width), rel=1e-6)
