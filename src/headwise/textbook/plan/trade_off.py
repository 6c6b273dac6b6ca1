"""The number of heads h against the head size d_k at a fixed d_model = h·d_k."""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.costs import Work, attention_stages, cache_bytes, score_bytes
from headwise.errors import ConfigError
from headwise.files import atomic_path
from headwise.nn.counts import counts_of
from headwise.pictures.colours import stops
from headwise.textbook.plan.tables import Column, Plan, Table, Value, masked, scaled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, LINE = "#1d1e26", "#63656f", "#dfddd3"
COLUMNS = (
    Column("h", "count", "num_heads"), Column("d_k", "count", "head_dim"), Column("parameters", "count"),
    Column("FLOPs", "flops", "flops"), Column("exps", "figure", "exponentials"),
    Column("n×n", "bytes", "materialised_bytes"), Column("lse", "bytes", "blockwise_bytes"),
    Column("MHA cache", "bytes", "cache_bytes"), Column("MQA cache", "bytes", "mqa_cache_bytes"),
)  # fmt: skip


def trade_off(d_model: int, work: Work) -> Plan:
    """Return a plan with one row for each power of two h that divides d_model, d_k = d_model / h: one layer of
    `multi_head`, and for comparison the cache of `mqa`, which shrinks as h grows.

    Raises:
        ConfigError: if no h above 1 divides d_model.
    """
    if d_model < 2:
        raise ConfigError(f"d_model={d_model}: expected at least 2, as one dimension cannot be divided")
    rows: list[tuple[Value, ...]] = []
    while d_model % (heads := 2 ** len(rows)) == 0:
        rows.append(_row(d_model, heads, work))
    if len(rows) == 1:
        raise ConfigError(f"d_model={d_model}: is odd, so no power of two above 1 divides it")
    note = (
        "Parameters, FLOPs and MHA's cache do not depend on h; exponentials and scores grow with it. A head's n×n "
        "scores have rank d_k at most: one head can reach every positive weight matrix if and only if d_k ≥ n "
        "(Bhojanapalli et al. 2020, 2002.07028)."
    )
    table = Table("trade_off", "One layer, h·d_k = d_model", COLUMNS, tuple(rows), note=note)
    size = f"{work.batch} × {work.queries:,} tokens, {masked(work)}, {work.dtype}"
    meanings = (
        "n×n: the scores, if stored; lse: what blockwise attention stores instead, a float32 log-sum-exp per "
        "query and head. FLOPs are those of matrix products, exps the softmax's exponentials.",
    )
    return Plan(f"Number of heads h and head size d_k at d_model {d_model:,}", (("input", size),), (table,), meanings)


def plot_trade_off(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Plot the table of `trade_off` as a PNG: memory and work over h, both axes logarithmic. Requires matplotlib."""
    from headwise.reports.figure import figure_class

    figure: Figure = figure_class()(figsize=(10.4, 4.7), layout="constrained", facecolor="white")
    memory, work = figure.subplots(1, 2)
    table = plan.table("trade_off")
    data = {column.key or column.name: [row[i] for row in table.rows] for i, column in enumerate(table.columns)}
    cool, warm = stops("light"), stops("dark")
    colours = [cool[29], warm[15], warm[23], cool[12]]
    lines = {
        "scores, materialised": "materialised_bytes", "cache, multi-head": "cache_bytes",
        "cache, MQA": "mqa_cache_bytes", "log-sum-exps, blockwise": "blockwise_bytes",
    }  # fmt: skip
    _draw(memory, data, lines, colours, "memory of one layer", "B")
    lines = {"FLOPs": "flops", "exponentials": "exponentials"}
    _draw(work, data, lines, colours[:2], "work of one forward pass of one layer", "")
    for axes in (memory, work):
        axes.set_xscale("log", base=2)
        axes.set_xticks(
            data["num_heads"], [f"{h}\n{d}" for h, d in zip(data["num_heads"], data["head_dim"], strict=True)]
        )
        axes.minorticks_off()
        axes.set_xlabel("number of heads h, and below it d_k = d_model / h", color=MUTED)
        axes.grid(axis="y", color=LINE, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.tick_params(color=LINE, labelcolor=MUTED, length=3, labelsize=8.5)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(LINE)
    figure.suptitle(f"{plan.title}, {plan.facts[0][1]}", color=INK, fontsize=12)
    with atomic_path(Path(path)) as temporary:
        figure.savefig(temporary, dpi=130, format="png")


def _row(d_model: int, heads: int, work: Work) -> tuple[Value, ...]:
    """The values of `COLUMNS`."""
    counts, shared = (counts_of(name, {"d_model": d_model, "num_heads": heads}) for name in ("multi_head", "mqa"))
    stages = attention_stages(counts, work)
    kept: Any = {"batch": work.batch, "dtype": work.cache or work.dtype, "window": work.window, "sinks": work.sinks}
    return (
        heads,
        d_model // heads,
        counts.parameters,
        sum(stage.flops for stage in stages),
        sum(stage.exponentials for stage in stages),
        *(score_bytes(counts, replace(work, materialised=stored)) for stored in (True, False)),
        *(cache_bytes(one, work.queries, **kept) for one in (counts, shared)),
    )


def _draw(
    axes: "Axes", data: dict[str, list[Any]], lines: dict[str, str], colours: list[str], title: str, unit: str
) -> None:  # fmt: skip
    """Draw lines on a logarithmic scale with a legend."""
    axes.set_yscale("log")
    for (name, key), colour in zip(lines.items(), colours, strict=True):
        axes.plot(data["num_heads"], data[key], color=colour, linewidth=2, marker="o", markersize=3.5, label=name)
    axes.set_title(title, loc="left", color=INK, fontsize=10.5)
    axes.yaxis.set_major_formatter(lambda value, _: scaled(value, unit).replace(".00", "").replace(".0", ""))
    axes.legend(frameon=False, fontsize=9, labelcolor=INK)
