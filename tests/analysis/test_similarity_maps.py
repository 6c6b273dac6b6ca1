"""Jensen–Shannon divergence between maps: against the dense formula in float64."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from headwise.analysis import similarity
from headwise.analysis.similarity import AMPLITUDES, ERROR, STEP, map_divergence
from headwise.errors import ConfigError, DTypeError, ShapeError
from headwise.map import AttentionMap
from headwise.map.attention import attend
from headwise.masks import Causal, Dense, Lengths, Mask, Window
from headwise.scores import ALiBi, SinkLogits, SoftCap


def map_of(b: int, h: int, n: int, m: int, *, seed: int = 0, sharp: float = 2.0, h_kv: int | None = None,
           mask: Mask | None = None, dtype: torch.dtype = torch.float32, **more: object) -> AttentionMap:  # fmt: skip
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(b, h, n, 6, generator=g).to(dtype) * sharp
    k = torch.randn(b, h_kv or h, m, 6, generator=g).to(dtype)
    return attend(q, k, k, mask=mask, return_map=True, **more)[1]  # type: ignore[call-overload, no-any-return]


def dense_divergence(maps: list[AttentionMap]) -> Tensor:
    """By its definition, rows that see something in both maps; what a row lacks to 1 counts as a key."""
    weights = torch.cat([amap.to_dense().double() for amap in maps], 1)
    weights = torch.cat((weights, (1 - weights.sum(-1, keepdim=True)).clamp_min(0.0)), -1)
    seen = torch.cat([amap.lse != -torch.inf for amap in maps], 1)
    size = weights.shape[1]
    found = torch.zeros(size, size, dtype=torch.float64)
    for i in range(size):
        for j in range(size):
            p, q = weights[:, i], weights[:, j]
            middle = (p + q) / 2
            row = torch.special.entr(middle).sum(-1)
            row = row - (torch.special.entr(p).sum(-1) + torch.special.entr(q).sum(-1)) / 2
            both = seen[:, i] & seen[:, j]
            found[i, j] = row[both].mean()
    return found


@pytest.mark.thorough
@settings(max_examples=12, deadline=None)
@given(st.integers(1, 2), st.integers(1, 5), st.integers(1, 19), st.integers(0, 9), st.sampled_from([0.1, 1.0, 30.0]))
def test_all_rows_equal_the_dense_formula(b: int, h: int, n: int, longer: int, sharp: float) -> None:
    maps = [map_of(b, h, n, n + longer, seed=k, sharp=sharp, mask=Causal()) for k in range(2)]
    found = map_divergence(maps, rows=None)
    torch.testing.assert_close(found.matrix, dense_divergence(maps), rtol=0, atol=ERROR + 5e-6)
    assert found.error is None
    assert not found.matrix.diagonal().any()


@pytest.mark.thorough_except("options0", "options2", "options5", "options7")
@pytest.mark.parametrize(
    "options",
    [
        {"mask": Causal() & Window(5)},
        {"mask": Lengths([17, 23]), "h_kv": 2},
        {"score": SoftCap(3.0)},
        {"score": (ALiBi.standard(4),), "mask": Causal()},
        {"score": SinkLogits(torch.tensor([0.5, 9.0, -3.0, 1.0]))},
        {"dtype": torch.bfloat16, "mask": Causal()},
        {"mask": Dense(torch.rand(2, 1, 23, 23, generator=torch.Generator().manual_seed(1)) > 0.6)},
        {"mask": Lengths([11, 23], [11, 23])},
    ],
)
def test_masks_scores_and_shared_keys(options: dict[str, object]) -> None:
    maps = [map_of(2, 4, 23, 23, seed=k, **options) for k in range(2)]  # type: ignore[arg-type]
    found = map_divergence(maps, rows=None)
    torch.testing.assert_close(found.matrix, dense_divergence(maps), rtol=0, atol=ERROR + 5e-6)


def test_layers_may_differ_in_heads_and_mask() -> None:
    maps = [map_of(1, 2, 31, 31, mask=Causal()), map_of(1, 3, 31, 31, seed=1), map_of(1, 1, 31, 31, mask=Window(2, 0))]
    found = map_divergence(maps, rows=None)
    torch.testing.assert_close(found.matrix, dense_divergence(maps), rtol=0, atol=ERROR + 5e-6)
    assert found.names == ("L0H0", "L0H1", "L1H0", "L1H1", "L1H2", "L2H0")


@pytest.mark.thorough
def test_long_rows_take_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    maps = [map_of(1, 3, 70, 90, seed=k, mask=Causal()) for k in range(2)]
    expected = dense_divergence(maps)
    for name, value in (("KEYS", 13), ("ROWS", 7), ("CACHED", 1)):
        monkeypatch.setattr(similarity, name, value)
    torch.testing.assert_close(map_divergence(maps, rows=None).matrix, expected, rtol=0, atol=ERROR + 5e-6)


@pytest.mark.thorough
def test_the_same_heads_and_heads_that_share_no_key() -> None:
    amap = map_of(1, 2, 40, 40)
    left = torch.zeros(1, 2, 40, 40, dtype=torch.bool)
    left[:, 0, :, :20], left[:, 1, :, 20:] = True, True
    split = map_of(1, 2, 40, 40, mask=Dense(left))
    same = map_divergence([amap, amap], rows=None)
    assert same["L0H1", "L1H1"] == pytest.approx(0, abs=2e-6)
    assert same.pairs(1)[0].value == pytest.approx(0, abs=2e-6)
    assert map_divergence([split])["L0H0", "L0H1"] == pytest.approx(math.log(2), abs=ERROR)


def test_the_waves_are_as_good_as_they_say() -> None:
    """κ(ω)/cosh(ω/2) by its definition and by the waves, far beyond any ratio of two weights."""
    half = torch.linspace(0, 100, 200_001, dtype=torch.float64)
    exact = half + torch.log1p(torch.exp(-2 * half)) - half * torch.tanh(half)
    waves = sum(a * torch.cos(2 * half * STEP * k) for k, a in AMPLITUDES.items()) / torch.cosh(half)
    assert float((waves - exact).abs().max()) < ERROR
    assert sum(AMPLITUDES.values()) == pytest.approx(math.log(2), abs=1e-9)


@pytest.mark.thorough
def test_sampled_rows_are_near_and_their_error_tells_how_near() -> None:
    maps = [map_of(2, 4, 300, 300, seed=k, mask=Causal()) for k in range(2)]
    whole = map_divergence(maps, rows=None).matrix
    upper = tuple(torch.triu_indices(8, 8, 1))
    scores = []
    for seed in range(12):
        found = map_divergence(maps, rows=40, seed=seed)
        assert found.error is not None
        scores.append(((found.matrix - whole) / found.error)[upper])
    spread = torch.cat(scores).square().mean().sqrt()
    assert 0.5 < float(spread) < 1.4  # 1 if the error is right, below if it is careful
    assert float(torch.cat(scores).mean().abs()) < 0.5
    again = map_divergence(maps, rows=40, seed=11)
    assert torch.equal(again.matrix, found.matrix)
    assert "standard error" in repr(found)
    assert "40 of 600 rows" in found.note


def test_each_stretch_has_one_row() -> None:
    drawn = similarity._drawn(103, 17, 3)
    edges = torch.arange(18) * 103 // 17
    assert ((drawn >= edges[:-1]) & (drawn < edges[1:])).all()
    every = torch.cat([similarity._drawn(103, 17, seed) for seed in range(400)])
    assert set(every.tolist()) == set(range(103))


def test_asking_for_more_rows_than_there_are_takes_all() -> None:
    maps = [map_of(1, 3, 20, 20)]
    told: list[tuple[int, int]] = []
    found = map_divergence(maps, rows=20, progress=lambda _, done, of: told.append((done, of)))
    assert found.error is None
    assert told[-1] == (20, 20)
    assert torch.equal(found.matrix, map_divergence(maps, rows=None).matrix)


def test_one_query_and_one_head() -> None:
    assert map_divergence([map_of(1, 1, 1, 1)]).matrix.tolist() == [[0.0]]
    assert map_divergence([map_of(1, 2, 1, 5)]).matrix.shape == (2, 2)


def test_bad_maps_are_named() -> None:
    good = map_of(1, 2, 9, 9)
    q = torch.full((1, 2, 9, 6), torch.nan)
    broken = attend(q, q, q, return_map=True)[1]
    nothing = map_of(1, 1, 9, 9, mask=Dense(torch.zeros(1, 1, 9, 9, dtype=torch.bool)))
    for call, error, words in (
        (lambda: map_divergence([]), ShapeError, "maps: got none"),
        (lambda: map_divergence([good, torch.zeros(3)]), DTypeError, r"maps\[1\].*Tensor"),  # type: ignore[list-item]
        (lambda: map_divergence([good, map_of(1, 2, 8, 9)]), ShapeError, r"maps\[1\]: 1 × 8"),
        (lambda: map_divergence([good, broken]), ConfigError, r"maps\[1\]: 18 rows of head 0, 1"),
        (lambda: map_divergence([good], rows=1), ConfigError, "rows=1"),
        (lambda: map_divergence([good, nothing]), ConfigError, "L0H0 and L1H0 have no row"),
    ):
        with pytest.raises(error, match=words):
            call()
