"""The loss against the number of heads kept, for one order and random ones, as a PNG. Requires matplotlib (`view`)."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headwise.analysis.importance import PruningCurve
from headwise.errors import ConfigError
from headwise.pictures.colours import stops
from headwise.reports.figure import INK, LINE, MUTED, drawable, figure_class, font, quiet, save
from headwise.reports.picture_words import said

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NEAR = 0.10  # increase of the loss at the top of the right picture, at least


def write_pruning(
    curve: PruningCurve, path: str | os.PathLike[str], *, chosen: int | None = None, limit: float | None = None
) -> None:
    """Write `pruning_figure` as a PNG."""
    save(pruning_figure(curve, chosen=chosen, limit=limit), Path(path))


def pruning_figure(curve: PruningCurve, *, chosen: int | None = None, limit: float | None = None) -> "Figure":
    """The whole curve, and beside it the part near the loss of the whole model, with the band of the random orders.

    Args:
        chosen: a number of removed heads to mark. limit: an increase of the loss to mark, 0.01 for 1 %.
    Raises:
        ConfigError: if matplotlib is missing, or the curve has a single point.
    """
    if len(curve.removed) < 2:
        raise ConfigError(f"curve: {len(curve.removed)} point; expected at least 2 to draw a line")
    figure: Figure = figure_class()(figsize=(10.4, 4.5), layout="constrained", facecolor="white")
    whole, near = figure.subplots(1, 2)
    top = float(curve.loss[0])
    for axes in (whole, near):
        _draw(axes, curve, chosen, limit)
    rise = max(NEAR, 1.5 * (limit or 0.0))
    if chosen is not None:
        rise = max(rise, 1.3 * float(curve.loss[list(curve.removed).index(chosen)] / top - 1))
    low = min(0.0, float(curve.loss.min()) / top - 1)
    near.set_ylim(top * (1 + 1.3 * low - 0.05 * rise), top * (1 + rise))
    shown = curve.removed[curve.loss <= top * (1 + rise)]
    least = curve.total - max(int(shown.max()), 2) - 1
    near.set_xlim(curve.total + 0.4, max(least, int(curve.kept.min())) - 0.4)
    share = near.secondary_yaxis("right", functions=(lambda y: 100 * (y / top - 1), lambda r: top * (1 + r / 100)))
    share.tick_params(color=LINE, labelcolor=MUTED, length=3, labelsize=8.5)
    share.spines["right"].set_color(LINE)
    place = {"xycoords": "axes fraction", "ha": "center"}
    near.annotate(said("increase"), (1.0, 1.02), **place, color=MUTED, fontproperties=font(8.5))
    whole.set_title(said("against"), loc="left", color=INK, fontproperties=font(10.5))
    near.set_title(said("near"), loc="left", color=INK, fontproperties=font(10.5))
    names = whole.get_legend_handles_labels()
    figure.legend(*names, loc="outside lower center", ncols=len(names[0]), frameon=False, prop=font(9), labelcolor=INK)
    title = said("removed", count=curve.total, method=curve.method)
    figure.suptitle(drawable(title), color=INK, fontproperties=font(12))
    return figure


def _draw(axes: "Axes", curve: PruningCurve, chosen: int | None, limit: float | None) -> None:
    from matplotlib.ticker import MaxNLocator

    kept, colours, chance = curve.kept, stops("light"), curve.random
    count = len(chance)
    if count > 1:
        orders = said("random", count=count)
        axes.fill_between(kept, chance.min(0), chance.max(0), color="#e3e1d8", linewidth=0, label=orders)
    word = said("mean" if count > 1 else "one_random")
    axes.plot(kept, chance.mean(0), color=MUTED, linewidth=1.4, linestyle=(0, (4, 2)), label=word)
    errors = np.nan_to_num(curve.errors)
    axes.errorbar(
        kept, curve.loss, yerr=errors, color=colours[26], linewidth=2, marker="o", markersize=3.2, elinewidth=1,
        label=said("order"),
    )  # fmt: skip
    if limit is not None:
        level = float(curve.loss[0]) * (1 + limit)
        axes.axhline(level, color=MUTED, linestyle=(0, (1, 2)), linewidth=1, label=said("limit", percent=100 * limit))
    if chosen is not None:
        at = list(curve.removed).index(chosen)
        axes.plot(
            [kept[at]], [curve.loss[at]], color=INK, marker="o", markersize=9, fillstyle="none", linestyle="none",
            label=said("chosen", count=chosen),
        )  # fmt: skip
    axes.set_xlim(curve.total + 0.4, kept.min() - 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(said("kept"), color=MUTED, fontproperties=font(9.5))
    axes.set_ylabel(said("loss"), color=MUTED, fontproperties=font(9.5))
    quiet(axes)
