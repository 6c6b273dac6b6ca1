"""A folder of transformers is data: what in it asks for code, or for weights that are pickled, is refused by name."""

import json
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import byte_level, saved, transformers

from headwise.base.read import check_built
from headwise.edit import load_pruned, prune, save_pruned
from headwise.errors import CheckpointError, HeadwiseError
from headwise.lm.loading import load_model

KERNEL = "kernels-community/flash-attn"


class Loaded(Exception):
    """What must not be loaded is."""


@pytest.fixture(autouse=True)
def _nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever transformers would fetch or run code, it is told here."""

    def refuse(*args: object, **options: object) -> Any:
        raise Loaded(args)

    hub = transformers.integrations.hub_kernels
    for name in ("get_kernel", "load_and_register_attn_kernel", "lazy_load_kernel"):
        if hasattr(hub, name):
            monkeypatch.setattr(hub, name, refuse)
    monkeypatch.setattr(transformers.dynamic_module_utils, "get_class_in_module", refuse)
    monkeypatch.setattr(torch, "load", refuse)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path / "model", "Llama", "ForCausalLM", byte_level())


def edit(path: Path, **changes: Any) -> None:
    values = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**values, **changes}), encoding="utf-8")


REFUSED: list[dict[str, Any]] = [
    {"attn_implementation": KERNEL},
    {"_attn_implementation": KERNEL},
    {"_attn_implementation_internal": KERNEL},
    {"attn_implementation": f"{KERNEL}@v1:flash"},
    {"attn_implementation": "flash_attention_2"},  # which falls back to a kernel from the hub
    {"attn_implementation": "msa|somebody/msa"},
    {"attn_implementation": {"": "sdpa", "text_config": KERNEL}},
    {"text_config": {"attn_implementation": KERNEL}},
    {"vision_config": {"deep": {"_attn_implementation": KERNEL}}},
    {"experts_implementation": "somebody/experts"},
    {"use_kernels": True},
    {"kernel_config": {"kernel_mapping": {"RMSNorm": "somebody/kernels:Norm"}}},
    {"trust_remote_code": True},
    {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
    {"text_config": {"quantization_config": {"quant_method": "awq"}}},
    {"transformers_weights": "adapter_model.bin"},
    {"transformers_weights": "../other.safetensors"},
    {"attribute_map": {"zz": "_attn_implementation"}, "zz": KERNEL},
    {"attribute_map": {"zz": "quantization_config"}, "zz": {"quant_method": "gptq", "bits": 4}},
    {"text_config": {"attribute_map": {"zz": "_attn_implementation_internal"}, "zz": KERNEL}},
    {"vision_config": {"backbone": "somebody/model"}},
    {"vision_config": {"backbone": "hf_hub:somebody/model", "model_type": "timm_backbone"}},
    {"parts": [{"attn_implementation": KERNEL}]},
    {"num_hidden_layers": 10**9},
    {"num_experts": -(10**400)},
    {"text_config": {"num_labels": 10**9}},
]


def names(entry: dict[str, Any]) -> str:
    """The entry that asks, where there are some inside one another."""
    name, value = next(iter(entry.items()))
    inner = (
        isinstance(value, dict) and name.endswith("_config") and name not in ("kernel_config", "quantization_config")
    )
    if name == "parts":
        return names(value[0])
    return names(value) if inner or name == "deep" else name


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize("entry", REFUSED, ids=json.dumps)
def test_what_asks_for_code_is_refused_by_name(folder: Path, entry: dict[str, Any]) -> None:
    edit(folder / "config.json", **entry)
    with pytest.raises(CheckpointError, match=names(entry)) as caught:
        load_model(folder)
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that `load_pruned` opens."""
    folder = tmp_path_factory.mktemp("pruned")
    model = load_model(saved(folder / "model", "Bert", "Model", byte_level())).model
    save_pruned(prune(model, {"encoder.layer.0.attention.self": [1]}, copy=True).model, folder / "pruned")
    assert load_pruned(folder / "pruned")
    return folder / "pruned"


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize("entry", REFUSED, ids=json.dumps)
def test_a_pruned_folder_may_not_ask_for_code_either(tmp_path: Path, pruned: Path, entry: dict[str, Any]) -> None:
    shutil.copytree(pruned, tmp_path / "pruned")
    edit(tmp_path / "pruned" / "config.json", **entry)
    with pytest.raises(CheckpointError, match=names(entry)):
        load_pruned(tmp_path / "pruned")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "entry",
    [
        {"attn_implementation": "eager"},
        {"_attn_implementation": "sdpa"},
        {"quantization_config": None},
        {"use_kernels": False},
        {"transformers_weights": "model.safetensors"},
    ],
    ids=json.dumps,
)
def test_what_asks_for_nothing_is_opened(folder: Path, entry: dict[str, Any]) -> None:
    before = load_model(folder)
    ids = before.read("hello world").ids
    edit(folder / "config.json", **entry)
    assert load_model(folder).loss(ids) == pytest.approx(before.loss(ids), rel=1e-6)


