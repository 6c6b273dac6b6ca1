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
    ("0", "none", "maps='lazy'"), ("blocks.0.attn.hook_z", "pooled", "maps='lazy'"),
    ("blocks.0.attn.hook_z", "lazy", "values=True"), ("blocks.0.attn.hook_mlp", "lazy", "expected one of hook_pattern"),
])  # fmt: skip
def test_a_missing_name_is_explained(name: str, maps: str, message: str):
    with pytest.raises(KeyError, match=message):
        recorded(maps).maps[name]


def test_before_the_first_forward():
    with hw.watch(model(), maps="lazy") as record, pytest.raises(KeyError, match="no forward was measured yet"):
        record.maps["0"]


class Plain(nn.Module):
    """An attention written by hand, without rotary positions; `changed` scales its queries."""

    def __init__(self, changed: float = 1.0) -> None:
        super().__init__()
        self.qkv, self.out, self.changed = nn.Linear(12, 36), nn.Linear(12, 12), changed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.view(*y.shape[:2], 3, 4).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        q = q if self.changed == 1 else q.roll(1, -1) * self.changed
        self.q, self.v, self.scores = q, v, (q @ k.mT / 2).masked_fill(torch.ones(7, 7).triu(1) == 1, -torch.inf)
        self.z = self.scores.softmax(-1) @ v
        return self.out(self.z.transpose(1, 2).flatten(2))


def test_values_and_outputs_of_an_attention_written_by_hand():
    torch.manual_seed(0)
    watched, x = nn.Sequential(Plain(), Plain(changed=1.5)), torch.randn(2, 7, 12)
    with torch.no_grad(), hw.watch(watched, maps="lazy", values=True) as record:
        watched(x)
    for i, layer in enumerate(watched):
        hooks = {name: record.maps[f"blocks.{i}.attn.hook_{name}"] for name in ("v", "z", "rot_q", "attn_scores")}
        torch.testing.assert_close(hooks["v"], layer.v.transpose(1, 2))
        torch.testing.assert_close(hooks["z"], layer.z.transpose(1, 2))
        torch.testing.assert_close(hooks["attn_scores"][:], layer.scores)
        torch.testing.assert_close(hooks["attn_scores"][1, 2, 3:5, 0], layer.scores[1, 2, 3:5, 0])
        assert hooks["attn_scores"].shape == (2, 3, 7, 7)
    assert torch.equal(record.maps["blocks.0.attn.hook_q"], watched[0].q.transpose(1, 2))
    with pytest.raises(KeyError, match=r"the queries are changed after their projection.*hook_rot_q"):
        record.maps["blocks.1.attn.hook_q"]
    assert record.maps["blocks.1.attn.hook_k"].shape == (2, 7, 3, 4)
    with pytest.raises(KeyError, match=r"its output projection is not known.*call find_heads\(model, batch\) first"):
        record.maps["blocks.0.attn.hook_result"]
    hw.find_heads(watched, x)
    result = record.maps["blocks.0.attn.hook_result"]
    torch.testing.assert_close(result.sum(2) + watched[0].out.bias, watched[0](x))


def test_outputs_of_headwises_own_layers():
    watched, x = model(), torch.randn(1, 5, 8)
    with torch.no_grad(), hw.watch(watched, maps="lazy", values=True) as record:
        watched(x)
    _, concat = watched[0](x, return_concat=True)
    z = record.maps["blocks.0.attn.hook_z"]
    torch.testing.assert_close(z, concat.unflatten(-1, (2, 4)))
    torch.testing.assert_close(record.maps["blocks.0.attn.hook_result"].sum(2), watched[0](x))
    assert record.maps["blocks.0.attn.hook_q"].shape == (1, 5, 2, 4)
    with pytest.raises(KeyError, match="MultiHeadAttention does not publish its values"):
        record.maps["blocks.0.attn.hook_v"]


@pytest.mark.parametrize(
    "options", [{"values": True}, {"values": True, "maps": "pooled"}, {"values": 1, "maps": "lazy"}]
)
def test_values_need_maps(options):
    with pytest.raises(hw.ConfigError, match=r"values=.* with maps=.*needs maps='lazy'"):
        hw.watch(model(), **options)


def test_outputs_of_linear_maps_are_kept_in_measured_forwards_only():
    watched, held = nn.Sequential(*model(), nn.Linear(8, 7)), []
    with hw.watch(watched, maps="lazy", values=True, every=2) as record:
        watched[2].register_forward_hook(lambda *call: held.append(len(record._projections._outputs or ())))
        for _ in range(3):
            watched(torch.randn(1, 5, 8))
            assert not record._projections._outputs
    assert held == [1, 0, 1]  # the last layer


def test_nothing_is_kept_without_values():
    watched = model()
    with hw.watch(watched, maps="lazy") as record:
        assert not any(module._forward_hooks for module in watched[0].children())
        watched(torch.randn(1, 5, 8))
    assert record.maps.kept_of == {}
