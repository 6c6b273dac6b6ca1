"""Pictures of trainings, plans and pruning: roles, trade-offs, losses. Requires matplotlib, the `view` extra."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headwise.analysis.checks import head_name
from headwise.analysis.head_roles.score import DEFINITIONS
from headwise.analysis.history import NO_ROLE, HeadHistory
from headwise.analysis.importance.curve import PruningCurve
from headwise.errors import ConfigError
from headwise.reports.colours import stops
from headwise.reports.figure import INK, LINE, MUTED, axis_names, drawable, figure_of, font, quiet, save, titled
from headwise.reports.messages import said
from headwise.wording import in_language, language, scaled, tr

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Different in hue and lightness (Okabe & Ito 2008); other roles share one colour.
COLOURS = {
    "induction": "#d55e00", "previous": "#0072b2", "local": "#56b4e9", "self": "#009e73", "first": "#cc79a7",
    "even": "#a58b00", "broad": "#a58b00", NO_ROLE: "#b9b7ae",
}  # fmt: skip
OTHER = "#7a4fb5"
NAMED = 4  # heads of a panel with their names at the ends of their lines


def write_dynamics(
    history: HeadHistory | str | os.PathLike[str], path: str | os.PathLike[str], *, title: str | None = None
) -> Path:
    """Write the picture as a PNG; see `dynamics_figure`. `history` may be the file heads.jsonl. Returns the path.

    Raises:
        CheckpointError: if the file is not a record of heads. ConfigError: without matplotlib or records.
    """
    found = history if isinstance(history, HeadHistory) else HeadHistory.read(history)
    return save(dynamics_figure(found, title=title), Path(path))


def dynamics_figure(history: HeadHistory, *, title: str | None = None) -> "Figure":
    """Four panels over the steps, as a matplotlib figure: weight on the previous token and on the tokens that followed
    earlier occurrences (random tokens, repeated), entropy on the held-out passage, and similarity of outputs."""
    if not history.looks:
        raise ConfigError("history: contains no records, so there is nothing to plot")
    figure = figure_of(10.6, 7.4)
    grid = figure.subplots(2, 2, sharex=True)
    broad = history.passage("broad")
    panels = [
        (said(tr("weight on the previous token · random tokens, repeated")), history.repeats("previous"), 1.0),
        (said(tr("induction weight · random tokens, repeated")), history.repeats("induction"), 1.0),
        (said(tr("entropy, nats · held-out passage")), broad, float(np.nanmax(broad, initial=0.0)) or 1.0),
    ]
    for axes, (name, values, top) in zip(grid.flat, panels, strict=False):
        _lines(axes, history, values)
        titled(axes, name)
        axes.set_ylim(0.0, 1.04 * top)
    _likeness(grid[1, 1], history)
    for axes in grid.flat:
        quiet(axes)
    for axes in grid[1]:
        axis_names(axes, said(tr("step", sense="training")))
    _legend(figure, history)
    title = drawable(title or said(tr("Heads during training: {title}", title=history.title)))
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontproperties=font(12))
    return figure


def _lines(axes: "Axes", history: HeadHistory, values: np.ndarray) -> None:
    """A line per head; those with the largest last values have their names."""
    layers, heads = history.shape
    if np.isnan(values).all():
        _unmeasured(axes)
        return
    for at in np.ndindex(layers, heads):
        role = history.role(*at)
        axes.plot(
            history.steps, values[:, at[0], at[1]], color=_colour(role), linewidth=1.0 if role == NO_ROLE else 1.7,
            zorder=2 if role == NO_ROLE else 3, marker="o" if len(history.looks) == 1 else None, markersize=3,
        )  # fmt: skip
    last = np.nan_to_num(values[-1], nan=-1.0)
    order = [divmod(int(i), heads) for i in np.argsort(-last, axis=None)]
    placed: list[float] = []
    span = float(np.nanmax(values)) or 1.0
    for at in order[:NAMED]:
        if all(abs(last[at] - y) > 0.05 * span for y in placed):  # names must not overlap
            placed.append(float(last[at]))
            role = history.role(*at)
            axes.annotate(
                head_name(*at), (history.steps[-1], last[at]), xytext=(4, 0), textcoords="offset points",
                va="center", color=MUTED if role == NO_ROLE else _colour(role), fontproperties=font(8),
                annotation_clip=False,
            )  # fmt: skip


def _likeness(axes: "Axes", history: HeadHistory) -> None:
    """Mean over all pairs, and over those inside a layer."""
    shown: list[Any] = []
    for measure, colour, word in (("cka", INK, "CKA"), ("cosine", "#009e73", said(tr("cosine")))):
        for within, style in ((False, "-"), (True, ":")):
            values = history.alike(measure, within)
            if not np.isnan(values).all():
                form = tr("{measure}, pairs of one layer") if within else tr("{measure}, all pairs")
                pairs = said(form.filled(measure=word))
                mark = "o" if len(history.looks) == 1 else None
                shown += axes.plot(history.steps, values, style, color=colour, linewidth=1.6, marker=mark, label=pairs)
    titled(axes, said(tr("similarity of the outputs of two heads, mean · held-out passage")))
    if shown:
        axes.legend(handles=shown, frameon=False, prop=font(9), labelcolor=MUTED)
    else:
        _unmeasured(axes)


def _unmeasured(axes: "Axes") -> None:
    words = said(tr("not measured"))
    axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", color=MUTED, fontproperties=font(10))


def _legend(figure: "Figure", history: HeadHistory) -> None:
    """The colours, with the number of heads of each role at the end."""
    from matplotlib.lines import Line2D

    roles = [history.role(*at) for at in np.ndindex(*history.shape)]
    counts = sorted({role: roles.count(role) for role in roles}.items(), key=lambda one: (one[0] == NO_ROLE, -one[1]))
    words = {
        NO_ROLE: said(tr("no role")),
        **{role: in_language(one.word, language()) for role, one in DEFINITIONS.items()},
    }
    handles = [
        Line2D([], [], color=_colour(role), linewidth=2.0, label=drawable(f"{words.get(role, role)} ({count})"))
        for role, count in counts
    ]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(len(handles), 6), frameon=False, prop=font(9),
        labelcolor=MUTED, title=said(tr("clearest role at the last step (heads)")), title_fontproperties=font(9),
    )  # fmt: skip


def _colour(role: str) -> str:
    return COLOURS.get(role, OTHER)


MEMORY: dict[str, str] = {
    tr("scores, materialised"): "materialised_bytes", tr("cache, multi-head"): "cache_bytes",
    tr("cache, MQA"): "mqa_cache_bytes", tr("log-sum-exps, blockwise"): "blockwise_bytes",
}  # fmt: skip
WORK: dict[str, str] = {tr("FLOPs"): "flops", tr("exponentials"): "exponentials"}


def write_trade_off(columns: Mapping[str, Sequence[Any]], path: str | os.PathLike[str], *, title: str) -> None:
    """Memory and work over the number of heads as a PNG. columns: num_heads, head_dim, those of MEMORY and WORK."""
    figure = figure_of(10.4, 4.7)
    memory, work = figure.subplots(1, 2)
    _draw_costs(memory, columns, MEMORY, said(tr("memory of one layer")), lambda value, _: scaled(value, "B"))
    _draw_costs(work, columns, WORK, said(tr("work of one forward pass of one layer")), lambda value, _: scaled(value))
    figure.suptitle(drawable(in_language(title, language())), color=INK, fontproperties=font(12))
    save(figure, Path(path))


def _draw_costs(
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
    titled(axes, title, 10.5)
    axis_names(axes, said(tr("number of heads h, and below it d_k = d_model / h")))
    quiet(axes)
    axes.yaxis.set_major_formatter(lambda value, at: number(value, at).replace(".00", "").replace(".0", ""))
    axes.legend(frameon=False, prop=font(9), labelcolor=INK)


NEAR = 0.10  # increase of the loss at the top of the right picture, at least


def write_pruning(
    curve: PruningCurve, path: str | os.PathLike[str], *, chosen: int | None = None, limit: float | None = None
) -> None:
    """Write `pruning_figure` as a PNG."""
    save(pruning_figure(curve, chosen=chosen, limit=limit), Path(path))


def pruning_figure(curve: PruningCurve, *, chosen: int | None = None, limit: float | None = None) -> "Figure":
    """The whole curve, and beside it the part near the loss of the whole model, with the band of the random orders.
    Marked: the number of removed heads `chosen`, and the increase of the loss `limit`, 0.01 for 1 %."""
    if len(curve.removed) < 2:
        raise ConfigError(f"curve: {len(curve.removed)} point; expected at least 2 to draw a line")
    figure = figure_of(10.4, 4.5)
    whole, near = figure.subplots(1, 2)
    top = float(curve.loss[0])
    for axes in (whole, near):
        _draw_losses(axes, curve, chosen, limit)
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
    near.annotate(said(tr("increase, %")), (1.0, 1.02), **place, color=MUTED, fontproperties=font(8.5))
    titled(whole, said(tr("loss against heads kept")), 10.5)
    titled(near, said(tr("near the loss of the whole model")), 10.5)
    names = whole.get_legend_handles_labels()
    figure.legend(*names, loc="outside lower center", ncols=len(names[0]), frameon=False, prop=font(9), labelcolor=INK)
    title = said(tr("{count} heads, removed by {method}", count=curve.total, method=curve.method))
    figure.suptitle(drawable(title), color=INK, fontproperties=font(12))
    return figure


def _draw_losses(axes: "Axes", curve: PruningCurve, chosen: int | None, limit: float | None) -> None:
    from matplotlib.ticker import MaxNLocator

    kept, colours, chance = curve.kept, stops("light"), curve.random
    count = len(chance)
    if count > 1:
        orders = said(tr("{count} random orders", count=count))
        axes.fill_between(kept, chance.min(0), chance.max(0), color="#e3e1d8", linewidth=0, label=orders)
    word = said(tr("their mean") if count > 1 else tr("1 random order"))
    axes.plot(kept, chance.mean(0), color=MUTED, linewidth=1.4, linestyle=(0, (4, 2)), label=word)
    errors = np.nan_to_num(curve.errors)
    axes.errorbar(
        kept, curve.loss, yerr=errors, color=colours[26], linewidth=2, marker="o", markersize=3.2, elinewidth=1,
        label=said(tr("this order, ± a standard error")),
    )  # fmt: skip
    if limit is not None:
        level = float(curve.loss[0]) * (1 + limit)
        words = said(tr("{percent:g} % more", percent=100 * limit))
        axes.axhline(level, color=MUTED, linestyle=(0, (1, 2)), linewidth=1, label=words)
    if chosen is not None:
        at = list(curve.removed).index(chosen)
        axes.plot(
            [kept[at]], [curve.loss[at]], color=INK, marker="o", markersize=9, fillstyle="none", linestyle="none",
            label=said(tr("chosen: {count} removed", count=chosen)),
        )  # fmt: skip
    axes.set_xlim(curve.total + 0.4, kept.min() - 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis_names(axes, said(tr("heads kept; all of them at the left")), said(tr("loss, nats per token")), 9.5)
    quiet(axes)
