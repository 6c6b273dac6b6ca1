"""What the compiled kernel tells about rows and keys beside the output, against the formula."""

import math

import pytest
import torch
from kernel_formula import LIMITS as LIMITS_OF_OUT, error, run, truth
from samples import MASKS, SCORES, qkv
from torch import Tensor

from headwise.kernels import KERNELS
from headwise.kernels.call import Call
from headwise.masks import Causal, Everything, Grid, Mask, Span, State, Window, spans
from headwise.rule import Rule
from headwise.scores import Bias, Score, SinkLogits
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

pytestmark = pytest.mark.usefixtures("target")

ROWS = (LARGEST, ENTROPY, SQUARES, CONCENTRATION, DISTANCE, DISTANCE_VARIANCE)
RANGES = (
    RangeMass(0, 1, relative=False),
    RangeMass(3, 40, relative=False),
    RangeMass(-1, 1, relative=True),
    RangeMass(-20, -3, relative=True),
    RangeMass(1, 9, relative=True),
    RangeMass(-100000, 100000, relative=True),
    RangeMass(45, 45, relative=False),
)
# float32 for all dtypes, in bfloat16 with a quicker exponential.
LIMITS = {torch.float32: 1e-5, torch.float16: 1e-5, torch.bfloat16: 3e-5}


def key_weights(b: int, m: int) -> tuple[KeyWeights, ...]:
    generator = torch.Generator().manual_seed(8)
    return (
        KeyWeights((torch.rand(b, m, generator=generator) > 0.6).float()),
        KeyWeights(torch.randn(1, m, generator=generator)),
        KeyWeights(torch.arange(m)[None] % 3 == 0),
        LargestOther(torch.rand(b, m, generator=generator) > 0.1),
        LargestOther(torch.arange(m)[None] % 5 != 0),
    )


def close(found: Tensor, expected: Tensor, limit: float = 1e-5, near: float = 2e-6) -> None:
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected.detach(), rtol=limit, atol=near)


def compare(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score: tuple[Score, ...] = ()) -> None:
    b, m = q.shape[0], k.shape[2]
    wanted: tuple[Statistic, ...] = (*ROWS, COLUMN_MASS, *RANGES, *key_weights(b, m))
    plain, found, expected = (
        run(q, k, v, mask, score),
        run(q, k, v, mask, score, statistics=wanted),
        truth(q, k, mask, score),
    )
    assert torch.equal(found.lse, plain.lse) or q.shape[2] <= 4  # decoding has no column mass, so these are two paths
    assert set(found.statistics) == set(wanted)
    limit = LIMITS[q.dtype]
    for statistic in wanted:
        # A logit is known to some 1e-7 of its size, and log-weights so much.
        near = 4e-6 if statistic in (LARGEST, ENTROPY, DISTANCE, DISTANCE_VARIANCE) else 2e-6
        close(found.statistics[statistic], expected.of(statistic), limit, near * limit / 1e-5)
    few = (*ROWS, *RANGES)
    if q.shape[2] <= 4:
        decoded = run(q, k, v, mask, score, statistics=few)
        assert torch.equal(decoded.out, plain.out)
        for statistic in few:
            close(decoded.statistics[statistic], expected.of(statistic), limit, 4e-6 * limit / 1e-5)


@pytest.mark.thorough_beyond(6)
@pytest.mark.every_target
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("n", [3, 37])
def test_masks(name: str, dtype: torch.dtype, n: int) -> None:
    compare(*qkv(n=n, dtype=dtype), MASKS[name](2, n, 53))


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize("name", [name for name in SCORES if name != "two biases"])
@pytest.mark.parametrize("n", [3, 37])
def test_scores(name: str, n: int) -> None:
    for mask in ("everything", "window and sinks", "nothing for some"):
        compare(*qkv(n=n), MASKS[mask](2, n, 53), SCORES[name](2, 6, n, 53))