def test_another_configuration_that_the_first_one_names_is_looked_at_too(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.5.0.0.json").write_text(json.dumps({**values, "attn_implementation": KERNEL}), encoding="utf-8")
    edit(folder / "config.json", configuration_files=["config.5.0.0.json"])
    with pytest.raises(CheckpointError, match="attn_implementation='kernels-community/flash-attn'"):
        load_model(folder)


def trap(folder: Path) -> None:
    """A module beside the model that writes a file where it is run."""
    (folder / "trap.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\nclass Trap: pass\n", encoding="utf-8")


@pytest.mark.thorough
def test_code_of_a_known_model_is_passed_over(folder: Path) -> None:
    """Many published models carry the code that transformers has by now; transformers' own is taken."""
    before = load_model(folder)
    ids = before.read("hello world").ids
    trap(folder)
    edit(folder / "config.json", auto_map={"AutoConfig": "trap.Trap", "AutoModelForCausalLM": "trap.Trap"})
    again = load_model(folder)
    assert again.loss(ids) == before.loss(ids)
    assert type(again.model).__module__.startswith("transformers.")
    assert not (folder / "ran").exists()


def test_code_of_an_unknown_model_is_refused_by_name(folder: Path) -> None:
    trap(folder)
    edit(folder / "config.json", model_type="trap", auto_map={"AutoConfig": "trap.Trap"})
    with pytest.raises(CheckpointError, match=r"auto_map=.*refers to custom code"):
        load_model(folder)
    assert not (folder / "ran").exists()


@pytest.mark.thorough_except("Trap-auto_map0", "None-auto_map0")
@pytest.mark.parametrize("auto_map", [{"AutoTokenizer": [None, "trap.Trap"]}, {"AutoTokenizer": ["trap.Trap", None]}])
@pytest.mark.parametrize("kind", ["Trap", "PreTrainedTokenizerFast", None])
def test_code_of_a_tokenizer_is_never_run(folder: Path, auto_map: Any, kind: str | None) -> None:
    trap(folder)
    edit(folder / "tokenizer_config.json", auto_map=auto_map, tokenizer_class=kind)
    before = set(sys.modules)
    with suppress(CheckpointError):
        assert load_model(folder).read("hello").pieces
    assert not (folder / "ran").exists()
    assert not [name for name in set(sys.modules) - before if "trap" in name]


@pytest.mark.thorough
def test_a_tokenizer_of_an_unknown_class_is_read_as_data(folder: Path) -> None:
    pieces = load_model(folder).read("hello world").pieces
    edit(folder / "tokenizer_config.json", tokenizer_class="SomebodysTokenizer")
    assert load_model(folder).read("hello world").pieces == pieces


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00001.bin"])
def test_pickled_weights_are_never_read(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(CheckpointError, match="pickled"):
        load_model(folder)


@pytest.mark.thorough
def test_pickled_weights_beside_safetensors_are_passed_over(folder: Path) -> None:
    before = load_model(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02csys\nexit\n(I3\ntR.")
    ids = before.read("hello world").ids
    assert load_model(folder).loss(ids) == before.loss(ids)


def test_an_adapter_is_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "somebody/model"}))
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        load_model(folder)


def test_a_built_configuration_is_checked_with_all_that_are_in_it(folder: Path) -> None:
    """Where transformers has a name for an entry that headwise does not know."""
    config = transformers.LlavaConfig()
    check_built(config, "config.json")
    config.text_config._attn_implementation_internal = KERNEL
    with pytest.raises(CheckpointError, match=f"_attn_implementation_internal='{KERNEL}'"):
        check_built(config, "config.json")
    config = transformers.LlavaConfig()
    config.parts = [{"deep": transformers.LlamaConfig(quantization_config={"quant_method": "awq"})}]
    with pytest.raises(CheckpointError, match="quantization_config"):
        check_built(config, "config.json")


SIZES: list[dict[str, Any]] = [
    {"vocab_size": 10**10}, {"hidden_size": 10**7, "head_dim": 6}, {"intermediate_size": 10**10},
    {"num_hidden_layers": 10**6}, {"num_attention_heads": 10**9, "num_key_value_heads": 2}, {"head_dim": 10**10},
    {"hidden_size": 10**30}, {"vocab_size": -1}, {"hidden_size": -24}, {"intermediate_size": 1.5},
    {"vocab_size": float("nan")}, {"num_hidden_layers": float("inf")}, {"rms_norm_eps": "x"},
]  # fmt: skip


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize("sizes", SIZES, ids=json.dumps)
def test_sizes_that_the_weights_do_not_have_are_refused_before_memory_is_allocated(
    folder: Path, sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwise.lm.loading.huggingface._load", Loaded)
    edit(folder / "config.json", **sizes)
    with pytest.raises(CheckpointError) as caught:
        load_model(folder)
    assert len(str(caught.value)) < 900


@pytest.mark.thorough
def test_a_pruned_folder_is_compared_with_its_weights_before_memory_is_allocated(tmp_path: Path) -> None:
    model = load_model(saved(tmp_path / "model", "Bert", "Model", byte_level())).model
    save_pruned(prune(model, {"encoder.layer.0.attention.self": [1]}, copy=True).model, tmp_path / "pruned")
    edit(tmp_path / "pruned" / "config.json", vocab_size=10**11)
    with pytest.raises(CheckpointError, match=r"numbers \(weights: [\d,]+\)"):
        load_pruned(tmp_path / "pruned")


WRONG: list[Any] = [5, "x", None, [], {}, -1, [5], {"a": 5}]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("file", "name"),
    [("config.json", "architectures"), ("config.json", "model_type"), ("config.json", "vocab_size"),
     ("config.json", "rope_parameters"), ("tokenizer_config.json", "tokenizer_class"), ("tokenizer.json", "model"),
     ("tokenizer.json", "pre_tokenizer"), ("tokenizer.json", "added_tokens")],
)  # fmt: skip
def test_a_value_of_another_type_is_one_error(folder: Path, file: str, name: str) -> None:
    for value in WRONG:
        text = (folder / file).read_text(encoding="utf-8")
        edit(folder / file, **{name: value})
        with suppress(HeadwiseError):
            load_model(folder).read("hello")
        (folder / file).write_text(text, encoding="utf-8")


@pytest.mark.thorough
def test_a_panic_of_a_tokenizer_is_one_error(folder: Path) -> None:
    """The regular expression of a tokenizer panics on a text; pyo3's PanicException is no Exception."""
    pattern = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    edit(folder / "tokenizer.json", pre_tokenizer=pattern)
    loaded = load_model(folder)
    with pytest.raises(CheckpointError, match="its tokenizer cannot read a text"):
        loaded.read("x" * 60)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no pipes with names")
@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json", "chat_template.jinja"]
)
def test_a_pipe_in_a_folder_is_refused(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(HeadwiseError):
        load_model(folder)
