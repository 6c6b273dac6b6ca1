"""What notebooks show: maps as small pictures, reports in a frame, tables in colour; all of it opened in a browser."""

import base64
import io
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from test_views_browser import BROWSER, opened
from view_samples import HOSTILE, compared, passage, report_of

import headwise as hw
from headwise.pictures.colours import stops
from headwise.pictures.png import heat_png

needs_browser = [pytest.mark.browser, pytest.mark.skipif(BROWSER is None, reason="no Chromium here")]


def amap(b: int = 1, h: int = 3, n: int = 11, m: int = 11, **options) -> hw.AttentionMap:
    torch.manual_seed(0)
    q, k = torch.randn(b, h, n, 8), torch.randn(b, h, m, 8)
    return hw.attend(q, k, k, mask=hw.Causal(), return_map=True, **options)[1]


def pixels(page: str) -> list[np.ndarray]:
    """The colours of every picture in the page, [rows, columns, 3] from 0 to 255."""
    image = pytest.importorskip("matplotlib.image")
    found = re.findall(r'src="data:image/png;base64,([^"]*)"', page)
    return [(image.imread(io.BytesIO(base64.b64decode(code)))[..., :3] * 255).round() for code in found]


def test_a_matrix_becomes_a_png_of_its_colours():
    page = f'src="data:image/png;base64,{base64.b64encode(heat_png(np.array([[0.0, 1.0, np.nan]]))).decode()}"'
    ends = [[int(stop[i : i + 2], 16) for i in (1, 3, 5)] for stop in (stops("light")[0], stops("light")[-1])]
    assert pixels(page)[0].tolist() == [[ends[0], ends[1], ends[0]]]


def test_a_map_shows_its_heads_and_exact_weights():
    shown = amap(h=5)
    page = shown._repr_html_()
    assert page.count("<img") == 5
    assert "AttentionMap(1 × 5 heads, 11 queries × 11 keys" in page
    found, weights = pixels(page)[3], shown[0, 3].numpy()
    dark = -found.sum(-1)
    assert (np.argsort(dark[10]) == np.argsort(weights[10])).mean() > 0.7  # equal shades aside
    assert (found[0, 1:] == found[0, 1]).all()  # what is masked has one colour
    assert shown.read_by == {"weights": shown.read_by["weights"]}  # that a map is shown is no reading of it


def test_a_large_map_is_pooled_and_says_so():
    page = amap(b=2, h=17, n=500, m=501)._repr_html_()
    assert page.count("<img") == 12
    assert "12 of 17 heads, entry 0 of the batch of 2: queries down, keys across, mean over squares of 7 × 7" in page
    assert pixels(page)[0].shape == (72, 72, 3)


def test_a_decoding_step_is_a_strip():
    page = amap(n=1, m=700)._repr_html_()
    assert pixels(page)[0].shape[:2] == (1, 70)
    assert 'width="144" height="12"' in page


def test_a_map_of_100_000_tokens_shows_only_facts_at_once():
    q, lse = torch.zeros(1, 2, 100_000, 8), torch.zeros(1, 2, 100_000)
    rule = hw.attend(q[:, :, :1], q, q, return_map=True)[1].rule
    from dataclasses import replace

    large = hw.AttentionMap(q, q, lse, replace(rule, grid=replace(rule.grid, n=100_000)))
    start = time.perf_counter()
    page = large._repr_html_()
    assert time.perf_counter() - start < 1
    assert "<img" not in page
    assert "100000 queries" in page
    assert "pool(512)" in page


def test_a_map_without_numbers_and_one_whose_kernel_makes_no_pictures_show_facts():
    with torch.device("meta"):
        q = torch.randn(1, 2, 5, 8)
    page = hw.attend(q, q, q, return_map=True)[1]._repr_html_()
    assert "5 queries" in page
    assert "<img" not in page
    page = amap(kernel="torch_fused")._repr_html_()
    assert "torch_fused" in page
    assert "<img" not in page


@pytest.mark.parametrize("shown", ["map", "table", "report", "hostile report"])
@pytest.mark.parametrize("_", [pytest.param(0, marks=needs_browser)])
def test_a_notebook_cell_opens_without_a_word_in_the_console(tmp_path: Path, shown, _):
    table = hw.HeadTable({HOSTILE: hw.HeadColumn([[1.0, 2.0], [3.0]], description=HOSTILE)}, title=HOSTILE)
    text = "武松打虎。" if shown == "report" else HOSTILE
    cell = {
        "map": lambda: amap()._repr_html_(),
        "table": lambda: table._repr_html_(),
        "report": lambda: compared()._repr_html_(),
        "hostile report": lambda: report_of(passage(text, text), title=text, notes=[text])._repr_html_(),
    }[shown]()
    path = tmp_path / "cell.html"
    path.write_text(f'<!doctype html><meta charset="utf-8"><title>cell</title>{cell}', encoding="utf-8")
    document, console = opened(path, tmp_path)
    assert console == []
    assert document.count("<img") == (3 if shown == "map" else 0)
    assert document.count("<iframe") == ("report" in shown)
    assert "<script" not in document
