"""The plot: time and memory against n, both axes logarithmic, a line for each contestant."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import Report, Row
from headwise.base.files import atomic_path

# Okabe and Ito's colours, which colour-blind readers can distinguish; warm ones for headwise, cool ones for the others.
STATISTICS = ("#D55E00", "headwise + 12 statistics")
KERNELS = ("#E69F00", "#CC3377", "#8B4513", "#F0B8A0", "#B8860B")
PEERS = {
    "sdpa": ("#000000", "PyTorch SDPA"),
    "flex": ("#009E73", "FlexAttention"),
    "eager": ("#56B4E9", "eager"),
    "eager_statistics": ("#0072B2", "eager + 12 statistics"),
}
LEAST_MB = 0.1  # what is less is drawn there: the measurement is no finer
GAP = 0.052  # of the axes' height, between two labels


@dataclass(frozen=True)
class Line:
    """One contestant's points."""

    label: str
    colour: str
    ours: bool
    xs: Sequence[int]
    ys: Sequence[float]


def draw(report: Report, path: Path) -> None:
    """Write the PNG. Raises ImportError without matplotlib, which is in the extra `view`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 6.2), dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    times = lines(report.sweep, lambda row: None if row.median is None else row.median * 1e3)
    rooms = lines(report.sweep, lambda row: None if row.memory is None else max(row.memory / 1e6, LEAST_MB))
    _panel(left, times, "Time of one call, ms")
    _panel(right, rooms, "Peak memory beside inputs and outputs, MB")
    machine = report.machine
    figure.suptitle("Causal attention, 12 heads of 64, float32", x=0.055, y=0.975, ha="left", size=15, weight="bold")
    many = "s" if machine.threads > 1 else ""
    note = (
        f"{machine.cpu}, {machine.threads} thread{many}, torch {machine.torch}. Medians, measured turn by turn. "
        f"Memory below {LEAST_MB:g} MB is drawn at {LEAST_MB:g} MB."
    )
    if report.quick:
        note += " Small sizes: these times say nothing."
    figure.text(0.055, 0.9, note, size=9.5, color="#555")
    figure.subplots_adjust(left=0.055, right=0.83, top=0.82, bottom=0.1, wspace=0.74)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png")


def lines(rows: list[Row], value: Any) -> list[Line]:
    """The points of each contestant that has any."""
    series: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in rows:
        found = value(row)
        if found is not None:
            series.setdefault((row.case, row.contestant), []).append((row.n, found))
    result, colours = [], iter(KERNELS * 4)
    for (case, name), points in series.items():
        ours = name not in PEERS
        if not ours:
            colour, label = PEERS[name]
        elif case == "sweep-statistics":
            colour, label = STATISTICS
        else:
            colour, label = next(colours), f"headwise {name}"
        points.sort()
        result.append(Line(label, colour, ours, [x for x, _ in points], [y for _, y in points]))
    return result


def spaced(wanted: Sequence[float], gap: float, low: float = 0.0, high: float = 1.0) -> list[float]:
    """Positions of labels closest to the wanted ones, at least `gap` apart and within low and high.

    Labels that would touch form a block around the mean of their wishes (pool adjacent violators).
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    blocks: list[tuple[float, int]] = []  # where the block's first label would be if free, number of labels
    for i in order:
        start, size = wanted[i], 1
        while blocks and blocks[-1][0] + blocks[-1][1] * gap > start:
            before, count = blocks.pop()
            start = (before * count + (start - count * gap) * size) / (count + size)
            size += count
        start = max(low, min(start, high - (size - 1) * gap))
        blocks.append((start, size))
    places = [0.0] * len(wanted)
    at = iter(order)
    for start, size in blocks:
        for k in range(size):
            places[next(at)] = start + k * gap
    return places


def _panel(axes: Any, drawn: list[Line], title: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for line in drawn:
        style = (
            {"linewidth": 2.4, "zorder": 3}
            if line.ours
            else {"linewidth": 1.6, "linestyle": (0, (5, 1.5)), "zorder": 4}
        )
        axes.plot(line.xs, line.ys, color=line.colour, marker="o", markersize=4.5 if line.ours else 3.5, **style)
    axes.margins(y=0.09)
    axes.set_title(title, loc="left", size=11.5, pad=10)
    axes.set_xlabel("n, tokens", size=10)
    ticks = sorted({x for line in drawn for x in line.xs})
    axes.set_xticks(ticks, [f"{x:,}" for x in ticks])
    axes.xaxis.set_minor_locator(_none())
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.tick_params(labelsize=9, length=3)
    axes.grid(True, which="major", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    _label(axes, drawn)


def _label(axes: Any, drawn: list[Line]) -> None:
    """Names to the right of the axes, each tied to the end of its line; above its end if the line stops early."""
    axes.figure.canvas.draw()
    to_axes = axes.transAxes.inverted()
    last = max((line.xs[-1] for line in drawn), default=0)
    for line in drawn:
        if line.xs[-1] < last:
            axes.annotate(
                line.label, xy=(line.xs[-1], line.ys[-1]), xytext=(4, 7), textcoords="offset points",
                color=line.colour, size=10, ha="right", weight="bold" if line.ours else "normal",
            )  # fmt: skip
    reaching = [line for line in drawn if line.xs[-1] == last]
    ends = [to_axes.transform(axes.transData.transform((line.xs[-1], line.ys[-1]))) for line in reaching]
    for line, end, y in zip(reaching, ends, spaced([end[1] for end in ends], GAP), strict=True):
        axes.annotate(
            line.label, xy=(end[0], end[1]), xytext=(1.05, y), xycoords="axes fraction", textcoords="axes fraction",
            color=line.colour, size=10, va="center", ha="left", weight="bold" if line.ours else "normal",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": line.colour, "linewidth": 0.7, "linestyle": ":", "shrinkA": 1,
                        "shrinkB": 3, "relpos": (0, 0.5)},
        )  # fmt: skip


def _none() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()
