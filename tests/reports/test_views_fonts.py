"""The font that pages and pictures carry."""

import base64
import io
import re
from pathlib import Path

import pytest
from fontTools.ttLib import TTFont
from view_samples import passage, report_of

import headwise.reports
import headwise_textbook
from headwise.reports.colours import EM, SIGNS, _rule, covered, font_face, font_path
from headwise.reports.page import write_report


def drawn(rules: str) -> dict[str, set[int]]:
    """Family → the code points that a browser takes from it."""
    found = {}
    for family, code, span in re.findall(r'font-family:"([^"]+)".*?base64,([^)]+)\).*?unicode-range:([^;]+);', rules):
        parts = [part.removeprefix("U+").partition("-") for part in span.split(",")]
        ends = [(int(first, 16), int(last or first, 16)) for first, _, last in parts]
        points = TTFont(io.BytesIO(base64.b64decode(code))).getBestCmap()
        found[family] = {p for p in points if any(first <= p <= last for first, last in ends)}
    return found


def test_font_draws_what_chinese_is_written_with():
    common = bytes(range(0xA1, 0xFF))
    level_one = {ord(bytes((high, low)).decode("gb2312")) for high in range(0xB0, 0xD7) for low in common}
    assert level_one <= covered()
    assert set(map(ord, "水滸傳〈〉，。！？：；“”‘’…—ａ（）" + SIGNS)) <= covered()


def test_font_is_free_to_ship_and_not_heavy():
    with TTFont(font_path()) as font:
        assert "Source" not in font["name"].getDebugName(1)
        assert font["name"].getDebugName(1) == "Headwise Han"
    assert "SIL OPEN FONT LICENSE Version 1.1" in (font_path().parent / "OFL.txt").read_text()
    assert font_path().stat().st_size <= 5_000_000


@pytest.mark.thorough
def test_page_brings_its_own_chinese_and_no_latin():
    face = font_face("Water 水浒“传” é…")
    assert drawn(face) == {"Headwise Han": set(map(ord, "水浒传" + SIGNS)), "Headwise Han Quotes": set(map(ord, "“”…"))}
    text = "武水、Ａ—‘’“”…·"
    assert set.union(*drawn(font_face(text)).values()) == set(map(ord, text + SIGNS))


def test_quotation_marks_stay_narrow_where_there_is_no_chinese():
    assert drawn(font_face("“quoted” — 🐯")) == {"Headwise Han": set(map(ord, SIGNS))}


@pytest.mark.thorough
def test_page_with_every_character_stays_small():
    assert len(font_face("".join(map(chr, covered())))) < 1_500_000


@pytest.mark.thorough
def test_page_brings_the_characters_of_its_title(tmp_path):
    page = write_report(report_of(passage("abc"), title="重建嵌入"), tmp_path / "page.html").read_text(encoding="utf-8")
    assert set(map(ord, "重建嵌入")) <= drawn(page)["Headwise Han"]


@pytest.mark.thorough
def test_the_same_text_gives_the_same_bytes_at_any_time(monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1000000000")
    _rule.cache_clear()
    before = font_face("武松")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    _rule.cache_clear()
    assert font_face("武松") == before


def test_the_packaged_font_stands_before_fonts_that_a_machine_may_have():
    """Chromium looks no further than the first font that the machine has: behind it, Han would be empty boxes."""
    reports = Path(headwise.reports.__file__).parent
    styles = [(path, path.read_text(encoding="utf-8")) for path in sorted(reports.rglob("*.css"))]
    textbook = Path(headwise_textbook.__file__).parent
    styles.append((textbook / "claims" / "page.css", (textbook / "claims" / "page.css").read_text(encoding="utf-8")))
    found = 0
    for path, style in styles:
        for line in re.findall(r"(?:--(?:ui|mono|han)|font(?:-family)?):([^;{}]*)", style):
            names = [name.strip(" \"'") for name in re.sub(r"^[^\"',]*\d[\d.a-z/]* ", "", line).split(",")]
            families = [name for name in names if not name.startswith(("var(", "Headwise Han"))]
            if len(names) < 3 or not families:
                continue
            first = next(i for i, name in enumerate(names) if name == families[0])
            assert any(n.startswith("Headwise Han") or n == "var(--han)" for n in names[:first]), (path.name, line)
            found += 1
    assert found >= 6


def test_outlines_of_the_packaged_font_can_be_copied_one_by_one():
    with TTFont(font_path(), lazy=True) as font:
        top = font["CFF "].cff[0]
        assert len(top.GlobalSubrs) == 0
        for entry in top.FDArray:
            private = entry.Private
            assert (private.defaultWidthX, private.nominalWidthX, hasattr(private, "Subrs")) == (EM, 0, False)
