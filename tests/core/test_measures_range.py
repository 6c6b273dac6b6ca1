"""Measures keep to 1e-5 of float64 wherever scores and learned sinks lie: no formula takes a small difference of large
numbers, whether a kernel gives the numbers of rows or the tiles do."""

from collections.abc import Callable

import pytest
import torch
from samples import qkv
from torch import Tensor

from headwise.map import AttentionMap
from headwise.map.attention import attend
from headwise.masks import Causal
from headwise.rule.tiles import stream
from headwise.scores import Bias, Score, SinkLogits
from headwise.stats import Measurements, measure

SINKS = [-30.0, -0.45, 0.0, 13.0, 16.0, 60.0, 300.0]
LEVELS = [-40.0, 0.0, 40.0]
NAMES = ("effective_keys", "learned_sink_mass", "distance_variance")


def by_kernel(amap: AttentionMap, *names: str) -> Measurements:
    return amap.measure(*names, rows=True)


def by_tiles(amap: AttentionMap, *names: str) -> Measurements:
    q, k, lse, rule = amap.q, amap.k, amap.lse, amap.rule
    with torch.no_grad():
        return measure(lambda: stream(q, k, lse, rule, width=7), lse, rule, names, rows=True)


WAYS: dict[str, Callable[..., Measurements]] = {"kernel": by_kernel, "tiles": by_tiles}


def formulas(scores: Tensor, sinks: Tensor | None) -> dict[str, Tensor]:
    """Of scores [b, h, n, m] in float64, −∞ where not allowed; among the keys, so that no sink makes them small."""
    lse = scores.logsumexp(-1, keepdim=True)
    p = (scores - lse).exp()
    n, m = scores.shape[2:]
    distance = (torch.arange(n)[:, None] + m - n - torch.arange(m)).abs().double()
    mean = (p * distance).sum(-1, keepdim=True)
    sink = torch.zeros_like(lse) if sinks is None else (sinks.double()[:, None, None] - lse).sigmoid()
    return {
        "effective_keys": 1 / p.square().sum(-1),
        "learned_sink_mass": sink[..., 0],
        "distance_variance": (p * (distance - mean).square()).sum(-1),
    }


def compare(found: Measurements, expected: dict[str, Tensor]) -> None:
    for name, rows in expected.items():
        torch.testing.assert_close(found.rows[name].double(), rows, rtol=1e-5, atol=1e-36, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kernel", ["auto", "torch_blocks"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("sink", SINKS)
def test_four_equal_keys_are_four(way: str, kernel: str, level: float, sink: float) -> None:
    q, k = torch.ones(1, 1, 3, 1), torch.full((1, 1, 4, 1), level)
    sinks = torch.tensor([sink])
    _, amap = attend(q, k, k, scale=1.0, score=SinkLogits(sinks), return_map=True, kernel=kernel)
    found = WAYS[way](amap, *NAMES)
    assert found["effective_keys"].item() == pytest.approx(4.0, rel=1e-6)
    compare(found, formulas(torch.full((1, 1, 3, 4), level).double(), sinks))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("sink", [None, *SINKS])
def test_measures_of_any_scores_beside_any_sink(way: str, level: float, sink: float | None) -> None:
    q, k, v = qkv(2, 6, 3, 37, 53)
    bias = Bias(torch.full((1, 1, 1, 1), level))
    score: tuple[Score, ...] = (bias,) if sink is None else (bias, SinkLogits([sink + 0.1 * h for h in range(6)]))
    sinks = None if sink is None else sink + 0.1 * torch.arange(6)
    _, amap = attend(q, k, v, mask=Causal(), scale=0.5, score=score, return_map=True)
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT * 0.5 + level
    allowed = torch.arange(37)[:, None] + 16 >= torch.arange(53)
    compare(WAYS[way](amap, *NAMES), formulas(scores.masked_fill(~allowed, -torch.inf), sinks))


@pytest.mark.thorough_except("None-kernel", "50.0-kernel")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sink", [None, 3.0, 50.0])
def test_variance_of_a_head_that_looks_far_and_at_one_distance(way: str, sink: float | None) -> None:
    """Some 700 tokens back, with almost all of the weight on one key: the squares of distances are 10⁷ times it."""
    n, m, far = 11, 997, 701
    offset = (torch.arange(m) - (torch.arange(n)[:, None] + m - n) + far).double()
    values = (-4.6 * offset.abs() - 0.1 * offset).clamp_min(-300.0)
    score: tuple[Score, ...] = (Bias(values.float()[None, None]),)
    score += () if sink is None else (SinkLogits([sink]),)
    q, k = torch.zeros(1, 1, n, 2), torch.zeros(1, 1, m, 2)
    _, amap = attend(q, k, k, score=score, return_map=True)
    expected = formulas(values.float().double()[None, None], None)["distance_variance"]
    assert float(expected.min()) < 0.03
    compare(WAYS[way](amap, "distance_variance"), {"distance_variance": expected})
