"""Models of which every layer keeps equally many heads are read by plain transformers; others warn."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import CAUSAL, hf_model, hidden, ids, transformers

from headwise.edit import load_pruned, merge_kv, prune, save_pruned
from headwise.errors import ConfigError
from headwise.models import find_heads
from headwise.wording import in_language

MORE = {0: [3, 1, 2], 1: [1, 0], 2: [0, 1, 3]}  # of 4 heads; layer 1 can spare two
UNEVEN = {0: [1, 3], 2: [0, 1]}
SAYS = [name for name in CAUSAL if name not in ("gpt2", "opt")]
CANNOT_READ = "from_pretrained of transformers cannot read this folder"


@pytest.mark.thorough_except("llama-2", "qwen3-4")
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("name", SAYS)
def test_plain_transformers_reads_it_with_equal_logits(name: str, kv_heads: int, tmp_path: Path) -> None:
    model = hf_model(name, num_key_value_heads=kv_heads, dtype=torch.float32)
    pruned = prune(model, MORE, uniform=True, copy=True).model
    assert [(s.num_heads, s.num_kv_heads) for s in find_heads(pruned)] == [(2, kv_heads // 2)] * 3
    assert model.config.num_attention_heads == 4
    save_pruned(pruned, tmp_path / "cut")  # a warning would be an error
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "cut")
    assert torch.equal(hidden(theirs, ids()), hidden(pruned, ids()))
    assert torch.equal(hidden(load_pruned(tmp_path / "cut"), ids()), hidden(pruned, ids()))


def test_each_layer_loses_the_first_of_those_given() -> None:
    model = hf_model("llama", num_key_value_heads=4)
    pairs = [(1, 3), (0, 2), (2, 1), (0, 0), (2, 3), (1, 1), (0, 1)]
    cuts = prune(model, pairs, uniform=True, copy=True).cuts
    assert [cut.removed for cut in cuts.values()] == [(0, 2), (1, 3), (1, 3)]
    grouped = prune(hf_model("llama"), {0: [2, 0, 3], 1: [1, 0, 3], 2: [0, 3, 2]}, uniform=True).cuts
    assert [cut.removed for cut in grouped.values()] == [(2, 3), (0, 1), (2, 3)]


def test_layers_that_already_differ_become_equal() -> None:
    model = prune(hf_model("qwen3", num_key_value_heads=4), {1: [0, 2]}).model
    prune(model, {0: [1, 2], 2: [3, 0]}, uniform=True)
    assert [site.num_heads for site in find_heads(model)] == [2, 2, 2]


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ({0: [1, 0], 1: [2, 3]}, r"2 at a time.*layers\.2\.self_attn.*with 4 heads, it is given \[\]"),
        ({0: [0, 1], 1: [1, 2], 2: [0, 1]}, r"2 at a time.*layers\.1\.self_attn.*it is given \[1, 2\]"),
        ({i: [0, 1, 2, 3] for i in range(3)}, "all 4 heads would be removed"),
    ],
)
def test_layers_that_cannot_keep_equally_many_are_told(heads: dict[int, list[int]], message: str) -> None:
    model = hf_model("llama")
    with pytest.raises(ConfigError, match=message):
        prune(model, heads, uniform=True)
    assert [site.num_heads for site in find_heads(model)] == [4, 4, 4]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "gpt2",
            r"GPT2Config cannot say 2 heads of 6: transformer\.h\.0\.attn\.c_attn\.weight is \(24, 36\), and \(24, 72",
        ),
        (
            "bert",
            r"BertConfig cannot say 2 heads of 6: encoder\.layer\.0.*save with save_pruned, which load_pruned reads",
        ),
        ("llama", r"LlamaConfig cannot say 7 heads of 3"),  # as 7 does not divide d_model
    ],
)
def test_a_configuration_that_cannot_say_it_is_refused(name: str, message: str) -> None:
    sizes: dict[str, Any] = (
        {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 3} if name == "llama" else {}
    )
    model = hf_model(name, **sizes)
    before = {key: x.clone() for key, x in model.state_dict().items()}
    heads = {i: [2] for i in range(3)} if sizes else MORE
    with pytest.raises(ConfigError, match=message) as error:
        prune(model, heads, uniform=True)
    assert "uniform=True" in error.value.zh != str(error.value)
    assert all(torch.equal(model.state_dict()[key], x) for key, x in before.items())


@pytest.mark.parametrize(
    ("name", "heads", "way"),
    [
        ("llama", UNEVEN, r"different numbers of heads, and prune\(…, uniform=True\)"),
        ("gpt2", MORE, r"different numbers of heads"),
        ("bert", {0: [1], 1: [2], 2: [3]}, "its configuration cannot say such numbers of heads"),
    ],
)
def test_a_folder_that_plain_transformers_cannot_read_is_told(
    name: str, heads: dict[int, list[int]], way: str, tmp_path: Path
) -> None:
    """And they cannot: it is the effect that is checked."""
    pruned = prune(hf_model(name, dtype=torch.float32), heads).model
    with pytest.warns(UserWarning, match=rf"{CANNOT_READ}, as .*{way}.* is \(\d+, \d+\), and .*load_pruned") as told:
        save_pruned(pruned, tmp_path / "cut")
    assert told[0].filename == __file__
    assert "load_pruned" in in_language(told[0].message.args[0], "zh") != str(told[0].message)  # type: ignore[union-attr]
    kind = transformers.AutoModel if name == "bert" else transformers.AutoModelForCausalLM
    with pytest.raises(RuntimeError, match=r"size|shape"):
        kind.from_pretrained(tmp_path / "cut")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=CANNOT_READ):
            save_pruned(pruned, tmp_path / "never")
    assert not (tmp_path / "never").exists()


@pytest.mark.thorough
def test_merged_kv_heads_of_a_llama_are_read_by_plain_transformers(tmp_path: Path) -> None:
    merged: Any = merge_kv(hf_model("llama", num_key_value_heads=4, dtype=torch.float32), 2).model
    save_pruned(merged, tmp_path / "merged")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(hidden(theirs, ids()), hidden(merged, ids()))
