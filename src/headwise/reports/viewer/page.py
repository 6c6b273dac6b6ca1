"""The viewer's page: one HTML document with its style, scripts and words.

>>> from headwise.reports.viewer.page import viewer_page
>>> viewer_page()[:15]
'<!doctype html>'
"""

import json
from functools import cache

from headwise.reports.fonts import QUOTES, font_face
from headwise.reports.template import COLOURS, document, inert, source
from headwise.reports.words import words
from headwise.wording import LANGUAGES, check_language

FROM_REPORT = ("elements.js", "numbers.js", "signs.js")
SCRIPTS = (
    "wire.js", "halves.js", "ink.js", "tiles.js", "pieces.js", "camera.js", "axes.js", "plot.js", "hand.js",
    "readout.js", "tops.js", "heads.js", "search.js", "picture.js", "reading.js", "controls.js", "address.js",
    "main.js",
)  # fmt: skip


def viewer_page(lang: str | None = None) -> str:
    """The page of `headwise view` as HTML; it reads the server's token from its own address.

    Args:
        lang: the initial language, "en" or "zh"; None: that of the browser. The reader can change it.

    Raises:
        ConfigError: for another language.
    """
    if lang is not None:
        check_language(lang)
    table = {name: words(name, "viewer") for name in LANGUAGES}
    settings = {"lang": lang, "words": table, "colours": COLOURS}
    # The page contains the characters of its own words; the server sends the whole font for other texts.
    style = _font(*table["zh"].values()) + source("base.css") + _own("view.css")
    scripts = [*map(source, FROM_REPORT), _own("words.js"), source("palette.js"), *map(_own, SCRIPTS)]
    parts = {
        "lang": lang or "en",
        "settings": inert(json.dumps(settings, ensure_ascii=False, separators=(",", ":"))),
    }
    allow = "connect-src 'self'; font-src 'self' data:"
    return document(_own("view.html"), table[lang or "en"], parts, style, scripts, allow)


@cache
def _font(*texts: str) -> str:
    """The font with the characters of these texts."""
    return font_face("".join(sorted({letter for text in texts for letter in text if ord(letter) not in QUOTES})))


def _own(name: str) -> str:
    return source(name, "headwise.reports.viewer")
