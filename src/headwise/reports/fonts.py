"""The font that comes with headwise, so that Chinese is drawn properly whatever fonts a machine has."""

import base64
import io
from functools import cache
from importlib.resources import files
from pathlib import Path

FAMILY = "Headwise Han"
SIGNS = "␣↵⇥␍"  # what stands for a space, line break, tab and return
# Wide in Chinese and narrow elsewhere; both fonts have them.
QUOTES = frozenset(map(ord, "—‘’“”…·"))
MOST_GLYPHS = 3000  # a page with more characters leaves the rest to the machine's fonts


def font_path() -> Path:
    """Where the OpenType file lies."""
    return Path(str(files("headwise.reports") / "fonts" / "HeadwiseHan.otf"))


@cache
def covered() -> frozenset[int]:
    """The code points that the font draws."""
    from fontTools.ttLib import TTFont

    with TTFont(font_path(), lazy=True) as font:
        return frozenset(font.getBestCmap())


def font_face(text: str) -> str:
    """CSS @font-face rules with just the wide characters of `text` that the font has, and the signs.

    About 200 bytes a Han character. Where there are Han characters, quotation marks and dashes come along in a family
    of their own, for the text alone: in an English sentence of the page they are to be narrow.
    """
    points = set(map(ord, text)) & covered()
    wide = {p for p in points if p >= 0x2E80} | set(map(ord, SIGNS))
    rules = _rule(FAMILY, sorted(wide)[:MOST_GLYPHS], "U+2190-21FF,U+2400-243F,U+2E80-10FFFF")
    if points & QUOTES and any(0x3400 <= p <= 0x9FFF for p in points):
        rules += _rule(f"{FAMILY} Quotes", sorted(points & QUOTES), "U+B7,U+2014-2026")
    return rules


def _rule(family: str, points: list[int], span: str) -> str:
    """span: for which code points a browser takes the font. Without it, it would also take its blank for the width
    that `ch` counts."""
    from fontTools import subset
    from fontTools.ttLib import TTFont

    options = subset.Options(layout_features=[], hinting=False, notdef_outline=True)
    with TTFont(font_path(), lazy=True) as font:
        worker = subset.Subsetter(options)
        worker.populate(unicodes=points)
        worker.subset(font)
        font.flavor = "woff"
        out = io.BytesIO()
        font.save(out)
    code = base64.b64encode(out.getvalue()).decode("ascii")
    source = f'url(data:font/woff;base64,{code}) format("woff")'
    return f'@font-face{{font-family:"{family}";src:{source};unicode-range:{span};font-display:block}}\n'
