"""`headwise plan --config FOLDER`: the sizes of a model of transformers by its config.json."""

import json
from pathlib import Path

import pytest

from headwise.errors import CheckpointError, ConfigError
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
