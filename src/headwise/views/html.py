"""The report as one HTML file: no network, opens from disk, keeps nothing elsewhere."""

import base64
import html
import json
import os
import zlib
from importlib.resources import files
from typing import Any

import numpy as np

from headwise.errors import ConfigError
from headwise.files import atomic_path
from headwise.views.data import Passage, Report
from headwise.views.fonts import font_face
from headwise.views.strings import STRINGS


def write_report(report: Report, path: str | os.PathLike[str], *, lang: str = "en") -> None:
    """Write the page; `lang` is "en" or "zh"."""
    page = render(report, lang=lang)
    with atomic_path(path) as temporary:
        temporary.write_text(page, encoding="utf-8")


def render(report: Report, *, lang: str = "en") -> str:
    """The page as text."""
    if lang not in STRINGS:
        raise ConfigError(f"lang={lang!r}: expected one of {', '.join(map(repr, STRINGS))}")
    strings = STRINGS[lang]
    data = {
        "strings": strings,
        "layers": report.shape[0],
        "heads": report.shape[1],
        "facts": report.facts,
        "notes": report.notes,
        "patterns": report.patterns,
        "first": _liveliest(report),
        "passages": [_passage(passage) for passage in report.passages],
        "statistics": [
            {
                "name": s.name,
                "unit": s.unit,
                "description": s.description,
                "values": [[_number(x) for x in row] for row in s.values.tolist()],
            }
            for s in report.statistics
        ],
    }
    words = "".join((report.title, *strings.values(), "␣↵⇥", *(t for p in report.passages for t in p.tokens)))
    words += "".join(text for pair in report.facts for text in pair) + "".join(report.notes)
    parts = {
        "lang": lang,
        "title": html.escape(report.title),
        "font": font_face(words),
        "css": _asset("report.css"),
        "js": _asset("report.js"),
        "data": _script_json(data),
    }
    page = _asset("report.html")
    # Split on the holes once, so that nothing inside a filled one is taken for a hole.
    pieces = page.split("{{")
    return pieces[0] + "".join(
        parts[piece[: piece.index("}}")]] + piece[piece.index("}}") + 2 :] for piece in pieces[1:]
    )


def _passage(passage: Passage) -> dict[str, Any]:
    return {
        "title": passage.title,
        "tokens": passage.tokens,
        "cell": passage.cell,
        "side": passage.maps.shape[-1],
        "sentences": passage.sentences,
        "maps": _packed(passage.maps),
        "peaks": None if passage.peaks is None else _packed(passage.peaks),
    }


def _packed(maps: np.ndarray) -> str:
    # float16 keeps three digits, which is what the page shows; the zeros above the diagonal compress away.
    raw = np.ascontiguousarray(maps, dtype="<f2").tobytes()
    return base64.b64encode(zlib.compress(raw, 6)).decode("ascii")


def _liveliest(report: Report) -> list[int]:
    """The head to show first: the one that departs most from looking at the first token or nearby."""
    maps = report.passages[0].maps
    side = maps.shape[-1]
    i = np.arange(side)
    away = (np.abs(i[:, None] - i) > 1) & (i > 0)
    spread = np.where(away, maps.astype(np.float64) ** 2, 0).sum((2, 3))
    layer, head = np.unravel_index(int(np.nan_to_num(spread).argmax()), spread.shape)
    return [int(layer), int(head)]


def _number(x: float) -> float | None:
    return float(f"{x:.6g}") if np.isfinite(x) else None


def _script_json(data: Any) -> str:
    """JSON that can stand inside <script>: no character that could end it or start a comment."""
    code = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        code = code.replace(sign, f"\\u{ord(sign):04x}")
    return code


def _asset(name: str) -> str:
    return (files("headwise.views") / name).read_text(encoding="utf-8")
