"""What notebooks show: maps, reports, records and layers as pictures, with a page that zooms in a frame above; opened
in a browser as Jupyter, VS Code and notebooks without scripts show it."""

import base64
import html
import io
import re
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from settled import SETTLED
from view_samples import HOSTILE, compared, passage, report_of

import headwise as hw
from chromium import Browser, Page
from headwise.reports import write_report
from headwise.reports.colours import heat_png, stops


@pytest.fixture
def tab(chromium: Browser) -> Iterator[Page]:
    page = chromium.page(900, 1000)
    yield page
    page.close()


def amap(b: int = 1, h: int = 3, n: int = 11, m: int = 11, **options) -> hw.AttentionMap:
    torch.manual_seed(0)
    q, k = torch.randn(b, h, n, 8), torch.randn(b, h, m, 8)
    return hw.attend(q, k, k, mask=hw.Causal(), return_map=True, **options)[1]


def pixels(page: str) -> list[np.ndarray]:
    """The colours of every picture in the page, [rows, columns, 3] from 0 to 255."""
    image = pytest.importorskip("matplotlib.image")
    found = re.findall(r'src="data:image/png;base64,([^"]*)"', page)
    return [(image.imread(io.BytesIO(base64.b64decode(code)))[..., :3] * 255).round() for code in found]


def frames(page: str) -> list[str]:
    """The pages in the frames of a notebook's cell."""
    return [html.unescape(source) for source in re.findall(r'srcdoc="([^"]*)"', page)]


