"""Every measure of a corpus as a picture of layers × heads. Requires matplotlib."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headwise.amounts import counted
from headwise.corpus.result import CorpusMeasures
from headwise.errors import ConfigError
from headwise.pictures.colours import stops
from headwise.reports.figure import INK, LINE, MUTED, colour_bar, drawable, figure_class, font, plain, save
from headwise.reports.picture_words import said
from headwise.reports.ranges import value_range
from headwise.reports.words import unit
from headwise.stats import describe
from headwise.wording import in_language, language

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    """A panel per measure, as a matplotlib figure: layers from top to bottom, heads from left to right, each panel with
    its own scale."""
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("headwise", stops("light")).with_extremes(bad=MISSING)
    names = list(found.table)
    layers, heads = found.table.dense(names[0]).shape
    wide = min(len(names), 3 if heads <= 16 else 2)
    high = math.ceil(len(names) / wide)
    width, height = float(np.clip(0.24 * heads, 2.2, 5.0)), float(np.clip(0.24 * layers, 1.4, 5.0))
    figure = figure_class()(
        figsize=(max(4.0, wide * (width + 1.2)), high * (height + 0.8) + 0.7), layout="constrained", facecolor="white"
    )
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
    grid = figure.subplots(high, wide, squeeze=False)
    for axes, measure in zip(grid.flat, found.measures, strict=False):
        image = _panel(axes, found.table.dense(measure.name).numpy(), colours)
        axes.set_title(drawable(_name(measure.name)), loc="left", color=INK, fontproperties=font(10))
        colour_bar(figure, image, axes, unit(measure.unit, language()), size=9)
    for axes in grid.flat[len(names) :]:
        axes.set_axis_off()
    counts = {"tokens": counted("token", found.total.tokens), "files": counted("file", len(found.about["files"]))}
    every = said("measured", **{name: in_language(count, language()) for name, count in counts.items()})
    name = found.about["model"]["name"]
    room = int(11 * figure.get_figwidth())  # letters of a line
    shown = name if len(name) <= room else name[: room - 1] + "…"
    title = f"{drawable(shown)}\n{drawable(every)}"
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontproperties=font(11))
    return figure


def _name(measure: str) -> str:
    known = describe(measure, "zh") if language() == "zh" else None
    return measure.replace("_", " ") if known is None else known.label


def _panel(axes: "Axes", values: np.ndarray, colours: Any) -> Any:
    low, high = value_range(values)
    shown = np.ma.masked_invalid(values)
    image = axes.imshow(shown, cmap=colours, interpolation="nearest", aspect="auto", vmin=low, vmax=high)
    for axis, count, what in (
        (axes.xaxis, values.shape[1], said("head")),
        (axes.yaxis, values.shape[0], said("layer")),
    ):
        axis.set_ticks(range(0, count, math.ceil(count / TICKS)))
        axis.set_label_text(what, color=MUTED, fontproperties=font(9))
    plain(axes)
    for spine in axes.spines.values():
        spine.set_color(LINE)
    return image
