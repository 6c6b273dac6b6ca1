"""Heat maps of a report, its layers side by side, and head × head matrices. Requires matplotlib, the `view` extra.

The colour scale of heat maps is the square root of the weight, with the colours and the upper end of the page.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from headwise.analysis.similarity import HeadSimilarity
from headwise.base.run import Progress
from headwise.errors import ConfigError, check_choice
from headwise.reports.colours import stops
from headwise.reports.data import Passage, Report, finite
from headwise.reports.figure import (
    INK,
    LINE,
    MUTED,
    READABLE as LABELLED,
    axis_names,
    bar,
    cell_inches,
    clipped,
    colour_bar,
    colour_map,
    draw,
    drawable,
    figure_class,
    figure_of,
    font,
    label_of,
    label_size,
    numbers,
    pixels,
    plain,
    quiet,
    save,
    save_pixels,
    shown,
    sides,
    ticks,
    titled,
    width_of,
)
from headwise.reports.messages import message, said
from headwise.reports.words import words
from headwise.wording import COMMA, in_language, joined, language_of, tr

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
        labels = pixels(_frame(report, passage, lang))  # the same for all heads
        for layer, head in heads[k]:
            if progress is not None:
                progress("drawing", len(written), total)
            picture = pixels(heat_map(report, passage, layer, head, lang, labelled=False))
            name = f"{prefix}layer-{layer}-head-{head}.png"
            written.append(save_pixels(np.minimum(labels, picture), folder / name))
    return written


def heat_map(
    report: Report, passage: Passage, layer: int, head: int, lang: str | None = None, *, labelled: bool = True
) -> "Figure":
    """One head: axes with the characters if `labelled`, colour bar and, for short texts, the weight in each cell; of
    pooled maps, the largest weight of each cell."""
    lang = language_of(lang)
    text, figure = words(lang, "report"), _frame(report, passage, lang, labelled)
    (axes,) = figure.axes
    weights = finite(shown(passage)[report.shown_in(passage).index(layer), head])
    image, cut = draw(axes, weights, passage.causal)
    beside = axes.get_position()
    inch = 1 / figure.get_figwidth()
    colours = figure.add_axes((beside.x1 + 0.12 * inch, beside.y0, 0.16 * inch, beside.height))
    pooled = in_language(message("pooled_weight", cell=passage.cell), lang)
    bar(figure, image, axes, text["weight"] if passage.cell == 1 else pooled, cut, colours)
    pattern = in_language(report.patterns[layer][head], lang)
    name = text["head_name"].format(layer=layer, head=head)
    title = in_language(joined([name, pattern], tr(": ")), lang) if pattern else name
    room = beside.width * figure.get_figwidth() + 1.2
    titled(axes, title, 12 * min(1.0, room / width_of(drawable(title), 12)), pad=10)  # it is not cut
    size = max(weights.shape)
    if size <= WITH_VALUES and passage.cell == 1:
        numbers(axes, image, weights, beside.width * figure.get_figwidth() / weights.shape[1], passage.causal)
    return figure


def _frame(report: Report, passage: Passage, lang: str, labelled: bool = True) -> "Figure":
    """The axes of a heat map with margins for the labels of its tokens, and these labels."""
    text = words(lang, "report")
    queries, keys = sides(passage)
    size = max(len(queries), len(keys))
    inches = max(3.2, cell_inches(size, passage.cell) * size)
    cell, below, left = inches / size, 0.25, 0.5
    if passage.cell == 1 and size <= LABELLED:
        left, below = (max(width_of(label_of(t), label_size(cell)) for t in tokens) + 0.1 for tokens in (queries, keys))
        below = below if any(len(label_of(token)) > 2 for token in keys) else 0.25
    left, below, above, right = left + 0.4, below + 0.35, 0.45, 1.25
    high, wide = (cell * len(tokens) for tokens in (queries, keys))
    whole = left + wide + right, below + high + above
    figure = figure_of(*whole, layout=None)
    axes = figure.add_axes((left / whole[0], below / whole[1], wide / whole[0], high / whole[1]))
    axes.set_xlim(-0.5, len(keys) - 0.5)
    axes.set_ylim(len(queries) - 0.5, -0.5)
    axes.spines[:].set_color(LINE)
    if labelled:
        ticks(axes, queries, keys, passage.cell, cell)
        axis_names(axes, text["key_axis"], text["query_axis"])
    else:
        axes.set_xticks([])
        axes.set_yticks([])
    return figure


def overview(report: Report, passage: Passage, lang: str | None = None) -> "Figure":
    """All heads, layer by head, each on its own scale; beneath each its strongest pattern."""
    lang = language_of(lang)
    text, between = words(lang, "report"), in_language(COMMA, lang).strip()
    layers, heads = report.shown_in(passage), report.shape[1]
    maps = shown(passage)
    wide = 1.5 * heads + 0.5
    figure = figure_of(wide, 1.75 * len(layers) + 0.7)
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
    title = drawable(in_language(report.title, lang))
    across = int(len(title) * (wide - 0.2) / max(width_of(title, 12), 0.1))  # characters of a line
    figure.suptitle(fill(title, max(across, 4)), color=INK, fontproperties=font(12))
    return figure


def loss_curve(
    log: list[dict[str, Any]], path: str | os.PathLike[str], baselines: dict[str, float] | None = None
) -> None:
    """A picture of a training log: dictionaries with `step`, `train_loss`, `heldout_loss` and, if there are several
    texts, `heldout`, the loss of each, in nats per token. baselines: held-out losses of other models, as lines."""
    if not log:
        raise ConfigError("loss_curve(log): got no entries, expected at least one evaluation")
    figure = figure_of(8.4, 4.6)
    axes = figure.subplots()
    steps = [entry["step"] for entry in log]
    axes.plot(
        steps, [entry["train_loss"] for entry in log], color="#c9c7bd", linewidth=1.4, label=said(tr("training batch"))
    )
    colours = stops("light")
    names = [name for name in log[0].get("heldout", {}) if name != "all"]
    for k, name in enumerate(names):
        losses = [entry["heldout"][name] for entry in log]
        colour = colours[14 + round(14 * k / max(1, len(names) - 1))]
        axes.plot(steps, losses, color=colour, linewidth=2, label=drawable(said(tr("held out: {name}", name=name))))
    if not names:
        axes.plot(
            steps, [entry["heldout_loss"] for entry in log], color=colours[22], linewidth=2, label=said(tr("held out"))
        )
    _baselines(axes, baselines or {})
    axis_names(axes, said(tr("step", sense="training")), said(tr("loss, nats per token")))
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


CELL = 0.21  # inches, which four digits fill
LEAST = 5.2  # inches of a panel, which its title requires


def write_panels(
    report: Report, folder: str | os.PathLike[str], *, views: Sequence[int], progress: Progress | None = None,
    theme: str = "light", lang: str | None = None,
) -> list[Path]:  # fmt: skip
    """Write sentence-S-head-H.png for each passage, from 1, and head, from 0, with the layers `views` side by side.

    Args:
        report: any report whose maps are exact. folder: of the pictures. views: layers, in the order of the panels.
        progress: called with ("drawing", pictures done, pictures in all). lang: of the titles.
        theme: "light", in which a large weight is dark, or "dark", in which it is bright.
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
            title = in_language(message("panels_title", sentence=i + 1, head=head), lang)
            figure = panels(report, passage, head, views, title, lang, theme)
            written.append(save(figure, Path(folder) / f"sentence-{i + 1}-head-{head}.png"))
            if progress is not None:
                progress("drawing", len(written), heads * len(report.passages))
    return written