def record(maps: str) -> hw.telemetry.Record:
    """Of a model of two layers with three heads, which ran once."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.TransformerEncoderLayer(12, 3, 17, batch_first=True) for _ in range(2)))
    with hw.watch(model.eval(), measures=["max_logit", "entropy"], maps=maps) as found, torch.no_grad():
        model(torch.randn(2, 11, 12))
    return found


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


@pytest.mark.thorough
def test_a_large_map_is_pooled_and_says_so():
    page = amap(b=2, h=17, n=500, m=501)._repr_html_()
    assert page.count("<img") == 12
    assert "12 of 17 heads, entry 0 of the batch of 2: queries down, keys across, mean over squares of 7 × 7" in page
    assert [len(frame) < 2_000_000 for frame in frames(page)] == [True]
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


@pytest.mark.browser
@pytest.mark.thorough
@pytest.mark.parametrize("shown", ["map", "table", "report", "hostile report", "record", "layer"])
def test_a_notebook_cell_opens_without_a_word_in_the_console(chromium: Browser, tab: Page, tmp_path: Path, shown):
    table = hw.HeadTable({HOSTILE: hw.table.HeadColumn([[1.0, 2.0], [3.0]], description=HOSTILE)}, title=HOSTILE)
    text = "武松打虎。" if shown == "report" else HOSTILE
    cell = {
        "map": lambda: amap()._repr_html_(),
        "table": lambda: table._repr_html_(),
        "report": lambda: compared()._repr_html_(),
        "record": lambda: record("pooled")._repr_html_(),
        "layer": lambda: hw.TransformerBlock(hw.MultiHeadAttention(12, 3), 17)._repr_html_(),
        "hostile report": lambda: report_of(passage(text, text), title=text, notes=[text])._repr_html_(),
    }[shown]()
    path = tmp_path / "cell.html"
    path.write_text(f'<!doctype html><meta charset="utf-8"><title>cell</title>{cell}', encoding="utf-8")
    before = chromium.console()
    tab.open(path.as_uri())
    tab.do(SETTLED)
    assert chromium.console() == before
    document = tab.do("document.documentElement.outerHTML")
    assert (
        document.count("<img")
        == {"map": 3, "table": 0, "report": 6, "hostile report": 6, "record": 8, "layer": 0}[shown]
    )
    assert document.count("<iframe") == (shown in ("map", "report", "hostile report"))
    assert "<script" not in document


@pytest.mark.thorough
def test_the_frame_of_a_map_has_every_head_and_what_was_not_given_is_a_number():
    (page,) = frames(amap(b=2, h=5)._repr_html_())
    assert '"heads":5' in page
    assert '"tokens":["0","1","2"' in page
    frame = amap()._repr_html_()
    assert 'sandbox="allow-scripts allow-downloads"' in frame  # not allow-same-origin: no way to the notebook


@pytest.mark.thorough
def test_a_map_is_shown_with_its_tokens():
    found = hw.show(amap(), pieces=[f"tok{i}" for i in range(11)], title="Mine", lang="zh")
    assert found.passages[0].tokens[3] == "tok3"
    (page,) = frames(found._repr_html_())
    assert '<html lang="zh">' in page
    assert "tok10" in page
    with pytest.raises(hw.ConfigError, match=r"show\(text=…\): does not apply to AttentionMap; give tokens=…"):
        hw.show(amap(), text="eleven tokens")


@pytest.mark.parametrize("maps", ["lazy", "pooled"])
def test_a_record_shows_each_head_and_each_statistic_beside_its_table(maps):
    page = record(maps)._repr_html_()
    assert re.findall(r'alt="(L\dH\d)"', page) == [f"L{layer}H{head}" for layer in range(2) for head in range(3)]
    assert re.findall(r'alt="(max logit|entropy):', page) == ["max logit", "entropy"]
    assert page.count("<tr><td>") >= 6
    assert "<iframe" not in page


def test_a_record_without_maps_shows_its_statistics():
    page = record("none")._repr_html_()
    assert re.findall(r'alt="([^":]*)', page) == ["max logit", "entropy"]
    assert "hw.show" not in page


@pytest.mark.thorough
def test_a_record_is_shown_with_its_tokens():
    found = hw.show(record("lazy"), pieces=[[f"tok{i}" for i in range(11)]] * 2)
    assert found.passages[1].tokens[3] == "tok3"


HOSTILE_LAYER = HOSTILE.replace(".", "")  # no dot is possible in a module's name


@pytest.mark.parametrize("maps", ["lazy", "pooled", "none"])
def test_names_of_layers_are_text_in_a_record_and_its_report(maps):
    torch.manual_seed(0)
    model, layer = torch.nn.Sequential(), torch.nn.TransformerEncoderLayer(12, 3, 17, batch_first=True)
    model.add_module(HOSTILE_LAYER, layer)
    with hw.watch(model.eval(), measures=["entropy"], maps=maps) as found, torch.no_grad():
        model(torch.randn(2, 11, 12))
    pages = [found._repr_html_(), found.table()._repr_html_()]
    if maps == "lazy":
        pages.append(hw.show(found, pieces=[[HOSTILE] * 11] * 2)._repr_html_())
    for page in pages:
        assert "<img src=x" not in page
        assert "<!--" not in page
    assert any(html.escape(HOSTILE_LAYER) in page for page in pages)
    for frame in (frame for page in pages for frame in frames(page)):
        assert "<img src=x" not in frame


@pytest.mark.parametrize("design", hw.nn.DESIGNS)
def test_each_design_shows_its_steps_and_parameters(design):
    layer = hw.nn.DESIGNS[design].build(12, 6).train()
    page = layer._repr_html_()
    assert f"<b>{type(layer).__name__}(d_model=" in page
    assert page.count("<table>") == 2
    assert f"<td>{sum(p.numel() for p in layer.parameters()):,}</td>" in page
    assert layer.training


@pytest.mark.thorough
def test_a_notebook_in_chinese_has_chinese_words(monkeypatch):
    monkeypatch.setenv("HEADWISE_LANG", "zh")
    assert "共 3 个头，显示 3 个" in amap()._repr_html_()
    assert "合计" in hw.MultiHeadAttention(12, 3)._repr_html_()
    assert "每个统计量一张图" in record("pooled")._repr_html_()
    assert '<html lang="zh">' in frames(compared()._repr_html_())[0]


@pytest.mark.thorough
def test_many_heads_have_a_limited_number_of_pictures():
    from headwise.reports.notebook import MOST, small_maps

    page = small_maps([[np.eye(3)] * 31] * 17, range(17), "en")
    assert page.count("<img") == MOST // 31 * 31
    assert f"… and {17 * 31 - MOST // 31 * 31} more heads" in page


def test_a_small_picture_has_the_means_of_squares():
    from headwise.reports.notebook import reduced

    matrix = np.arange(35.0).reshape(5, 7)
    assert reduced(matrix, 3).shape == (2, 3)
    assert reduced(matrix, 3)[0, 0] == matrix[:3, :3].mean()
    assert reduced(matrix, 3)[1, 2] == matrix[3:, 6:].mean()
    assert reduced(matrix, 7) is matrix


# The policy of the page in which VS Code shows outputs: inline scripts, no network but https.
VS_CODE = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src https: http: data:; font-src https:; connect-src https:; child-src https: data:"
)


def cell(tab: Page, tmp_path: Path, shown: str, policy: str = "") -> None:
    """A cell's output in a page. The frame may be looked into, which it may not in a notebook."""
    shown = shown.replace('sandbox="allow-scripts', 'sandbox="allow-same-origin allow-scripts')
    head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
    (tmp_path / "cell.html").write_text(f"<!doctype html>{head}<title>cell</title>{shown}", encoding="utf-8")
    tab.open((tmp_path / "cell.html").as_uri())


