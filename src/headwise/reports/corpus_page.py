"""A sweep of a corpus as one HTML file: heads by any two statistics, and the passages of each."""

import html
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from headwise.amounts import counted
from headwise.corpus.passages import ROUNDING
from headwise.corpus.result import CorpusMeasures
from headwise.files import atomic_path
from headwise.reports.corpus_passages import passages_data
from headwise.reports.corpus_words import CORPUS
from headwise.reports.fonts import font_face
from headwise.reports.messages import message
from headwise.reports.template import COLOURS, document, inert, source
from headwise.reports.words import description, label, unit, words
from headwise.wording import in_language, language_of

SCRIPTS = (
    "elements.js", "numbers.js", "signs.js", "data.js", "palette.js", "text.js", "passages.js", "scatter.js",
    "corpus.js",
)  # fmt: skip


def write_corpus_page(found: CorpusMeasures, path: str | os.PathLike[str], *, lang: str | None = None) -> Path:
    """Write the page of a sweep to `path`: it contains everything and loads nothing. Returns the path.

    `lang` is "en", "zh" or None, the language of the locale.

    Raises:
        ConfigError: for an unknown language. CheckpointError: if the file cannot be written.
    """
    lang = language_of(lang)
    with atomic_path(path) as temporary:
        temporary.write_text(corpus_page(found, lang), encoding="utf-8")
    return Path(path)


def corpus_page(found: CorpusMeasures, lang: str) -> str:
    """The page as text."""
    table = words(lang, "corpus")
    model = found.about["model"] | (found.about["model"].get("zh", {}) if lang == "zh" else {})
    title = model["name"].encode("utf-8", "replace").decode()
    tokens, windows = counted("token", found.total.tokens), counted("window", found.total.windows)
    data: dict[str, Any] = {
        "passages": [], "colours": COLOURS, "words": table, "statistics": _statistics(found, lang),
        "names": {head.layer: head.name for head in found.heads},
        "heads": [[head.layer, head.head] for head in found.heads],
        "facts": [
            [in_language(name, lang), in_language(value, lang)]
            for name, value in (
                (message("model"), model["about"]),
                (message("corpus"), message("fact_corpus", tokens=tokens, windows=windows)),
                (message("kernel"), ", ".join(found.about["kernels"])),
            )
        ],
        "corpus": None, "first": list(_first(found)),
    }  # fmt: skip
    blobs, text = "", ""
    if len(found.passages):
        data["corpus"], blobs, text = passages_data(found.passages, lang)
    code = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    style = source("base.css") + source("report.css") + source("passages.css")
    parts = {"lang": lang, "title": html.escape(title), "report": inert(code), "blobs": blobs}
    style = font_face(code + title + text) + style
    return document(source("corpus.html"), table, parts, style, map(source, SCRIPTS), allow="font-src data:")


def _statistics(found: CorpusMeasures, lang: str) -> list[dict[str, Any]]:
    """Columns with a value for each head, in the order of the heads; null for what is unknown."""
    columns = [
        {
            "name": name, "label": label(name, lang), "unit": unit(column.unit, lang),
            "description": description(name, column, lang), "values": _numbers(found.table.column(name).tolist()),
        }
        for name, column in found.table.items()
    ]  # fmt: skip
    if len(found.passages):
        each = [found.passages[head.layer, head.head].contrast for head in found.heads]
        values = [value if abs(value) > ROUNDING else 0.0 for value in each]
        columns.append({
            "name": "contrast", "label": CORPUS["contrast"][lang == "zh"], "unit": unit(found.passages.unit, lang),
            "description": CORPUS["contrast_about"][lang == "zh"], "values": _numbers(values),
        })  # fmt: skip
    for name, at in (("layer", 0), ("head", 1)):
        places = [float((head.layer, head.head)[at]) for head in found.heads]
        columns.append({
            "name": name, "label": words(lang, "report")[name], "unit": "", "description": "", "values": places,
        })  # fmt: skip
    return columns


def _numbers(values: list[float]) -> list[float | None]:
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values]


def _first(found: CorpusMeasures) -> tuple[int, int]:
    """The head to show first."""
    place = next(iter(found.passages.distinctive(1)), None)
    return place or (found.heads[0].layer, found.heads[0].head)
