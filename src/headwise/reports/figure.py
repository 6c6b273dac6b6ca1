"""Shared parts of all pictures: axes, files, and the cells of a drawn map with its tokens. Requires matplotlib."""

import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headwise.base.files import atomic_path
from headwise.errors import not_installed
from headwise.reports.colours import FAMILY, covered, font_path, rgb_png, stops
from headwise.reports.data import Passage, colour_top, halves, reduced, visible
from headwise.wording import tr

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, LINE = "#1d1e26", "#63656f", "#dfddd3"


def figure_class() -> Any:
    """matplotlib's Figure. ConfigError with the command to install matplotlib if it is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise not_installed(tr("writing pictures"), "matplotlib") from None
    return Figure


def figure_of(wide: float, high: float, layout: str | None = "constrained") -> Any:
    """A white figure of that many inches."""
    return figure_class()(figsize=(wide, high), layout=layout, facecolor="white")


def colour_map(colours: Sequence[Any], missing: str | None = None) -> Any:
    """Colours, evenly spaced or with their positions, as a colour map. missing: the colour of masked values."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("headwise", colours).with_extremes(bad=missing)


def titled(axes: "Axes", text: str, size: float = 10, pad: float | None = None) -> None:
    """A title at the left, of `size` points."""
    axes.set_title(drawable(text), loc="left", pad=pad, color=INK, fontproperties=font(size))


def axis_names(axes: "Axes", x: str = "", y: str = "", size: float = 10) -> None:
    """What the axes are, in `size` points."""
    axes.set_xlabel(x, color=MUTED, fontproperties=font(size))
    axes.set_ylabel(y, color=MUTED, fontproperties=font(size))


def plain(axes: "Axes") -> None:
    """Light ticks, in the packaged font."""
    axes.tick_params(color=LINE, labelcolor=MUTED, length=3)
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        label.set_fontproperties(font(9))


