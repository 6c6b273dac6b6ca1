"""The font that comes with headwise, so that Chinese is drawn properly whatever fonts a machine has."""

import base64
import io
from functools import cache
from importlib.resources import files
from pathlib import Path

FAMILY = "Headwise Han"
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
    """A CSS @font-face rule with just the wide characters of `text` that the font has; empty if there are none."""
    from fontTools import subset
    from fontTools.ttLib import TTFont

    wanted = sorted(set(map(ord, text)) & covered() - set(range(0x300)))[:MOST_GLYPHS]
    if not wanted:
        return ""
    options = subset.Options(layout_features=[], hinting=False, notdef_outline=True)
    with TTFont(font_path(), lazy=True) as font:
        worker = subset.Subsetter(options)
        worker.populate(unicodes=wanted)
        worker.subset(font)
        font.flavor = "woff"
        out = io.BytesIO()
        font.save(out)
    code = base64.b64encode(out.getvalue()).decode("ascii")
    return f'@font-face{{font-family:"{FAMILY}";src:url(data:font/woff;base64,{code}) format("woff")}}\n'
