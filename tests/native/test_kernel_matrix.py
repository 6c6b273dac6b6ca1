"""What the compiled library makes of q, k and the log-sum-exp: weights, squares and diagonals, against the formula."""

import math

import compiled_reads
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from kernel_formula import truth
from large_logits import KINDS, made, off, vectors
from samples import MASKS, SCORES as ALL_SCORES, qkv
from torch import Tensor

from headwise.map.attention import attend
from headwise.masks import Causal, Grid, Mask, Span, Window
from headwise.rule import Rule
from headwise.rule.pooling import Squares, diagonal_means
from headwise.scores import Bias, Score

# All but one that is refused.
SCORES = {name: score for name, score in ALL_SCORES.items() if name != "two biases"}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
pytestmark = pytest.mark.usefixtures("target")


class Whole:
    """A matrix in float64 with what the library is given to make it again."""

    def __init__(self, q: Tensor, k: Tensor, mask: Mask, score: tuple[Score, ...] = ()) -> None:
        b, h, n, d = q.shape
        found = truth(q, k, mask, score)
        self.q, self.k, self.p, self.lse = q, k, found.p.detach(), found.lse.detach().float()
        self.rule = Rule(mask, d**-0.5, Grid(b, h, n, k.shape[2]), tuple(score))
        self.allowed = mask.to_dense(n, k.shape[2], batch=b, heads=h).expand(self.p.shape)

    def part(self, rows: Span, cols: Span) -> tuple[tuple[Tensor, Tensor, Tensor, Rule], Tensor, Tensor]:
        """What the library is given for a rectangle; its weights and allowed cells."""
        r, c = slice(*rows), slice(*cols)
        given_ = self.q[:, :, r], self.k[:, :, c], self.lse[:, :, r], self.rule.part(rows, cols)
        return given_, self.p[:, :, r, c], self.allowed[:, :, r, c]


def close(found: Tensor | None, expected: Tensor, near: float = 3e-7) -> None:
    assert found is not None
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=near)


def in_squares(x: Tensor, cell: int) -> Tensor:
    """[b, h, R, C, cell · cell], with zeros beyond the edges."""
    _, _, n, m = x.shape
    x = torch.nn.functional.pad(x, (0, -m % cell, 0, -n % cell))
    return x.unflatten(3, (-1, cell)).unflatten(2, (-1, cell)).transpose(3, 4).flatten(4)


def check_squares(found: Squares | None, p: Tensor, allowed: Tensor, cell: int) -> None:
    assert found is not None
    count = in_squares(allowed.long(), cell).sum(-1)
    assert torch.equal(found.allowed, count)
    close(found.mean, in_squares(p, cell).sum(-1) / count.clamp_min(1))
    close(found.largest, in_squares(p, cell).amax(-1))


def in_diagonals(x: Tensor) -> Tensor:
    """Sums over the diagonals, lower left to upper right: [b, h, n + m - 1]."""
    n, m = x.shape[2:]
    # Rows from below, each one place further to the right.
    longer = torch.nn.functional.pad(x.flip(2), (0, n)).flatten(2)[..., : n * (n + m - 1)]
    return longer.unflatten(2, (n, n + m - 1)).sum(2)


def check(whole: Whole, rows: Span, cols: Span, *cells: int) -> None:
    given_, p, allowed = whole.part(rows, cols)
    tile = compiled_reads.weights(*given_)
    close(tile, p)
    assert tile is not None
    assert (tile[~allowed] == 0).all()
    for cell in cells:
        check_squares(compiled_reads.squares(*given_, cell), p, allowed, cell)
    mass = compiled_reads.diagonals(*given_)
    n, m = p.shape[2:]
    sums = in_diagonals(p)
    close(mass, sums, near=1e-6)
    offsets, means = diagonal_means([(given_[3], mass)])
    close(means, sums / in_diagonals(allowed.long()).clamp_min(1), near=1e-6)
    assert offsets.tolist() == [x + cols.start - rows.start - whole.rule.grid.shift for x in range(1 - n, m)]


