"""The font that pages and pictures carry."""

import base64
import io
import re

from fontTools.ttLib import TTFont

from headwise.views.fonts import SIGNS, covered, font_face, font_path


def drawn(face: str) -> set[int]:
    code = re.search(r"base64,([^)]+)\)", face)[1]
    return set(TTFont(io.BytesIO(base64.b64decode(code))).getBestCmap())


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


def test_page_brings_its_own_chinese_and_no_latin():
    points = drawn(font_face("Water 水浒“传” é"))
    assert points == set(map(ord, "水浒传“”" + SIGNS))


def test_quotation_marks_stay_narrow_where_there_is_no_chinese():
    assert drawn(font_face("“quoted” — 🐯")) == set(map(ord, SIGNS))


def test_page_with_every_character_stays_small():
    assert len(font_face("".join(map(chr, covered())))) < 1_500_000
