"""Shared parts of all pictures: colours, a font with Chinese characters, axes, files. Requires matplotlib."""

import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.errors import not_installed
from headwise.files import atomic_path
from headwise.reports.fonts import FAMILY, covered, font_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, LINE = "#1d1e26", "#63656f", "#dfddd3"


def figure_class() -> Any:
    """matplotlib's Figure. ConfigError with the command to install matplotlib if it is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise not_installed("writing pictures", "matplotlib", zh="绘图") from None
    return Figure


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
    size: float = 10,
) -> None:  # fmt: skip
    """The scale of an image beside its axes. ticks: value → label; size: of the axis label, in points."""
    bar = figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02, ticks=None if ticks is None else list(ticks))
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


def save(figure: "Figure", path: Path) -> Path:
    """Write a PNG, whole or not at all."""
    with atomic_path(path) as temporary, warnings.catch_warnings():
        # Very small pictures leave no room for the layout, and are drawn without it.
        warnings.filterwarnings("ignore", message=".*constrained_layout not applied.*")
        figure.savefig(temporary, dpi=130, format="png")
    return path
