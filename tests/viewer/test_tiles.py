"""A rectangle of a head's map, pooled: the same as the dense weights in float64, whatever the mask and the place."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from tile_samples import close, dense, map_of, pooled

import headwise as hw
from headwise.kernels.cpu.library import library
from headwise.masks import Causal, Dense, Documents, Everything, Lengths, Mask, Sinks, Span, Window
from headwise.reports.viewer import tiles
from headwise.reports.viewer.tiles import Unwanted, rectangle, tile_spans
from headwise.rule.pooling import Squares
from headwise.scores import ALiBi, Bias, SoftCap

MASKS = {
    "everything": lambda n, m: Everything(),
    "causal": lambda n, m: Causal(),
    "window": lambda n, m: Causal() & Window(7),
    "window and sinks": lambda n, m: Causal() & (Window(5) | Sinks(3)),
    "documents": lambda n, m: Documents(torch.arange(m) // 9) & Causal(),
    "rows that see nothing": lambda n, m: Lengths([m - 11], [n - 6]) & Causal(),
    "nothing at all": lambda n, m: Lengths([0]),
    "dense": lambda n, m: Dense(torch.rand(1, 1, n, m, generator=torch.Generator().manual_seed(4)) > 0.7),
    "dense, by head": lambda n, m: Dense(torch.rand(1, 2, n, m, generator=torch.Generator().manual_seed(5)) > 0.9),
}


def by_name(found: Squares) -> list[tuple[str, torch.Tensor]]:
    return [("mean", found.mean), ("max", found.largest)]


def counted(allowed: np.ndarray, cell: int) -> torch.Tensor:
    """Allowed pairs in each square."""
    n, m = allowed.shape
    filled = np.zeros((-(-n // cell) * cell, -(-m // cell) * cell), np.int64)
    filled[:n, :m] = allowed
    return torch.from_numpy(filled.reshape(len(filled) // cell, cell, -1, cell).sum((1, 3)))


@pytest.mark.parametrize("cell", [1, 2, 3, 4, 16, 64, 100])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_rectangle_is_the_dense_map_pooled(mask, cell):
    n, m = 67, 83
    amap = map_of(n, m, mask(n, m))
    for head in range(2):
        weights, allowed = dense(amap, head)
        found = rectangle(amap.head(0, head), Span(0, n), Span(0, m), cell)
        for reduce, values in zip(("mean", "max"), found, strict=False):
            assert values.dtype == torch.float32
            close(values.numpy(), pooled(weights, allowed, cell, reduce))
        assert torch.equal(found.allowed, counted(allowed, cell))


@pytest.mark.thorough
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_part_of_any_size(data):
    m = data.draw(st.integers(1, 90))
    n = data.draw(st.integers(1, m))
    mask = MASKS[data.draw(st.sampled_from(["causal", "window and sinks", "documents", "everything"]))](n, m)
    rows, cols = (
        Span(*sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size))))) for size in (n, m)
    )  # fmt: skip
    cell = 2 ** data.draw(st.integers(0, 5))
    if rows.start == rows.stop or cols.start == cols.stop:
        return
    amap = map_of(n, m, mask, heads=1, seed=n + m)
    weights, allowed = dense(amap, 0)
    at = slice(*rows), slice(*cols)
    for reduce, values in by_name(rectangle(amap.head(0, 0), rows, cols, cell)):
        close(values.numpy(), pooled(weights[at], allowed[at], cell, reduce))


@pytest.mark.parametrize(
    "score", [SoftCap(3.0), ALiBi.standard(2), Bias(torch.linspace(-2, 2, 61 * 61).view(1, 1, 61, 61))], ids=repr
)
def test_scores_count_in_every_part(score):
    amap = map_of(61, 61, Causal(), score=(score,))
    whole = amap[0, 1].double().numpy()
    allowed = Causal().to_dense(61, 61)[0, 0].numpy()
    found = by_name(rectangle(amap.head(0, 1), Span(16, 48), Span(8, 40), 4))
    for reduce, values in found:
        close(values.numpy(), pooled(whole[16:48, 8:40], allowed[16:48, 8:40], 4, reduce))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_keys_shared_by_heads_and_other_dtypes(dtype):
    amap = map_of(45, 45, Causal(), dtype=dtype)
    _, shared = hw.attend(amap.q, amap.k[:, :1], amap.k[:, :1], mask=Causal(), return_map=True)
    weights = (amap.q[0, 1].double() @ amap.k[0, 0].double().T * amap.rule.scale - shared.lse[0, 1, :, None]).exp()
    allowed = Causal().to_dense(45, 45)[0, 0].numpy()
    found = by_name(rectangle(shared.head(0, 1), Span(0, 45), Span(0, 45), 8))
    for reduce, values in found:
        truth = pooled(weights.numpy(), allowed, 8, reduce)
        close(values.numpy(), truth)


def test_bands_do_not_show(monkeypatch):
    amap = map_of(97, 97, Causal() & Window(31), heads=1)
    whole = rectangle(amap.head(0, 0), Span(0, 97), Span(0, 97), 4)
    monkeypatch.setattr(tiles, "BAND", 97 * 8)
    for banded, values in zip(rectangle(amap.head(0, 0), Span(0, 97), Span(0, 97), 4), whole, strict=True):
        torch.testing.assert_close(banded, values, equal_nan=True, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("native", [True, False])
def test_it_stops_once_nobody_waits(monkeypatch, native):
    if native and library().handle is None:
        pytest.skip("the kernels are not compiled")
    mask: Mask = Causal() if native else Dense(Causal().to_dense(64, 64)[0, 0].expand(1, 1, 64, 64))
    amap = map_of(64, 64, mask, heads=1)
    monkeypatch.setattr(tiles, "BAND", 64 * 8)
    asked = []

    def wanted() -> bool:
        asked.append(True)
        return len(asked) < 3

    with pytest.raises(Unwanted):
        rectangle(amap.head(0, 0), Span(0, 64), Span(0, 64), 8, wanted=wanted)
    assert len(asked) == 3


def test_tiles_cover_the_map_once():
    n, m, cell = 1201, 1303, 2
    seen = torch.zeros(n, m)
    for row in range(4):
        for col in range(4):
            rows, cols = tile_spans(n, m, cell, row, col)
            seen[slice(*rows), slice(*cols)] += 1
            assert rows.stop - rows.start <= 512
    assert bool((seen == 1).all())
