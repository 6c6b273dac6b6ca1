"""A head × head matrix as a picture, with similar heads side by side in boxes. Requires matplotlib."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headwise.analysis.similarity import HeadSimilarity
from headwise.errors import check_choice
from headwise.pictures.colours import stops
from headwise.reports.figure import INK, LINE, MUTED, colour_bar, drawable, figure_class, font, plain, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ORDERS = ("layers", "alike")
READABLE = 96  # heads at most to label each one along an axis
ITSELF = "#b9b8b2"  # the diagonal, a grey outside of the scale
BELOW = ["#fdf3ea", "#f6c49b", "#dd8148", "#a84a1c", "#5f2508"]  # below 0, from small to large


def write_matrix(
    similarity: HeadSimilarity, path: str | os.PathLike[str], *, order: str = "alike", title: str | None = None
) -> Path:
    """Write the matrix as a PNG; see `matrix_figure`. Returns the path.

    Raises:
        ConfigError: if matplotlib is missing, or SciPy for the order "alike".
    """
    return save(matrix_figure(similarity, order=order, title=title), Path(path))


def matrix_figure(similarity: HeadSimilarity, *, order: str = "alike", title: str | None = None) -> "Figure":
    """The matrix as a matplotlib figure.

    Args:
        order: "alike" puts similar heads side by side, with a box around each group of at least two; "layers" sorts
            by layer, with lines between layers, which is the only order for a directed matrix.
        title: replaces the title of the matrix.
    """
    check_choice("order", order, ORDERS)
    directed = similarity.distance is None
    alike = order == "alike" and not directed
    size = len(similarity.names)
    at = similarity.order if alike else list(range(size))
    values = similarity.matrix.numpy()[np.ix_(at, at)]
    names = [similarity.names[i] for i in at]
    inches = float(np.clip(0.14 * size, 4.2, 12.0))
    figure = figure_class()(figsize=(inches + 1.9, inches + 1.2), layout="compressed", facecolor="white")
    axes = figure.subplots()
    image = _draw(axes, values, similarity)
    if alike:
        _boxes(axes, similarity.groups(), names)
    else:
        _layer_lines(axes, names)
    _ticks(axes, names)
    if directed:
        axes.set_ylabel("writes", color=MUTED, fontproperties=font(10))
    if size > 1:
        label = f"{'reads   ·   ' if directed else ''}grey: each head with itself, not on the scale"
        axes.set_xlabel(label, color=MUTED, fontproperties=font(10))
    colour_bar(figure, image, axes, similarity.unit)
    axes.set_title(drawable(title or similarity.title), loc="left", pad=10, color=INK, fontproperties=font(12))
    return figure


def _draw(axes: "Axes", values: np.ndarray, similarity: HeadSimilarity) -> Any:
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    # The diagonal is not informative and would determine the scale: it is grey, except for a single head.
    itself = np.eye(len(values), dtype=bool) & (len(values) > 1)
    others = values[~itself]
    low, high = min(0.0, float(others.min())), max(0.0, float(others.max()))
    if low < -0.02 * high:
        end = max(high, -low) or 1.0
        colours = LinearSegmentedColormap.from_list("headwise-signed", _signed())
        norm = Normalize(-end, end, clip=True)
    else:
        # A divergence is small for similar heads; darker means more similar in every picture.
        scale = stops("light")[::-1] if similarity.small_is_alike else stops("light")
        colours = LinearSegmentedColormap.from_list("headwise", scale)
        norm = Normalize(0.0, high or 1.0, clip=True)
    for spine in axes.spines.values():
        spine.set_color(LINE)
    shown = np.ma.array(values, mask=itself)
    return axes.imshow(
        shown, cmap=colours.with_extremes(bad=ITSELF), norm=norm, interpolation="nearest", aspect="equal"
    )


def _signed() -> list[tuple[float, str]]:
    """Colours with their positions from 0 to 1; the lightest, for 0, is in the middle."""
    above, below = stops("light"), BELOW[::-1]
    left = [(0.5 * k / len(below), colour) for k, colour in enumerate(below)]
    return left + [(0.5 + 0.5 * k / (len(above) - 1), colour) for k, colour in enumerate(above)]


def _boxes(axes: "Axes", groups: list[list[str]], names: list[str]) -> None:
    """A box around each group of at least two heads, which are adjacent in the order of the tree."""
    from matplotlib.patches import Rectangle

    for group in groups:
        if 1 < len(group) < len(names):
            first = min(map(names.index, group)) - 0.5
            box = Rectangle((first, first), len(group), len(group), fill=False, edgecolor=INK, linewidth=1.1)
            axes.add_patch(box)


def _layer_lines(axes: "Axes", names: list[str]) -> None:
    layers = [name.partition("H")[0].partition("K")[0] for name in names]  # of L3H5 and L3KV1
    for i in range(1, len(names)):
        if layers[i] != layers[i - 1]:
            axes.axhline(i - 0.5, color=MUTED, linewidth=0.5)
            axes.axvline(i - 0.5, color=MUTED, linewidth=0.5)


def _ticks(axes: "Axes", names: list[str]) -> None:
    if len(names) <= READABLE:
        size = float(np.clip(560 / len(names), 5.0, 9.5))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(range(len(names)), names, color=INK, fontproperties=font(size))
            axis.set_tick_params(length=0, pad=3)
        axes.tick_params(axis="x", rotation=90)
        return
    # About 24 ticks where there is no room for all.
    step = -(-len(names) // 24)
    places = range(0, len(names), step)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(places, [names[i] for i in places])
    axes.tick_params(axis="x", rotation=90)
    plain(axes)
