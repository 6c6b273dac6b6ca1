"""Layers of a report side by side: a picture for each passage and head, with every token and every number.

Requires matplotlib, the `view` extra.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headwise.progress import Progress
from headwise.reports.cells import bar, draw, numbers, ticks
from headwise.reports.data import Passage, Report
from headwise.reports.figure import INK, MUTED, drawable, figure_class, font, save
from headwise.reports.messages import message
from headwise.reports.ranges import finite
from headwise.reports.words import words
from headwise.wording import in_language, language_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CELL = 0.21  # inches, which four digits fill
LEAST = 5.2  # inches of a panel, which its title requires


def write_panels(
    report: Report, folder: str | os.PathLike[str], *, views: Sequence[int], progress: Progress | None = None,
    lang: str | None = None,
) -> list[Path]:  # fmt: skip
    """Write sentence-S-head-H.png, numbered from 1, for each passage and head, with the layers `views` side by side.

    Args:
        report: any report whose maps are exact. folder: of the pictures. views: layers, in the order of the panels.
        progress: called with ("drawing", pictures done, pictures in all). lang: of the titles.
    Returns:
        The paths of the pictures.
    Raises:
        ConfigError: if matplotlib is missing, and for another language than "en", "zh" and None, that of the locale.
    """
    lang = language_of(lang)
    figure_class()
    written: list[Path] = []
    heads = report.shape[1]
    for i, passage in enumerate(report.passages):
        for head in range(heads):
            title = in_language(message("panels_title", sentence=i + 1, head=head + 1), lang)
            figure = panels(report, passage, head, views, title, lang)
            written.append(save(figure, Path(folder) / f"sentence-{i + 1}-head-{head + 1}.png"))
            if progress is not None:
                progress("drawing", len(written), heads * len(report.passages))
    return written


def panels(report: Report, passage: Passage, head: int, views: Sequence[int], title: str, lang: str) -> "Figure":
    """The maps of one head in the layers `views`, without special tokens, each under the name of its layer.

    Weights that are exactly 0 are written as 0, others with two decimals.
    """
    text = words(lang, "report")
    own = [i for i in range(len(passage.tokens)) if i not in set(passage.special)]
    tokens = [passage.tokens[i] for i in own]
    side = max(LEAST, CELL * len(tokens))
    large = float(np.clip(side, 11, 30))  # points: titles grow with the picture
    figure = figure_class()(
        figsize=(len(views) * (side + 1.8), side + 0.08 * large + 0.8), layout="constrained", facecolor="white"
    )
    grid = figure.subplots(1, len(views), squeeze=False)[0]
    for axes, layer in zip(grid, views, strict=True):
        rows = finite(passage.maps[layer, head])[own]
        weights, sums = rows[:, own], rows.sum(1)
        image, cut = draw(axes, weights)
        bar(figure, image, axes, text["weight"], cut)
        ticks(axes, tokens, tokens, 1, side / len(tokens))
        numbers(axes, image, weights, side / len(tokens))
        axes.set_xlabel(text["key_axis"], color=MUTED, fontproperties=font(large * 0.9))
        axes.set_ylabel(text["query_axis"], color=MUTED, fontproperties=font(large * 0.9))
        said = message(
            "panel_padded" if passage.special else "panel", zero=f"{np.mean(weights == 0):.1%}",
            low=float(sums.min()), high=float(sums.max()),
        )  # fmt: skip
        lines = (drawable(in_language(line, lang)) for line in (report.layers[layer], said))
        axes.set_title("\n".join(lines), loc="left", pad=10, color=INK, fontproperties=font(large * 0.9))
    figure.suptitle(drawable(title), color=INK, fontproperties=font(large * 1.25))
    return figure
