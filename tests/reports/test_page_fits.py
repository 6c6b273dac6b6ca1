"""What fits on the page: tables, lists and numbers in their cards; and ranges that are only rounding are none."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from settled import SETTLED
from view_samples import column, compared, passage, report_of

from chromium import Page
from headwise.reports.data import value_range
from headwise.reports.page import source
from headwise.table import HeadTable

pytestmark = pytest.mark.browser

NAMES = (
    "entropy", "normalized_entropy", "effective_keys", "top1_mass", "max_logit", "mean_distance", "local_mass",
    "sink_mass", "previous_mass", "self_mass", "received_mass", "punctuation_mass",
)  # fmt: skip
# Texts that stick out of the card that they are in.
OUTSIDE = """
[...document.querySelectorAll(".panel")].flatMap((panel) => {
  const right = panel.getBoundingClientRect().right;
  return [...panel.querySelectorAll(".tops *, .columns *, #differences *")]
    .filter((e) => e.getBoundingClientRect().right > right).map((e) => e.textContent.slice(0, 20));
})
"""


def wide(lang: str):
    """Every statistic that `see` gives, and patterns of two parts."""
    rng = np.random.default_rng(1)
    columns = {name: column(rng.random((2, 3)) * 10, [3, 3], "tokens", "A statistic.") for name in NAMES}
    comma, words = (", ", ["punctuation 0.23", "nearby 0.73"]) if lang == "en" else ("，", ["标点 0.23", "邻近 0.73"])
    return replace(
        report_of(passage("The tiger sleeps.")), statistics=HeadTable(columns), patterns=[[comma.join(words)] * 3] * 2,
    )  # fmt: skip


def at_widths(page: Page, *widths: int) -> Iterator[int]:
    """The window takes one width after the other, and the page has drawn itself anew."""
    for width in widths:
        page.resize(width, 1000)
        page.do(SETTLED)
        assert page.do("innerWidth") == width
        yield width


@pytest.mark.thorough
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_table_of_all_heads_fits_its_card_and_breaks_no_pair(show, lang):
    page = show(wide(lang), lang=lang)
    box = "document.querySelector('.numbers-panel .scroll')"
    high = "[...document.querySelectorAll('td.word span')].map((e) => e.getClientRects().length)"
    for width in at_widths(page, 1400, 1300, 1200):
        sizes = page.do(f"[{box}.scrollWidth, {box}.clientWidth]")
        assert sizes[0] <= sizes[1], width
        assert set(page.do(high)) == {1}, width
    assert page.do("document.querySelector('#table tbody tr').lastChild.textContent").count("0.") == 2


@pytest.mark.thorough
@pytest.mark.parametrize("heads", [12, 16])
def test_the_small_maps_of_all_heads_fit_their_card(show, heads):
    page = show(report_of(passage("The tiger sleeps.", layers=6, heads=heads)))
    box = "document.querySelector('.grid-panel .scroll')"
    for width in at_widths(page, 1440, 1280):
        sizes = page.do(f"[{box}.scrollWidth, {box}.clientWidth]")
        assert sizes[0] <= sizes[1], width


@pytest.mark.thorough
def test_lists_of_a_pooled_text_stay_in_their_cards(show):
    page = show(report_of(passage("abcdefghijklmnopqrstuvwxyz" * 12, cell=40)), "pin=4")
    for width in at_widths(page, 1400, 1000, 360):
        assert page.do(OUTSIDE) == [], width


@pytest.mark.thorough
def test_numbers_of_importance_fit_their_cells(show):
    page = show(compared(), "tab=compare")
    cells = "[...document.querySelectorAll('.weight-cell')].map((e) => e.scrollWidth - e.clientWidth)"
    for width in at_widths(page, 1000, 500, 360):
        assert max(page.do(cells)) <= 0, width
        assert page.do(OUTSIDE) == [], width


def rounded():
    """Heads that differ by rounding only: in a statistic about 1, in one about 0, and in the weights of one token."""
    noise = np.array([[0, 3, -4], [5, -2, 1]]) * 1e-7
    one = passage("a")
    maps = (1 + noise[..., None, None]).astype(np.float32)
    columns = {"top1_mass": 1 + 3 * noise, "entropy": noise / 2}
    columns = {name: column(values, [3, 3], "mass", "A statistic.") for name, values in columns.items()}
    return replace(report_of(replace(one, maps=maps)), statistics=HeadTable(columns))


@pytest.mark.thorough
def test_a_range_of_rounding_is_none(show):
    page = show(rounded(), "pin=0")
    cells = "[...document.querySelectorAll('#table td.meter')]"
    wide = "Math.round(parseFloat(e.style.backgroundSize))"
    assert page.do(f"{cells}.map((e) => [e.textContent, {wide}])") == [["1.000", 44], ["0.000", 0]] * 6
    ticks = """
    [...document.querySelectorAll("#card canvas")].map((canvas) => {
      const { width, height } = canvas, found = [];
      const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
      const row = Math.round(height / 2) - 3;  // above the line, within the strokes
      for (let x = 0; x < width; x++) if (data[4 * (width * row + x) + 3]) found.push(x / width);
      return found;
    })
    """
    for found in page.do(ticks):
        assert found
        assert max(abs(x - 0.5) for x in found) < 0.05
    page.wait("document.querySelectorAll('#everywhere ol').length === 2")
    names = "[...document.querySelectorAll('#everywhere ol')].map((e) => e.innerText.match(/L\\dH\\d/g).join(' '))"
    assert page.do(names) == ["L0H0 L0H1 L0H2 L1H0 L1H1 L1H2"] * 2


RANGES = [
    ([1, 1 - 3e-6, np.nan], (1, 1)), ([1, 1 - 3e-5], (1 - 3e-5, 1)), ([0, 3e-7, -1e-7], (0, 0)),
    ([-0.0, 2e-6], (0, 2e-6)), ([500, 500.001], (500.001, 500.001)), ([np.inf, np.nan], (0, 0)), ([], (0, 0)),
]  # fmt: skip


@pytest.mark.thorough
def test_page_and_pictures_have_the_same_ranges(new_page):
    page = new_page()
    for values, expected in RANGES:
        array = np.array(values, dtype=np.float64)
        assert value_range(array) == expected
        shown = ", ".join(str(float(x)) if np.isfinite(x) else "null" for x in array)
        assert tuple(page.do(f"{{ {source('numbers.js')}; valueRange([{shown}]) }}")) == expected
