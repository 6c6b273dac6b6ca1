"""A report as one page: one file, no network, every weight inside.

>>> from headwise.reports.html import write_report
>>> write_report(report, "report.html")                                    # doctest: +SKIP
PosixPath('report.html')
"""

import base64
import html
import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from headwise.errors import ConfigError
from headwise.files import atomic_path
from headwise.pictures.colours import stops
from headwise.reports.data import Passage, Report, Statistic
from headwise.reports.fonts import font_face
from headwise.reports.ranges import colour_top, finite, halves
from headwise.reports.template import digest, filled, inert, joined, source
from headwise.reports.words import LANGUAGES, words
from headwise.stats import describe

SCRIPTS = (
    "elements.js", "numbers.js", "signs.js", "data.js", "palette.js", "paint.js", "text.js", "heatmap.js", "grid.js",
    "table.js", "card.js", "compare.js", "main.js",
)  # fmt: skip


def write_report(report: Report, path: str | os.PathLike[str], *, lang: str = "en", embed_font: bool = True) -> Path:
    """Write `report` to `path` and return it.

    Weights are kept as half precision (11 significant bits), scaled by a power of two for each head. `lang` is "en" or
    "zh". With `embed_font`, the Chinese characters that occur travel along as a font.

    Raises:
        ConfigError: for an unknown language.
        OSError: where the file cannot be written; an old file at `path` then stays as it was.
    """
    if lang not in LANGUAGES:
        raise ConfigError(f"write_report(lang): got {lang!r}, expected one of {', '.join(LANGUAGES)}")
    page = _page(report, lang, embed_font)
    with atomic_path(path) as temporary:
        temporary.write_bytes(page)
    return Path(path)


def framed(report: Report) -> str:
    """The page as a frame of a notebook: its scripts run inside it, and cannot reach what is around it."""
    page = html.escape(_page(report, "en", embed_font=True).decode())
    look = "width: 100%; height: 760px; border: 1px solid #8884; border-radius: 6px"
    return f'<iframe srcdoc="{page}" sandbox="allow-scripts" title="headwise" style="{look}"></iframe>'


def _page(report: Report, lang: str, embed_font: bool) -> bytes:
    table = words(lang)
    data, blobs = _data(report, lang)
    data["words"] = table
    code = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    style = source("base.css") + source("report.css")
    if embed_font:
        style = font_face(code) + style
    early = source("theme.js")
    script = joined(map(source, SCRIPTS))
    # Nothing may load, and no script runs but these two: what a text contains can only ever be text.
    policy = (
        f"default-src 'none'; script-src {digest(early)} {digest(script)}; style-src {digest(style)}; "
        "font-src data:; img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    parts = {
        "lang": "zh" if lang == "zh" else "en",
        "title": html.escape(_printable(report.title)),
        "policy": policy,
        "style": style,
        "early": early,
        "report": inert(code),
        "blobs": "\n".join(blobs),
        "script": script,
    }
    page = filled(source("report.html"), table, parts)
    return page.encode("utf-8")


def _data(report: Report, lang: str) -> tuple[dict[str, Any], list[str]]:
    passages, blobs = [], []
    for index, passage in enumerate(report.passages):
        entry, more = _passage(index, passage, report)
        passages.append(entry)
        blobs += more
    data = {
        "layers": report.shape[0],
        "names": report.layers,
        "heads": report.shape[1],
        "counts": report.counts or [report.shape[1]] * report.shape[0],
        "passages": passages,
        "statistics": _statistics(report.statistics, lang),
        "patterns": report.patterns,
        "roles": report.roles,
        "comparisons": [
            {
                "name": c.name,
                "unit": c.unit,
                "description": c.description,
                "values": _numbers(c.values),
                "order": list(map(int, c.order)),
                "small": c.small_is_alike,
            }
            for c in report.comparisons
        ],
        "importance": _statistics(report.importance, lang),
        "facts": [[str(name), str(value)] for name, value in report.facts],
        "notes": report.notes,
        "first": _liveliest(report),
        "colours": {theme: stops(theme) for theme in ("light", "dark")},
    }
    return data, blobs


def _passage(index: int, passage: Passage, report: Report) -> tuple[dict[str, Any], list[str]]:
    """What the page is told of a passage; numbers of heads in lists of all layers, null for those it has no maps of."""
    layers = report.shown_in(passage)
    entry: dict[str, Any] = {
        "title": passage.title,
        "tokens": passage.tokens,
        "keys": passage.keys,
        "special": list(map(int, passage.special)),
        "special_keys": list(map(int, passage.special_keys)),
        "layers": list(map(int, layers)),
        "cell": passage.cell,
        "rows": passage.maps.shape[2],
        "columns": passage.maps.shape[3],
        "causal": passage.causal,
        "sentences": [list(map(int, sentence)) for sentence in passage.sentences],
    }
    blobs = []
    for kind, maps in (("mean", passage.maps), ("peak", passage.peaks)):
        if maps is None:
            continue
        maps = finite(maps)
        told: dict[str, list[list[float] | None]] = {
            name: [None] * report.shape[0] for name in ("shift", "own", "most")
        }
        for layer, block in zip(layers, maps, strict=True):
            packed = [halves(head) for head in block]
            told["shift"][layer] = [shift for _, shift in packed]
            told["own"][layer] = [colour_top(*pair) for pair in packed]
            told["most"][layer] = block.max(axis=(1, 2)).astype(float).tolist()
            bits = np.stack([scaled for scaled, _ in packed]).view(np.uint16)
            planes = (bits >> 8).astype(np.uint8).tobytes() + (bits & 255).astype(np.uint8).tobytes()
            code = base64.b64encode(zlib.compress(planes, 9)).decode("ascii")
            blobs.append(f'<script type="application/octet-stream" id="w-{index}-{layer}-{kind}">{code}</script>')
        entry[kind] = {**told, "all": float(maps.max()) or 1.0}
    return entry, blobs


def _liveliest(report: Report) -> list[int]:
    """Layer, head and cell to show first: of the first passage, the head with the sharpest weights beyond the first
    token and the neighbours, and of its later queries the one that looks hardest there."""
    maps = report.passages[0].maps
    i, j = (np.arange(size) for size in maps.shape[2:])
    away = (np.abs(i[:, None] - j) > 1) & (j > 0)
    spread = np.array([[np.square(head[away], dtype=np.float64).sum() for head in layer] for layer in maps])
    layer, head = np.unravel_index(int(np.nan_to_num(spread).argmax()), spread.shape)
    most = np.where(away, np.nan_to_num(maps[layer, head]), 0).max(1)
    late = len(i) // 3
    return [report.shown_in(report.passages[0])[layer], int(head), late + int(most[late:].argmax())]


def _statistics(statistics: list[Statistic], lang: str) -> list[dict[str, Any]]:
    found = []
    for s in statistics:
        label, unit, description = s.name.replace("_", " "), s.unit, s.description
        english, words = describe(s.name), describe(s.name, lang)
        if english is not None and words is not None:
            label = words.label
            unit = words.unit if unit == english.unit else unit
            description = words.summary if description == english.summary else description
        found.append(
            {"name": s.name, "label": label, "unit": unit, "description": description, "values": _numbers(s.values)}
        )
    return found


def _numbers(values: np.ndarray) -> list[list[float | None]]:
    """JSON has no NaN."""
    return [[float(f"{v:.6g}") if np.isfinite(v) else None for v in row] for row in values]


def _printable(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")