def panels(
    report: Report, passage: Passage, head: int, views: Sequence[int], title: str, lang: str, theme: str = "light"
) -> "Figure":
    """The maps of one head in the layers `views`, without special tokens, each under the name of its layer. Weights
    that are exactly 0 are written as 0, others with two decimals."""
    text = words(lang, "report")
    own = [i for i in range(len(passage.tokens)) if i not in set(passage.special)]
    tokens = [passage.tokens[i] for i in own]
    side = max(LEAST, CELL * len(tokens))
    large = float(np.clip(side, 11, 30))  # points: titles grow with the picture
    figure = figure_of(len(views) * (side + 1.8), side + 0.08 * large + 0.8)
    grid = figure.subplots(1, len(views), squeeze=False)[0]
    for axes, layer in zip(grid, views, strict=True):
        rows = finite(passage.maps[layer, head])[own]
        weights, sums = rows[:, own], rows.sum(1)
        image, cut = draw(axes, weights, theme=theme)
        bar(figure, image, axes, text["weight"], cut)
        ticks(axes, tokens, tokens, 1, side / len(tokens))
        numbers(axes, image, weights, side / len(tokens))
        axis_names(axes, text["key_axis"], text["query_axis"], large * 0.9)
        said = message(
            "panel_padded" if passage.special else "panel", zero=f"{np.mean(weights == 0):.1%}",
            low=float(sums.min()), high=float(sums.max()),
        )  # fmt: skip
        lines = (drawable(in_language(line, lang)) for line in (report.layers[layer], said))
        axes.set_title("\n".join(lines), loc="left", pad=10, color=INK, fontproperties=font(large * 0.9))
    figure.suptitle(drawable(title), color=INK, fontproperties=font(large * 1.25))
    return figure


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
    """The matrix as a matplotlib figure. order: "alike" puts similar heads side by side, with a box around each group;
    "layers" sorts by layer, with lines between them, which is the only order for a directed matrix."""
    check_choice("order", order, ORDERS)
    directed = similarity.distance is None
    alike = order == "alike" and not directed
    size = len(similarity.names)
    at = similarity.order if alike else list(range(size))
    values = similarity.matrix.numpy()[np.ix_(at, at)]
    names = [similarity.names[i] for i in at]
    inches = float(np.clip(0.14 * size, 4.2, 12.0))
    figure = figure_of(inches + 1.9, inches + 1.2, layout="compressed")
    axes = figure.subplots()
    image = _draw(axes, values, similarity)
    if alike:
        _boxes(axes, similarity.groups(), names)
    else:
        _layer_lines(axes, names)
    _ticks(axes, names)
    itself = f"{'reads   ·   ' if directed else ''}grey: each head with itself, not on the scale"
    axis_names(axes, itself if size > 1 else "", "writes" if directed else "")
    colour_bar(figure, image, axes, similarity.unit)
    titled(axes, title or similarity.title, 12, pad=10)
    return figure


