"""A report as one HTML file that contains the weights of every head and loads nothing.

>>> from headwise.reports.page import write_report
>>> write_report(report, "report.html")                                    # doctest: +SKIP
PosixPath('report.html')
"""

import html
import json
import os
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from headwise.analysis.head_roles import DEFINITIONS
from headwise.base.files import atomic_path
from headwise.reports.colours import font_face
from headwise.reports.corpus_page import passages_data
from headwise.reports.data import LEVELS, Passage, Report, blob, coded, colour_top, finite, halves, packed, sorted_codes
from headwise.reports.findings import NAMED, findings
from headwise.reports.template import COLOURS, document, inert, source
from headwise.reports.words import description, label, unit, words
from headwise.table import HeadTable
from headwise.wording import in_language, language_of

SCRIPTS = (
    "elements.js", "numbers.js", "signs.js", "data.js", "codes.js", "palette.js", "paint.js", "text.js", "state.js",
    "heatmap.js", "full.js", "grid.js", "table.js", "card.js", "arcs.js", "image.js", "find.js", "everywhere.js",
    "writes.js", "passages.js", "sides.js", "compare.js", "pointing.js", "pen.js", "export.js", "link.js",
    "printing.js", "main.js",
)  # fmt: skip
GREY = "#9b9ba3"  # of tendencies


def write_report(
    report: Report, path: str | os.PathLike[str], *, lang: str | None = None, embed_font: bool = True
) -> Path:
    """Write `report` to `path`. Returns the path.

    Weights are stored in ten bits: of a head whose largest weight is 1, the error is 0.001 at most, and √weight / 1023
    (see `ranges.coded`). `lang` is "en", "zh" or None, the language of the locale. With `embed_font`, the page contains
    a font with its Chinese characters.

    Raises:
        ConfigError: for an unknown language.
        OSError: if the file cannot be written; an existing file is then left unchanged.
    """
    lang = language_of(lang)
    content = page(report, lang, embed_font=embed_font).encode()
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)
    return Path(path)


def page(report: Report, lang: str, *, embed_font: bool = True, still: str = "") -> str:
    """The page as text. still: HTML without styles, shown instead of the page where scripts do not run."""
    table = words(lang, "report")
    data, blobs = _data(report, lang)
    data["words"] = table
    read = ""
    if report.corpus is not None:
        data["corpus"], element, read = passages_data(report.corpus, lang)
        blobs.append(element)
    code = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    style = source("base.css") + source("report.css") + source("passages.css")
    title = in_language(report.title, lang).encode("utf-8", "replace").decode()
    if embed_font:
        style = font_face(code + title + read) + style
    parts = {
        "lang": lang,
        "title": html.escape(title),
        "report": inert(code),
        "blobs": "\n".join(blobs),
        "still": still,
    }
    return document(source("report.html"), table, parts, style, map(source, SCRIPTS), allow="font-src data:")


def _data(report: Report, lang: str) -> tuple[dict[str, Any], list[str]]:
    def own(text: str) -> str:
        return in_language(text, lang)

    passages, blobs = [], []
    for index, passage in enumerate(report.passages):
        entry, more = _passage(index, passage, report)
        passages.append({"title": own(passage.title), **entry})
        blobs += more
    found = findings(report)
    data = {
        "layers": report.shape[0],
        "names": [own(name) for name in report.layers],
        "heads": report.shape[1],
        "counts": report.counts,
        "passages": passages,
        "statistics": _columns(report.statistics, lang),
        "patterns": [[own(pattern) for pattern in row] for row in report.patterns],
        **_labels(report, lang),
        "findings": [[own(finding.text), finding.heads[:NAMED]] for finding in found],
        "comparisons": [
            {
                "name": own(c.name),
                "unit": unit(c.unit, lang),
                "description": own(c.description),
                "values": _numbers(c.values, digits=4),
                "order": list(map(int, c.order)),
                "small": c.small_is_alike,
            }
            for c in report.comparisons
        ],
        "importance": _columns(report.importance, lang),
        "facts": [[own(name), own(value)] for name, value in report.facts],
        "notes": [own(note) for note in report.notes],
        "first": next(([*x.heads[0], x.query, "q", 0] for x in found if x.query is not None), None)
        or _liveliest(report),
        "levels": LEVELS,
        "colours": COLOURS,
        "corpus": None,
    }
    return data, blobs


