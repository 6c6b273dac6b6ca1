"""A sweep of a corpus: its page, its passages as data and as lines in a terminal, its measures as a picture."""

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from headwise.analysis.checks import head_name
from headwise.base.files import write_text
from headwise.corpus.passages import ROUNDING, CorpusPassage, Passages
from headwise.corpus.result import CorpusMeasures
from headwise.errors import ConfigError
from headwise.reports.colours import stops
from headwise.reports.data import value_range, visible
from headwise.reports.figure import INK, LINE, MUTED, colour_bar, drawable, figure_class, figure_of, font, plain, save
from headwise.reports.messages import message, said
from headwise.reports.page import COLOURS, assembled, column_words
from headwise.reports.words import CORPUS, by_name, unit, words
from headwise.stats import describe
from headwise.wording import counted, in_language, language, language_of, tr

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SCRIPTS = (
    "elements.js", "numbers.js", "signs.js", "data.js", "palette.js", "text.js", "passages.js", "scatter.js",
    "corpus.js",
)  # fmt: skip


def write_corpus_page(found: CorpusMeasures, path: str | os.PathLike[str], *, lang: str | None = None) -> Path:
    """Write the page of a sweep, which contains everything and loads nothing. Returns the path."""
    lang = language_of(lang)
    write_text(path, corpus_page(found, lang))
    return Path(path)


def corpus_page(found: CorpusMeasures, lang: str) -> str:
    """The page as text."""
    model = found.about["model"] | (found.about["model"].get("zh", {}) if lang == "zh" else {})
    tokens, windows = counted("token", found.total.tokens), counted("window", found.total.windows)
    data: dict[str, Any] = {
        "passages": [], "colours": COLOURS, "statistics": _statistics(found, lang),
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
        "corpus": None, "first": next(iter(found.passages.distinctive(1)), (found.heads[0].layer, found.heads[0].head)),
    }  # fmt: skip
    return assembled("corpus", SCRIPTS, data, model["name"], lang, found.passages if len(found.passages) else None)


def _statistics(found: CorpusMeasures, lang: str) -> list[dict[str, Any]]:
    """Columns with a value for each head, in the order of the heads; null for what is unknown."""
    columns = [
        {**column_words(name, column, lang), "values": _numbers(found.table.column(name).tolist())}
        for name, column in found.table.items()
    ]
    if len(found.passages):
        each = [found.passages[head.layer, head.head].contrast for head in found.heads]
        values = [value if abs(value) > ROUNDING else 0.0 for value in each]
        columns.append({
            "name": "contrast", "label": in_language(CORPUS["contrast"], lang), "unit": unit(found.passages.unit, lang),
            "description": in_language(CORPUS["contrast_about"], lang), "values": _numbers(values),
        })  # fmt: skip
    for name, at in (("layer", 0), ("head", 1)):
        places = [float((head.layer, head.head)[at]) for head in found.heads]
        columns.append({
            "name": name, "label": words(lang, "report")[name], "unit": "", "description": "", "values": places,
        })  # fmt: skip
    return columns


def _numbers(values: list[float]) -> list[float | None]:
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values]


LINES = 5  # heads in a terminal


def print_passages(passages: Passages, console: Console) -> None:
    """Print a line for each of the heads that attend strongly in few passages; nothing without such heads."""
    places = passages.distinctive(LINES)
    if not places:
        return
    title = tr(
        "Heads that attend strongly in few passages ({by} in the strongest passage; in brackets: mean of the sample):",
        by=by_name(passages.by),
    )
    console.print()
    console.print(Text(in_language(title, language()), style="bold"), soft_wrap=True)
    for layer, head in places:
        console.print(_line(head_name(layer, head), passages, (layer, head), console.width), soft_wrap=True)


