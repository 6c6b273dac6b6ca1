"""The statistics that the GPU kernel sums up in its pass are those of the weights in float64."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from formula import distance, error, rule, weights
from samples import MASKS, SCORES, qkv
from torch import Tensor
from triton_here import DEVICE, mostly_slow, same, slow

from headwise.kernels.call import Call
from headwise.kernels.triton_gpu import TritonGPU, plan
from headwise.masks import Causal, Everything, Mask
from headwise.scores import Bias, Score
from headwise.stats import (
    COLUMN_MASS,
    CONCENTRATION,
    DISTANCE,
    DISTANCE_VARIANCE,
    ENTROPY,
    LARGEST,
    SQUARES,
    KeyWeights,
    LargestOther,
    RangeMass,
    Statistic,
)

RANGES = tuple(
    RangeMass(start, stop, relative=relative)
    for start, stop, relative in ((0, 4, False), (-2, 1, True), (20, 43, False), (-900, -30, True))
)


ROWS = (LARGEST, ENTROPY, SQUARES, CONCENTRATION, DISTANCE, DISTANCE_VARIANCE)


def measured(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, score: tuple[Score, ...] = (), more: tuple[Statistic, ...] = ()
) -> Mapping[Statistic, Tensor]:
    """All statistics of one call, on the CPU."""
    given = Call(
        *(x.to(DEVICE) for x in (q, k, v)), rule(q, k, mask, score), statistics=(*ROWS, *RANGES, *more, COLUMN_MASS)
    )
    kernel = TritonGPU()
    if reason := kernel.refuse(given):
        assert "would have shape" in reason  # two biases that are small apart and large as one
        pytest.skip(reason)
    result = kernel.run(given)
    plain = kernel.run(replace(given, statistics=()))
    assert same(result.out, plain.out)  # asking for statistics changes nothing else
    assert same(result.lse, plain.lse)
    assert dict(plain.statistics) == {}
    assert set(result.statistics) == set(given.statistics)
    assert not any(x.requires_grad for x in result.statistics.values())
    return {part: x.cpu() for part, x in result.statistics.items()}


def check(found: Mapping[Statistic, Tensor], p: Tensor, limit: float = 1e-5) -> None:
    """Every statistic against its formula in the weights p [b, h, n, m]."""
    n, m = p.shape[2:]
    p = p.detach()
    d = distance(p)
    mass = p.sum(-1)
    mean = (p * d).sum(-1) / mass.clamp_min(1e-300)
    expected = {
        ENTROPY: torch.special.entr(p).sum(-1),
        SQUARES: (p * p).sum(-1),
        CONCENTRATION: (p * p).sum(-1) / mass.square().clamp_min(1e-300),
        DISTANCE: mean * mass,
        DISTANCE_VARIANCE: (p * (d - mean[..., None]) ** 2).sum(-1) / mass.clamp_min(1e-300),
        COLUMN_MASS: p.sum(-2),
    }
    for part, value in expected.items():
        assert error(found[part], value) <= limit, part
    offset = torch.arange(m) - (torch.arange(n)[:, None] + m - n)
    for part, value in found.items():
        assert value.dtype == torch.float32
        if isinstance(part, RangeMass):
            x = offset if part.relative else torch.arange(m).expand(n, m)
            exact = (p * ((x >= part.start) & (x < part.stop))).sum(-1)
        elif isinstance(part, LargestOther):
            exact = p.masked_fill(((part.weights <= 0).cpu()[:, None] | (offset == 0))[:, None], 0.0).amax(-1)
        elif isinstance(part, KeyWeights):
            exact = (p * part.weights.cpu().double()[:, None, None, :]).sum(-1)
        else:
            continue
        torch.testing.assert_close(value.double(), exact, rtol=limit, atol=1e-7)


@pytest.mark.parametrize("name", mostly_slow(MASKS, "causal", "window and sinks", "nothing for some", "dense"))
@pytest.mark.parametrize("n", [37, 3])
def test_statistics_under_every_mask(name: str, n: int) -> None:
    q, k, v = qkv(h=3, h_kv=1, n=n)
    mask = MASKS[name](2, n, 53)
    p, _ = weights(q, k, mask)
    found = measured(q, k, v, mask)
    check(found, p)
    largest = ((q.double() @ k.double().mT) * 8**-0.5).masked_fill(p == 0, -torch.inf).amax(-1)
    torch.testing.assert_close(found[LARGEST].double(), largest, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", mostly_slow(SCORES, "soft cap", "sinks", "all"))
def test_statistics_under_every_score(name: str) -> None:
    q, k, v = qkv(h=3, h_kv=1)
    score = SCORES[name](2, 3, 37, 53)
    mask = MASKS["nothing for some"](2, 37, 53)
    check(measured(q, k, v, mask, score), weights(q, k, mask, score)[0])


@pytest.mark.parametrize("n", [37, 3])
@pytest.mark.parametrize("batch", [slow(1), 2])
def test_shares_of_classes(n: int, batch: int) -> None:
    q, k, v = qkv(h=3, h_kv=1, n=n)
    generator = torch.Generator().manual_seed(0)
    classes = tuple(KeyWeights(torch.rand(size, 53, generator=generator)) for size in (batch, 1, batch))
    classes += tuple(LargestOther(torch.rand(size, 53, generator=generator) > 0.2) for size in (batch, 1))
    check(measured(q, k, v, Causal(), (), classes), weights(q, k, Causal())[0])


@pytest.mark.parametrize("name", ["causal", "window and sinks", "nothing for some"])
@pytest.mark.parametrize(("split", "m"), [(64, 167), slow(512, 1337)])
def test_statistics_of_split_keys(name: str, split: int, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "SPLIT_KEYS", split)
    q, k, v = qkv(h=3, h_kv=1, n=2, m=m)
    mask = MASKS[name](2, 2, m)
    score = SCORES["sinks"](2, 3, 2, m)
    others = (LargestOther(torch.arange(m)[None] % 7 != 0),)  # of each range the largest, not their sum
    check(measured(q, k, v, mask, score, others), weights(q, k, mask, score)[0])


@pytest.mark.parametrize(("size", "far"), [(400, 300), slow(1000, 900), slow(1000, 1)])
def test_distances_of_weights_in_one_place_are_exact(size: int, far: int) -> None:
    """All weight within a few keys, all of them far away: Σ p d² − (Σ p d)² in float32 would have lost its digits."""
    n = m = size
    q, k, v = qkv(1, 1, 1, n, m)
    bump = -(((torch.arange(n)[:, None] - torch.arange(m)).abs() - far) ** 2) / 8.0
    for rows in (slice(n - 64, n), slice(n - 5, n)):
        score = (Bias(bump[None, None, rows].float()),)
        p, _ = weights(q[:, :, rows], k, Everything(), score)
        got = measured(q[:, :, rows], k, v, Everything(), score)
        mean = (p * distance(p)).sum(-1)
        variance = (p * (distance(p) - mean[..., None]) ** 2).sum(-1)
        assert 0.1 < float(variance.min()) < 10
        assert error(got[DISTANCE], mean) <= 1e-6
        assert error(got[DISTANCE_VARIANCE], variance) <= 1e-5


def test_big_logits_leave_the_entropy_alone() -> None:
    """1e4 on all keys alike: entropy is the log-sum-exp less a mean score, and both are large."""
    q, k, v = qkv(1, 2, 1, 37, 53)
    high = (Bias(torch.full((1, 1, 1, 1), 1e4)),)
    got = measured(q, k, v, Causal(), high)
    p, _ = weights(q, k, Causal())
    assert error(got[ENTROPY], torch.special.entr(p).sum(-1)) <= 2e-3  # scores of 1e4 are known to 1e-3
    one = measured(q * 1e5, k, v, Causal())
    assert torch.isfinite(one[ENTROPY]).all()
    assert (one[ENTROPY] >= -1e-6).all()
