"""Comparison of all designs at one width: parameters, work and cache."""

from dataclasses import replace
from math import gcd
from typing import Any

from headwise.costs import Counts, Work, attention_stages
from headwise.nn.registry import counts_of, design_of, names, sizes_of
from headwise.textbook.plan.tables import Column, Plan, Table, Value, masked, written
from headwise.textbook.plan.words import term
from headwise.wording import Bilingual, joined

COLUMNS = (
    Column(term("design")), Column(term("parameters"), "count"),
    Column(term("met"), "figure", "parameters_a_token_meets"),
    Column("FLOPs", "flops", "flops"), Column(term("exps"), "figure", "exponentials"),
    Column(term("cache"), "count", "cached_numbers_a_token"), Column(term("one_step"), "flops", "step_flops"),
)  # fmt: skip


def compare_designs(d_model: int, num_heads: int, work: Work, *, num_kv_heads: int | None = None) -> Plan:
    """Return a plan with one row per design, all options at their defaults.

    Args:
        work: the input; designs that do not support masks are counted with full attention.
        num_kv_heads: of designs that require it; by default one KV head for up to four heads.
    """
    shared = num_heads // gcd(num_heads, 4) if num_kv_heads is None else num_kv_heads
    rows = tuple(_row(name, d_model, num_heads, shared, work) for name in names())
    grouped = joined((name for name in names() if sizes_of(name).get("num_kv_heads")), " and ", "、")
    notes = [term("compare_note", n=work.queries, grouped=grouped, shared=written(shared, "count"))]
    for name in names():
        design = design_of(name)
        remarks = [] if (own := design.notes.compared) is None else [Bilingual(*own)]
        remarks += [] if design.takes_mask else [term("no_masks")]
        if remarks:
            notes.append(term("remark", name=name, remarks=joined(remarks)))
    table = Table("comparison", term("comparison_title"), COLUMNS, rows, note=joined(notes, " ", ""))
    size = term("input_of", batch=work.batch, tokens=term("tokens", n=work.queries), rest=masked(work))
    title = term("compare_title", d_model=d_model, h=num_heads)
    return Plan(title, ((term("input"), size),), (table,), (term("compare_meaning"),))


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
