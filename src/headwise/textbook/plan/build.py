"""The plan of a published model, the plan of one layer, and the list of models and designs."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headwise.costs import (
    Counts,
    Machine,
    Stage,
    Work,
    attention_stages,
    backward_flops,
    cache_bytes,
    kept_bytes,
    score_bytes,
)
from headwise.costs.configs import CONFIGS, ModelConfig
from headwise.costs.model import (
    Load,
    active_parameters,
    attention_layers,
    cached_numbers,
    decodes,
    model_cache_bytes,
    parameter_parts,
    pass_stages,
    step_stages,
    training_flops,
)  # fmt: skip
from headwise.costs.work import BYTES
from headwise.nn.counts import attention_of, counts_of, sizes_of, summary_of
from headwise.nn.named import names
from headwise.textbook.plan.tables import Column, Plan, Table, Value, masked, scaled, written

MEMORY_NOTE = "An int8 cache has one float32 scale per vector. Kept for backward: attention only, without other layers."
NOTES = (
    "A multiply-add is two FLOPs; exps are the softmax's exponentials. Bytes and times are lower bounds: each step "
    "reads its inputs and writes its results once; the steps run one after another, each at the roofline.",
)


def plan_model(config: ModelConfig, load: Load, *, machine: Machine | None = None) -> Plan:
    """Return parameters, memory, one pass over the whole text and one decoding step of a published model.

    Args:
        load: sequences and tokens, and how numbers are stored.
        machine: adds minimum times and what limits each step.
    """
    counts = attention_of(config)
    total = sum(parameter_parts(config, counts).values())
    n, b, dtype = load.tokens, load.batch, load.dtype
    both = "source and target of " if config.decoder_layers else ""
    facts = [
        ("source", config.source),
        ("sizes", _sizes(config, counts)),
        ("input", f"{b} × {both}{n:,} tokens, {dtype}" + (f", {load.cache} cache" if load.cache else "")),
        *_machine_facts(machine),
    ]
    if n > config.context:
        facts.append(("warning", f"the model was trained on at most {config.context:,} tokens"))
    tables = [_parameters(config, counts, total), _model_memory(config, counts, total, load)]
    title = f"One forward pass over {both}{n:,} tokens" + (" (prefill)" if config.causal else "")
    note = f"Training (all logits, forward and backward): {written(training_flops(config, counts, load), 'flops')}."
    tables.append(_stage_table("pass", title, pass_stages(config, counts, load), machine, note))
    if decodes(config):
        step = step_stages(config, counts, load)
        tables.append(_stage_table("step", f"One decoding step at token {n:,}", step, machine))
    return Plan(f"{config.name}: {total:,} parameters", tuple(facts), tuple(tables), NOTES)


def plan_design(
    design: str, sizes: Mapping[str, Any], work: Work, *, machine: Machine | None = None
) -> Plan:  # fmt: skip
    """As `plan_model`, for one layer of a design: self attention of `work.queries` tokens. Full attention has no
    decoding step and no cache."""
    counts = counts_of(design, sizes)
    n, stored = work.queries, "materialised" if work.materialised else "blockwise"
    facts = [
        ("design", summary_of(design)),
        ("sizes", ", ".join(f"{name} {value}" for name, value in sizes.items())),
        ("input", f"{work.batch} × {n:,} tokens, {masked(work)}, {stored}, {work.dtype}"),
        *_machine_facts(machine),
    ]
    forward = attention_stages(counts, work)
    backward = backward_flops(forward, materialised=work.materialised)
    note = f"Backward: {written(backward, 'flops')}."
    tables = [
        _layer_memory(counts, work),
        _stage_table("pass", f"One forward pass over {n:,} tokens (prefill)", forward, machine, note),
    ]
    if _decodes(counts, work):
        step = replace(work, queries=1)
        stages = attention_stages(counts.at_decoding, step)
        tables.append(_stage_table("step", f"One decoding step at token {n:,}", stages, machine))
    return Plan(f"{design}: {counts.parameters:,} parameters per layer", tuple(facts), tuple(tables), NOTES)


def listing() -> Plan:
    """List all published configurations, and all designs with their sizes."""
    models = tuple(
        (
            c.name, sum(parameter_parts(c, counts).values()), c.layers + c.decoder_layers, c.d_model, counts.heads,
            c.head_dim, _shared(c, counts), c.d_ff, c.vocab, cached_numbers(c, counts) or None,
        )
        for c, counts in ((c, attention_of(c)) for c in CONFIGS.values())
    )  # fmt: skip
    columns = (
        Column("config", key="name"), Column("parameters", "figure"), Column("layers", "count"),
        Column("d_model", "count"), Column("h", "count", "num_heads"), Column("d_k", "count", "head_dim"),
        Column("h_kv", "count", "num_kv_heads"), Column("d_ff", "count"), Column("vocab", "count"),
        Column("cache", "count", "cached_numbers_a_token"),
    )  # fmt: skip
    designs = tuple((name, ", ".join(sizes_of(name))) for name in names())
    return Plan(
        "Models and designs",
        (),
        (
            Table(
                "configs", "Published models: headwise plan --config NAME", columns, models,
                note="cache: numbers per token in all layers, source and target in an encoder-decoder; — for encoders. "
                "h_kv c: all heads share one latent vector c.",
            ),
            Table(
                "designs", "Designs: headwise plan --design NAME --d-model … --num-heads … --set SIZE=…",
                (Column("design"), Column("sizes")), designs,
            ),
        ),
    )  # fmt: skip


def _decodes(counts: Counts, work: Work) -> bool:
    """Whether a layer can decode token by token: it is causal and has a cache."""
    return counts.cached and work.causal


def _shared(config: ModelConfig, counts: Counts) -> Value:
    from_one = counts.cached and not counts.at_decoding.values  # values are computed from the cached keys
    return "c" if from_one else config.size("num_kv_heads") or config.size("num_heads")


def _sizes(config: ModelConfig, counts: Counts) -> str:
    c = config
    layers = f"{c.layers} + {c.decoder_layers} layers" if c.decoder_layers else f"{c.layers} layers"
    parts = [layers, f"d_model {c.d_model:,}", *(f"{name} {value}" for name, value in c.sizes)]
    parts.append(f"d_ff {c.d_ff:,}" + (" (gated)" if c.gated else ""))
    if c.experts:
        shared = f" and {c.shared_experts} shared" if c.shared_experts else ""
        parts.append(
            f"{c.active_experts} of {c.experts}{shared} experts, {scaled(active_parameters(c, counts), '')} active"
        )
    parts.append(f"vocabulary {c.vocab:,}" + (" (tied)" if c.output == "tied" else ""))
    return ", ".join([*parts, f"window {c.window:,}"] if c.window else parts)


def _machine_facts(machine: Machine | None) -> list[tuple[str, str]]:
    if machine is None:
        return []
    peak, bandwidth = scaled(machine.peak, "FLOP/s"), scaled(machine.bandwidth, "B/s")
    pace = f"memory-bound below {machine.ridge:.3g} FLOP per byte"
    return [("machine", f"{peak} and {bandwidth}, {machine.by}: {pace}")]


def _parameters(config: ModelConfig, counts: Counts, total: int) -> Table:
    parts = parameter_parts(config, counts)
    rows = [(name, count, count / total) for name, count in parts.items()]
    stated = f"about {scaled(config.published, '')}" if config.rounded else f"{config.published:,}"
    return Table(
        "parameters", "Parameters", (Column("part"), Column("parameters", "count"), Column("share", "share")),
        (*rows, ("all", total, 1.0)), total=True, note=f"The source states {stated}.",
    )  # fmt: skip


def _model_memory(config: ModelConfig, counts: Counts, total: int, load: Load) -> Table:
    n, layers = load.tokens, attention_layers(config)
    rows: list[tuple[Value, ...]] = [("weights", total * BYTES[load.dtype])]
    if decodes(config):
        one = Load(1, 1, cache=load.cache, dtype=load.dtype)
        rows.append(("cache, one token", model_cache_bytes(config, counts, one)))
        rows.append(("cache, all tokens", model_cache_bytes(config, counts, load)))
        if (load.cache or load.dtype) != "int8":
            eight = Load(load.batch, n, dtype=load.dtype, cache="int8")
            rows.append(("cache, all tokens, int8", model_cache_bytes(config, counts, eight)))
    rows += _attention_memory(counts, load.work(n, n, causal=config.causal), f", {layers} layers", layers)
    return Table("memory", "Memory", (Column("what"), Column("bytes", "bytes")), tuple(rows), note=MEMORY_NOTE)


def _layer_memory(counts: Counts, work: Work) -> Table:
    rows: list[tuple[Value, ...]] = [("weights", counts.parameters * work.size)]
    window = {"window": work.window, "sinks": work.sinks}
    for dtype in dict.fromkeys((work.cache or work.dtype, "int8")) if _decodes(counts, work) else ():
        rows.append((f"cache, one token, {dtype}", cache_bytes(counts, 1, dtype=dtype)))
        full = cache_bytes(counts, work.queries, batch=work.batch, dtype=dtype, **window)  # type: ignore[arg-type]
        rows.append((f"cache, all tokens, {dtype}", full))
    rows += _attention_memory(counts, work, "", 1)
    columns = (Column("what"), Column("bytes", "bytes"))
    return Table("memory", "Memory of one layer", columns, tuple(rows), note=MEMORY_NOTE)


def _attention_memory(counts: Counts, work: Work, words: str, layers: int) -> list[tuple[Value, ...]]:
    """Bytes of one layer's scores and of what is kept for the backward pass, materialised and blockwise."""
    rows: list[tuple[Value, ...]] = []
    for name, materialised in (("materialised", True), ("blockwise", False)):
        same = replace(work, materialised=materialised)
        rows.append((f"scores, {name}, one layer", score_bytes(counts, same)))
        rows.append((f"kept for backward, {name}{words}", layers * kept_bytes(counts, same)))
    return rows


def _stage_table(key: str, title: str, stages: list[Stage], machine: Machine | None, note: str = "") -> Table:
    columns = [
        Column("step"), Column("FLOPs", "flops", "flops"), Column("exps", "figure", "exponentials"),
        Column("bytes", "bytes"), Column("FLOP/B", "number", "intensity"),
    ]  # fmt: skip
    whole = Stage(
        "all", sum(s.flops for s in stages), sum(s.bytes for s in stages), sum(s.exponentials for s in stages)
    )
    if machine is not None:
        columns += [Column("time ≥", "seconds", "seconds"), Column("limit")]
    rows = []
    for stage in [*stages, whole]:
        row: list[Value] = [stage.name, stage.flops or None, stage.exponentials or None, stage.bytes or None]
        row.append(stage.intensity if stage.bytes and stage.flops else None)
        if machine is not None:
            seconds = machine.seconds(stages if stage is whole else [stage])
            row += [seconds or None, "" if stage is whole or not seconds else machine.limit(stage)]
        rows.append(tuple(row))
    return Table(key, title, tuple(columns), tuple(rows), total=True, note=note)