def quiet(axes: "Axes") -> None:
    """Light ticks, horizontal grid lines, and no frame at the top and the right."""
    axes.grid(axis="y", color=LINE, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(LINE)
    plain(axes)


def colour_bar(
    figure: "Figure", image: Any, axes: "Axes", label: str, *, ticks: Mapping[float, str] | None = None,
    size: float = 10, inside: "Axes | None" = None,
) -> None:  # fmt: skip
    """The scale of an image beside its axes, or in axes of its own. ticks: value → label; size: of the label."""
    where = {"ax": axes, "fraction": 0.04, "pad": 0.02} if inside is None else {"cax": inside}
    bar = figure.colorbar(image, **where, ticks=None if ticks is None else list(ticks))
    if ticks is not None:
        bar.ax.set_yticklabels(list(ticks.values()))
        bar.ax.minorticks_off()
    bar.outline.set_edgecolor(LINE)
    bar.set_label(drawable(label), color=MUTED, fontproperties=font(size))
    plain(bar.ax)


def font(size: float) -> Any:
    """The packaged font at a size in points, with matplotlib's own font for missing characters."""
    from matplotlib.font_manager import FontProperties

    return FontProperties(family=_families(), size=size)


@cache
def _families() -> tuple[str, ...]:
    """The packaged font, which is registered with matplotlib, and matplotlib's own."""
    from matplotlib.font_manager import fontManager

    if FAMILY not in {entry.name for entry in fontManager.ttflist}:
        fontManager.addfont(str(font_path()))
    return FAMILY, "DejaVu Sans"


@cache
def _known() -> frozenset[int]:
    """Code points of both fonts."""
    from matplotlib.font_manager import FontProperties, fontManager, get_font

    other = get_font(fontManager.findfont(FontProperties(family="DejaVu Sans")))
    return covered() | frozenset(other.get_charmap())


def drawable(text: str) -> str:
    """The text with U+XXXX for characters that no font has, and with TeX disabled."""
    return "".join(c if ord(c) in _known() else f"U+{ord(c):04X}" for c in text).replace("$", r"\$")


DPI = 130


def save(figure: "Figure", path: Path) -> Path:
    """Write a PNG, whole or not at all."""
    return save_pixels(pixels(figure), path)


def pixels(figure: "Figure") -> np.ndarray:
    """The drawn figure, [rows, columns, 3] bytes; `Figure.savefig` would draw it twice."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure.set_dpi(DPI)
    canvas = FigureCanvasAgg(figure)
    with warnings.catch_warnings():
        # Very small pictures leave no room for the layout, and are drawn without it.
        warnings.filterwarnings("ignore", message=".*constrained_layout not applied.*")
        canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]


def save_pixels(colours: np.ndarray, path: Path) -> Path:
    """Write [rows, columns, 3] bytes as a PNG, whole or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(rgb_png(colours))
    return path


READABLE = 100  # tokens at most of a heat map that labels each one along an axis
MASKED = "#f1efe8"
_WIDEST, _NARROWEST, _ROOM = 0.23, 0.108, 11.5  # inches of a labelled cell, and of a side while cells may shrink


def cell_inches(size: int, pooled: int = 1) -> float:
    """The side of a token's share of a map of `size` tokens: as wide as a label requires, while there are labels."""
    if pooled > 1 or size > READABLE:
        return min(_NARROWEST / 2, 7.2 / size) if pooled == 1 else min(_WIDEST, 7.2 / size)
    return float(np.clip(_ROOM / size, _NARROWEST, _WIDEST))


def sides(passage: Passage) -> tuple[list[str], list[str]]:
    """The tokens of the queries and of the keys."""
    return passage.tokens, passage.tokens if passage.keys is None else passage.keys


def shown(passage: Passage) -> np.ndarray:
    """The weights that a picture shows, [layers, heads, P, Q]: of pooled maps the largest of each cell."""
    return passage.maps if passage.peaks is None else passage.peaks


def draw(
    axes: "Axes", weights: np.ndarray, causal: bool = False, limit: int = 1600, theme: str = "light"
) -> tuple[Any, bool]:
    """The image, and whether there are weights above the end of its scale."""
    from matplotlib.colors import PowerNorm

    top = colour_top(*halves(weights))
    rows, columns = weights.shape
    small = reduced(weights, limit)
    ahead = np.triu(np.ones(small.shape, bool), 1) if causal else np.zeros(small.shape, bool)
    image = axes.imshow(
        np.ma.array(small, mask=ahead), cmap=colour_map(stops(theme), MASKED),
        norm=PowerNorm(0.5, vmin=0, vmax=top, clip=True), interpolation="nearest", aspect="equal",
        extent=(-0.5, columns - 0.5, rows - 0.5, -0.5),
    )  # fmt: skip
    axes.spines[:].set_color(LINE)
    return image, f"{weights.max():.3g}" != f"{top:.3g}"


def bar(figure: "Figure", image: Any, axes: "Axes", label: str, cut: bool, inside: "Axes | None" = None) -> None:
    """The colour bar of an image. cut: whether there are weights above the end of the scale."""
    values = image.norm.vmax * np.linspace(0, 1, 6) ** 2  # evenly spaced along a bar of square roots
    labels = {value: f"{value:.3g}" for value in values.tolist()}
    if cut:
        labels[max(labels)] = f"≥ {labels[max(labels)]}"
    colour_bar(figure, image, axes, label, ticks=labels, inside=inside)


def numbers(axes: "Axes", image: Any, weights: np.ndarray, inches: float, causal: bool = False) -> None:
    """Write the weight into each cell, whose side is `inches`: 0 if it is exactly 0, otherwise with two decimals. All
    numbers are one collection of shapes, so that a map of a hundred tokens takes a second and not a minute."""
    from matplotlib.collections import PathCollection
    from matplotlib.transforms import Affine2D

    drawn = np.tril(np.ones(weights.shape, bool)) if causal else np.ones(weights.shape, bool)
    rows, columns = np.nonzero(drawn)
    words = ["0" if weight == 0 else f"{weight:.2f}" for weight in weights[drawn].tolist()]
    size = min(9.5, 72 * inches * 0.42)  # four characters of half a size each, and a margin
    dark = image.to_rgba(weights[drawn])[..., :3] @ (0.3, 0.59, 0.11) < 0.6
    numbers = PathCollection(
        [_centred(word, size) for word in words], offsets=np.stack((columns, rows), 1), linewidths=0,
        offset_transform=axes.transData, facecolors=np.where(dark, "white", INK), gid=" ".join(words),
    )  # fmt: skip
    numbers.set_transform(Affine2D().scale(1 / 72) + axes.figure.dpi_scale_trans)
    axes.add_collection(numbers, autolim=False)


@cache
def _centred(word: str, size: float) -> Any:
    """The shape of a word of `size` points, with its middle at 0."""
    from matplotlib.textpath import TextPath
    from matplotlib.transforms import Affine2D

    path = TextPath((0, 0), word, size=size, prop=font(size))
    box = path.get_extents()
    return path.transformed(Affine2D().translate(-(box.x0 + box.x1) / 2, -(box.y0 + box.y1) / 2))


def ticks(axes: "Axes", queries: list[str], keys: list[str], cell: int, inches: float) -> None:
    """Every token where there is room, otherwise round positions. cell: its tokens; inches: of a token."""
    pairs = (axes.xaxis, keys), (axes.yaxis, queries)
    if cell == 1 and inches >= _NARROWEST:
        size = label_size(inches)
        for axis, tokens in pairs:
            labels = [label_of(token) for token in tokens]
            axis.set_ticks(range(len(labels)), labels, color=INK, fontproperties=font(size))
            axis.set_tick_params(length=0, pad=5)
            if axis is axes.xaxis and any(len(label) > 2 for label in labels):
                axes.tick_params(axis="x", rotation=90)
        return
    for axis, tokens in pairs:
        n = len(tokens)
        step = next(s for s in (10**k * f for k in range(12) for f in (1, 2, 5)) if n / s <= 8)
        places = range(0, n, step)
        axis.set_ticks([p / cell for p in places], [f"{p:,}" for p in places])
    plain(axes)


def label_size(inches: float) -> float:
    """Points of the labels of cells whose side is `inches`."""
    return min(10.5, 72 * inches * 0.85)


@cache
def label_of(token: str) -> str:
    """The label of a token along an axis."""
    return drawable(clipped(visible(token.strip() or token), 14))


@cache
def width_of(label: str, size: float) -> float:
    """The inches that a label of `size` points takes."""
    from matplotlib.textpath import TextPath

    return float(TextPath((0, 0), label, size=size, prop=font(size)).get_extents().width) / 72 if label.strip() else 0.0


def clipped(text: str, most: int) -> str:
    """The text, with an ellipsis for what exceeds `most` characters."""
    return text if len(text) <= most else text[: most - 1] + "…"
