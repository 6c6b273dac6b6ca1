"""Pictures: what is written, with which characters, and what the pixels say."""

import re
import sys

import numpy as np
import pytest
from view_samples import passage, report_of, weights

from headwise.errors import ConfigError
from headwise.reports.data import Passage, reduced
from headwise.reports.figure import INK, pixels
from headwise.reports.pictures import WITH_VALUES, heat_map, loss_curve, overview, panels, write_pngs

pytest.importorskip("matplotlib", reason="pictures need the view extra")
from matplotlib.colors import to_rgba


def labels(axes) -> tuple[list[str], list[str]]:
    return [t.get_text() for t in axes.get_xticklabels()], [t.get_text() for t in axes.get_yticklabels()]


@pytest.mark.thorough
def test_every_head_and_the_overview_are_written(tmp_path, chinese):
    told = []
    written = write_pngs(chinese, tmp_path / "new", progress=lambda *news: told.append(news))
    assert [p.name for p in written] == [
        "all-heads.png",
        *(f"layer-{layer}-head-{head}.png" for layer in range(2) for head in range(3)),
    ]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in written)
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == sorted(p.name for p in written)
    assert told[-1][1:] == (6, 7)


@pytest.mark.thorough
@pytest.mark.parametrize("n", [1, 40, 99, 130, 700])
def test_pictures_are_small_and_like_their_figures(tmp_path, n):
    one = passage("水" * n if n != 99 else ["wide token mmm"] * n, layers=1, heads=1)
    report = report_of(one)
    _, path = write_pngs(report, tmp_path)
    found = matplotlib_image(path)
    assert max(found.shape) <= 2000
    np.testing.assert_allclose(found, pixels(heat_map(report, one, 0, 0)), atol=60)


def matplotlib_image(path) -> np.ndarray:
    from matplotlib.image import imread

    return (imread(path) * 255).round().astype(int)


@pytest.mark.thorough
def test_passages_are_kept_apart(tmp_path):
    written = write_pngs(report_of(passage("ab"), passage("水浒")), tmp_path)
    assert {p.name.split("-")[1] for p in written} == {"1", "2"}
    assert len({p.name for p in written}) == 14


@pytest.mark.thorough
@pytest.mark.filterwarnings("error")
def test_ticks_are_the_characters_and_what_has_no_glyph_is_numbered(tmp_path):
    one = passage(["水", "浒", " ", "\n", "\t", "é", "$", "👩", "滸", "\u0301"])
    figure = heat_map(report_of(one), one, 0, 0)
    x, y = labels(figure.axes[0])
    assert x == y == ["水", "浒", "␣", "↵", "⇥", "é", r"\$", "U+1F469", "滸", "\u0301"]
    figure.savefig(tmp_path / "x.png")  # a missing glyph would warn


@pytest.mark.thorough
def test_short_texts_have_their_weights_in_the_cells(chinese):
    one = chinese.passages[0]
    drawn = written(heat_map(chinese, one, 1, 2).axes[0])
    assert drawn == {(i, j): f"{one.maps[1, 2, i, j]:.2f}" for i in range(9) for j in range(i + 1)}
    longest, longer = passage("x" * WITH_VALUES), passage("x" * (WITH_VALUES + 1))
    assert len(written(heat_map(report_of(longest), longest, 0, 0).axes[0])) == WITH_VALUES * (WITH_VALUES + 1) / 2
    assert not written(heat_map(report_of(longer), longer, 0, 0).axes[0])


def written(axes) -> dict[tuple[int, int], str]:
    """The number in each cell."""
    (numbers,) = axes.collections[:1] or [None]
    if numbers is None:
        return {}
    places = [(int(i), int(j)) for j, i in numbers.get_offsets()]
    assert len(set(places)) == len(places)
    return dict(zip(places, numbers.get_gid().split(), strict=True))


@pytest.mark.thorough
def test_every_character_is_along_the_axes_up_to_100():
    text = "水浒好汉聚" * 20
    one = passage(text, layers=1, heads=1)
    axes = heat_map(report_of(one), one, 0, 0, "zh").axes[0]
    assert labels(axes) == (list(text), list(text))
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("键（被关注的词元）", "查询（当前词元）")
    longer = passage(text + "林", layers=1, heads=1)
    assert "水" not in labels(heat_map(report_of(longer), longer, 0, 0).axes[0])[0]


def test_panels_show_one_head_in_several_layers_without_padding():
    one = passage("水浒好汉聚", causal=False)
    one = Passage("padded", one.tokens, one.maps, special=[4])
    one.maps[1, 2, 0, 1] = 0
    statistics = report_of(one, layers=["plain", "dropped"])
    figure = panels(statistics, one, 2, (1, 0), "a title", "en")
    left, right = figure.axes[0], figure.axes[1]
    assert figure.get_suptitle() == "a title"
    assert [axes.get_title(loc="left").splitlines()[0] for axes in (left, right)] == ["dropped", "plain"]
    assert left.get_title(loc="left").splitlines()[1].startswith("6.2% of the cells are 0; rows sum to ")
    assert labels(left) == labels(right) == (list("水浒好汉"), list("水浒好汉"))
    numbers = written(left)
    assert len(numbers) == 16
    assert numbers[0, 1] == "0"
    assert numbers[3, 2] == f"{one.maps[1, 2, 3, 2]:.2f}"