@pytest.mark.thorough_except("avx2-1-1", "portable-49-257", "portable-4-1100")
@pytest.mark.parametrize(("n", "m"), [(1, 1), (49, 257), (101, 530), (4, 1100)])
def test_sizes(n: int, m: int) -> None:
    for mask in (Everything(), Causal(), Causal() & Window(33)):
        compare(*qkv(1, 4, 2, n, m, 16, 16), mask)


def test_each_alone_is_what_it_is_among_others() -> None:
    q, k, v = qkv(m=300)
    wanted = (*ROWS, COLUMN_MASS, *RANGES, *key_weights(2, 300))
    together = run(q, k, v, Causal(), statistics=wanted)
    for one in wanted:
        alone = run(q, k, v, Causal(), statistics=[one])
        assert torch.equal(alone.out, together.out)
        assert torch.equal(alone.lse, together.lse)
        assert torch.equal(alone.statistics[one], together.statistics[one])


def test_statistics_are_of_the_weights_before_dropout() -> None:
    for n in (3, 37):
        q, k, v = qkv(n=n)
        found, expected = (
            run(q, k, v, Causal(), statistics=(*ROWS, *RANGES), dropout=0.5, seed=3),
            truth(q, k, Causal()),
        )
        close(found.lse, expected.lse)
        for statistic in (*ROWS, *RANGES):
            close(found.statistics[statistic], expected.of(statistic), near=4e-6)


@pytest.mark.thorough_except("avx2-2")
@pytest.mark.parametrize("n", [2, 9])
def test_many_keys(n: int) -> None:
    q, k, v = qkv(1, 1, 1, n, 70001, 8, 4)
    found, expected = run(q, k, v, statistics=(*ROWS, *RANGES)), truth(q, k)
    assert (found.out.double() - expected.out(v)).norm() <= 2e-6 * expected.out(v).norm().clamp_min(0.05)
    for statistic in (*ROWS, *RANGES):
        close(found.statistics[statistic], expected.of(statistic), near=0.0 if statistic != LARGEST else 1e-6)


@pytest.mark.thorough_except("avx2-0.0-2")
@pytest.mark.parametrize("n", [2, 9])
@pytest.mark.parametrize("lower", [0.0, 1.0, 1.7, 3.3])
def test_many_equal_weights(n: int, lower: float) -> None:
    """One key above 70,000 that are all alike: adding one number again and again rounds always the same way."""
    m = 70001
    q, k = torch.ones(1, 1, n, 1), torch.full((1, 1, m, 1), -lower)
    k[:, :, 5] = 0.0
    v = qkv(1, 1, 1, n, m, 8, 4)[2] + 1.0
    v[..., 0] = 1.7
    found, expected = run(q, k, v, statistics=(*ROWS, *RANGES)), truth(q, k)
    close(found.lse, expected.lse, limit=1e-6, near=0.0)
    close(found.out, expected.out(v), limit=3e-6, near=0.0)
    for statistic in (*ROWS, *RANGES):
        close(found.statistics[statistic], expected.of(statistic), near=1e-30)


class Apart(Mask):
    """Of 18,000 keys, some queries have only the first half, some only the second, some all, some none."""

    holds = None
    ends = torch.tensor([[0, 9000], [9000, 18000], [0, 18000], [0, 0]]).repeat_interleave(
        torch.tensor([14, 13, 7, 6]), 0
    )

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        first, last = self.ends[rows].T[..., None]
        return ((cols >= first) & (cols < last))[None, None]

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        return State.MIXED

    def spans(self, grid: Grid) -> Tensor:
        return spans.one(self.ends[None, :, 0], self.ends[None, :, 1], grid.m)


