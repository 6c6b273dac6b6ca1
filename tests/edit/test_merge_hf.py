"""Llama-like models of transformers whose heads come to share keys and values."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import hf_model, hidden, ids, transformers

from headwise.edit import load_pruned, merge_kv, prune, save_pruned
from headwise.edit.merging import METHODS
from headwise.errors import ConfigError
from headwise.models import find_heads

NAMES = ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3"]


def equal_heads(name: str) -> Any:
    """4 key heads, of which 0 and 2, and 1 and 3, are the same."""
    model = hf_model(name, num_key_value_heads=4)
    with torch.no_grad():
        for site in find_heads(model):
            for linear in (site.module.k_proj, site.module.v_proj):
                for x in (linear.weight, linear.bias):
                    if x is not None:
                        heads = x.view(4, 6, -1)
                        heads[2:] = heads[:2].clone()
    return model


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", METHODS)
def test_equal_heads_lose_nothing(name: str, method: str) -> None:
    model = equal_heads(name)
    groups = None if method in ("cluster", "svd") else {i: [[0, 2], [1, 3]] for i in range(3)}
    result = merge_kv(model, 2, method, groups=groups, copy=True)
    assert {merge.groups for merge in result.merges.values()} == {((0, 2), (1, 3))}
    assert [site.num_kv_heads for site in find_heads(result.model)] == [2, 2, 2]
    torch.testing.assert_close(hidden(result.model, ids()), hidden(model, ids()), rtol=1e-4, atol=1e-5)
    assert model.config.num_key_value_heads == 4


@pytest.mark.thorough
def test_complex_factors_pass_the_rotary_positions_of_llama() -> None:
    model = hf_model("llama", num_key_value_heads=4, attention_bias=True)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for site in find_heads(model):
            for x in (site.module.k_proj.weight, site.module.k_proj.bias):
                heads = x.view(4, 6, -1)
                for head in range(1, 4):
                    a, b = torch.randn(2, 3, 1, generator=generator.manual_seed(head), dtype=torch.float64)
                    re, im = heads[0, :3], heads[0, 3:]
                    heads[head] = torch.cat((a * re - b * im, a * im + b * re))
            for x in (site.module.v_proj.weight, site.module.v_proj.bias):
                heads = x.view(4, 6, -1)
                heads[1:] = heads[0].clone()
    result = merge_kv(model, 1, "svd", copy=True)
    torch.testing.assert_close(hidden(result.model, ids()), hidden(model, ids()), rtol=1e-5, atol=1e-6)
    mean = merge_kv(model, 1, "mean", copy=True)
    assert not torch.allclose(hidden(mean.model, ids()), hidden(model, ids()), atol=1e-2)


@pytest.mark.thorough
def test_a_merged_model_generates_and_comes_back(tmp_path: Path) -> None:
    model = hf_model("llama", num_key_value_heads=4)
    merged = merge_kv(model, {0: 2, 2: 1}, "svd", copy=True).model
    assert [site.num_kv_heads for site in find_heads(merged)] == [2, 4, 1]
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(merged.generate(ids(5), **options), merged.generate(ids(5), use_cache=False, **options))
    save_pruned(merged, tmp_path / "merged")
    again = load_pruned(tmp_path / "merged")
    torch.testing.assert_close(hidden(again, ids()), hidden(merged, ids()))
    both = prune(again, {1: [0], 2: [3]}, copy=True).model
    save_pruned(both, tmp_path / "both")
    torch.testing.assert_close(hidden(load_pruned(tmp_path / "both"), ids()), hidden(both, ids()))


@pytest.mark.thorough
def test_a_model_merged_alike_everywhere_is_one_that_transformers_writes_itself(tmp_path: Path) -> None:
    merged = merge_kv(hf_model("llama", num_key_value_heads=4, dtype=torch.float32), 2, "cluster").model
    assert merged.config.num_key_value_heads == 2
    merged.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(hidden(again, ids()), hidden(merged, ids()))


@pytest.mark.thorough
def test_other_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="BertSelfAttention does not support merging of KV heads; supported"):
        merge_kv(hf_model("bert"), 1)
    model = hf_model("llama")
    for site in find_heads(model):
        site.module.config.rope_parameters["partial_rotary_factor"] = 0.5
    with pytest.raises(ConfigError, match="which channels LlamaAttention rotates together is unknown"):
        merge_kv(model, 1, "svd")
    assert merge_kv(model, 1, "mean", copy=True).parameters_after < sum(p.numel() for p in model.parameters())
