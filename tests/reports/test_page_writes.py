"""What a head writes, in a report of the embedded decoder and on its page."""

import json

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.errors import ConfigError, ShapeError
from headwise.lm.loading import load_model
from headwise.reports import Report, write_report
from headwise.reports.data import Passage, Writes
from parameters import thorough

TEXT = "武松打虎，武松又打虎。𠀀虎"  # 𠀀 is read as four bytes


@pytest.fixture(scope="module")
def report() -> Report:
    return hw.see(TEXT)


@pytest.mark.thorough
def test_writes_of_the_embedded_decoder(report):
    writes, loaded = report.passages[0].writes, load_model(None)
    reading = loaded.read(TEXT)
    n = len(TEXT)
    assert writes.norms.shape == writes.next_token.shape == (4, 8, n)
    norms = hw.analysis.value_norms(loaded.model, lambda: loaded.maps(reading.ids))
    np.testing.assert_allclose(writes.norms[2, :, :11], list(norms.values())[2][0, :, :11], rtol=1e-5)
    assert np.isnan(writes.norms[:, :, 11]).all()  # of the character of four bytes
    assert np.isnan(writes.next_token[:, :, -1]).all()
    amap = list(loaded.maps(reading.ids).values())[1]
    whole = torch.einsum("hnd,hmd->hnm", amap.q[0], amap.k[0]) * amap.rule.scale
    kept = np.einsum("hnc,hmc->hnm", writes.queries[1], writes.keys[1])
    rest = np.abs(whole.numpy()[:, :11, :11] - kept[:, :11, :11]).mean()
    assert rest < np.abs(whole.numpy()[:, :11, :11]).mean()  # these channels explain part of the scores
    for head in range(8):
        for at, channel in enumerate(writes.channels[1, head]):
            np.testing.assert_allclose(writes.keys[1, head, :11, at], amap.k[0, head, :11, channel], rtol=1e-5)


@pytest.mark.thorough
def test_a_second_text_is_a_passage_of_its_own(report):
    found = hw.see(TEXT, beside="武松打狼")
    assert [len(passage.tokens) for passage in found.passages] == [13, 4]
    np.testing.assert_array_equal(found.passages[0].maps, report.passages[0].maps)
    np.testing.assert_allclose(found.passages[1].maps[:, :, :3, :3], report.passages[0].maps[:, :, :3, :3], atol=1e-5)
    with pytest.raises(ConfigError, match="beside: requires a loaded model"):
        hw.see(torch.tensor([1, 2]), torch.nn.Linear(2, 2), beside="a")


@pytest.mark.thorough
def test_long_texts_and_other_shapes_have_none(report):
    assert hw.see(TEXT * 3, cells=16).passages[0].writes is None
    shown = report.passages[0]
    with pytest.raises(ShapeError, match=r"Writes\(norms\): shape \(4, 8, 3\)"):
        Passage("a", shown.tokens, shown.maps, writes=Writes(norms=np.zeros((4, 8, 3), np.float32)))


@pytest.mark.thorough
@pytest.mark.browser
@pytest.mark.parametrize("lang", thorough(["en", "zh"], {"zh"}))
def test_the_page_shows_what_is_written(report, chromium, tmp_path, lang):
    layer, head, query = 1, 6, 9
    page = chromium.page(1400, 1000)
    path = write_report(report, tmp_path / "report.html", lang=lang)
    page.open(f"{path.as_uri()}#layer={layer}&head={head}&pin={query}")
    page.wait("document.querySelectorAll('#writes ol').length === 3")
    shown, writes = report.passages[0], report.passages[0].writes
    ends = "[...list.children].map((li) => [li.firstChild.textContent, li.lastChild.textContent])"
    values, effects, channels = page.do(f"[...document.querySelectorAll('#writes ol')].map((list) => {ends})")
    number = lambda text: float(text.replace("−", "-").replace("+", ""))  # noqa: E731
    weights = shown.maps[layer, head, query]
    lengths = np.nan_to_num(weights * writes.norms[layer, head])
    order = np.argsort(-lengths)[: len(values)]
    assert [number(value) for _, value in values] == pytest.approx(lengths[order], rel=2e-2, abs=2e-3)
    following = writes.next_token[layer, head, query]
    top = np.nanmax(np.abs(writes.next_token[layer, head]))
    assert number(effects[0][1]) == pytest.approx(following, abs=float(top / 1023 + 0.005 * abs(following)))
    assert len(effects) == 1 + np.isfinite(writes.effects[layer, head, query]).sum()
    key = int(weights.argmax())
    products = writes.queries[layer, head, query] * writes.keys[layer, head, key]
    said = {int(name.split()[-1]): number(value) for name, value in channels}
    assert set(said) == set(writes.channels[layer, head].tolist())
    largest = np.nanmax(np.abs(writes.queries[layer, head])) * np.nanmax(np.abs(writes.keys[layer, head]))
    for channel, product in zip(writes.channels[layer, head], products, strict=True):
        assert said[channel] == pytest.approx(product, abs=float(0.04 * largest))
    assert json.dumps(page.said()) == "[]"
    page.close()
