"""Every level of a head's pyramid, against the dense map in float64."""

import numpy as np
import pytest
import torch
from tile_samples import close, dense, map_of, pooled

from headwise.masks import Causal, Dense, Everything, Lengths, Sinks, Window
from headwise.reports.viewer import tiles
from headwise.reports.viewer.tiles import SIDE, Levels, Unwanted, choose_levels, head_pyramid

MASKS = {
    "causal": Causal(),
    "everything": Everything(),
    "window and sinks": Causal() & (Window(40) | Sinks(2)),
    "rows that see nothing": Lengths([300], [333]) & Causal(),
    "dense": Dense(torch.rand(1, 1, 523, 523, generator=torch.Generator().manual_seed(1)) > 0.995),
}


@pytest.mark.thorough_except("everything-4", "rows that see nothing-4")
@pytest.mark.parametrize("base", [1, 4])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_every_level_is_the_dense_map_pooled(mask, base):
    n = 523
    amap = map_of(n, n, mask, heads=1)
    weights, allowed = dense(amap, 0)
    made = head_pyramid(amap.head(0, 0), Levels(n, n, base, 64))
    assert made.levels.cells[0] == base
    assert made.levels.cells[-1] == 64
    for cell in made.levels.cells:
        for reduce in ("mean", "max"):
            truth = pooled(weights, allowed, cell, reduce)
            close(made.whole(reduce, cell), truth, of_half=2.0**-10)
            for row in range(-(-len(truth) // SIDE)):
                for col in range(-(-len(truth) // SIDE)):
                    part = truth[row * SIDE : (row + 1) * SIDE, col * SIDE : (col + 1) * SIDE]
                    found = tiles.decode(made.tile(reduce, cell, row, col))
                    assert found.shape == (1, *part.shape)
                    close(found[0], part, of_half=2.0**-10)


def test_rows_far_apart_in_size_fold_with_their_counts():
    """The first causal cells have few pairs and large weights: an unweighted mean of means would be far off."""
    amap = map_of(33, 33, Causal(), heads=1)
    weights, allowed = dense(amap, 0)
    made = head_pyramid(amap.head(0, 0), Levels(33, 33, 1, 32))
    unweighted = np.nanmean(pooled(weights, allowed, 16, "mean"))
    truth = pooled(weights, allowed, 32, "mean")[0, 0]
    assert made.whole("mean", 32)[0, 0] == pytest.approx(truth, rel=1e-3)
    assert abs(unweighted - truth) > 0.2 * truth


@pytest.mark.thorough
def test_tiles_where_nothing_is_allowed_take_no_room():
    causal = head_pyramid(map_of(1100, 1100, Causal(), heads=1).head(0, 0), Levels(1100, 1100, 1, 128))
    full = head_pyramid(map_of(1100, 1100, Everything(), heads=1).head(0, 0), Levels(1100, 1100, 1, 128))
    assert causal.size < 0.75 * full.size
    assert np.isnan(tiles.decode(causal.tile("max", 1, 0, 3))).all()
    assert tiles.decode(causal.tile("max", 1, 0, 4)).shape == (1, SIDE, 1100 - 4 * SIDE)


@pytest.mark.parametrize("causal", [True, False])
def test_budget_is_kept_and_used(causal):
    amap = map_of(1500, 1500, Causal() if causal else Everything(), heads=1, d=2)
    for budget in (200_000, 1_000_000, 20_000_000):
        levels = choose_levels(1500, 6, causal, budget)
        assert 6 * head_pyramid(amap.head(0, 0), levels).size <= budget
        finer = Levels(1500, 1500, levels.base // 2, levels.coarsest)
        finest = levels.base // 2 < 1500 / SIDE  # finer than that is of no use
        assert finest or 6 * head_pyramid(amap.head(0, 0), finer).size > budget


@pytest.mark.parametrize(
    ("n", "base", "coarsest"), [(1, 1, 1), (16, 1, 1), (17, 1, 2), (256, 1, 16), (257, 2, 32), (4097, 16, 512)]
)
def test_levels_of_small_texts(n, base, coarsest):
    assert choose_levels(n, 1, True) == Levels(n, n, base, coarsest)


def test_a_hundred_thousand_tokens_fit_the_budget_without_being_computed():
    levels = choose_levels(100_000, 32, causal=True)
    assert levels.base == 64
    assert 32 * tiles._bytes(100_000, True, levels.base, levels.coarsest) <= tiles.BUDGET


def test_progress_is_told_and_it_stops_once_nobody_waits(monkeypatch):
    monkeypatch.setattr(tiles, "LEVELS_BAND", 300 * 64)
    head = map_of(300, 300, Causal(), heads=1).head(0, 0)
    told: list[tuple[int, int]] = []
    head_pyramid(head, Levels(300, 300, 4, 16), lambda _, *done: told.append(done))
    assert told == [(64, 300), (128, 300), (192, 300), (256, 300), (300, 300)]
    with pytest.raises(Unwanted):
        head_pyramid(head, Levels(300, 300, 4, 16), lambda _, *done: told.append(done), lambda: len(told) < 7)
    assert told[5:] == [(64, 300), (128, 300)]
