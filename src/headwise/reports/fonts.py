"""The packaged font, which draws Chinese on machines without Chinese fonts."""

import base64
import io
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path

FAMILY = "Headwise Han"
SIGNS = "␣↵⇥␍"  # for a space, line break, tab and return
# Wide in Chinese and narrow elsewhere; in both fonts.
QUOTES = frozenset(map(ord, "—‘’“”…·"))
MOST_GLYPHS = 3000  # of a page; further characters use the fonts of the machine


def font_path() -> Path:
    """The path of the OpenType file."""
    return Path(str(files("headwise.reports") / "fonts" / "HeadwiseHan.otf"))


@cache
def covered() -> frozenset[int]:
    """The code points of the font."""
    from fontTools.ttLib import TTFont

    with TTFont(font_path(), lazy=True) as font:
        return frozenset(font.getBestCmap())


def font_face(text: str) -> str:
    """CSS @font-face rules with the wide characters of `text` that the font has, and the signs.

    About 200 bytes per Han character. With Han characters, quotation marks and dashes are in a separate family for the
    text only, because they are narrow in English sentences of the page.
    """
    points = set(map(ord, text)) & covered()
    wide = {p for p in points if p >= 0x2E80} | set(map(ord, SIGNS))
    rules = _rule(FAMILY, (*sorted(wide)[:MOST_GLYPHS],), "U+2190-21FF,U+2400-243F,U+2E80-10FFFF")
    if points & QUOTES and any(0x3400 <= p <= 0x9FFF for p in points):
        rules += _rule(f"{FAMILY} Quotes", (*sorted(points & QUOTES),), "U+B7,U+2014-2026")
    return rules


@lru_cache(maxsize=32)  # pages of the same texts, and those without Chinese, need the same
def _rule(family: str, points: tuple[int, ...], span: str) -> str:
    """A font with some code points. span: the code points that a browser uses it for; without it, the blank of the font
    would determine the unit `ch`."""
    from fontTools import subset
    from fontTools.ttLib import TTFont

    options = subset.Options(layout_features=[], hinting=False, desubroutinize=True, notdef_outline=True)
    with TTFont(font_path(), lazy=True, recalcTimestamp=False) as font:
        worker = subset.Subsetter(options)
        worker.populate(unicodes=points)
        worker.subset(font)
        font.flavor = "woff"
        out = io.BytesIO()
        font.save(out)
    code = base64.b64encode(out.getvalue()).decode("ascii")
    source = f'url(data:font/woff;base64,{code}) format("woff")'
    return f'@font-face{{font-family:"{family}";src:{source};unicode-range:{span};font-display:block}}\n'
