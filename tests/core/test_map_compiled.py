"""What the compiled kernel does with a map is what the tiles in PyTorch give."""

import compiled_reads
import pytest
import torch
from samples import MASKS, SCORES, kernels_here, qkv

from headwise.map import AttentionMap
from headwise.map.attention import attend
from headwise.masks import Causal
from headwise.rule import pooling
from headwise.rule.pooling import Squares

pytestmark = pytest.mark.skipif("cpu" not in kernels_here(), reason="the compiled kernel is not here")
CELLS = (1, 3, 8, 16, 60)


def same(found: Squares | None, expected: Squares, rtol: float = 1e-5, atol: float = 1e-7) -> None:
    assert found is not None
    assert torch.equal(found.allowed, expected.allowed)
    torch.testing.assert_close(found.mean, expected.mean, rtol=rtol, atol=atol)
    torch.testing.assert_close(found.largest, expected.largest, rtol=rtol, atol=atol)


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize("name", MASKS)
def test_pictures(name: str) -> None:
    q, k, v = qkv()
    _, amap = attend(q, k, v, mask=MASKS[name](2, 37, 53), return_map=True)
    for cell in CELLS:
        expected = pooling.squares(amap.q, amap.k, amap.lse, amap.rule, cell)
        told: list[int] = []
        for progress in (None, lambda what, done, of: told.append(done)):  # noqa: B023
            same(compiled_reads.squares(amap.q, amap.k, amap.lse, amap.rule, cell, progress), expected)
        assert told[-1] == 37


@pytest.mark.thorough
def test_pictures_of_many_blocks() -> None:
    q, k, v = qkv(1, 2, 1, 1301, 1301, 16, 16)
    _, amap = attend(q, k, v, mask=Causal(), return_map=True)
    for cell in (7, 100, 650):
        expected = pooling.squares(amap.q, amap.k, amap.lse, amap.rule, cell)
        same(compiled_reads.squares(amap.q, amap.k, amap.lse, amap.rule, cell), expected, rtol=1e-4, atol=1e-8)


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize("name", MASKS)
def test_tiles_and_diagonals(name: str) -> None:
    q, k, v = qkv()
    _, amap = attend(q, k, v, mask=MASKS[name](2, 37, 53), return_map=True)
    exact = AttentionMap(*(x.double() for x in (amap.q, amap.k, amap.lse)), amap.rule)  # which no compiled kernel takes
    for index in (
        (...,),
        (1, 4, slice(3, 9), slice(10, 40)),
        (slice(None, None, -1), 0, 20),
        (0, slice(1, 6, 2), 3, slice(50, 53)),
    ):
        torch.testing.assert_close(amap[index].double(), exact[index], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(amap.diagonals()[1].double(), exact.diagonals()[1], rtol=1e-5, atol=1e-7)
    assert torch.equal(amap.diagonals()[0], exact.diagonals()[0])


@pytest.mark.parametrize("score", SCORES)
def test_pictures_and_products_under_scores(score: str) -> None:
    q, k, v = qkv()
    scores = SCORES[score](2, 6, 37, 53)
    _, amap = attend(q, k, v, score=scores, return_map=True)
    dense = amap[:]
    y = torch.randn(2, 6, 37, 7, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(amap.T @ y, dense.mT @ y, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(amap @ v, dense @ v.repeat_interleave(2, 1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(amap.received(), dense.sum(-2), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(amap.pool(8), pooling.squares(amap.q, amap.k, amap.lse, amap.rule, 7).mean)
    mass = pooling.diagonal_mass(amap.q, amap.k, amap.lse, amap.rule)
    torch.testing.assert_close(amap.diagonals()[1], pooling.diagonal_means([(amap.rule, mass)])[1])


@pytest.mark.parametrize("name", MASKS)
def test_products(name: str) -> None:
    q, k, v = qkv()
    _, amap = attend(q, k, v, mask=MASKS[name](2, 37, 53), return_map=True)
    dense = amap[:]
    generator = torch.Generator().manual_seed(1)
    y, x = torch.randn(2, 6, 37, 7, generator=generator), torch.randn(2, 6, 53, 3, generator=generator)
    got = compiled_reads.READS.transposed_times(amap._matrix, y)
    torch.testing.assert_close(got, dense.mT @ y, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(compiled_reads.READS.times(amap._matrix, x), dense @ x, rtol=1e-5, atol=2e-6)
    received = compiled_reads.READS.received(amap._matrix)
    torch.testing.assert_close(received, dense.sum(-2), rtol=1e-5, atol=2e-6)
