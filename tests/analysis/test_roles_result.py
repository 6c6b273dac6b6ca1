"""What comes back: confidence, merging over inputs, the table, JSON, and errors."""

import json

import numpy as np
import pytest
import torch
from planted import embeddings, planted

import headwise as hw
from headwise.analysis.head_roles.relations import Placed
from headwise.analysis.head_roles.score import DEFINITIONS, ROWS, VERSION
from headwise.analysis.head_roles.tally import MOST, STRETCHES, Tally, by_stretch, pooled
from headwise.errors import ConfigError, DTypeError, ShapeError


def mixed(b=2, n=60, seed=0):
    """A layer of a planted previous-token head and a random one, and one of two random heads."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 30, (b, n), generator=g)
    q, k = planted(["previous"], ids, n)
    maps = []
    for first in (q, torch.randn(q.shape, generator=g)):
        both = torch.cat((first, torch.randn(q.shape, generator=g)), 1)
        _, amap = hw.attend(both, k, k[..., :1], mask=hw.Causal(), scale=1.0, return_map=True)
        maps.append(amap)
    return maps, ids


def noisy(share, n=400, seed=0):
    """A head that looks at the previous key in so many of its rows, and at a random one in the others."""
    g = torch.Generator().manual_seed(seed)
    key = torch.where(torch.rand(n, generator=g) < share, torch.arange(n) - 1, torch.randint(0, n, (n,), generator=g))
    q = torch.zeros(1, 1, n, n)
    q[0, 0, torch.arange(n), key.clamp_min(0)] = 40.0
    k = torch.eye(n)[None, None]
    return hw.attend(q, k, k[..., :1], scale=1.0, return_map=True)[1]


@pytest.mark.thorough
def test_confidence_is_that_of_a_score_over_its_threshold():
    sure, unsure, no = (hw.analysis.roles(noisy(share))["previous"] for share in (0.8, 0.51, 0.2))
    assert sure.confidence[0, 0] == 1.0
    assert 0.05 < unsure.confidence[0, 0] < 0.95
    assert no.confidence[0, 0] == 0.0
    low, high = unsure.interval
    assert low[0, 0] < unsure.mass[0, 0] < high[0, 0]
    # Of 400 rows that are independent, the standard error is 0.025, and the interval some four of them wide.
    assert 0.06 < high[0, 0] - low[0, 0] < 0.14


def test_rows_that_are_alike_make_less_sure_than_as_many_that_are_not():
    """60 % of the rows, one after the other, and the same share scattered."""
    n = 400
    key = torch.where(torch.arange(n) < 0.6 * n, torch.arange(n) - 1, torch.zeros(n).long())
    q = torch.zeros(1, 1, n, n)
    q[0, 0, torch.arange(n), key.clamp_min(0)] = 40.0
    k = torch.eye(n)[None, None]
    _, amap = hw.attend(q, k, k[..., :1], scale=1.0, return_map=True)
    together, scattered = hw.analysis.roles(amap)["previous"], hw.analysis.roles(noisy(0.6))["previous"]
    widths = [float(score.interval[1][0, 0] - score.interval[0][0, 0]) for score in (together, scattered)]
    assert widths[0] > 1.8 * widths[1]


def test_a_label_needs_the_confidence_that_is_asked_for():
    found = hw.analysis.roles(noisy(0.51))
    assert found.labels(0, 0) == []
    label = next(x for x in found.labels(0, 0, confidence=0.0) if x.role == "previous")
    assert label.score == pytest.approx(float(found["previous"].mass[0, 0]))
    assert label.threshold == 0.5
    assert label.source.startswith("Clark")
    assert str(label).startswith("previous 0.")


def test_one_row_is_never_sure():
    q = torch.zeros(1, 1, 1, 4)
    _, amap = hw.attend(q, q, q, return_map=True)
    found = hw.analysis.roles(amap)
    assert found["self"].mass[0, 0] == 1.0
    assert found["self"].uniform[0, 0] == 1.0
    assert found.labels(0, 0, confidence=0.5) == []
    assert np.isnan(found["previous"].mass[0, 0])
    assert np.isnan(found["previous"].lift[0, 0])


@pytest.mark.thorough
def test_merged_inputs_are_one_batch():
    maps, ids = mixed(b=3)
    parts = []
    for i in range(3):
        one = []
        for amap in maps:
            _, alone = hw.attend(
                amap.q[i : i + 1], amap.k[i : i + 1], amap.k[i : i + 1, ..., :1], mask=hw.Causal(), scale=1.0,
                return_map=True,
            )  # fmt: skip
            one.append(alone)
        parts.append(hw.analysis.roles(one, tokens=ids[i], embeddings=embeddings(30)))
    whole = hw.analysis.roles(maps, tokens=ids, embeddings=embeddings(30))
    merged = parts[0].merge(parts[1]).merge(parts[2])
    for name, score in whole.items():
        for field in ("mass", "uniform", "coverage", "lift"):
            np.testing.assert_allclose(getattr(merged[name], field), getattr(score, field), rtol=1e-5, atol=1e-7)
        if score.without_first is not None:
            np.testing.assert_allclose(merged[name].without_first.mass, score.without_first.mass, rtol=1e-5)
    np.testing.assert_allclose(merged.olsson, whole.olsson, rtol=1e-5)
    np.testing.assert_array_equal(merged["offset"].offset, whole["offset"].offset)
    assert merged.rows == whole.rows == 180


def test_many_merged_inputs_keep_a_bounded_number_of_stretches():
    tally = Tally(*np.random.default_rng(0).random((3, 2, 200, 5)))
    both = tally.merge(tally)
    assert both.total.shape == (2, 200, 5)
    np.testing.assert_allclose(both.total.sum(1), 2 * tally.total.sum(1))
    odd = pooled(np.ones((1, MOST + 1, 1)))
    assert odd.shape[1] == MOST // 2 + 1
    assert odd.sum() == MOST + 1


@pytest.mark.parametrize(("b", "n"), [(1, 5), (1, 64), (1, 131), (7, 40), (200, 3)])
def test_stretches_never_hold_two_sequences(b, n):
    rows = torch.arange(b).float()[:, None, None].expand(b, 2, n) + 1
    sums, counts = by_stretch(rows, rows.shape), by_stretch(torch.ones(b, 2, n), rows.shape)
    assert sums.shape[1] <= max(STRETCHES + b, b)
    np.testing.assert_allclose(sums.sum(1)[0, 0], rows.sum() / 2)
    assert {float(x) for x in (sums / counts)[0, :, 0]} == {float(i + 1) for i in range(b)}


def test_the_table_says_where_it_holds():
    maps, ids = mixed()
    found = hw.analysis.roles(maps, tokens=ids, pieces=["a"] * 60)
    text = repr(found)
    lines = text.splitlines()
    assert "on this input" in lines[0]
    assert lines[1].split()[:4] == ["0", "0", "previous", "1.00"]
    assert lines[2].split()[2] == "·"
    assert "on this input of 120 rows" in text
    assert VERSION in text
    assert all(word in text for word in ("a uniform head", "eligible rows", "at −1", "—"))
    assert len(lines) == 1 + 4 + 1 + 2 + 3
    html = found._repr_html_()
    assert html.count("<tr>") == 7
    assert "on this input" in html


def test_words_of_the_caller_are_escaped_in_html():
    maps, ids = mixed()
    arcs = [Placed(((0, 1), (1, 2)), ((1, 0, "<script>"),))]
    html = hw.analysis.roles(maps, tokens=ids, arcs=arcs)._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;" in html


def test_everything_goes_into_json(tmp_path):
    maps, ids = mixed()
    found = hw.analysis.roles(maps, tokens=ids, mentions=[hw.analysis.Mention(3, "a"), hw.analysis.Mention(9, "a")])
    found.save(tmp_path / "roles.json")
    read = json.loads((tmp_path / "roles.json").read_text(encoding="utf-8"))
    assert read["version"] == VERSION
    assert read["scope"] == "on this input"
    assert read["shape"] == [2, 2]
    assert read["labels"][0][0][0]["role"] == "previous"
    assert read["roles"]["next"]["mass"] == [[None, None], [None, None]]
    np.testing.assert_allclose(read["roles"]["previous"]["mass"], found["previous"].mass)
    np.testing.assert_allclose(read["roles"]["induction"]["olsson"], found.olsson)
    assert read["roles"]["offset"]["offset"][0][0] == -1
    assert read["coreference"]["cases"] == 1
    assert read["roles"]["first"]["limit"].startswith("Gu et al. 2024")


def test_definitions_tell_their_sources():
    for definition in DEFINITIONS.values():
        assert definition.source
        assert definition.limit
        assert definition.what
    assert DEFINITIONS["first"].threshold == 0.3
    assert DEFINITIONS["broad"].threshold == 3.8
    assert DEFINITIONS["offset"].threshold == 0.9


@pytest.mark.thorough
def test_a_role_that_needs_more_than_was_given_is_not_there():
    maps, ids = mixed()
    given = {name for name, definition in DEFINITIONS.items() if definition.given}
    assert given == {"separator", "punctuation", "duplicate", "induction", "rare", "semantic"}
    assert given & set(hw.analysis.roles(maps)) == set()
    assert np.isnan(hw.analysis.roles(maps).olsson).all()
    assert "semantic" not in hw.analysis.roles(maps, tokens=ids)
    everything = hw.analysis.roles(maps, tokens=ids, pieces="a" * 60, frequencies={}, embeddings=embeddings(30))
    assert set(everything) == set(DEFINITIONS)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tokens": torch.zeros(59).long()}, ShapeError, r"tokens: shape \(1, 59\)"),
        ({"tokens": torch.zeros(3, 60).long()}, ShapeError, "tokens"),
        ({"tokens": torch.zeros(60)}, DTypeError, "float32"),
        ({"pieces": ["a"] * 59}, ShapeError, "59 of them for 60 tokens"),
        ({"pieces": [["a"] * 60] * 3}, ShapeError, "3 lists for a batch of 2"),
        ({"pieces": [1] * 60}, DTypeError, "pieces"),
        ({"frequencies": {}}, ConfigError, "requires tokens"),
        ({"tokens": torch.full((60,), 9), "frequencies": torch.ones(5)}, ShapeError, "5 of them, but tokens holds 9"),
        ({"tokens": torch.zeros(60).long(), "frequencies": {}, "rare": 1.0}, ConfigError, r"rare=1\.0"),
        ({"reach": 0}, ConfigError, "reach=0"),
        ({"radius": 1.5}, ConfigError, r"radius=1\.5"),
    ],
)
def test_what_does_not_fit_is_named(options, error, message):
    with pytest.raises(error, match=message):
        hw.analysis.roles(mixed()[0], **options)


def test_maps_that_do_not_fit_are_named():
    maps, ids = mixed()
    with pytest.raises(ConfigError, match="maps: got none"):
        hw.analysis.roles([])
    with pytest.raises(DTypeError, match=r"maps\[1\]: expected an AttentionMap, got Tensor"):
        hw.analysis.roles([maps[0], torch.zeros(3)])
    with pytest.raises(ShapeError, match=r"maps\[1\]: \(1, 2, 60, 60\)"):
        hw.analysis.roles([maps[0], mixed(b=1)[0][0]])
    found = hw.analysis.roles(maps, tokens=ids)
    with pytest.raises(ShapeError, match="layer=2"):
        found.labels(2, 0)
    with pytest.raises(ConfigError, match="confidence=2"):
        found.labels(0, 0, confidence=2)
    with pytest.raises(ConfigError, match="merge"):
        found.merge(hw.analysis.roles(maps))


def test_a_role_of_many_heads_prints_a_small_table():
    g = torch.Generator().manual_seed(0)
    given = [torch.randn(3, 1, 12, 40, 8, generator=g) for _ in range(6)]
    maps = [hw.attend(*qkv, mask=hw.Causal(), return_map=True)[1] for qkv in given]
    found = hw.analysis.roles(maps, mentions=[hw.analysis.Mention(at, at % 3) for at in range(4, 40, 3)])
    assert "; known for none of the 72 heads" in repr(found["next"]).splitlines()[0]
    for shown in (*(score for name, score in found.items() if name != "next"), found.coreference):
        lines = repr(shown).splitlines()
        assert len(lines) == 10
        assert max(map(len, lines)) <= 160
        assert lines[0].endswith("; 64 of 72 heads are not shown")
        assert "array" not in repr(shown)
        assert shown._repr_html_().count("<tr>") == 9
    mass = found["previous"].mass
    best = np.unravel_index(mass.argmax(), mass.shape)
    cells = repr(found["previous"]).splitlines()[2].split()
    assert [int(cells[0]), int(cells[1])] == list(best)
    assert float(cells[2]) == pytest.approx(mass.max(), rel=1e-3)
    assert list(found.table) == [*found, "offset_at"]
    np.testing.assert_array_equal(found.table.dense("previous"), mass)
    np.testing.assert_array_equal(torch.stack(found.table["previous"].error)[..., 1], found["previous"].interval[1])
    assert len(repr(found.keys())) < 250
    assert list(found.items()) == list(zip(found.keys(), found.values(), strict=True))


def weights(rows, mask=None, **options):
    """The roles of one head with these weights [n, n], and of the same head in a second layer."""
    k = torch.eye(len(rows))[None, None]
    q = (rows + 1e-9).log()[None, None]
    return hw.analysis.roles([hw.attend(q, k, k, mask=mask, scale=1.0, return_map=True)[1]] * 2, **options)


@pytest.mark.parametrize("n", [3, 9, 10, 11, 12, 40])
def test_a_label_rests_on_ten_eligible_queries(n):
    """A head that looks at the key before: the first query has none."""
    found = weights(torch.eye(n).roll(-1, 1).tril(), hw.Causal())
    assert found["previous"].mass[1, 0] > 0.99
    enough = n - 1 >= ROWS
    assert bool(found["previous"].holds[1, 0]) is enough
    assert [label.role for label in found.labels(1, 0)] == (["previous"] if enough else [])
    assert all(label.rows >= ROWS for label in found.pattern(1, 0))
    if enough:
        assert found.labels(1, 0)[0].rows == n - 1


def test_a_strong_match_of_one_query_is_no_induction():
    """One token of a text is there twice, and its second occurrence looks at what followed the first."""
    n, ids = 24, torch.arange(24)
    ids[20] = ids[5]
    rows = torch.full((n, n), 0.01) + torch.eye(n)[torch.full((n,), 3)] * 0.1
    rows[20, 6] = 9.0
    found = weights(rows, hw.Causal(), tokens=ids)
    assert found["induction"].mass[0, 0] > 0.9
    assert found["induction"].rows[0, 0] == 1
    assert not found["induction"].holds.any()
    assert not found["induction"].tends.any()
    assert "induction" not in [x.role for x in found.pattern(0, 0)]


def test_attention_to_both_sides_has_no_induction():
    n, ids = 40, torch.arange(40) % 10
    rows = torch.zeros(n, n)
    rows[torch.arange(n), (torch.arange(n) - 9).clamp_min(0)] = 1.0
    causal, both = (weights(rows, mask, tokens=ids) for mask in (hw.Causal(), None))
    assert "induction" in [x.role for x in causal.labels(0, 0)]
    assert "induction" not in both
    assert both.olsson.shape == (2, 1)  # as a measure alone
    assert "induction" not in [x.role for x in both.pattern(0, 0)]
    dense = hw.Dense(torch.ones(n, n, dtype=torch.bool).tril())
    assert "induction" in weights(rows, dense, tokens=ids)


def near(previous, others, n=60):
    """A head with so much weight on the key before, and so much on the three before that, except that every fifth query
    attends to the third one."""
    rows = torch.full((n, n), (1 - previous - others) / n)
    for offset, weight in ((1, previous), (2, others / 3), (3, others / 3), (4, others / 3)):
        rows += weight * torch.eye(n).roll(-offset, 1).tril()
    rows[4::5] = torch.eye(n).roll(-3, 1)[4::5]
    return weights(rows, hw.Causal())


def test_a_tendency_is_named_by_what_has_most_of_the_weight():
    (wide,), (narrow,) = near(0.3, 0.4).pattern(0, 0), near(0.55, 0.1).pattern(0, 0)
    assert (wide.role, narrow.role) == ("local", "previous")
    assert near(0.3, 0.4)["previous"].tends[0, 0]
    assert not wide.sure
    assert str(wide) == f"tendency: nearby {wide.score:.2f}"
    assert wide.words.zh.startswith("倾向：")
    assert near(0.3, 0.4).labels(0, 0) == []
    assert near(0.95, 0.0).pattern(0, 0)[0].sure


def test_what_holds_is_what_the_label_says():
    """In 95 % of the draws, not by the score alone."""
    found = hw.analysis.roles(noisy(0.51))
    score = found["previous"]
    assert score.mass[0, 0] > score.definition.threshold
    assert score.confidence[0, 0] < 0.95
    assert not score.holds[0, 0]
    assert score.enough(0.0)[0, 0]
