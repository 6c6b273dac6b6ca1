"""The number of heads h against the head size d_k at a fixed d_model = h·d_k."""

import os
from dataclasses import replace
from typing import Any

from headwise.costs import Work, attention_stages, cache_bytes, score_bytes
from headwise.errors import ConfigError
from headwise.nn.registry import counts_of
from headwise.textbook.plan.tables import Column, Plan, Table, Value, masked
from headwise.textbook.plan.words import term
from headwise.wording import joined

COLUMNS = (
    Column("h", "count", "num_heads"), Column("d_k", "count", "head_dim"), Column(term("parameters"), "count"),
    Column("FLOPs", "flops", "flops"), Column(term("exps"), "figure", "exponentials"),
    Column("n×n", "bytes", "materialised_bytes"), Column("lse", "bytes", "blockwise_bytes"),
    Column(term("MHA cache"), "bytes", "cache_bytes"), Column(term("MQA cache"), "bytes", "mqa_cache_bytes"),
)  # fmt: skip


def trade_off(d_model: int, work: Work) -> Plan:
    """Return a plan with one row for each power of two h that divides d_model, d_k = d_model / h: one layer of
    `multi_head`, and for comparison the cache of `mqa`, which shrinks as h grows.

    Raises:
        ConfigError: if no h above 1 divides d_model.
    """
    if d_model < 2:
        raise ConfigError(
            f"d_model={d_model}: expected at least 2, as one dimension cannot be divided",
            f"d_model={d_model}：应不小于 2，一维无法再分",
        )
    rows: list[tuple[Value, ...]] = []
    while d_model % (heads := 2 ** len(rows)) == 0:
        rows.append(_row(d_model, heads, work))
    if len(rows) == 1:
        raise ConfigError(
            f"d_model={d_model}: is odd, so no power of two above 1 divides it",
            f"d_model={d_model}：是奇数，没有大于 1 的 2 的幂能整除它",
        )
    table = Table("trade_off", term("vary_table_title"), COLUMNS, tuple(rows), note=term("vary_note"))
    rest = joined([masked(work), work.dtype])
    size = term("input_of", batch=work.batch, tokens=term("tokens", n=work.queries), rest=rest)
    title = term("vary_title", d_model=d_model)
    return Plan(title, ((term("input"), size),), (table,), (term("vary_meaning"),))


def plot_trade_off(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Plot the table of `trade_off` as a PNG: memory and work over h, both axes logarithmic. Requires matplotlib."""
    from headwise.reports.plots import write_trade_off  # imports reports and models

    table = plan.table("trade_off")
    columns = {column.key or column.name: [row[i] for row in table.rows] for i, column in enumerate(table.columns)}
    write_trade_off(columns, path, title=joined([plan.title, plan.facts[0][1]]))


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
