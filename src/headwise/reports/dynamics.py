"""The development of head roles during training, as a picture: a line per head, in the colour of its last role.
Requires matplotlib."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headwise.analysis.checks import head_name
from headwise.analysis.head_roles.definitions import DEFINITIONS
from headwise.analysis.history import NO_ROLE, HeadHistory
from headwise.errors import ConfigError
from headwise.reports.figure import INK, MUTED, drawable, figure_class, font, quiet, save
from headwise.reports.picture_words import said
from headwise.wording import in_language, language

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
    figure = figure_class()(figsize=(10.6, 7.4), layout="constrained", facecolor="white")
    grid = figure.subplots(2, 2, sharex=True)
    broad = history.passage("broad")
    panels = [
        (said("previous"), history.repeats("previous"), 1.0),
        (said("induction"), history.repeats("induction"), 1.0),
        (said("broad"), broad, float(np.nanmax(broad, initial=0.0)) or 1.0),
    ]
    for axes, (name, values, top) in zip(grid.flat, panels, strict=False):
        _lines(axes, history, values)
        axes.set_title(drawable(name), loc="left", color=INK, fontproperties=font(10))
        axes.set_ylim(0.0, 1.04 * top)
    _likeness(grid[1, 1], history)
    for axes in grid.flat:
        quiet(axes)
    for axes in grid[1]:
        axes.set_xlabel(said("step"), color=MUTED, fontproperties=font(10))
    _legend(figure, history)
    figure.suptitle(
        drawable(title or said("training", title=history.title)), x=0.01, ha="left", color=INK,
        fontproperties=font(12),
    )  # fmt: skip
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
    for measure, colour, word in (("cka", INK, "CKA"), ("cosine", "#009e73", said("cosine"))):
        for within, style in ((False, "-"), (True, ":")):
            values = history.alike(measure, within)
            if not np.isnan(values).all():
                pairs = said("within" if within else "pairs", measure=word)
                mark = "o" if len(history.looks) == 1 else None
                shown += axes.plot(history.steps, values, style, color=colour, linewidth=1.6, marker=mark, label=pairs)
    axes.set_title(drawable(said("alike")), loc="left", color=INK, fontproperties=font(10))
    if shown:
        axes.legend(handles=shown, frameon=False, prop=font(9), labelcolor=MUTED)
    else:
        _unmeasured(axes)


def _unmeasured(axes: "Axes") -> None:
    axes.text(0.5, 0.5, said("unmeasured"), transform=axes.transAxes, ha="center", color=MUTED, fontproperties=font(10))


def _legend(figure: "Figure", history: HeadHistory) -> None:
    """The colours, with the number of heads of each role at the end."""
    from matplotlib.lines import Line2D

    roles = [history.role(*at) for at in np.ndindex(*history.shape)]
    counts = sorted({role: roles.count(role) for role in roles}.items(), key=lambda one: (one[0] == NO_ROLE, -one[1]))
    handles = [
        Line2D([], [], color=_colour(role), linewidth=2.0, label=drawable(f"{_word(role)} ({count})"))
        for role, count in counts
    ]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(len(handles), 6), frameon=False, prop=font(9),
        labelcolor=MUTED, title=said("clearest"), title_fontproperties=font(9),
    )  # fmt: skip


def _word(role: str) -> str:
    if role == NO_ROLE:
        return said("no_role")
    return in_language(DEFINITIONS[role].word, language()) if role in DEFINITIONS else role


def _colour(role: str) -> str:
    return COLOURS.get(role, OTHER)
