"""The keys of add_bias_kv and add_zero_attn are no tokens: positions, distances and edits are those of the others."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.interventions import Forbid, Scale
from headwise.stats import ClassMass, DuplicateMass, InductionMass

N, H = 7, 4
IDS = torch.tensor([3, 1, 3, 3, 2, 1, 3])
HIDDEN = torch.ones(N, N).triu(1).bool()  # True = ignore
OWN = [{"add_bias_kv": True}, {"add_zero_attn": True}, {"add_bias_kv": True, "add_zero_attn": True}]


@pytest.fixture(params=OWN, ids=["bias", "zero", "both"])
def module(request: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    made = nn.MultiheadAttention(16, H, batch_first=True, **request.param).double().eval()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.4)
    return made


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, N, 16, dtype=torch.float64)


def expected(p: Tensor) -> dict[str, Tensor]:
    """The measures of PyTorch's weights on the tokens, [b, h, n, n], by their definitions."""
    distance = (torch.arange(N)[:, None] - torch.arange(N)).abs().double()
    mass, mean = p.sum(-1), (p * distance).sum(-1)
    centre = (mean / mass)[..., None]
    match = IDS.eq(IDS[:, None]).tril(-1)
    follows = torch.nn.functional.pad(match, (1, 0))[:, :N]  # and so up to the query itself
    return {
        "sink_mass": p[..., 0].mean(-1),
        "mean_distance": mean.mean(-1),
        "distance_variance": ((p * (distance - centre).square()).sum(-1) / mass).mean(-1),
        "local_mass": (p * (distance <= 8)).sum(-1).mean(-1),
        "local": (p * (distance <= 2)).sum(-1).mean(-1),
        "sinks": p[..., :3].sum((-1, -2)) / N,
        "previous_mass": p.diagonal(-1, 2, 3).mean(-1),
        "self_mass": p.diagonal(0, 2, 3).mean(-1),
        "class_mass": p[..., IDS == 3].sum(-1).mean(-1),
        "duplicate_mass": (p * match).sum((-1, -2)) / match.any(-1).sum(),
        "induction_mass": (p * follows).sum((-1, -2)) / follows.any(-1).sum(),
    }


def measures() -> list[Any]:
    local, sinks = hw.stats.LocalMass(2), hw.stats.SinkMass(3)
    local.name, sinks.name = "local", "sinks"  # type: ignore[misc]
    names = ["sink_mass", "mean_distance", "distance_variance", "local_mass", "previous_mass", "self_mass"]
    return [*names, local, sinks, ClassMass(IDS == 3), DuplicateMass(IDS), InductionMass(IDS)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kernel", ["auto", "reference", "torch_blocks"])
def test_statistics_are_those_of_the_tokens(module: nn.MultiheadAttention, x: Tensor, causal: bool, kernel: str):
    mask = HIDDEN if causal else None
    with torch.no_grad():
        weights = module(x, x, x, attn_mask=mask, average_attn_weights=False)[1]
        seen: list[Any] = []
        model = nn.ModuleDict({"a": module})
        with hw.attach(model), hw.use_kernel(kernel), \
                hw.models.observe(seen.append, model=model, measures=measures()):  # fmt: skip
            module(x, x, x, attn_mask=mask)
    (call,) = seen
    found = call.measured
    for name, value in expected(weights[..., :N]).items():
        assert torch.allclose(found[name], value.float(), rtol=1e-5, atol=1e-6), name
    again = call.map.measure(*measures())
    for name in found:
        torch.testing.assert_close(again[name], found[name], rtol=1e-5, atol=1e-6)


def test_maps_have_these_keys_first_and_returned_weights_last(module: nn.MultiheadAttention, x: Tensor, tmp_path: Any):
    with torch.no_grad():
        weights = module(x, x, x, average_attn_weights=False)[1]
        with hw.attach(module):
            amap = module(x, x, x, average_attn_weights=False)[1].map
    extra = weights.shape[-1] - N
    assert f", the first {extra} no tokens" in repr(amap)
    torch.testing.assert_close(amap[:].roll(-extra, -1), weights)
    offsets, means = amap.diagonals()
    assert offsets.tolist() == [*range(-N + 1, N)]
    tokens = weights[..., :N]
    torch.testing.assert_close(means, torch.stack([tokens.diagonal(at, 2, 3).mean(-1) for at in offsets.tolist()], -1))
    amap.save(tmp_path / "map.safetensors")
    loaded = hw.AttentionMap.load(tmp_path / "map.safetensors")
    assert loaded.rule.grid == amap.rule.grid
    with pytest.raises(hw.ConfigError, match=f"its first {extra} keys are no tokens"):
        hw.analysis.roles(amap)


def test_edits_count_tokens(module: nn.MultiheadAttention, x: Tensor):
    hidden = torch.zeros(N, N).bool()
    hidden[3, 2] = hidden[-1, 0] = True
    with torch.no_grad():
        wanted = module(x, x, x, attn_mask=hidden)[0]
        with hw.intervene(module, Forbid(3, 2), Forbid(-1, -N), unused="raise"):
            torch.testing.assert_close(module(x, x, x)[0], wanted)
        with hw.watch(module, maps="lazy") as record, hw.intervene(module, Forbid(3, 2)):
            module(x, x, x)
        (amap,) = record.maps.values()
        extra = amap.shape[3] - N
        assert not amap[:, :, 3, 2 + extra].any()
        assert amap[:, :, 3].gt(0).sum() == 2 * H * (N + extra - 1)
        with hw.intervene(module, Scale(0.0)):  # all keys, these too
            torch.testing.assert_close(module(x, x, x)[0], module.out_proj.bias.expand_as(x))
        memory = torch.randn(2, 5, 16, dtype=torch.float64)
        hidden = torch.zeros(N, 5).bool()
        hidden[3, 2] = True
        wanted = module(x, memory, memory, attn_mask=hidden)[0]
        with hw.intervene(module, Forbid(3, 2), unused="raise"):
            torch.testing.assert_close(module(x, memory, memory)[0], wanted)
