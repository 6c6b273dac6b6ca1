"""Norms of values after the output projection, against what a weight of 1 adds."""

from typing import Any

import pytest
import torch
from torch import nn

import headwise as hw
from headwise.analysis import value_norms
from headwise.interventions import Uniform


def llama() -> Any:
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=23, hidden_size=24, intermediate_size=19, num_attention_heads=6,
                         num_key_value_heads=2, num_hidden_layers=2)  # fmt: skip
    return LlamaModel(config).double().eval()


def test_norms_of_a_model_of_transformers_with_shared_kv_heads() -> None:
    model, ids = llama(), torch.arange(22).view(2, 11)
    hidden: list[torch.Tensor] = []
    attention = model.layers[1].self_attn
    handle = attention.register_forward_pre_hook(
        lambda _, __, options: hidden.append(options["hidden_states"]), with_kwargs=True
    )
    norms = value_norms(model, lambda: model(ids))
    handle.remove()
    assert list(norms) == ["layers.0.self_attn", "layers.1.self_attn"]
    values = attention.v_proj(hidden[0]).view(2, 11, 2, 4)
    for head in range(6):
        added = values[:, :, head // 3] @ attention.o_proj.weight[:, head * 4 : head * 4 + 4].T
        torch.testing.assert_close(norms["layers.1.self_attn"][:, head], added.norm(dim=-1).detach())


def test_a_module_that_is_called_twice() -> None:
    layer = hw.MultiHeadAttention(8, 2)
    x = torch.randn(1, 5, 8)
    norms = value_norms(layer, lambda: layer(layer(x)))
    assert list(norms) == ["", "#2"]
    torch.testing.assert_close(norms[""], value_norms(layer, lambda: layer(x))[""])


def test_bad_input() -> None:
    layer = hw.MultiHeadAttention(8, 2)
    with pytest.raises(hw.ConfigError, match="run: called no attention"):
        value_norms(layer, lambda: None)
    with hw.intervene(layer, Uniform(), unused="ignore"), pytest.raises(hw.ConfigError, match="call it outside"):
        value_norms(layer, lambda: layer(torch.randn(1, 5, 8)))
    with pytest.raises(hw.ConfigError, match="Linear"):
        value_norms(nn.Linear(2, 2), lambda: None)
