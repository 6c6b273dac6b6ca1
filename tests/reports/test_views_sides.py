"""Maps whose queries and keys are two texts, passages of some layers only, special tokens: as data and on the page."""

import re
from dataclasses import replace

import numpy as np
import pytest
from view_samples import HOSTILE, passage, report_of, weights

from headwise.errors import ShapeError
from headwise.reports.data import Passage, Report
from headwise.table import HeadTable


def cross_report() -> Report:
    """Layers 0 and 2 look at their own text, layer 1 at another one."""
    rng = np.random.default_rng(3)
    own = Passage("own", ["[CLS]", " the", " tiger", "!"], weights(4, causal=False), layers=[0, 2], special=[0])
    maps = rng.dirichlet(np.ones(5), (1, 3, 4)).astype(np.float32)
    keys = ["武", "松", "打", "虎", HOSTILE]
    cross = Passage("cross", own.tokens, maps, keys=keys, layers=[1], special=[0])
    names = ["encoder.0", "decoder.0.cross", HOSTILE]
    spread = HeadTable({"entropy": rng.uniform(size=(3, 3))}, layers=names)
    return Report("Sides", [own, cross], spread, [["mixed"] * 3, [""] * 3, ["mixed"] * 3])


def test_layers_and_heads_are_those_of_all_passages() -> None:
    report = cross_report()
    assert report.shape == (3, 3)
    assert [report.shown_in(passage) for passage in report.passages] == [[0, 2], [1]]
    assert not report.passages[1].causal


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"keys": ["a"] * 4}, "4 keys"),
        ({"keys": []}, "at least one"),
        ({"layers": [0, 1]}, "layers"),
        ({"sentences": [(0, 2)]}, "sentences"),
    ],
)
def test_sides_that_do_not_fit_are_refused(change: dict, words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        replace(cross_report().passages[1], **change)
    with pytest.raises(ShapeError, match="ascending"):
        replace(cross_report().passages[0], layers=[2, 0])


@pytest.mark.parametrize(("layers", "heads"), [(3, 5), (2, 3), (5, 3)])
def test_passages_of_two_models_are_refused(layers: int, heads: int) -> None:
    report = report_of(passage("seven 7", layers=3, heads=3))
    tokens = ["se", "ven"]  # of another tokenizer
    other = passage(tokens, "of another model", layers=layers, heads=heads)
    refused = (
        f"'of another model' has maps of {layers} layers × {heads} heads, expected 3 × 3: a report is of one model"
    )
    with pytest.raises(ShapeError, match=re.escape(refused)):
        replace(report, passages=[*report.passages, other])


@pytest.mark.thorough
@pytest.mark.browser
def test_the_page_shows_both_texts_and_what_they_give_each_other(played) -> None:
    report = cross_report()
    steps = """
      await ready();
      const strip = (id) => all(`${id} > [data-unit]`);
      const shownLayers = () => all("#grid .thumb").filter((t) => !t.hidden).map((t) => t.layer);
      out.layers = [...one("#layer").options].map((o) => o.value);
      out.rows = [...new Set(shownLayers())];
      out.name = text("#layer-name");
      out.both = [one("#strip-keys").hidden, strip("#strip").length, strip("#strip-keys").length];
      out.chips = all("#strip .code").map((e) => e.textContent);
      out.text = text("#strip");
      out.keys = strip("#strip-keys").map((u) => u.textContent);
      out.said = await sweep(40);
      const tinted = (id) => strip(id).map((u) => u.style.backgroundImage !== "");
      point(strip("#strip")[2], "pointerover");
      out.looks = [tinted("#strip"), tinted("#strip-keys"), all("#tops h3").length];
      point(strip("#strip-keys")[1], "pointerover");
      out.looked = [tinted("#strip"), tinted("#strip-keys"), all("#tops h3").length];
      strip("#strip-keys")[1].click();
      point(strip("#strip")[3], "pointerover", { clientX: 50, clientY: 50 });
      out.pair = text("#tip");
      press(document.body, "Escape");
      await drawn(() => choose("#passage", "0"));
      const options = [...one("#layer").options].map((o) => o.value);
      out.own = [one("#strip-keys").hidden, options, [...new Set(shownLayers())]];
      await drawn(() => all("#table tbody tr")[4].click());
      out.back = [one("#passage").value, one("#layer").value, one("#head").value];
    """
    out = played(report, steps, "#passage=1&layer=1&head=1")
    maps = report.passages[1].maps[0, 1]
    assert (out["layers"], out["rows"], out["name"]) == (["1"], [1], "decoder.0.cross")
    assert out["both"] == [False, 4, 5]
    assert out["chips"] == ["[CLS]"]
    assert out["text"] == "[CLS] the tiger!" or out["text"] == "[CLS]  the tiger!"
    assert out["keys"][:4] == ["武", "松", "打", "虎"]
    assert "onerror=alert(1)" in out["keys"][4]
    assert len(out["said"]) == 20
    assert any(line.startswith("query|tiger 2") and f"|{maps[2, 1]:.3f}"[:5] in line for line in out["said"])
    assert out["looks"] == [[False] * 4, [bool(x) for x in maps[2] > 0.001], 1]
    assert out["looked"][1:] == [[False] * 5, 1]
    assert out["looked"][0] == [True] * 4
    assert out["pair"].startswith("! → 松")
    assert float(out["pair"].split("松")[1]) == pytest.approx(maps[3, 1], rel=6e-3)
    assert out["own"] == [True, ["0", "2"], [0, 2]]
    assert out["back"] == ["1", "1", "1"]