@pytest.mark.thorough
@pytest.mark.every_target
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_on_two_levels(dtype: torch.dtype) -> None:
    """Those of thousands of keys are added to those of the keys before; the largest logit rises all the time."""
    q, k, v = qkv(1, 2, 1, 40, 18000, 8, 24, dtype=dtype)
    k[..., 0] += torch.linspace(0, 40, 18000).to(dtype)
    q[..., 0].abs_()
    found, expected = run(q, k, v, Apart(), statistics=(*ROWS, *RANGES)), truth(q, k, Apart())
    assert error(found.out, expected.out(v)) <= LIMITS_OF_OUT[dtype]
    close(found.lse, expected.lse, limit=2e-6, near=2e-6)
    for statistic in (*ROWS, *RANGES):
        close(found.statistics[statistic], expected.of(statistic), LIMITS[dtype], near=LIMITS[dtype])


@pytest.mark.thorough
@pytest.mark.parametrize("n", [2, 5])
@pytest.mark.parametrize("far", [60000, 50000, 0])
def test_variance_of_a_head_that_looks_at_one_distance(n: int, far: int) -> None:
    """Mean 50,000 and more, spread of about two, under a gentle rise that moves the largest logit again and again."""
    m = 70001
    q, k, v = torch.ones(1, 1, n, 1), torch.zeros(1, 1, m, 1), qkv(1, 1, 1, n, m, 8, 4)[2]
    offset = (torch.arange(m) - (torch.arange(n)[:, None] + m - n) + far).float()
    score = [Bias((-0.125 * offset.square()).clamp_min(-200.0)[None, None])]
    found, expected = run(q, k, v, score=score, statistics=ROWS), truth(q, k, score=score)
    for statistic in ROWS:
        close(found.statistics[statistic], expected.of(statistic), near=1e-5 if statistic == LARGEST else 0.0)