def _line(name: str, passages: Passages, place: tuple[int, int], width: int) -> Text:
    found = passages[place]
    best = found.strongest[0]
    usual = sum(one.strength for one in found.sampled) / len(found.sampled) if found.sampled else 0.0
    key = next((key for key in best.keys if key.position not in (0, best.query)), None)
    pair = f"{_token(best.token)} → {_token(key.token)}" if key is not None else _token(best.token)
    start = f"{name:>7}  {best.strength:.3g} ({usual:.3g})  {pair}  "
    room = width - cell_len(start) - 1
    return Text(start) + Text(set_cell_size(_around(best, room), max(0, room)).rstrip() if room > 8 else "", "dim")


def _around(one: CorpusPassage, room: int) -> str:
    """The text around the query, which is in the middle."""
    at = one.positions.index(one.query)
    before, after = ("".join(map(_plain, part)) for part in (one.tokens[:at], one.tokens[at:]))
    half = room // 2
    while cell_len(before) > half:
        before = before[1:]
    return f"…{before.replace('␣', ' ')}{after.replace('␣', ' ')}"


def _token(text: str) -> str:
    return f"“{_plain(text.strip() or text)}”"


def _plain(text: str) -> str:
    """As `visible`, and with nothing that could change the order of a terminal's line."""
    return "".join(c if c.isprintable() else "·" for c in visible(text.replace("\u3000", " ")))


MISSING = "#f1efe8"  # no such head, or no value
TICKS = 16  # numbers along an axis, at most


def check_picture(path: Path) -> None:
    """Raise ConfigError if a picture cannot be written there."""
    figure_class()
    if path.suffix.lower() != ".png":
        raise ConfigError(f"png={str(path)!r}: expected a name that ends in .png")


def write_picture(found: CorpusMeasures, path: Path) -> Path:
    """Write the picture as a PNG; see `measures_figure`. Returns the path."""
    return save(measures_figure(found), path)


def measures_figure(found: CorpusMeasures) -> "Figure":
    """A panel per measure, each on its own scale: layers from top to bottom, heads from left to right."""
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("headwise", stops("light")).with_extremes(bad=MISSING)
    names = list(found.table)
    layers, heads = found.table.dense(names[0]).shape
    wide = min(len(names), 3 if heads <= 16 else 2)
    high = math.ceil(len(names) / wide)
    width, height = float(np.clip(0.24 * heads, 2.2, 5.0)), float(np.clip(0.24 * layers, 1.4, 5.0))
    figure = figure_of(max(4.0, wide * (width + 1.2)), high * (height + 0.8) + 0.7)
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
    grid = figure.subplots(high, wide, squeeze=False)
    for axes, measure in zip(grid.flat, found.measures, strict=False):
        image = _panel(axes, found.table.dense(measure.name).numpy(), colours)
        known = describe(measure.name, "zh") if language() == "zh" else None
        title = measure.name.replace("_", " ") if known is None else known.label
        axes.set_title(drawable(title), loc="left", color=INK, fontproperties=font(10))
        colour_bar(figure, image, axes, unit(measure.unit, language()), size=9)
    for axes in grid.flat[len(names) :]:
        axes.set_axis_off()
    tokens, files = counted("token", found.total.tokens), counted("file", len(found.about["files"]))
    every = said(tr("every head on {tokens} of {files}", tokens=tokens, files=files))
    name = found.about["model"]["name"]
    room = int(11 * figure.get_figwidth())  # letters of a line
    shown = name if len(name) <= room else name[: room - 1] + "…"
    title = f"{drawable(shown)}\n{drawable(every)}"
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontproperties=font(11))
    return figure


def _panel(axes: "Axes", values: np.ndarray, colours: Any) -> Any:
    low, high = value_range(values)
    shown = np.ma.masked_invalid(values)
    image = axes.imshow(shown, cmap=colours, interpolation="nearest", aspect="auto", vmin=low, vmax=high)
    for axis, count, what in zip((axes.yaxis, axes.xaxis), values.shape, (tr("layer"), tr("head")), strict=True):
        axis.set_ticks(range(0, count, math.ceil(count / TICKS)))
        axis.set_label_text(said(what), color=MUTED, fontproperties=font(9))
    plain(axes)
    axes.spines[:].set_color(LINE)
    return image
