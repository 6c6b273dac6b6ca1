"""What all pictures share: colours, a font that has Chinese, quiet axes, and files that are whole. Needs matplotlib."""

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
    """matplotlib's Figure, or an error that says how to get it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise not_installed("writing pictures", "matplotlib") from None
    return Figure


def plain(axes: "Axes") -> None:
    """Quiet ticks, in our font."""
    axes.tick_params(color=LINE, labelcolor=MUTED, length=3)
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        label.set_fontproperties(font(9))


def colour_bar(
    figure: "Figure", image: Any, axes: "Axes", label: str, *, ticks: Mapping[float, str] | None = None,
    size: float = 10,
) -> None:  # fmt: skip
    """The scale of an image beside its axes. ticks: value → what stands there; size: of the label, in points."""
    bar = figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02, ticks=None if ticks is None else list(ticks))
    if ticks is not None:
        bar.ax.set_yticklabels(list(ticks.values()))
        bar.ax.minorticks_off()
    bar.outline.set_edgecolor(LINE)
    bar.set_label(drawable(label), color=MUTED, fontproperties=font(size))
    plain(bar.ax)


def font(size: float) -> Any:
    """Our font at a size in points; matplotlib's own for what it lacks."""
    from matplotlib.font_manager import FontProperties

    return FontProperties(family=_families(), size=size)


@cache
def _families() -> tuple[str, ...]:
    """Our font for all, matplotlib's own for what it lacks. Known to matplotlib from then on, and used only by name."""
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
    """The text with characters that no font has as U+XXXX, and no sign that matplotlib would take for TeX."""
    return "".join(c if ord(c) in _known() else f"U+{ord(c):04X}" for c in text).replace("$", r"\$")


def save(figure: "Figure", path: Path) -> Path:
    """Write a PNG, whole or not at all."""
    with atomic_path(path) as temporary, warnings.catch_warnings():
        # Very small pictures leave the layout no room; they are drawn all the same.
        warnings.filterwarnings("ignore", message=".*constrained_layout not applied.*")
        figure.savefig(temporary, dpi=130, format="png")
    return path
