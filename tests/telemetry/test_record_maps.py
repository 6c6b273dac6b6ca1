"""The names by which a record returns its maps."""

import pytest
import torch
from torch import nn

import headwise as hw


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(hw.MultiHeadAttention(8, 2), hw.MultiHeadAttention(8, 2))


def recorded(maps: str) -> hw.telemetry.Record:
    watched = model()
    with hw.watch(watched, maps=maps) as record:
        watched(torch.randn(1, 5, 8))
    return record


def test_names_of_transformer_lens():
    maps = recorded("lazy").maps
    assert list(maps) == ["0", "1"]
    assert maps["blocks.1.attn.hook_pattern"] is maps["1"]
    assert "blocks.1.attn.hook_pattern" not in maps


@pytest.mark.parametrize(("name", "maps", "message"), [
    ("blocks.2.attn.hook_pattern", "lazy", "no such module among 2"), ("00", "lazy", "did you mean '0'"),
    ("0", "none", "maps='lazy'"), ("blocks.0.attn.hook_z", "pooled", "no such module"),
])  # fmt: skip
def test_a_missing_name_is_explained(name: str, maps: str, message: str):
    with pytest.raises(KeyError, match=message):
        recorded(maps).maps[name]


def test_before_the_first_forward():
    with hw.watch(model(), maps="lazy") as record, pytest.raises(KeyError, match="no forward was measured yet"):
        record.maps["0"]
