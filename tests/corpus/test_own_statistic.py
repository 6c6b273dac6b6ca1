"""A statistic of one's own: a class and one line that registers it, and every room knows it."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from sweep_samples import said
from torch import Tensor

import headwise as hw
from headwise import stats
from headwise.cli.see import measures as list_measures
from headwise.corpus import measure_corpus
from headwise.errors import ConfigError, ShapeError
from headwise.kernels import KERNELS
from headwise.lm.loading import load_model
from headwise.masks import Grid
from headwise.reports.viewer.session import words_of
from headwise.reports.views import print_report
from headwise.rule import Rule
from headwise.rule.tiles import Tile
from headwise.stats import RangeMass, RowMeasure, Statistic, Tokens
from headwise.stats.base import PLACES

THIRD = RangeMass(0, 3, relative=False)


class FirstThree(RowMeasure):
    """Weight on the first three keys, mean over queries.

    More than this is not in the table.
    """

    name, unit, range = "first_three", "mass", "0 to 1"
    source = "this test"
    short, label, placed = "first 3", "first three keys", False
    shown = {"report": 40, "viewer": 41, "watch": 42, "corpus": 43}

    def partial(self, tile: Tile) -> Tensor:
        return (tile.weights * (tile.keys < 3)).sum(-1)

    def needs(self, rule: Rule) -> tuple[Statistic, ...]:
        return (THIRD,)

    def from_rows(self, found: dict[Statistic, Tensor], lse: Tensor, rule: Rule) -> Tensor:  # type: ignore[override]
        return found[THIRD]


class VowelMass(stats.OfPieces):
    """Weight on vowels, mean over queries."""

    name = "vowel_mass"
    requires = "the text of the tokens"
    shown = {"report": 44}

    @staticmethod
    def belongs(piece: str) -> bool:
        return piece in set("aeiou，")


class LowTokens(RowMeasure):
    """Weight on keys whose token is below 40, mean over queries."""

    name, unit, range, source = "low_tokens", "mass", "0 to 1", "this test"
    requires = "LowTokens(ids)"

    def __init__(self, ids: Tensor) -> None:
        self.ids = torch.atleast_2d(ids)

    @classmethod
    def of(cls, tokens: Tokens) -> "LowTokens | None":
        return None if tokens.ids is None else cls(tokens.ids)

    def partial(self, tile: Tile) -> Tensor:
        low = self.ids[:, None, None, tile.cols.start : tile.cols.stop] < 40
        return (tile.weights * low).sum(-1)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = dict(stats.MEASURES), dict(stats.GIVEN)
    for kind in (FirstThree, VowelMass, LowTokens):
        assert stats.register(kind) is kind
    yield
    for registry, names in zip((stats.MEASURES, stats.GIVEN), before, strict=True):
        registry.clear()
        registry.update(names)


@pytest.mark.parametrize("kernel", [name for name in ("torch_blocks", "cpu", "reference") if name in KERNELS])
def test_map_measures_it(kernel: str) -> None:
    q, k, v = torch.randn(3, 2, 5, 17, 7, generator=torch.Generator().manual_seed(1))
    _, amap = hw.attend(q, k, v, mask=hw.Causal(), return_map=True, measures=["first_three"], kernel="torch_blocks")
    expected = amap.to_dense()[..., :3].sum(-1).mean(-1)
    torch.testing.assert_close(amap.measured["first_three"], expected)
    torch.testing.assert_close(amap.using(kernel).measure("first_three")["first_three"], expected)


@pytest.mark.thorough
def test_watch_shows_it_and_a_report_has_its_words(model_folder, tmp_path, capsys) -> None:
    subject = load_model(model_folder)
    reading = subject.read(said(23, 5))
    with hw.watch(subject.model, maps="lazy") as record, torch.no_grad():
        subject.model(reading.ids[None])
    assert record.latest.names[-1] == "first_three"
    first = next(iter(record.maps.values())).to_dense()[0]
    torch.testing.assert_close(record.latest["first_three"][0], first[..., :3].sum(-1).mean(-1))
    label, about = "first three keys", "Weight on the first three keys, mean over queries."
    words = {"en": (label, "mass", about), "zh": (label, "权重", about)}  # this file has no catalogue
    for lang, expected in words.items():
        page = tmp_path / f"{lang}.html"
        report = hw.report(record, page, tokens=reading.ids[None], pieces=[reading.pieces], lang=lang)
        data = json.loads(re.search(r'id="report"[^>]*>(.*?)</script>', page.read_text(encoding="utf-8"), re.S)[1])
        shown = {s["name"]: (s["label"], s["unit"], s["description"]) for s in data["statistics"]}
        assert shown["first_three"] == expected
        assert shown["vowel_mass"] == ("vowel mass", expected[1], "Weight on vowels, mean over queries.")
    vowels = torch.tensor([piece in set("aeiou，") for piece in reading.pieces])
    expected = (first * vowels).sum(-1).mean(-1)
    torch.testing.assert_close(report.statistics["vowel_mass"][0].float(), expected)
    from rich.console import Console

    print_report(report, Console(width=200), everything=True)
    assert "first 3" in capsys.readouterr().out


@pytest.mark.thorough
def test_a_corpus_is_measured_with_it(model_folder, tmp_path) -> None:
    (tmp_path / "a.txt").write_text(said(60, 2), encoding="utf-8")
    options = {"window": 13, "device": "cpu", "batch": 3}
    usual = measure_corpus(model_folder, tmp_path / "a.txt", tmp_path / "usual.csv", **options)
    assert list(usual.table)[-1] == "first_three"
    names = ["first_three", "vowel_mass", "low_tokens"]
    found = measure_corpus(model_folder, tmp_path / "a.txt", tmp_path / "all.csv", measures=names, **options)
    subject = load_model(model_folder)
    reading = subject.read(said(60, 2))
    rows: dict[str, list[Tensor]] = {name: [] for name in names}
    for start in range(0, len(reading), 13):
        ids, pieces = reading.ids[start : start + 13], reading.pieces[start : start + 13]
        p = subject.maps(ids)["blocks.1.attention"].to_dense()[0, 2]
        vowels = torch.tensor([piece in set("aeiou，") for piece in pieces])
        for name, members in (
            ("first_three", torch.arange(len(ids)) < 3),
            ("vowel_mass", vowels),
            ("low_tokens", ids < 40),
        ):
            rows[name].append((p * members).sum(-1))
    for name in names:
        assert float(found.table.dense(name)[1, 2]) == pytest.approx(float(torch.cat(rows[name]).mean()), rel=1e-5)


def test_the_viewer_and_the_list_of_measures_know_it(capsys, monkeypatch) -> None:
    chinese = {
        "label": "first three keys",
        "about": "Weight on the first three keys, mean over queries.",
        "unit": "权重",
    }
    assert words_of("first_three")["zh"] == chinese  # this file has no catalogue
    monkeypatch.setenv("COLUMNS", "200")
    list_measures()
    listed = capsys.readouterr().out
    assert all(name in listed for name in ("first_three", "vowel_mass", "low_tokens"))


def test_what_cannot_be_registered_is_named() -> None:
    class Entropy(RowMeasure):
        name, unit, range, source = "entropy", "bits", "0 to 1", "this test"

        def partial(self, tile: Tile) -> Tensor:
            return tile.entropy

    with pytest.raises(ConfigError, match=r"register\(Entropy\): there is another measure 'entropy'"):
        stats.register(Entropy)
    with pytest.raises(ConfigError, match=r"register\(kind\): expected a class of Measure, got .*Entropy object"):
        stats.register(Entropy())
    with pytest.raises(ConfigError, match="measure 'low_tokens' requires the tokens; give LowTokens"):
        stats.resolve(["low_tokens"])


class Told(RowMeasure):
    """Weight on the first key."""

    name, unit, range, source = "told", "mass", "0 to 1", "this test"

    def partial(self, tile: Tile) -> Tensor:
        return tile.weights[..., 0]


@pytest.mark.parametrize("missing", ["unit", "range", "source", "docstring"])
def test_a_measure_without_words_for_reports_is_refused(missing: str) -> None:
    words = {"name": "silent", "__doc__": "Words."} | {"__doc__" if missing == "docstring" else missing: ""}
    with pytest.raises(ConfigError, match=rf"register\(Silent\): expected words in {missing}, which reports show"):
        stats.register(type("Silent", (Told,), words))
    assert "silent" not in stats.MEASURES


def test_a_measure_of_another_package_may_do_without_chinese() -> None:
    stats.register(Told)
    words = stats.describe("told", "zh")
    assert (words.label, words.about) == ("told", "Weight on the first key.")
    assert (words.unit, words.range) == ("权重", "0 至 1")


def test_a_place_that_shows_no_measures_is_refused() -> None:
    lost = type("Lost", (Told,), {"name": "lost", "__doc__": "Words.", "shown": {"report": 30, "reprot": 1}})
    places = "'report', 'viewer', 'watch', 'corpus'"
    with pytest.raises(ConfigError, match=rf"shown={{'reprot': …}}: no such place; expected {places}"):
        stats.register(lost)


@pytest.mark.parametrize(
    "bad", [lambda p: p.sum(-1), lambda p: p[:, :1], lambda p: p[..., None, None], torch.Tensor.tolist]
)
def test_a_partial_of_another_shape_is_named(bad: Callable[[Tensor], Any]) -> None:
    q = torch.randn(1, 2, 7, 5)
    _, amap = hw.attend(q, q, q, return_map=True)
    wrong = type("Wrong", (Told,), {"partial": lambda self, tile: bad(tile.weights[..., 0])})
    expected = r"Wrong\.partial\(tile\): expected \[b, h, r\]=\[1, 2, 7\] or \[b, h, r, parts\]"
    with pytest.raises(ShapeError, match=expected):
        amap.measure(wrong())


def test_a_name_may_lead_to_a_measure_with_options() -> None:
    stats.MEASURES["first_five"] = lambda: stats.SinkMass(5)
    words = stats.describe("first_five", "zh")
    assert words is not None
    assert words.label == stats.describe("sink_mass", "zh").label
    assert stats.describe("nothing of that name") is None
    assert stats.known("first_five").count == 5


@pytest.mark.parametrize("name", [*stats.MEASURES, *stats.GIVEN])
def test_every_measure_has_words_in_both_languages(name: str) -> None:
    english, chinese = stats.describe(name), stats.describe(name, "zh")
    assert english is not None
    assert chinese is not None
    assert all(english)
    assert all(chinese)
    assert not re.search(r"[a-z]{4}", chinese.label)
    assert re.search(r"[一-鿿]", chinese.about)
    assert re.search(r"[一-鿿]", chinese.unit)


def test_places_differ_where_measures_are_shown() -> None:
    for place in PLACES:
        numbers = [stats.known(name).shown[place] for name in stats.shown_in(place)]
        assert numbers == sorted(set(numbers))


def test_a_grid_is_not_needed_to_make_a_measure_of_tokens() -> None:
    made = stats.of_tokens("low_tokens", Tokens(torch.arange(9)))
    assert made is not None
    made.start(Grid(1, 1, 9, 9), torch.zeros(1))
    assert stats.of_tokens("low_tokens", Tokens()) is None
    with pytest.raises(ConfigError, match="measure='low_token': did you mean 'low_tokens'"):
        stats.of_tokens("low_token", Tokens())
