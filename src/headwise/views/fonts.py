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
    return Path(str(files("headwise.views") / "fonts" / "HeadwiseHan.otf"))


@cache
def covered() -> frozenset[int]:
    """The code points that the font draws."""
    from fontTools.ttLib import TTFont

    with TTFont(font_path(), lazy=True) as font:
        return frozenset(font.getBestCmap())


def font_face(text: str) -> str:
    """A CSS @font-face rule with just the wide characters of `text` that the font has, and the signs.

    About 200 bytes a Han character. Quotation marks and dashes come along when there are Han characters.
    """
    from fontTools import subset
    from fontTools.ttLib import TTFont

    points = set(map(ord, text))
    wanted = {p for p in points if p >= 0x2E80} | set(map(ord, SIGNS))
    if any(0x3400 <= p <= 0x9FFF for p in points):
        wanted |= points & QUOTES
    options = subset.Options(layout_features=[], hinting=False, notdef_outline=True)
    with TTFont(font_path(), lazy=True) as font:
        worker = subset.Subsetter(options)
        worker.populate(unicodes=sorted(wanted & covered())[:MOST_GLYPHS])
        worker.subset(font)
        font.flavor = "woff"
        out = io.BytesIO()
        font.save(out)
    code = base64.b64encode(out.getvalue()).decode("ascii")
    source = f'url(data:font/woff;base64,{code}) format("woff")'
    return f'@font-face{{font-family:"{FAMILY}";src:{source};font-display:block}}\n'
