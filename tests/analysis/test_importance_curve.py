"""Agreement against scipy, and curves against the losses of the heads that they name."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from importance_samples import planted, square_loss, stack, vectors, wanted_of
from scipy.stats import rankdata, spearmanr

from headwise.analysis.importance.ablation import ablation_importance, losses_without
from headwise.analysis.importance.curve import pruning_curve, rank_agreement, ranks
from headwise.analysis.importance.losses import HeadImportance
from headwise.edit import prune
from headwise.errors import ConfigError

HEADS = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (1, 3), (1, 4)]


def made_up(name: str, values: np.ndarray, cut: int = 3) -> HeadImportance:
    rows = (values[:cut].astype(float), values[cut:].astype(float))
    return HeadImportance.of(name, "loss", ("a", "b"), rows, loss=1.0)


@pytest.mark.thorough
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(5, 41), st.integers(2, 40))
def test_rank_correlation_is_that_of_scipy(seed: int, heads: int, levels: int) -> None:
    """With few levels there are many ties."""
    rng = np.random.default_rng(seed)
    a, b = rng.integers(levels, size=(2, heads))
    assert np.array_equal(ranks(np.stack([a, b])), [rankdata(a), rankdata(b)])
    if len(set(a)) > 1 and len(set(b)) > 1:
        found = rank_agreement([made_up("a", a), made_up("b", b)], resamples=2)
        assert found.rho[0, 1] == pytest.approx(spearmanr(a, b).statistic, abs=1e-12)
        assert found.rho[1, 0] == found.rho[0, 1]


def test_the_columns_of_a_table_are_compared_like_methods() -> None:
    rng = np.random.default_rng(5)
    one, two, three = (made_up(name, rng.standard_normal(11)) for name in "abc")
    merged = one.table.merge(two.table.sort("b"), three.table)
    found, expected = (rank_agreement(given, resamples=7) for given in (merged, [one, two, three]))
    assert found.to_dict() == expected.to_dict()


@pytest.mark.thorough
def test_methods_that_agree_do_so_beyond_chance_and_others_do_not() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 30))
    methods = [
        made_up("a", a),
        made_up("cubed", a**3),
        made_up("near", a + 0.3 * b),
        made_up("turned", -a),
        made_up("b", b),
    ]
    found = rank_agreement(methods, resamples=500)
    assert found.rho[0, 1] == pytest.approx(1)
    assert found.rho[0, 3] == pytest.approx(-1)
    assert found.p[0, 1] == found.p[0, 3] == pytest.approx(1 / 501)
    assert 0.5 < found.low[0, 2] < found.rho[0, 2] < found.high[0, 2] < 1
    assert found.p[0, 4] > 0.05
    assert found.low[0, 4] < 0 < found.high[0, 4]


@pytest.mark.thorough
def test_p_of_few_heads_is_that_of_all_permutations() -> None:
    a, b = np.array([1.0, 5, 2, 4, 3]), np.array([2.0, 4, 1, 5, 3])
    all_of_them = [abs(np.corrcoef(a, order)[0, 1]) for order in itertools.permutations(b)]  # they are ranks
    exact = np.mean(np.array(all_of_them) >= abs(spearmanr(a, b).statistic) - 1e-12)
    found = rank_agreement([made_up("a", a), made_up("b", b)], resamples=5000)
    assert found.p[0, 1] == pytest.approx(exact, abs=0.02)  # four standard deviations


def test_a_method_that_ranks_nothing_is_not_a_number() -> None:
    found = rank_agreement([made_up("a", np.arange(6)), made_up("flat", np.ones(6))], resamples=20)
    assert np.isnan(found.rho[0, 1])
    assert np.isnan(found.p[0, 1])
    assert found.to_dict()["rho"][0] == [pytest.approx(1), None]
    json.dumps(found.to_dict())


@pytest.mark.thorough
def test_a_wider_confidence_is_a_wider_interval_and_the_seed_decides() -> None:
    rng = np.random.default_rng(1)
    methods = [made_up("a", rng.standard_normal(12)), made_up("b", rng.standard_normal(12))]
    narrow, wide = (rank_agreement(methods, confidence=c, resamples=300) for c in (0.5, 0.99))
    assert wide.low[0, 1] < narrow.low[0, 1] < narrow.high[0, 1] < wide.high[0, 1]
    again, other = (rank_agreement(methods, confidence=0.5, resamples=300, seed=s) for s in (0, 1))
    assert again.low[0, 1] == narrow.low[0, 1]
    assert other.low[0, 1] != narrow.low[0, 1]


def test_agreement_prints_every_pair() -> None:
    methods = [made_up(name, np.random.default_rng(i).standard_normal(9)) for i, name in enumerate("xyz")]
    found = rank_agreement(methods, resamples=50)
    lines = str(found).splitlines()
    assert [line.split()[:2] for line in lines[2:]] == [["x", "y"], ["x", "z"], ["y", "z"]]
    assert f"{found.rho[0, 2]:+.3f}" in lines[3]
    assert "<table>" in found._repr_html_()


@pytest.mark.parametrize(
    ("methods", "options", "message"),
    [
        ([np.arange(5)], {}, "1 given"),
        ([np.arange(5), np.arange(6)], {}, "about other heads"),
        ([np.arange(2), np.arange(2)], {}, "2 heads"),
        ([np.arange(5), np.arange(5)], {"resamples": 0}, "resamples=0"),
        ([np.arange(5), np.arange(5)], {"confidence": 1.0}, r"confidence=1\.0"),
    ],
)
def test_what_cannot_be_compared_is_named(methods: list[np.ndarray], options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rank_agreement([made_up(str(i), values) for i, values in enumerate(methods)], **options)


@pytest.mark.thorough
@pytest.mark.parametrize("by", ["zero", "mean", "resample"])
def test_each_point_is_the_loss_without_the_heads_before_it(by: str) -> None:
    model, batches = stack(), vectors()
    order = [HEADS[i] for i in (5, 2, 7, 0, 1, 6, 3, 4)]
    curve = pruning_curve(model, batches, square_loss, order, by=by, random_orders=2, seed=4)
    assert curve.removed.tolist() == list(range(9))
    assert curve.kept.tolist() == list(range(8, -1, -1))
    for count in range(9):
        expected = losses_without(model, batches, square_loss, order[:count], by=by, seed=4)
        assert np.allclose(curve.losses[count], expected, atol=1e-14)
    for r in range(2):
        shuffled = [order[i] for i in np.random.default_rng(4 + r).permutation(8)]
        expected = losses_without(model, batches, square_loss, shuffled[:3], by=by, seed=4)
        assert np.allclose(curve.random_losses[r, 3], expected, atol=1e-14)
    rise = curve.losses - curve.losses[0]
    assert np.allclose(curve.errors, rise.std(1, ddof=1) / np.sqrt(3))


@pytest.mark.thorough
def test_steps_are_points_of_the_whole_curve() -> None:
    model, batches = stack(), vectors()
    importance = ablation_importance(model, batches, square_loss)
    whole = pruning_curve(model, batches, square_loss, importance, random_orders=1)
    few = pruning_curve(model, batches, square_loss, importance, points=[6, 3], random_orders=1)
    assert few.removed.tolist() == [0, 3, 6]
    assert np.array_equal(few.losses, whole.losses[[0, 3, 6]])
    assert np.array_equal(few.random_losses, whole.random_losses[:, [0, 3, 6]])
    assert few.method == importance.method
    assert few.order == tuple(importance.order())


@pytest.mark.thorough
def test_the_planted_heads_go_last_and_that_is_better_than_chance() -> None:
    model = planted([(0, 1), (1, 3)])
    batches = wanted_of(model, vectors(6, dtype=torch.float32))
    importance = ablation_importance(model, batches[:3], square_loss)
    curve = pruning_curve(model, batches[3:], square_loss, importance, random_orders=4)
    assert curve.better_everywhere
    assert curve.removable(0.01) == 6
    turned = pruning_curve(model, batches[3:], square_loss, importance.order()[::-1], random_orders=4)
    assert not turned.better.any()
    assert not turned.better_everywhere
    assert turned.removable(0.01) == 0


def test_what_is_better_is_said_point_by_point() -> None:
    curve = pruning_curve(stack(), vectors(), square_loss, HEADS, points=[0, 2, 4, 8], random_orders=2)
    one = np.ones(3)
    losses = np.stack([one, 1.005 * one, 1.02 * one, 2 * one])
    chance = np.stack([np.stack([one, a * one, b * one, 2 * one]) for a, b in ((1.01, 1.01), (1.004, 1.05))])
    curve = replace(curve, losses=losses, random_losses=chance)
    assert curve.better.tolist() == [False, True, True, False]
    assert curve.better_than_all.tolist() == [False, False, False, False]
    assert curve.better_everywhere
    assert [curve.removable(rise) for rise in (0.001, 0.01, 0.02, 0.5, 1.0)] == [0, 2, 4, 4, 8]
    unknown = losses.copy()
    unknown[3] = np.nan
    assert replace(curve, losses=unknown).removable(0.5) == 4
    assert replace(curve, losses=losses * np.nan).removable(0.5) == 0
    said = "2 of 8 heads can be removed for less than 1 % more loss; better than the average random order at 2 of 2 "
    assert f"{said}points, and than all of them at 0" in curve.title
    assert "; all 8 heads can be removed for less than" in replace(curve, losses=losses[[0] * 4]).title
    words = [line.split()[-1] for line in str(curve).splitlines()[2:]]
    assert words == ["—", "mean", "mean", "—"]
    assert "<table>" in curve._repr_html_()
    back = json.loads(json.dumps(curve.to_dict()))
    assert back["better"] == [False, True, True, False]
    assert back["removable_at_1_percent"] == 2
    assert not replace(curve, removed=np.array([0, 2, 4, 8]), losses=losses[:, :1], total=8).to_dict()["errors"][1]


@pytest.mark.thorough
def test_progress_is_told_to_the_end() -> None:
    told: list[tuple[int, int]] = []
    pruning_curve(
        stack(), vectors(), square_loss, HEADS, by="mean", random_orders=2, points=[3, 8],
        progress=lambda _, *done: told.append(done),
    )  # fmt: skip
    assert told == [(i + 1, 3 + 3 * (1 + 3 * 2)) for i in range(24)]


@pytest.mark.thorough
def test_orders_may_empty_a_layer_which_then_gives_its_bias_alone() -> None:
    """So do 3 of the 40 random orders here."""
    model, batches = stack(bias=True), vectors()
    order = [(0, 2), (0, 0), (0, 1), *((1, head) for head in range(5))]
    curve = pruning_curve(model, batches, square_loss, order, points=[3, 8], random_orders=40)

    def loss(empty: set[int]) -> float:
        def edit(layer: int, concat: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(concat) if layer in empty else concat

        with torch.no_grad():
            return float(np.mean([(model.by_hand(x, edit) - y).square().mean() for x, y in batches]))

    assert curve.loss[1:] == pytest.approx([loss({0}), loss({0, 1})], rel=1e-9)
    assert np.isfinite(curve.random).all()
    assert np.isclose(curve.random[:, 1], loss({0}), rtol=1e-9).sum() == 3
    with pytest.raises(ConfigError, match="all 3 heads would be removed; expected to keep at least one"):
        prune(model, order[:3])
