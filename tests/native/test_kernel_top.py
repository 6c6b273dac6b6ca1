"""The largest weights of each row, and mass on keys with the query's label, found in the pass: against the formula."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from kernel_formula import Truth, run, truth
from samples import MASKS, SCORES as ALL_SCORES, qkv
from torch import Tensor

from headwise.masks import Causal, Everything, Mask
from headwise.scores import ALiBi, Bias
from headwise.stats import COLUMN_MASS, ENTROPY, SameLabel, TopKeys, TopWeights

# All but one that is refused.
SCORES = {name: score for name, score in ALL_SCORES.items() if name != "two biases"}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
pytestmark = pytest.mark.usefixtures("target")


def top(
    q: Tensor, k: Tensor, count: int, mask: Mask | None = None, score: tuple = (), **options: float
) -> tuple[Tensor, Tensor]:
    """Weights and keys that the kernel finds."""
    weights, keys = TopWeights(count), TopKeys(count)
    found = run(q, k, k[..., :0], mask, score, statistics=[weights, keys], **options).statistics
    return found[weights], found[keys]


def check(weights: Tensor, keys: Tensor, expected: Truth, count: int) -> None:
    """The right weights, at keys that have them; nothing twice, in order, and −1 beyond what a row sees."""
    visible = (expected.s > -math.inf).sum(-1, keepdim=True)
    there = torch.arange(count) < visible
    assert torch.equal(keys >= 0, there)
    assert (weights[~there] == 0).all()
    wanted = torch.nn.functional.pad(expected.p, (0, count)).topk(count).values
    torch.testing.assert_close(weights.double(), wanted, rtol=2e-5, atol=1e-7)
    at_them = expected.p.gather(-1, keys.clamp_min(0)).masked_fill(~there, 0.0)
    torch.testing.assert_close(weights.double(), at_them, rtol=2e-5, atol=1e-7)
    assert (weights.diff(dim=-1) <= 0).all()
    names = keys.masked_fill(~there, 0) + torch.arange(count).where(~there, 0) + (~there) * expected.p.shape[-1]
    assert (names.sort(-1).values.diff(dim=-1) > 0).all()


@pytest.mark.thorough_beyond(6)
@pytest.mark.every_target
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_masks(name: str, dtype: torch.dtype) -> None:
    for n in (3, 37):
        q, k, _ = qkv(n=n, dtype=dtype)
        mask = MASKS[name](2, n, 53)
        for count in (1, 5, 53, 60):
            check(*top(q, k, count, mask), truth(q, k, mask), count)


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str) -> None:
    q, k, _ = qkv()
    for mask in ("everything", "window and sinks", "nothing for some", "dense"):
        which, score = MASKS[mask](2, 37, 53), SCORES[name](2, 6, 37, 53)
        expected = truth(q, k, which, score)
        check(*top(q, k, 7, which, score), Truth(expected.p.detach(), expected.s.detach(), expected.lse.detach()), 7)


@pytest.mark.thorough
@settings(deadline=None, derandomize=True, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_equal_scores_go_by_the_key(data: st.DataObject) -> None:
    """Whole numbers from a small range, exact in every dtype: mostly ties."""
    draw = data.draw
    n, m = draw(st.integers(1, 60)), draw(st.integers(60, 1500))
    count, spread = draw(st.integers(1, 70)), draw(st.integers(0, 6))
    dtype, name = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([*MASKS]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    q, k = torch.zeros(1, 2, n, 3, dtype=dtype), torch.zeros(1, 1, m, 3, dtype=dtype)
    q[..., 1] = torch.randint(-1, 2, (1, 2, n), generator=generator).to(dtype)
    k[..., 1] = torch.randint(-spread, spread + 1, (1, 1, m), generator=generator).to(dtype)
    mask = MASKS[name](1, n, m)
    expected = truth(q, k, mask, scale=1.0)
    weights, keys = top(q, k, count, mask, scale=1.0)
    scores, order = expected.s.sort(dim=-1, descending=True, stable=True)
    scores = torch.nn.functional.pad(scores, (0, count), value=-math.inf)[..., :count]
    order = torch.nn.functional.pad(order, (0, count))[..., :count]
    assert torch.equal(keys, order.masked_fill(scores == -math.inf, -1))
    logs = (scores - expected.lse[..., None]).masked_fill(scores == -math.inf, -math.inf)
    torch.testing.assert_close(weights.double(), logs.exp(), rtol=1e-5, atol=1e-9)


@pytest.mark.thorough
def test_scores_that_rise_and_fall() -> None:
    """Every block holds larger ones than those before, or none does."""
    q, k, _ = qkv(1, 2, 1, 50, 2100)
    for score in (ALiBi([0.9, 0.0]), Bias(-0.7 * torch.arange(2100.0).expand(1, 1, 1, -1))):
        for count in (1, 8, 64, 500):
            check(*top(q, k, count, Causal(), (score,)), truth(q, k, Causal(), (score,)), count)


def test_signs_of_scales_and_zeros() -> None:
    q, k, _ = qkv(1, 2, 1, 19, 70)
    for dtype in DTYPES:
        for scale in (-0.7, 3.0):
            check(
                *top(q.to(dtype), k.to(dtype), 9, Causal(), scale=scale),
                truth(q.to(dtype), k.to(dtype), Causal(), scale=scale),
                9,
            )
        k0 = k.to(dtype) * torch.tensor([-0.0, 0.0]).to(dtype).repeat(35)[:, None]
        assert (top(q.to(dtype), k0, 9)[1] == torch.arange(9)).all()  # -0 is 0


def test_fewer_are_the_first_of_more() -> None:
    q, k, v = qkv(m=300)
    wanted = [TopWeights(3), TopKeys(20), TopWeights(20), TopKeys(1), ENTROPY, COLUMN_MASS]
    found = run(q, k, v, Causal(), statistics=wanted)
    assert torch.equal(found.out, run(q, k, v, Causal()).out)
    assert torch.equal(found.statistics[wanted[0]], found.statistics[wanted[2]][..., :3])
    assert torch.equal(found.statistics[wanted[3]], found.statistics[wanted[1]][..., :1])
    assert torch.equal(top(q, k, 20, Causal())[1], found.statistics[wanted[1]])


def test_rows_that_see_nothing_or_are_not_numbers() -> None:
    q, k, _ = qkv()
    weights, keys = top(q, k, 4, score=(Bias(torch.full((1, 1, 1, 53), -math.inf)),))
    assert (weights == 0).all()
    assert (keys == -1).all()
    q[0, 1, 20, 3] = math.nan
    weights, keys = top(q, k, 4, Causal())
    assert weights[0, 1, 20].isnan().all()
    assert weights.isnan().sum() == 4
    assert (keys[0, 1, 20] == -1).all()


def labels(b: int, size: int, kinds: int, seed: int) -> Tensor:
    return torch.randint(-1, kinds, (b, size), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_mass_on_the_querys_label(name: str, dtype: torch.dtype) -> None:
    for n, m in ((3, 53), (37, 53), (60, 700)):
        q, k, v = qkv(n=n, m=m, dtype=dtype)
        mask = MASKS[name](2, n, m)
        wanted = [
            SameLabel(labels(2, m, 3, 1), labels(2, n, 3, 2), 0),
            SameLabel(labels(1, m, 30, 3), labels(1, n, 30, 4), 1),
            SameLabel(labels(2, m, 2, 5), labels(1, n, 2, 6), 10_000),
            SameLabel(labels(1, m, 1, 7), labels(2, n, 1, 8), -9),
        ]
        found, expected = run(q, k, v, mask, statistics=[*wanted, ENTROPY]), truth(q, k, mask)
        position = torch.arange(n)[:, None] + m - n
        for one in wanted:
            same = (one.queries[:, :, None] == one.keys[:, None]) & (one.queries >= 0)[:, :, None]
            same = (same & (torch.arange(m) < position + one.ahead))[:, None]
            mass = (expected.p * same).sum(-1)
            torch.testing.assert_close(found.statistics[one].double(), mass, rtol=3e-5, atol=3e-6)


def test_labels_under_scores_and_dropout() -> None:
    q, k, v = qkv()
    one = SameLabel(labels(2, 53, 4, 1), labels(2, 37, 4, 2), 1)
    same = (one.queries[:, :, None] == one.keys[:, None]) & (one.queries >= 0)[:, :, None]
    same = (same & (torch.arange(53) < torch.arange(37)[:, None] + 17))[:, None]
    for score in (SCORES["all"](2, 6, 37, 53), ()):
        mass = (truth(q, k, Everything(), score).p.detach() * same).sum(-1)
        found = run(q, k, v.detach(), Everything(), score, statistics=[one], dropout=0.0 if score else 0.4, seed=1)
        torch.testing.assert_close(found.statistics[one].double(), mass, rtol=1e-5, atol=2e-6)
