"""Pages of HTML that contain everything and load nothing: their assembly from files, and the page of a report.

>>> from headwise.reports.page import write_report
>>> write_report(report, "report.html")                                    # doctest: +SKIP
PosixPath('report.html')
>>> filled("<p>{{name}}: {{t:lead}}</p>", {"lead": "a < b"}, {"name": "<b>x</b>"})
'<p><b>x</b>: a &lt; b</p>'
"""

import base64
import hashlib
import html
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from headwise.analysis.head_roles.score import DEFINITIONS
from headwise.base.files import write_text
from headwise.corpus.passages import Passages
from headwise.reports.colours import font_face, stops
from headwise.reports.data import LEVELS, Passage, Report, blob, coded, colour_top, finite, halves, packed, sorted_codes
from headwise.reports.findings import NAMED, findings
from headwise.reports.words import PLACES, by_name, description, label, unit, words
from headwise.table import HeadColumn, HeadTable
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
    write_text(path, page(report, lang, embed_font=embed_font))
    return Path(path)


def page(report: Report, lang: str, *, embed_font: bool = True, still: str = "") -> str:
    """The page as text. still: HTML without styles, shown instead of the page where scripts do not run."""
    data, blobs = _data(report, lang)
    title = in_language(report.title, lang)
    return assembled("report", SCRIPTS, data, title, lang, report.corpus, blobs, embed_font=embed_font, still=still)


def assembled(
    name: str, scripts: Sequence[str], data: dict[str, Any], title: str, lang: str, passages: Passages | None,
    blobs: Sequence[str] = (), *, embed_font: bool = True, still: str = "",
) -> str:  # fmt: skip
    """The page of that name with its data, its words, and the passages of a corpus."""
    table, text, title = words(lang, name), "", title.encode("utf-8", "replace").decode()
    data["words"] = table
    if passages is not None:
        data["corpus"], element, text = _passages(passages, lang)
        blobs = [*blobs, element]
    code = _json(data)
    style = source("base.css") + source("report.css") + source("passages.css")
    if embed_font:
        style = font_face(code + title + text) + style
    blocks = {"report": inert(code), "blobs": "\n".join(blobs), "still": still}
    parts = {"lang": lang, "title": html.escape(title), **blocks}
    return document(source(f"{name}.html"), table, parts, style, map(source, scripts), allow="font-src data:")


def _json(data: dict[str, Any]) -> str:
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


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
        last = shown.image.rows * shown.image.columns - 1
        rows, columns = (
            np.zeros(len(cells), bool)
            if first is None
            else (cells >= first // shown.cell) & (cells <= (first + last) // shown.cell)
            for first, cells in ((shown.image.query, i), (shown.image.key, j))
        )
        side, since = ("k", 0) if shown.image.key is None else ("q", 0)
        between = rows[:, None] & ~columns if side == "k" else ~rows[:, None] & columns
        counted = between if between.any() else np.ones_like(between)
    spread = np.array([[np.square(head[counted], dtype=np.float64).sum() for head in layer] for layer in maps])
    layer, head = np.unravel_index(int(spread.argmax()), spread.shape)
    most = np.where(counted, maps[layer, head], 0).max(1 if side == "q" else 0)
    return [report.shown_in(shown)[layer], int(head), since + int(most[since:].argmax()), side, at]


def _columns(table: HeadTable, lang: str) -> list[dict[str, Any]]:
    return [
        {**column_words(name, column, lang), "values": _numbers(table.dense(name).numpy(force=True))}
        for name, column in table.items()
    ]


def column_words(name: str, column: HeadColumn, lang: str) -> dict[str, Any]:
    """What a page says of a statistic."""
    about = description(name, column, lang)
    return {"name": name, "label": label(name, lang), "unit": unit(column.unit, lang), "description": about}


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


def _passages(passages: Passages, lang: str) -> tuple[dict[str, Any], str, str]:
    """What a page says of the strengths, the passages of all heads as a compressed element, and their characters."""
    heads = {
        f"{layer}-{head}": {
            part: [vars(one) | {"where": _where(one.where, lang)} for one in getattr(found, part)]
            for part in ("strongest", "sampled")
        }
        for (layer, head), found in passages.items()
    }
    about = {"by": passages.by, "name": in_language(by_name(passages.by), lang), "unit": unit(passages.unit, lang)}
    code = _json(heads)
    return about, blob("corpus-passages", code.encode("utf-8", "replace")), "".join(sorted(set(code)))


def _where(where: str, lang: str) -> str:
    """ "byte 4,096" or "row 3" of a file, in that language."""
    kind, _, number = where.partition(" ")
    return in_language(PLACES[kind], lang).format(at=number) if kind in PLACES else where


COLOURS = {theme: stops(theme) for theme in ("light", "dark")}


def source(name: str, package: str = "headwise.reports") -> str:
    """The text of a file in the package's folder `page`."""
    return (resources.files(package) / "page" / name).read_text(encoding="utf-8")


def document(
    template: str, words: Mapping[str, str], parts: Mapping[str, str], style: str, scripts: Iterable[str], allow: str
) -> str:
    """A template with its words and parts, one style sheet, one script, and the script that sets the theme. The policy
    allows these and `allow`, and nothing else: text cannot become code."""
    early, script = source("theme.js"), '"use strict";\n(() => {\n' + "\n".join(scripts) + "})();\n"
    policy = (
        f"default-src 'none'; script-src {digest(early)} {digest(script)}; style-src {digest(style)}; {allow}; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    fixed = {"policy": policy, "style": style, "early": early, "script": script}
    return filled(template, words, {**fixed, "head": filled(source("head.html"), words, fixed), **parts})


def filled(template: str, words: Mapping[str, str], parts: Mapping[str, str]) -> str:
    """The template with {{t:name}} as a word, escaped, and {{name}} as a part; marks in what is inserted stay."""
    return re.sub(
        r"\{\{(t:)?(\w+)\}\}",
        lambda mark: html.escape(words[mark[2]]) if mark[1] else parts[mark[2]],
        template,
    )


def inert(code: str) -> str:
    """JSON for a <script> element: no end tag, comment, line separator or lone surrogate."""
    return re.sub("[<>&\u2028\u2029\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", code)


def digest(code: str) -> str:
    """The source expression of a script or style sheet in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'"