def test_a_large_weight_is_dark_in_a_light_panel_and_bright_in_a_dark_one():
    one = passage("水浒", causal=False)
    one.maps[0, 0] = [[0.99, 0.01], [0.01, 0.99]]
    for theme, ink in (("light", "white"), ("dark", INK)):
        figure = panels(report_of(one, layers=["a", "b"]), one, 0, (0,), "", "en", theme)
        (numbers,) = (part for part in figure.axes[0].collections if "0.99" in str(part.get_gid()))
        assert np.array_equal(numbers.get_facecolor()[0], to_rgba(ink))


@pytest.mark.thorough
def test_long_texts_have_round_numbers(tmp_path):
    long = passage("水" * 450, layers=1, heads=1)
    x, _ = labels(heat_map(report_of(long), long, 0, 0).axes[0])
    assert x == ["0", "100", "200", "300", "400"]
    pooled = passage("水" * 450, layers=1, heads=1, cell=9)
    axes = heat_map(report_of(pooled), pooled, 0, 0).axes[0]
    assert labels(axes)[0] == x
    np.testing.assert_allclose(axes.get_xticks(), np.arange(0, 450, 100) / 9)


def test_title_and_bar_say_what_is_shown():
    pooled = passage("水" * 30, cell=4)
    figure = heat_map(report_of(pooled), pooled, 1, 0)
    axes, bar = figure.axes
    assert axes.get_title(loc="left") == "Layer 1 · head 0: previous 0.91"
    assert bar.get_ylabel() == "largest weight of 4 × 4 tokens"
    shown = axes.images[0].get_array()
    np.testing.assert_array_equal(shown.filled(0), np.tril(pooled.peaks[1, 0]))
    assert shown.mask[0, 1]
    assert not shown.mask[1, 0]


def test_a_title_in_chinese_has_a_chinese_colon():
    one = passage("水" * 5)
    title = heat_map(report_of(one), one, 1, 0, "zh").axes[0].get_title(loc="left")
    assert re.fullmatch(r"第 1 层 · 第 0 头：[^:]*0\.91", title)


@pytest.mark.thorough
def test_scale_says_where_it_is_cut():
    n = 200
    even = (np.tril(np.ones((n, n))) / np.arange(1, n + 1)[:, None]).astype(np.float32)
    one = Passage("even", list("x" * n), even[None, None])
    figure = heat_map(report_of(one), one, 0, 0)
    words = [t.get_text() for t in figure.axes[1].get_yticklabels()]
    assert words[-1].startswith("≥ ")
    assert figure.axes[0].images[0].norm.vmax < 0.2


@pytest.mark.thorough
def test_weights_that_are_not_finite_are_drawn_as_none(tmp_path):
    one = passage("abcd")
    one.maps[0, 0] = np.nan
    write_pngs(report_of(one), tmp_path)


@pytest.mark.thorough
def test_one_character_and_no_weight_at_all(tmp_path):
    one = Passage("水", ["水"], np.zeros((1, 1, 1, 1), np.float32))
    assert len(write_pngs(report_of(one), tmp_path)) == 2


@pytest.mark.parametrize(
    "title", ["The tiger sleeps in the shade of the old tree.", "武松打虎，虎死了，众人都来看。" * 3]
)
def test_the_overviews_title_is_whole_and_in_the_picture(title):
    figure = overview(report_of(passage("abc", layers=1, heads=1), title=title), passage("abc", layers=1, heads=1))
    lines = figure.get_suptitle().split("\n")
    assert len(lines) > 1
    assert "".join(lines).replace(" ", "") == title.replace(" ", "")
    pixels(figure)
    box = figure._suptitle.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width


def test_overview_has_a_map_a_head(chinese):
    figure = overview(chinese, chinese.passages[0])
    assert len(figure.axes) == 6
    assert [a.get_xlabel() for a in figure.axes[:3]] == ["previous 0.91", "first 0.80", "tendency: nearby 0.40"]


@pytest.mark.parametrize(("n", "limit"), [(7, 7), (7, 3), (100, 9), (12, 6)])
def test_smaller_maps_keep_their_largest_weights(n, limit):
    weight = weights(n, 1, 1, causal=False)[0, 0]
    small = reduced(weight, limit)
    step = -(-n // limit)
    assert max(small.shape) <= limit
    for i, j in np.ndindex(small.shape):
        assert small[i, j] == weight[i * step : (i + 1) * step, j * step : (j + 1) * step].max()


def test_loss_curve_is_drawn_from_a_log(tmp_path):
    log = [
        {"step": s, "train_loss": 5 - s / 9, "heldout_loss": 5.1 - s / 9, "heldout": {"all": 5.1, "水浒": 5.2}}
        for s in range(1, 9)
    ]
    loss_curve(log, tmp_path / "loss.png", {"bigram": 4.2, "5-gram": 4.19})
    loss_curve([{k: v for k, v in line.items() if k != "heldout"} for line in log[:1]], tmp_path / "one.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="log"):
        loss_curve([], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch, chinese):
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        write_pngs(chinese, tmp_path / "pictures")
    assert not (tmp_path / "pictures").exists()


@pytest.mark.thorough
def test_pictures_leave_the_users_matplotlib_as_it_was(chinese):
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    overview(chinese, chinese.passages[0])
    assert dict(mpl.rcParams) == before