@pytest.mark.thorough
@pytest.mark.browser
@pytest.mark.parametrize("policy", [VS_CODE, "default-src * data: 'unsafe-inline'"], ids=["vscode", "open"])
def test_the_frame_runs_and_covers_the_pictures(tab, tmp_path, policy):
    cell(tab, tmp_path, amap()._repr_html_(), policy)
    inside = "document.querySelector('iframe').contentDocument"
    tab.wait(f"{inside}.querySelector('#map-title')?.textContent.startsWith('Layer 0')")
    assert tab.do("document.elementFromPoint(90, 90).tagName") == "IFRAME"
    assert tab.do(f"{inside}.querySelectorAll('#grid canvas').length") == 3


@pytest.mark.thorough
@pytest.mark.browser
@pytest.mark.parametrize("shown", ["map", "report"])
def test_without_scripts_there_are_pictures(tab, tmp_path, shown):
    tab.send("Emulation.setScriptExecutionDisabled", value=True)
    try:
        cell(tab, tmp_path, {"map": amap, "report": compared}[shown]()._repr_html_())
        pictures = "[...document.querySelector('iframe').contentDocument.querySelectorAll('img')]"
        tab.wait(f"{pictures}.length && {pictures}.every((one) => one.complete)")
        assert tab.do(
            f"{pictures}.filter((one) => one.naturalWidth && one.getBoundingClientRect().height > 20).length"
        ) == (3 if shown == "map" else 6)
        main = "document.querySelector('iframe').contentDocument.querySelector('main')"
        assert tab.do(f"{main}.getBoundingClientRect().height") == 0
    finally:
        tab.send("Emulation.setScriptExecutionDisabled", value=False)


@pytest.mark.thorough
@pytest.mark.browser
def test_without_frames_there_are_pictures(tab, tmp_path):
    """As JupyterLab shows a notebook that is not trusted, and GitHub every one."""
    cell(tab, tmp_path, re.sub("<iframe.*?</iframe>", "", compared()._repr_html_(), flags=re.DOTALL))
    pictures = "[...document.querySelectorAll('img')]"
    assert tab.do(f"{pictures}.filter((one) => one.getBoundingClientRect().height > 20).length") == 6
    assert tab.do("document.elementFromPoint(90, 120).closest('table') !== null")


@pytest.mark.thorough
def test_a_notebook_runs_and_its_outputs_are_html():
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    cells = [
        "import torch, headwise as hw\nq = torch.randn(1, 3, 11, 8)\nhw.attend(q, q, q, return_map=True)[1]",
        "hw.show(text='武松打虎，又打虎。')",
        "hw.MultiHeadAttention(12, 3)",
        "hw.HeadTable({'a': [[1.0, 2.0], [3.0]]})",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(one) for one in cells])
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    outputs = [one for entry in notebook.cells for one in entry.outputs if one.output_type == "execute_result"]
    shown = [one.data["text/html"] for one in outputs]
    assert ["<iframe" in one for one in shown] == [True, True, False, False]
    assert ["<img" in one for one in shown] == [True, True, False, False]
    assert all(not re.search(r"(src|href)=\"?(https?:)?//", one) for one in shown)


def test_a_map_of_a_model_is_named_as_its_layer():
    first, second = record("lazy").maps.values()
    assert (amap().layer, first.layer, second.layer) == ("", "0.self_attn", "1.self_attn")
    assert second.using("auto").layer == second.clone().layer == "1.self_attn"
    page = second._repr_html_()
    assert "AttentionMap(1.self_attn: 2 × 3 heads" in page
    assert "<figcaption><small>head 2</small></figcaption>" in page
    assert '<h1 title="1.self_attn">1.self_attn</h1>' in frames(page)[0]
    one = second.head(1, 2)
    page = one._repr_html_()
    assert repr(one).startswith("AttentionMap(1.self_attn, head 2: 1 × 1 heads, ")
    assert "<title>1.self_attn, head 2</title>" in frames(page)[0]
    assert "<figcaption><small>head 2</small></figcaption>" in page
    assert hw.show(one, lang="zh").title.zh == "1.self_attn，第 2 头"
    assert hw.show(amap()).title == "Attention map"


@pytest.mark.browser
def test_a_page_of_one_map_says_which_layer_it_is(tab: Page, tmp_path: Path):
    second = record("lazy").maps["1.self_attn"]
    said = {}
    for name, shown in {"map": second, "head": second.head(0, 2)}.items():
        write_report(hw.show(shown, lang="en"), tmp_path / f"{name}.html", lang="en")
        tab.open((tmp_path / f"{name}.html").as_uri())
        tab.do(SETTLED)
        said[name] = tab.do("document.querySelector('#map-title').textContent")
        assert tab.do("document.querySelector('#layer').parentElement.hidden")
    assert re.fullmatch(r"1\.self_attn · H\d", said["map"])
    assert said["head"] == "1.self_attn"
