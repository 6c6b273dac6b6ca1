"""Heat maps as PNG: one picture of all heads, and one of each. Requires matplotlib, the `view` extra.

The colour scale is the square root of the weight, with the colours and the upper end of the page.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headwise.errors import ConfigError
from headwise.pictures.colours import stops
from headwise.progress import Progress
from headwise.reports.cells import bar, cell_inches, clipped, draw, numbers, shown, sides, ticks
from headwise.reports.data import Passage, Report
from headwise.reports.figure import INK, MUTED, drawable, figure_class, font, quiet, save
from headwise.reports.messages import message
from headwise.reports.picture_words import said
from headwise.reports.ranges import finite
from headwise.reports.words import words
from headwise.wording import in_language, joined, language_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WITH_VALUES = 40  # tokens at most to write the weight into each cell


def write_pngs(
    report: Report, folder: str | os.PathLike[str], *, progress: Progress | None = None, lang: str | None = None
) -> list[Path]:
    """Write all-heads.png and layer-L-head-H.png (for each passage, if there are several) into `folder`.

    Returns the files in the order they were written. Raises ConfigError if matplotlib is missing, and for another
    language than "en" and "zh"; None is that of the locale.
    """
    lang = language_of(lang)
    figure_class()
    folder = Path(folder)
    heads = [[(i, h) for i, h in report.heads if i in report.shown_in(passage)] for passage in report.passages]
    total, written = sum(len(those) + 1 for those in heads), []
    for k, passage in enumerate(report.passages):
        prefix = f"passage-{k + 1}-" if len(report.passages) > 1 else ""
        written.append(save(overview(report, passage, lang), folder / f"{prefix}all-heads.png"))
        for layer, head in heads[k]:
            if progress is not None:
                progress("drawing", len(written), total)
            picture = heat_map(report, passage, layer, head, lang)
            written.append(save(picture, folder / f"{prefix}layer-{layer}-head-{head}.png"))
    return written


def heat_map(report: Report, passage: Passage, layer: int, head: int, lang: str | None = None) -> "Figure":
    """One head: axes with the characters, colour bar and, for short texts, the weight in each cell.

    Pooled maps show the largest weight of each cell, as the colour bar states.
    """
    lang = language_of(lang)
    text = words(lang, "report")
    weights = finite(shown(passage)[report.shown_in(passage).index(layer), head])
    queries, keys = sides(passage)
    size = max(len(queries), len(keys))
    cell = cell_inches(size, passage.cell)
    inches = max(4.2, cell * size)
    figure = figure_class()(figsize=(inches + 1.2, inches + 0.8), layout="compressed", facecolor="white")
    axes = figure.subplots()
    image, cut = draw(axes, weights, passage.causal)
    pooled = in_language(message("pooled_weight", cell=passage.cell), lang)
    bar(figure, image, axes, text["weight"] if passage.cell == 1 else pooled, cut)
    ticks(axes, queries, keys, passage.cell, inches / size)
    axes.set_xlabel(text["key_axis"], color=MUTED, fontproperties=font(10))
    axes.set_ylabel(text["query_axis"], color=MUTED, fontproperties=font(10))
    pattern = in_language(report.patterns[layer][head], lang)
    name = text["head_name"].format(layer=layer, head=head)
    title = in_language(joined([name, pattern], ": ", "："), lang) if pattern else name
    axes.set_title(drawable(title), loc="left", pad=10, color=INK, fontproperties=font(12))
    if size <= WITH_VALUES and passage.cell == 1:
        numbers(axes, image, weights, inches / size, passage.causal)
    return figure


def overview(report: Report, passage: Passage, lang: str | None = None) -> "Figure":
    """All heads, layer by head, each on its own scale; beneath each its strongest pattern."""
    lang = language_of(lang)
    text, between = words(lang, "report"), "，" if lang == "zh" else ","
    layers, heads = report.shown_in(passage), report.shape[1]
    maps = shown(passage)
    size = 1.5 * heads + 0.5, 1.75 * len(layers) + 0.7
    figure = figure_class()(figsize=size, layout="constrained", facecolor="white")
    figure.get_layout_engine().set(w_pad=0.03, h_pad=0.03, wspace=0.02, hspace=0.02)
    grid = figure.subplots(len(layers), heads, squeeze=False)
    for row, layer in enumerate(layers):
        for head in range(heads):
            axes = grid[row, head]
            if (layer, head) not in report.heads:
                axes.set_axis_off()
                continue
            draw(axes, finite(maps[row, head]), passage.causal, limit=160)
            axes.set_xticks([])
            axes.set_yticks([])
            pattern = in_language(report.patterns[layer][head], lang).split(between)[0]
            axes.set_xlabel(drawable(clipped(pattern, 22)), color=MUTED, labelpad=3, fontproperties=font(7.5))
            if row == 0:
                axes.set_title(text["head_short"].format(head=head), color=INK, fontproperties=font(9))
        grid[row, 0].set_ylabel(text["layer_short"].format(layer=layer), color=INK, fontproperties=font(9))
    figure.suptitle(
        drawable(clipped(in_language(report.title, lang), 12 * heads + 12)), color=INK, fontproperties=font(12)
    )
    return figure


def loss_curve(
    log: list[dict[str, Any]], path: str | os.PathLike[str], baselines: dict[str, float] | None = None
) -> None:
    """A picture of a training log: dictionaries with `step`, `train_loss`, `heldout_loss` and, if there are several
    texts, `heldout`, the loss of each, in nats per token. baselines: held-out losses of other models, as lines."""
    if not log:
        raise ConfigError("loss_curve(log): got no entries, expected at least one evaluation")
    figure = figure_class()(figsize=(8.4, 4.6), layout="constrained", facecolor="white")
    axes = figure.subplots()
    steps = [entry["step"] for entry in log]
    axes.plot(steps, [entry["train_loss"] for entry in log], color="#c9c7bd", linewidth=1.4, label=said("batch"))
    colours = stops("light")
    names = [name for name in log[0].get("heldout", {}) if name != "all"]
    for k, name in enumerate(names):
        losses = [entry["heldout"][name] for entry in log]
        colour = colours[14 + round(14 * k / max(1, len(names) - 1))]
        axes.plot(steps, losses, color=colour, linewidth=2, label=drawable(said("heldout_of", name=name)))
    if not names:
        axes.plot(
            steps, [entry["heldout_loss"] for entry in log], color=colours[22], linewidth=2, label=said("heldout")
        )
    _baselines(axes, baselines or {})
    axes.set_xlabel(said("step"), color=MUTED, fontproperties=font(10))
    axes.set_ylabel(said("loss"), color=MUTED, fontproperties=font(10))
    quiet(axes)
    axes.legend(frameon=False, prop=font(9))
    save(figure, Path(path))


def _baselines(axes: "Axes", losses: dict[str, float]) -> None:
    """Dotted lines with their names at the right, moved apart where they would touch."""
    if not losses:
        return
    for loss in losses.values():
        axes.axhline(loss, color=MUTED, linestyle=(0, (1, 2)), linewidth=1)
    low, high = axes.get_ylim()
    apart, last = (high - low) * 0.045, -np.inf
    for name, loss in sorted(losses.items(), key=lambda item: item[1]):
        last = max(loss, last + apart)
        axes.annotate(
            drawable(f"{name} {loss:.2f}"), (1.01, last), xycoords=("axes fraction", "data"), va="center",
            annotation_clip=False, color=MUTED, fontproperties=font(8.5),
        )  # fmt: skip
