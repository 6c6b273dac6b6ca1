"""Comparison of all designs at one width: parameters, work and cache."""

from dataclasses import replace
from math import gcd
from typing import Any

from headwise.costs import Counts, Work, attention_stages
from headwise.nn.counts import counts_of, sizes_of
from headwise.nn.named import design_of, names
from headwise.textbook.plan.tables import Column, Plan, Table, Value, masked, written

COLUMNS = (
    Column("design"), Column("parameters", "count"), Column("met", "figure", "parameters_a_token_meets"),
    Column("FLOPs", "flops", "flops"), Column("exps", "figure", "exponentials"),
    Column("cache", "count", "cached_numbers_a_token"), Column("step", "flops", "step_flops"),
)  # fmt: skip


def compare_designs(d_model: int, num_heads: int, work: Work, *, num_kv_heads: int | None = None) -> Plan:
    """Return a plan with one row per design, all options at their defaults.

    Args:
        work: the input; designs that do not support masks are counted with full attention.
        num_kv_heads: of designs that require it; by default one KV head for up to four heads.
    """
    shared = num_heads // gcd(num_heads, 4) if num_kv_heads is None else num_kv_heads
    rows = tuple(_row(name, d_model, num_heads, shared, work) for name in names())
    grouped = " and ".join(name for name in names() if sizes_of(name).get("num_kv_heads"))
    note = (
        f"met: parameters used per token. FLOPs and exps: one forward pass. cache: numbers per token. step: one "
        f"decoding step at token {work.queries:,}. {grouped} has {written(shared, 'count')} KV heads; all other "
        f"options are at their defaults. —: does not support decoding."
    )
    for name in names():
        design = design_of(name)
        remarks = [design.notes.compared, None if design.takes_mask else "full, as it does not support masks"]
        if any(remarks):
            note += f" {name}: {', '.join(filter(None, remarks))}."
    table = Table("comparison", "One layer of each design", COLUMNS, rows, note=note)
    size = f"{work.batch} × {work.queries:,} tokens, {masked(work)}"
    meanings = ("A multiply-add is two FLOPs; only matrix products are counted, and exps are the softmax's.",)
    return Plan(f"Head designs at d_model {d_model:,} and h {num_heads:,}", (("input", size),), (table,), meanings)


def _row(name: str, d_model: int, num_heads: int, shared: int, work: Work) -> tuple[Value, ...]:
    """The values of `COLUMNS`."""
    sizes: dict[str, Any] = {"d_model": d_model, "num_heads": num_heads, "num_kv_heads": shared}
    needed = sizes_of(name)
    counts: Counts = counts_of(name, {size: value for size, value in sizes.items() if needed.get(size)})
    stages = attention_stages(counts, work if counts.masked else replace(work, causal=False, window=None, sinks=0))
    row: list[Value] = [name, counts.parameters, counts.met]
    row += [sum(stage.flops for stage in stages), sum(stage.exponentials for stage in stages)]
    if not counts.cached or not work.causal:
        return (*row, None, None)
    step = attention_stages(counts.at_decoding, replace(work, queries=1))
    return (*row, counts.cache, sum(stage.flops for stage in step))
