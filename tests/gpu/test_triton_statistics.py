"""The statistics that the GPU kernel sums up in its pass are those of the weights in float64."""

import pytest
import torch
from formula import distance, error, rule, weights
from samples import MASKS, SCORES, qkv
from torch import Tensor

pytest.importorskip("triton", reason="the GPU kernel is written in Triton")

from headwise.kernels.triton_gpu import sums
from headwise.kernels.triton_gpu.launch import Problem, Wanted, columns, forward
from headwise.lowering import Lowered, lower
from headwise.masks import Causal, Everything, Mask
from headwise.scores import Bias, Score

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RANGES = ((0, 4, False), (-2, 1, True), (20, 43, False), (-900, -30, True))


def planes(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, score: tuple[Score, ...] = (), classes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """All row statistics, and what each key receives."""
    laid = rule(q, k, mask, score)
    lowered = lower(laid, DEVICE)
    assert isinstance(lowered, Lowered)
    problem = Problem(
        *(x.to(DEVICE) for x in (q, k, v)), laid.scale, lowered.spans, lowered.dense, lowered.soft_cap,
        lowered.relative, lowered.bias, lowered.sinks,
    )  # fmt: skip
    with torch.no_grad():
        out, found = forward(problem, Wanted(True, True, True, RANGES, classes))
        plain, alone = forward(problem, Wanted())
        assert torch.equal(out, plain)  # asking for statistics changes nothing else
        assert torch.equal(found[:2], alone[:2])
        return found.cpu(), columns(problem, found[sums.LSE]).cpu()


def check(found: tuple[Tensor, Tensor], p: Tensor, classes: Tensor | None = None, limit: float = 1e-5) -> None:
    """Every statistic against its formula in the weights p [b, h, n, m]."""
    got, received = found
    n, m = p.shape[2:]
    p = p.detach()
    d = distance(p)
    mean = (p * d).sum(-1)
    assert error(got[sums.ENTROPY], torch.special.entr(p).sum(-1)) <= limit
    assert error(got[sums.SQUARED], (p * p).sum(-1)) <= limit
    assert error(got[sums.DISTANCE], mean) <= limit
    assert error(got[sums.VARIANCE], (p * d * d).sum(-1) - mean * mean) <= limit
    offset = torch.arange(m) - (torch.arange(n)[:, None] + m - n)
    for at, (start, stop, relative) in enumerate(RANGES):
        x = offset if relative else torch.arange(m).expand(n, m)
        torch.testing.assert_close(
            got[sums.SHARES + at].double(), (p * ((x >= start) & (x < stop))).sum(-1), rtol=limit, atol=1e-7
        )
    if classes is not None:
        for at, of_key in enumerate(classes.double()):
            mass = (p * of_key[:, None, None, :]).sum(-1)
            torch.testing.assert_close(got[sums.SHARES + len(RANGES) + at].double(), mass, rtol=limit, atol=1e-7)
    assert error(received, p.sum(-2)) <= limit


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("n", [37, 3])
def test_statistics_under_every_mask(name: str, n: int) -> None:
    q, k, v = qkv(h=3, h_kv=1, n=n)
    mask = MASKS[name](2, n, 53)
    p, _ = weights(q, k, mask)
    found = planes(q, k, v, mask)
    check(found, p)
    _, _, s = torch.empty(0), p, (q.double() @ k.double().mT) * 8**-0.5
    top = s.masked_fill(p == 0, -torch.inf).amax(-1)
    torch.testing.assert_close(found[0][sums.MAX].double(), top, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", SCORES)
def test_statistics_under_every_score(name: str) -> None:
    q, k, v = qkv(h=3, h_kv=1)
    score = SCORES[name](2, 3, 37, 53)
    mask = MASKS["nothing for some"](2, 37, 53)
    check(planes(q, k, v, mask, score), weights(q, k, mask, score)[0])


@pytest.mark.parametrize("n", [37, 3])
@pytest.mark.parametrize("batch", [1, 2])
def test_shares_of_classes(n: int, batch: int) -> None:
    q, k, v = qkv(h=3, h_kv=1, n=n)
    classes = torch.rand(5, batch, 53, generator=torch.Generator().manual_seed(0)).round()
    check(planes(q, k, v, Causal(), (), classes.to(DEVICE)), weights(q, k, Causal())[0], classes)


@pytest.mark.parametrize("name", ["causal", "window and sinks", "nothing for some"])
def test_statistics_of_split_keys(name: str) -> None:
    q, k, v = qkv(h=4, h_kv=2, n=2, m=1337)
    mask = MASKS[name](2, 2, 1337)
    score = SCORES["sinks"](2, 4, 2, 1337)
    check(planes(q, k, v, mask, score), weights(q, k, mask, score)[0])


@pytest.mark.parametrize("far", [900, 1])
def test_distances_of_weights_in_one_place_are_exact(far: int) -> None:
    """All weight within a few keys, 900 keys away: Σ p d² − (Σ p d)² in float32 would have lost every digit."""
    n = m = 1000
    q, k, v = qkv(1, 1, 1, n, m)
    bump = -(((torch.arange(n)[:, None] - torch.arange(m)).abs() - far) ** 2) / 8.0
    for rows in (slice(936, 1000), slice(995, 1000)):
        score = (Bias(bump[None, None, rows].float()),)
        p, _ = weights(q[:, :, rows], k, Everything(), score)
        got, _ = planes(q[:, :, rows], k, v, Everything(), score)
        mean = (p * distance(p)).sum(-1)
        variance = (p * (distance(p) - mean[..., None]) ** 2).sum(-1)
        assert 0.1 < float(variance.min()) < 10
        assert error(got[sums.DISTANCE], mean) <= 1e-6
        assert error(got[sums.VARIANCE], variance) <= 1e-5


def test_big_logits_leave_the_entropy_alone() -> None:
    """1e4 on all keys alike: entropy is the log-sum-exp less a mean score, and both are large."""
    q, k, v = qkv(1, 2, 1, 37, 53)
    high = (Bias(torch.full((1, 1, 1, 1), 1e4)),)
    got, _ = planes(q, k, v, Causal(), high)
    p, _ = weights(q, k, Causal())
    assert error(got[sums.ENTROPY], torch.special.entr(p).sum(-1)) <= 2e-3  # scores of 1e4 are known to 1e-3
    one = planes(q * 1e5, k, v, Causal())[0]
    assert torch.isfinite(one[sums.ENTROPY]).all()
    assert (one[sums.ENTROPY] >= -1e-6).all()