def _draw(axes: "Axes", values: np.ndarray, similarity: HeadSimilarity) -> Any:
    from matplotlib.colors import Normalize

    # The diagonal is not informative and would determine the scale: it is grey, except for a single head.
    itself = np.eye(len(values), dtype=bool) & (len(values) > 1)
    others = values[~itself]
    low, high = min(0.0, float(others.min())), max(0.0, float(others.max()))
    if low < -0.02 * high:
        end = max(high, -low) or 1.0
        above, below = stops("light"), BELOW[::-1]  # the lightest, for 0, is in the middle
        colours: Sequence[Any] = [
            *((0.5 * k / len(below), colour) for k, colour in enumerate(below)),
            *((0.5 + 0.5 * k / (len(above) - 1), colour) for k, colour in enumerate(above)),
        ]
        norm = Normalize(-end, end, clip=True)
    else:
        # A divergence is small for similar heads; darker means more similar in every picture.
        colours = stops("light")[::-1] if similarity.small_is_alike else stops("light")
        norm = Normalize(0.0, high or 1.0, clip=True)
    axes.spines[:].set_color(LINE)
    shown = np.ma.array(values, mask=itself)
    return axes.imshow(shown, cmap=colour_map(colours, ITSELF), norm=norm, interpolation="nearest", aspect="equal")


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