@pytest.mark.parametrize("n", [2, 7])
@pytest.mark.parametrize("step", [0.3, 1.9, 2.7, 3.5])
def test_logits_that_rise_from_block_to_block(n: int, step: float) -> None:
    """By less, about and more than what a row's top may lie below its largest logit; the last keys see the most."""
    m = 2053
    q, k = torch.ones(1, 1, n, 1), qkv(1, 1, 1, n, m, 1, 4)[1] * 0.2
    k += (torch.arange(m) // 64 * step).view(m, 1)
    v = qkv(1, 1, 1, n, m, 1, 4)[2]
    wanted = (*ROWS, *RANGES, *key_weights(1, m))
    for mask in (Everything(), Causal()):
        found, expected = run(q, k, v, mask, scale=1.0, statistics=wanted), truth(q, k, mask, scale=1.0)
        close(found.out, expected.out(v), limit=2e-5, near=1e-5)
        for statistic in wanted:
            close(found.statistics[statistic], expected.of(statistic), 4e-5, near=4e-6)
        columns = run(q, k, v, mask, scale=1.0, statistics=[COLUMN_MASS]).statistics[COLUMN_MASS]
        close(columns, expected.of(COLUMN_MASS), 4e-5)


def test_the_largest_is_that_of_all_blocks_to_the_last_bit() -> None:
    """Though the top that weights are made with stays behind where it rises by little."""
    for n in (2, 9):
        k = torch.cat([torch.full((64,), 0.25 * block) for block in range(20)]).view(1, 1, -1, 1)
        found = run(torch.ones(1, 1, n, 1), k, k, scale=1.0, statistics=[LARGEST])
        assert (found.statistics[LARGEST] == 4.75).all()
        for block in range(20):
            some = k[:, :, : 64 * block + 1]
            part = run(torch.ones(1, 1, n, 1), some, some, scale=1.0, statistics=[LARGEST]).statistics[LARGEST]
            torch.testing.assert_close(part, torch.full((1, 1, n), 0.25 * block), rtol=1e-7, atol=0.0)


@pytest.mark.parametrize("n", [2, 9])
def test_ranges_without_end(n: int) -> None:
    q, k, v = qkv(n=n)
    far = 2**63 - 1
    whole = (RangeMass(-far, far, relative=True), RangeMass(0, far, relative=False), RangeMass(-far, 1, relative=True))
    found, expected = run(q, k, v, Everything(), statistics=whole), truth(q, k, Everything())
    for statistic in whole:
        close(found.statistics[statistic], expected.of(statistic))


def test_whether_all_is_finite_is_known_of_the_pass() -> None:
    """`Call.values_finite` looks at every key and value; the kernel has seen them."""
    for where, known in ((None, True), ("k", None), ("v", None)):
        q, k, v = qkv(n=37)
        if where:
            {"k": k, "v": v}[where][1, 2, 52, 0] = math.nan
        call = Call(q, k, v, Rule(Everything(), 0.5, Grid(*q.shape[:3], 53)))
        KERNELS["cpu"].run(call)
        assert call.__dict__.get("values_finite") is known
        assert call.values_finite is (where is None)


@pytest.mark.thorough_except("avx2-2")
@pytest.mark.parametrize("n", [2, 9])
def test_two_places_far_apart(n: int) -> None:
    """Half of the mass 50,000 keys back, half near, the nearer a little above the farther."""
    m = 60001
    q, k, v = torch.ones(1, 1, n, 1), torch.full((1, 1, m, 1), -50.0), qkv(1, 1, 1, n, m, 8, 4)[2]
    k[0, 0, 9990:10010, 0] = 0.01 * torch.arange(20)
    k[0, 0, 59980:, 0] = 0.01 * torch.arange(21)
    found, expected = run(q, k, v, statistics=ROWS), truth(q, k)
    for statistic in ROWS:
        close(found.statistics[statistic], expected.of(statistic), near=0.0)


@pytest.mark.parametrize("n", [2, 37])
def test_sharp_rows_and_sinks(n: int) -> None:
    q, k, v = qkv(n=n)
    for factor, sink in ((60.0, -3.0), (1.0, 4.0), (1.0, 30.0), (1.0, 300.0)):
        score = (SinkLogits(torch.full((6,), sink)),)
        found, expected = run(q * factor, k, v, score=score, statistics=ROWS), truth(q * factor, k, score=score)
        for statistic in ROWS:
            near = 1e-5 * factor if statistic in (LARGEST, ENTROPY, DISTANCE) else 1e-6 * factor**2
            if statistic != DISTANCE_VARIANCE or factor == 1.0:
                close(found.statistics[statistic], expected.of(statistic), near=near)


def test_rows_that_see_nothing() -> None:
    for n in (3, 37):
        q, k, v = qkv(n=n)
        score = (Bias(torch.full((1, 1, 1, 53), -math.inf)),)
        found = run(q, k, v, score=score, statistics=(*ROWS, *RANGES, *key_weights(2, 53)))
        assert (found.out == 0).all()
        assert (found.lse == -math.inf).all()
        for statistic, x in found.statistics.items():
            assert (x == (-math.inf if statistic == LARGEST else 0.0)).all()
        assert (run(q, k, v, score=score, statistics=[COLUMN_MASS]).statistics[COLUMN_MASS] == 0).all()


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", LIMITS)
def test_column_mass_over_many_blocks_and_heads(dtype: torch.dtype) -> None:
    for b, h, h_kv in ((1, 2, 1), (2, 9, 3)):
        q, k, v = qkv(b, h, h_kv, 211, 600, 8, 4, dtype=dtype)
        found, expected = run(q, k, v, Causal(), statistics=[COLUMN_MASS]), truth(q, k, Causal())
        limit = LIMITS[dtype]
        close(found.statistics[COLUMN_MASS], expected.of(COLUMN_MASS), limit, near=1e-6)
        total = found.statistics[COLUMN_MASS].double().sum(-1)
        torch.testing.assert_close(total, torch.full_like(total, 211.0), rtol=limit / 2, atol=0.0)


def test_column_mass_of_many_equal_rows() -> None:
    n, k = 3000, torch.full((1, 1, 40, 1), -1.7)
    k[:, :, 5] = 0.0
    found = run(torch.ones(1, 64, n, 1), k, k, statistics=[COLUMN_MASS]).statistics[COLUMN_MASS]
    expected = n * k.double().squeeze().softmax(0)
    close(found, expected.expand(1, 64, 40), near=0.0)