def _passage(index: int, passage: Passage, report: Report) -> tuple[dict[str, Any], list[str]]:
    """A passage as data and its weights. Numbers of heads are lists of all layers, null for layers without maps."""
    layers = report.shown_in(passage)
    entry: dict[str, Any] = {
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
        "image": None if passage.image is None else asdict(passage.image),
    }
    blobs = []
    for kind, maps in (("mean", passage.maps), ("peak", passage.peaks)):
        if maps is None:
            continue
        maps = finite(maps)
        lower = not np.triu(maps, 1).any()
        scales: dict[str, list[list[float] | None]] = {name: [None] * report.shape[0] for name in ("own", "most")}
        for layer, block in zip(layers, maps, strict=True):
            scales["own"][layer] = [colour_top(*halves(head)) for head in block]
            scales["most"][layer] = block.max(axis=(1, 2)).astype(float).tolist()
            codes = np.stack([coded(head) for head in block])
            blobs.append(blob(f"w-{index}-{layer}-{kind}", sorted_codes(codes, lower=lower)))
        entry[kind] = {**scales, "lower": lower, "all": float(maps.max()) or 1.0}
    if passage.writes is not None:
        entry["writes"], more = packed(passage.writes, index, layers, report.shape[0])
        blobs += more
    return entry, blobs


def _liveliest(report: Report) -> list[int | str]:
    """What to show first: passage, layer, head, token, and whether it is a query "q" or a key "k": the sharpest weights
    except on the first token and the neighbours; in a passage with an image, those between text and patches."""
    at = next((i for i, passage in enumerate(report.passages) if passage.image is not None), 0)
    shown = report.passages[at]
    maps = np.nan_to_num(shown.maps)
    i, j = (np.arange(size) for size in maps.shape[2:])
    counted, side, since = (np.abs(i[:, None] - j) > 1) & (j > 0), "q", len(i) // 3
    if shown.image is not None:
        rows, columns = (
            np.zeros(len(cells), bool) if first is None else _cells_of(shown, first, cells)
            for first, cells in ((shown.image.query, i), (shown.image.key, j))
        )
        side, since = ("k", 0) if shown.image.key is None else ("q", 0)
        between = rows[:, None] & ~columns if side == "k" else ~rows[:, None] & columns
        counted = between if between.any() else np.ones_like(between)
    spread = np.array([[np.square(head[counted], dtype=np.float64).sum() for head in layer] for layer in maps])
    layer, head = np.unravel_index(int(spread.argmax()), spread.shape)
    most = np.where(counted, maps[layer, head], 0).max(1 if side == "q" else 0)
    return [report.shown_in(shown)[layer], int(head), since + int(most[since:].argmax()), side, at]


def _cells_of(passage: Passage, first: int, cells: np.ndarray) -> np.ndarray:
    """Which cells of a side are of patches, the first of which is that token."""
    assert passage.image is not None
    last = first + passage.image.rows * passage.image.columns - 1
    return np.asarray((cells >= first // passage.cell) & (cells <= last // passage.cell))


def _columns(table: HeadTable, lang: str) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "label": label(name, lang),
            "unit": unit(column.unit, lang),
            "description": description(name, column, lang),
            "values": _numbers(table.dense(name).numpy(force=True)),
        }
        for name, column in table.items()
    ]


def _numbers(values: np.ndarray, digits: int = 6) -> list[list[float | None]]:
    """JSON has no NaN."""
    return [[float(f"{v:.{digits}g}") if np.isfinite(v) else None for v in row] for row in values]


def _labels(report: Report, lang: str) -> dict[str, Any]:
    """Of each head its labels with their evidence, and the index of its kind; the kinds of the legend, labels in the
    colours of their roles before tendencies in grey, the most frequent first."""
    labels = report.labels or [[[] for _ in row] for row in report.patterns]
    first = [[(head[0].sure, in_language(head[0].name, lang)) if head else None for head in row] for row in labels]
    counts = Counter(kind for row in first for kind in row if kind)
    kinds = sorted(counts, key=lambda kind: (not kind[0], -counts[kind]))
    colours = {in_language(x.name, lang): DEFINITIONS[x.role].colour for row in labels for head in row for x in head}
    return {
        "labels": [
            [[[in_language(x.words, lang), x.rows, x.uniform, x.confidence, x.sure] for x in head] for head in row]
            for row in labels
        ],
        "kindOf": [[kinds.index(kind) if kind else None for kind in row] for row in first],
        "kinds": [
            {"name": name, "count": counts[sure, name], "colour": colours[name] if sure else GREY}
            for sure, name in kinds
        ],
    }