def test_diagonals_are_those_of_torch() -> None:
    p = torch.randn(2, 3, 7, 5, dtype=torch.float64)
    expected = torch.stack([p.diagonal(i, 2, 3).sum(-1) for i in range(-6, 5)], -1)
    torch.testing.assert_close(in_diagonals(p), expected)


@pytest.mark.every_target
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "m", "d"), [(2, 37, 128), (53, 600, 64), (3, 5, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_large_logits_sum_to_one(dtype: torch.dtype, n: int, m: int, d: int, kind: str) -> None:
    q, k = (x.to(dtype) for x in vectors(kind, 7e3, d, n, m))
    amap = made(q, k, "cpu")
    tiles = torch.cat([amap[:, :, :, :2], amap[:, :, :, 2:]], 3)
    for weights in (amap[:], tiles, (amap.T @ torch.eye(n)).mT):
        mass, relative = off(weights, q, k)
        assert mass <= 2e-6
        assert relative <= 1


@pytest.mark.thorough_beyond(6)
@pytest.mark.every_target
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_masks(name: str, dtype: torch.dtype) -> None:
    q, k, _ = qkv(dtype=dtype)
    whole = Whole(q, k, MASKS[name](2, 37, 53))
    check(whole, Span(0, 37), Span(0, 53), 1, 3, 8, 16, 60)
    check(whole, Span(5, 30), Span(9, 52), 4)


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("mask", ["everything", "window and sinks", "nothing for some", "dense"])
def test_scores(name: str, mask: str) -> None:
    q, k, _ = qkv()
    whole = Whole(q, k, MASKS[mask](2, 37, 53), SCORES[name](2, 6, 37, 53))
    check(whole, Span(0, 37), Span(0, 53), 5)
    check(whole, Span(11, 12), Span(3, 53), 1)


@pytest.mark.thorough
@settings(deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_rectangles(data: st.DataObject) -> None:
    draw = data.draw
    b, h_kv, group = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    n = draw(st.one_of(st.integers(1, 9), st.integers(1, 400)))
    m = draw(st.integers(max(n, 8), n + 300))
    q, k, _ = qkv(b, h_kv * group, h_kv, n, m, draw(st.integers(1, 40)), dtype=draw(st.sampled_from(DTYPES)))
    mask = MASKS[draw(st.sampled_from([*MASKS]))](b, n, m)
    score = SCORES[draw(st.sampled_from([*SCORES]))](b, h_kv * group, n, m) if draw(st.booleans()) else ()
    first, left = draw(st.integers(0, n - 1)), draw(st.integers(0, m - 1))
    rows, cols = Span(first, draw(st.integers(first + 1, n))), Span(left, draw(st.integers(left + 1, m)))
    check(Whole(q, k, mask, score), rows, cols, draw(st.one_of(st.integers(1, 9), st.integers(1, 700))))


# Around the sizes of blocks, panels and rectangles.
@pytest.mark.thorough_except("avx2-48-257", "avx2-97-513", "portable-47-48", "portable-49-512")
@pytest.mark.parametrize(("n", "m"), [(1, 1025), (47, 48), (48, 257), (49, 512), (97, 513), (1030, 1100)])
def test_many_blocks(n: int, m: int) -> None:
    q, k, _ = qkv(1, 2, 1, n, m, 16)
    for mask in (Causal(), Window(33, 5)):
        whole = Whole(q, k, mask)
        check(whole, Span(0, n), Span(0, m), 7, 45, 100, 650)


def test_strides() -> None:
    """Heads beside one another in memory, as layers lay them out, and rows with gaps."""
    q, k, _ = qkv(2, 6, 3, 37, 53, 8)
    expected = Whole(q, k, Causal())
    q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    wide = torch.full((2, 3, 53, 11), math.nan)
    wide[..., :8] = k
    for keys in (k, wide[..., :8], k.mT.contiguous().mT):
        given_, p, allowed = expected.part(Span(2, 35), Span(4, 50))
        given_ = q[:, :, 2:35], keys[:, :, 4:50], *given_[2:]
        close(compiled_reads.weights(*given_), p)
        check_squares(compiled_reads.squares(*given_, 6), p, allowed, 6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["causal", "window and sinks", "dense", "nothing for some"])
def test_numbers_that_are_not_finite(bad: float, name: str) -> None:
    """As the tiles in PyTorch have them: hidden cells are 0, and no row spoils another."""
    q, k, _ = qkv()
    q[0, 1, 20, 3], k[1, 2, 30, 5] = bad, bad
    mask = MASKS[name](2, 37, 53)
    grid = Grid(2, 6, 37, 53)
    rule = Rule(mask, 1.0, grid)
    allowed = mask.to_dense(37, 53, batch=2, heads=6).expand(*grid)
    s = (q @ k.repeat_interleave(2, 1).mT).masked_fill(~allowed, -math.inf)
    lse = s.logsumexp(-1)
    minus = lse.masked_fill(lse == -math.inf, math.inf)
    expected = (s - minus[..., None]).masked_fill(~allowed, -math.inf).exp()
    found = compiled_reads.weights(q, k, lse, rule)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-6, equal_nan=True)
    squares = compiled_reads.squares(q, k, lse, rule, 4)
    assert squares is not None
    for got, want in ((squares.mean, "sum"), (squares.largest, "amax")):
        assert torch.equal(got.isnan(), getattr(in_squares(expected, 4), want)(-1).isnan())


def test_a_bias_of_minus_infinity_hides_a_key_and_counts() -> None:
    q, k, _ = qkv()
    values = torch.zeros(1, 1, 1, 53)
    values[..., 7:20] = -math.inf
    whole = Whole(q, k, Causal(), (Bias(values),))
    check(whole, Span(0, 37), Span(0, 53), 4)
    assert (compiled_reads.weights(*whole.part(Span(0, 37), Span(7, 20))[0]) == 0).all()


def test_squares_of_many_equal_weights() -> None:
    """A sum of millions of weights, each of which alone would be lost beside it in float32."""
    n = 3000
    q, k = torch.zeros(1, 1, n, 1), torch.zeros(1, 1, n, 1)
    rule = Rule(MASKS["everything"](1, n, n), 1.0, Grid(1, 1, n, n))
    lse = torch.full((1, 1, n), math.log(n))
    weight = float(compiled_reads.weights(q[:, :, :1], k, lse[:, :, :1], rule.part(Span(0, 1), Span(0, n)))[0, 0, 0, 0])
    found = compiled_reads.squares(q, k, lse, rule, n)
    assert found is not None
    torch.testing.assert_close(found.mean.item(), weight, rtol=1e-6, atol=0.0)
    assert found.largest.item() == weight
    mass = compiled_reads.diagonals(q, k, lse, rule)
    cells = n - (torch.arange(2 * n - 1) - (n - 1)).abs()
    torch.testing.assert_close(mass[0, 0].double(), cells.double() * weight, rtol=1e-6, atol=0.0)


def test_a_broken_query_has_no_effect_on_masked_keys() -> None:
    q, k, v = qkv(n=40, m=70)
    q[1, 2, 9, 0] = math.nan
    mask = Causal() & Window(7)
    v.requires_grad_()
    out, amap = attend(q, k, v, mask=mask, return_map=True, kernel="cpu")
    out.sum().backward()
    assert v.grad is not None
    sums = amap.T @ torch.ones(40, 1)
    seen = mask.to_dense(40, 70)[0, 0, 9]
    assert torch.equal(sums[1, 2, :, 0].isnan(), seen)
    assert int(sums.isnan().sum()) == 7
    assert torch.equal(sums[..., 0].isnan(), amap.received().isnan())
    assert torch.equal(v.grad[1, 1, :, 0].isnan(), seen)
    assert not v.grad[0].isnan().any()
