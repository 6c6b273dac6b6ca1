"""The viewer's page: small files joined to one document, with its style, scripts and words inside.

>>> from headwise.reports.viewer.page import viewer_page
>>> viewer_page()[:15]
'<!doctype html>'
"""

import json
from functools import cache

from headwise.errors import ConfigError
from headwise.pictures.colours import stops
from headwise.reports.fonts import QUOTES, font_face
from headwise.reports.template import digest, filled, inert, joined, source
from headwise.reports.viewer.said import in_chinese
from headwise.reports.viewer.words import words
from headwise.reports.words import LANGUAGES

FROM_REPORT = ("elements.js", "numbers.js", "signs.js")
SCRIPTS = (
    "wire.js", "ink.js", "tiles.js", "pieces.js", "camera.js", "axes.js", "plot.js", "hand.js", "readout.js",
    "heads.js", "search.js", "picture.js", "reading.js", "controls.js", "address.js",
    "main.js",
)  # fmt: skip


def viewer_page(lang: str | None = None) -> str:
    """The page of `headwise view` as HTML; it finds the server's token in its own address.

    Args:
        lang: the language to begin with, "en" or "zh"; None: the browser's. The reader may change it.

    Raises:
        ConfigError: for another language.
    """
    if lang not in (None, *LANGUAGES):
        raise ConfigError(f"viewer_page(lang): got {lang!r}, expected None or one of {', '.join(LANGUAGES)}")
    settings = {
        "lang": lang,
        "words": {name: words(name) for name in LANGUAGES},
        "said": {"zh": in_chinese()},
        "colours": {theme: stops(theme) for theme in ("light", "dark")},
    }
    # Its own words can be drawn at once; the whole font, for any text, is asked of the server.
    style = _letters_of(*words("zh").values(), *in_chinese().values()) + source("base.css") + _own("view.css")
    early = source("theme.js")
    own = [_own("words.js"), source("palette.js"), *map(_own, SCRIPTS)]
    script = joined([*map(source, FROM_REPORT), *own])
    # Only these two scripts run, and they speak only to the server that gave the page.
    policy = (
        f"default-src 'none'; script-src {digest(early)} {digest(script)}; style-src {digest(style)}; "
        "connect-src 'self'; font-src 'self' data:; img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    parts = {
        "lang": lang or "en",
        "policy": policy,
        "style": style,
        "early": early,
        "settings": inert(json.dumps(settings, ensure_ascii=False, separators=(",", ":"))),
        "script": script,
    }
    return filled(_own("view.html"), words(lang or "en"), parts)


@cache
def _letters_of(*said: str) -> str:
    """The font for the page's own words, drawn at once; the whole one, for any text, is asked of the server."""
    letters = {letter for word in said for letter in word if ord(letter) not in QUOTES}
    return font_face("".join(sorted(letters)))


def _own(name: str) -> str:
    return source(name, "headwise.reports.viewer")
