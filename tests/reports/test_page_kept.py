"""What holds on every page, in a real browser: files that open, labels, colours of roles, and sizes."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from view_samples import compared, label, passage, report_of

from chromium import Page
from headwise.reports.data import Passage
from headwise.reports.page import write_report
from headwise.reports.see import see

OPENING = (
    "《水浒传》施耐庵\n\n楔子 张天师祈禳瘟疫 洪太尉误走妖魔\n\n话说大宋仁宗天子在位，嘉佑三年三月三日五"
    "更三点，天子驾坐紫哀殿，受百官朝贺。但见：\n\n祥云迷凤阁，瑞气罩龙楼。含烟御柳拂篮旗，带露宫花迎剑戟"
    "。天香影里，玉吞珠履聚丹墀；仙乐声中，绣袄锦衣扶御驾。珍珠帘卷，黄金殿上现金舆；凤羽扇开，白王阶前停"
    "宝辇。隐隐净鞭三下响，层层文武两班齐。\n\n当有殿头官喝道：“有事出班早奏，无事卷帘退朝。”只见班部丛"
    "中，宰相赵哲、参政文彦博出班奏曰：“目今京师瘟疫盛行，伤损军民甚多。伏望陛下释罪宽恩，省刑薄税，祈禳"
)  # of Water Margin, 250 characters


def colours(page: Page, script: str) -> np.ndarray:
    """Colours [n, 3] in a picture: `script` is a promise of a source of pixels, its size and points (x, y) in it."""
    found = page.do(
        f"(async () => {{ const [source, width, height, points] = await ({script});"
        f" const g = new OffscreenCanvas(width, height).getContext('2d', {{ willReadFrequently: true }});"
        f" g.drawImage(source, 0, 0); return points.map(([x, y]) => [...g.getImageData(x, y, 1, 1).data].slice(0, 3));"
        f" }})()"
    )
    return np.array(found, float)


@pytest.mark.thorough
@pytest.mark.browser
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_saved_picture_has_the_colours_of_the_page(show, theme: str) -> None:
    maps = np.full((1, 1, 5, 5), 0.02, np.float32)
    maps[0, 0, 3, 1] = 0.9
    page = show(report_of(Passage("t", list("abcde"), maps)), theme=theme)
    page.do("document.querySelector('#save-png').click()")
    page.wait("files.length")
    wide, high = page.do(
        "createImageBitmap(files[0]).then((b) => { const c = document.querySelector('#map-base');"
        " return [b.width / c.clientWidth, b.height / c.clientHeight]; })"
    )
    assert wide == pytest.approx(2, abs=0.02)
    assert high > 2.1  # with a title and a colour bar
    strongest = (
        "(async () => { const b = await createImageBitmap(files[0]), c = document.querySelector('#map-base'),"
        " points = Array.from({ length: 400 }, (_, i) => [(i % 20 + .5) * b.width / 20,"
        " 72 + (Math.floor(i / 20) + .5) * c.clientHeight * 2 / 20]); return [b, b.width, b.height, points]; })()"
    )
    drawn = (
        "(async () => { const c = document.querySelector('#map-base'), points = Array.from({ length: 400 }, (_, i) =>"
        " [(i % 20 + .5) * c.width / 20, (Math.floor(i / 20) + .5) * c.height / 20]);"
        " return [c, c.width, c.height, points]; })()"
    )
    found, expected = colours(page, strongest), colours(page, drawn)
    assert np.ptp(expected[:300], axis=0).sum() > 100
    seen = expected.sum(1) > 0  # outside of the map, the canvas is transparent
    same = np.abs(found - expected).sum(1)[seen] < 12
    assert same.mean() > 0.9  # letters are drawn finer in the file


@pytest.mark.thorough
@pytest.mark.browser
def test_a_difference_is_blue_where_the_first_is_larger_and_orange_where_the_second_is(show) -> None:
    maps = np.zeros((1, 2, 3, 3), np.float32)
    maps[0, :, :, 0] = 0.5
    maps[0, 0, 2, 2], maps[0, 1, 1, 1] = 0.8, 0.8
    page = show(report_of(Passage("t", list("abc"), maps)), "tab=sides&beside=0.0.0-0.0.1")
    page.wait("document.querySelector('#differences').children.length")
    found = colours(
        page,
        "(async () => { const c = document.querySelector('#side-d-base'), points = []; for (let i = 0; i < 900; i++)"
        " points.push([(i % 30 + .5) * c.width / 30, (Math.floor(i / 30) + .5) * c.height / 30]);"
        " return [c, c.width, c.height, points]; })()",
    ).reshape(30, 30, 3)
    strong = found.max(2) - found.min(2) > 90
    blue, orange = strong & (found[..., 2] > found[..., 0]), strong & (found[..., 0] > found[..., 2])
    middle = [np.argwhere(which).mean(0) for which in (blue, orange)]
    assert (middle[0] > middle[1] + 3).all()  # the last token is below and right of the second one


@pytest.mark.thorough
@pytest.mark.browser
def test_blanks_around_words_are_no_part_of_their_labels(show) -> None:
    shown = report_of(passage(["The", " tiger", "  ", "\n", " is", "\u00a0"], causal=False))
    page = show(shown, "layer=0&head=2&text=arcs&pin=1")
    labels = page.do("[...document.querySelectorAll('#arcs text')].map((e) => e.textContent)")
    assert labels[:6] == ["The", "tiger", "␣␣", "↵", "is", "⍽"]
    listed = page.do("[...document.querySelectorAll('#tops h3')].map((e) => e.textContent)")
    assert listed == ["“tiger” attends most to", "“tiger” is attended most by"]


@pytest.mark.browser
@pytest.mark.thorough
def test_numbers_below_a_narrow_map_do_not_meet(show) -> None:
    rows = [str(i) for i in range(120)]
    shown = Passage("t", rows, np.full((1, 2, 120, 4), 0.25, np.float32), keys=list("abcd"))
    page = show(report_of(shown), "layer=0&head=0")
    labels = page.do("""new Promise((done) => {
      const canvas = document.querySelector("#map-base"), found = [], kind = CanvasRenderingContext2D.prototype;
      const write = kind.fillText, number = /^\\d+$/;
      kind.fillText = function (text, x, ...more) {
        const half = this.measureText(text).width / 2;
        const below = this.canvas === canvas && this.textAlign === "center" && number.test(text);
        if (below) found.push([x - half, x + half]);
        return write.call(this, text, x, ...more);
      };
      document.querySelector("#theme").click();
      setTimeout(() => done(found), 300);
    })""")
    assert len(labels) >= 2
    assert all(one[1] < other[0] for one, other in pairwise(labels))


@pytest.mark.thorough
@pytest.mark.browser
def test_a_role_has_one_colour_in_every_report_and_place(show) -> None:
    first = show(compared(), "layer=0&head=0")
    one = "getComputedStyle(document.querySelector('#map-pattern i')).backgroundColor"
    colour = first.do(one)
    assert colour != "rgba(0, 0, 0, 0)"
    rows = [[[], [label("previous", 0.4, sure=False)], [label("previous", 0.99)]]] * 2
    second = show(report_of(passage("abcd"), labels=rows), "layer=1&head=2", theme="dark")
    assert second.do(one) == colour
    dots = "[...document.querySelectorAll('#patterns button')].find((e) => e.textContent.includes('previous'))"
    assert second.do(f"getComputedStyle({dots}.querySelector('i')).backgroundColor") == colour
    thumb = "getComputedStyle(document.querySelectorAll('.thumb')[5].querySelector('i')).backgroundColor"
    assert second.do(thumb) == colour
    kinds = "[...document.querySelectorAll('#patterns button')].map((e) => e.textContent)"
    assert second.do(kinds) == ["previous2", "tendency: previous2"]
    grey = "getComputedStyle(document.querySelectorAll('.thumb')[4].querySelector('i')).backgroundColor"
    assert second.do(grey) == "rgb(155, 155, 163)"


@pytest.mark.browser
@pytest.mark.thorough
def test_marks_that_turn_the_line_are_shown_as_codes_in_every_view(show) -> None:
    tokens = ["a", "\u202e", "\u200f", "e", "\u0301", "\x1b", "\x00", "👩\u200d👩\u200d👧", "\u2067x"]
    page = show(report_of(passage(tokens, causal=False)), "layer=0&head=2&text=arcs&pin=1")
    words = page.do("document.querySelector('#arcs').textContent + document.querySelector('#tops').textContent")
    assert "U+202E" in words
    assert not set("\u202e\u200f\x1b\x00") & set(words)
    page.do("document.querySelector('#save-svg').click()")
    saved = page.do("files[0].text()")
    page.do("document.querySelector('#save-csv').click()")
    table = page.do("files[1].text()")
    assert not set("\u202e\u200f\x1b\x00") & set(saved)
    assert "\x1b" not in table
    assert json.dumps("\x1b").strip('"') in table


@pytest.mark.thorough
def test_the_page_of_250_characters_over_the_32_heads_of_the_embedded_decoder_is_small(tmp_path: Path) -> None:
    report = see(OPENING, out=tmp_path / "see.html")
    assert (len(report.passages[0].tokens), len(report.heads)) == (250, 32)
    assert (tmp_path / "see.html").stat().st_size <= 1_460_000


@pytest.mark.thorough
def test_the_page_of_250_tokens_over_32_heads_and_that_of_35_000_characters_are_small(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    text = "".join(chr(0x4E00 + int(c)) for c in rng.integers(0, 3000, 35_000))
    short = report_of(passage(text[:250], layers=4, heads=8))
    assert write_report(short, tmp_path / "short.html").stat().st_size <= 1_500_000
    long = passage(text[:368], layers=4, heads=8)  # as many cells as a page has at most
    long = Passage("long", list(text[: 368 * 95]), long.maps, 95, np.minimum(long.maps * 3, 1))
    assert write_report(report_of(long), tmp_path / "long.html").stat().st_size <= 8_000_000
