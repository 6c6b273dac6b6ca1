"""Memory and work against the number of heads at a fixed d_model, as a picture. Requires matplotlib."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.amounts import scaled
from headwise.pictures.colours import stops
from headwise.reports.figure import INK, MUTED, drawable, figure_class, font, quiet, save
from headwise.reports.picture_words import said
from headwise.wording import in_language, language

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MEMORY = {
    "materialised": "materialised_bytes", "cache": "cache_bytes", "mqa_cache": "mqa_cache_bytes",
    "blockwise": "blockwise_bytes",
}  # fmt: skip
WORK = {"flops": "flops", "exponentials": "exponentials"}  # in `picture_words`: of the columns


def write_trade_off(columns: Mapping[str, Sequence[Any]], path: str | os.PathLike[str], *, title: str) -> None:
    """Write a PNG with memory and work over the number of heads, both axes logarithmic.

    Args:
        columns: num_heads, head_dim and those of MEMORY and WORK, a value per number of heads.
    """
    figure: Figure = figure_class()(figsize=(10.4, 4.7), layout="constrained", facecolor="white")
    memory, work = figure.subplots(1, 2)
    _draw(memory, columns, MEMORY, said("memory"), lambda value, _: scaled(value, "B"))
    _draw(work, columns, WORK, said("work"), lambda value, _: scaled(value))
    figure.suptitle(drawable(in_language(title, language())), color=INK, fontproperties=font(12))
    save(figure, Path(path))


def _draw(
    axes: "Axes", columns: Mapping[str, Sequence[Any]], lines: Mapping[str, str], title: str,
    number: Callable[[float, Any], str],
) -> None:  # fmt: skip
    """Lines with a legend; below each number of heads the head size."""
    cool, warm = stops("light"), stops("dark")
    heads, sizes = columns["num_heads"], columns["head_dim"]
    for (name, key), colour in zip(lines.items(), (cool[29], warm[15], warm[23], cool[12]), strict=False):
        axes.plot(heads, columns[key], color=colour, linewidth=2, marker="o", markersize=3.5, label=said(name))
    axes.set_yscale("log")
    axes.set_xscale("log", base=2)
    axes.set_xticks(heads, [f"{h}\n{d}" for h, d in zip(heads, sizes, strict=True)])
    axes.minorticks_off()
    axes.set_title(title, loc="left", color=INK, fontproperties=font(10.5))
    axes.set_xlabel(said("sizes"), color=MUTED, fontproperties=font(10))
    quiet(axes)
    axes.yaxis.set_major_formatter(lambda value, at: number(value, at).replace(".00", "").replace(".0", ""))
    axes.legend(frameon=False, prop=font(9), labelcolor=INK)
