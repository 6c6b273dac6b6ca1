"""A folder of transformers is data: what in it asks for code, or for weights that are pickled, is refused by name."""

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import byte_level, saved, transformers

from headwise.edit import load_pruned, prune, save_pruned
from headwise.errors import CheckpointError
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
]


def names(entry: dict[str, Any]) -> str:
    """The entry that asks, where there are some inside one another."""
    name, value = next(iter(entry.items()))
    inner = (
        isinstance(value, dict) and name.endswith("_config") and name not in ("kernel_config", "quantization_config")
    )
    return names(value) if inner or name == "deep" else name


@pytest.mark.parametrize("entry", REFUSED, ids=json.dumps)
def test_what_asks_for_code_is_refused_by_name(folder: Path, entry: dict[str, Any]) -> None:
    edit(folder / "config.json", **entry)
    with pytest.raises(CheckpointError, match=names(entry)) as caught:
        load_model(folder)
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("entry", REFUSED, ids=json.dumps)
def test_a_pruned_folder_may_not_ask_for_code_either(tmp_path: Path, entry: dict[str, Any]) -> None:
    model = load_model(saved(tmp_path / "model", "Bert", "Model", byte_level())).model
    save_pruned(prune(model, {"encoder.layer.0.attention.self": [1]}, copy=True).model, tmp_path / "pruned")
    assert load_pruned(tmp_path / "pruned")
    edit(tmp_path / "pruned" / "config.json", **entry)
    with pytest.raises(CheckpointError, match=names(entry)):
        load_pruned(tmp_path / "pruned")


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


def test_pickled_weights_beside_safetensors_are_passed_over(folder: Path) -> None:
    before = load_model(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02csys\nexit\n(I3\ntR.")
    ids = before.read("hello world").ids
    assert load_model(folder).loss(ids) == before.loss(ids)


def test_an_adapter_is_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "somebody/model"}))
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        load_model(folder)
