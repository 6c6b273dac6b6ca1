"""Designs, numbers of heads, and ways to partition attention over devices, side by side; the speed of a machine."""

import ctypes
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import gcd
from time import perf_counter
from typing import Any

import torch

from headwise.base.run import seeded
from headwise.costs import Counts, Machine, Work, attention_stages, cache_bytes, communication, score_bytes
from headwise.errors import ConfigError
from headwise.kernels.cpu.library import library
from headwise.nn.registry import counts_of, design_of, names, sizes_of
from headwise.plan.tables import Column, Plan, Table, Value, masked, named, written
from headwise.wording import BLANK, joined, tr

DESIGNS = (
    Column(tr("design")), Column(tr("parameters"), "count"),
    Column(tr("met"), "figure", "parameters_a_token_meets"),
    Column("FLOPs", "flops", "flops"), Column(tr("exps"), "figure", "exponentials"),
    Column(tr("cache"), "count", "cached_numbers_a_token"), Column(tr("step", sense="decoding"), "flops", "step_flops"),
)  # fmt: skip


def compare_designs(d_model: int, num_heads: int, work: Work, *, num_kv_heads: int | None = None) -> Plan:
    """Return a plan with one row per design, all options at their defaults.

    Args:
        work: the input; designs that do not support masks are counted with full attention.
        num_kv_heads: of designs that require it; by default one KV head for up to four heads.
    """
    shared = num_heads // gcd(num_heads, 4) if num_kv_heads is None else num_kv_heads
    rows = tuple(_design(name, d_model, num_heads, shared, work) for name in names())
    grouped = joined((name for name in names() if sizes_of(name).get("num_kv_heads")), tr(" and "))
    notes = [tr(
        "met: parameters used per token. FLOPs and exps: one forward pass. cache: numbers per token. step: one "
        "decoding step at token {n:,}. {grouped} has {shared} KV heads; all other options are at their defaults. —: "
        "does not support decoding.", n=work.queries, grouped=grouped, shared=written(shared, "count"),
    )]  # fmt: skip
    for name in names():
        design = design_of(name)
        remarks = [] if (own := design.notes.compared) is None else [own]
        remarks += [] if design.takes_mask else [tr("full, as it does not support masks")]
        if remarks:
            notes.append(tr("{name}: {remarks}.", name=name, remarks=joined(remarks)))
    table = Table("comparison", tr("One layer of each design"), DESIGNS, rows, note=joined(notes, BLANK))
    tokens = tr("{n:,} tokens", n=work.queries)
    size = tr("{batch} × {tokens}, {rest}", batch=work.batch, tokens=tokens, rest=masked(work))
    title = tr("Head designs at d_model {d_model:,} and h {h:,}", d_model=d_model, h=num_heads)
    meaning = tr("A multiply-add is two FLOPs; only matrix products are counted, and exps are the softmax's.")
    return Plan(title, ((tr("input"), size),), (table,), (meaning,))


def _design(name: str, d_model: int, num_heads: int, shared: int, work: Work) -> tuple[Value, ...]:
    """The values of `DESIGNS`."""
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


HEADS = (
    Column("h", "count", "num_heads"), Column("d_k", "count", "head_dim"), Column(tr("parameters"), "count"),
    Column("FLOPs", "flops", "flops"), Column(tr("exps"), "figure", "exponentials"),
    Column("n×n", "bytes", "materialised_bytes"), Column("lse", "bytes", "blockwise_bytes"),
    Column(tr("MHA cache"), "bytes", "cache_bytes"), Column(tr("MQA cache"), "bytes", "mqa_cache_bytes"),
)  # fmt: skip


def trade_off(d_model: int, work: Work) -> Plan:
    """Return a plan with one row for each power of two h that divides d_model, d_k = d_model / h: one layer of
    `multi_head`, and for comparison the cache of `mqa`, which shrinks as h grows.

    Raises:
        ConfigError: if no h above 1 divides d_model.
    """
    if d_model < 2:
        raise ConfigError("d_model={d_model}: expected at least 2, as one dimension cannot be divided", d_model=d_model)
    kept: Any = {"batch": work.batch, "dtype": work.cache or work.dtype, "window": work.window, "sinks": work.sinks}
    rows: list[tuple[Value, ...]] = []
    while d_model % (heads := 2 ** len(rows)) == 0:
        counts, shared = (counts_of(name, {"d_model": d_model, "num_heads": heads}) for name in ("multi_head", "mqa"))
        stages = attention_stages(counts, work)
        rows.append((
            heads, d_model // heads, counts.parameters, sum(stage.flops for stage in stages),
            sum(stage.exponentials for stage in stages),
            *(score_bytes(counts, replace(work, materialised=stored)) for stored in (True, False)),
            *(cache_bytes(one, work.queries, **kept) for one in (counts, shared)),
        ))  # fmt: skip
    if len(rows) == 1:
        raise ConfigError("d_model={d_model}: is odd, so no power of two above 1 divides it", d_model=d_model)
    note = tr(
        "Parameters, FLOPs and MHA's cache do not depend on h; exponentials and scores grow with it. A head's n×n "
        "scores have rank d_k at most: with d_k ≥ n one head can reach every positive weight matrix (Bhojanapalli et "
        "al. 2020, 2002.07028), with d_k < n − 1 it cannot."
    )
    meaning = tr(
        "n×n: the scores, if stored; lse: what blockwise attention stores instead, a float32 log-sum-exp per query and "
        "head. FLOPs are those of matrix products, exps the softmax's exponentials."
    )
    table = Table("trade_off", tr("One layer, h·d_k = d_model"), HEADS, tuple(rows), note=note)
    rest = joined([masked(work), work.dtype])
    size = tr("{batch} × {tokens}, {rest}", batch=work.batch, tokens=tr("{n:,} tokens", n=work.queries), rest=rest)
    title = tr("Number of heads h and head size d_k at d_model {d_model:,}", d_model=d_model)
    return Plan(title, ((tr("input"), size),), (table,), (meaning,))


def plot_trade_off(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Plot the table of `trade_off` as a PNG: memory and work over h, both axes logarithmic. Requires matplotlib."""
    from headwise.reports.plots import write_trade_off  # imports reports and models

    table = plan.table("trade_off")
    columns = {column.key or column.name: [row[i] for row in table.rows] for i, column in enumerate(table.columns)}
    write_trade_off(columns, path, title=joined([plan.title, plan.facts[0][1]]))


WAYS = (
    Column(tr("way")), Column(tr("forward"), "bytes"), Column(tr("backward"), "bytes"),
    Column(tr("weight gradients"), "bytes", "weight_gradients"), Column(tr("weights"), "bytes"),
    Column(tr("kept"), "bytes", "kept_for_backward"),
)  # fmt: skip
TIMES = (Column(tr("sending"), "seconds"), Column(tr("waits"), "seconds", "waits_forward"))
Layers = Mapping[tuple[Counts, Work], int]


def spread(
    plan: Plan, design: str, layers: Layers, devices: int | None, link: float | None, machine: Machine | None
) -> Plan:
    """The plan with the table of `spread_table`; without devices, the plan itself."""
    for name, value in (("devices", devices), ("link", link)):
        if value is not None and not value > 0:
            raise ConfigError("{name}={value}: expected more than 0", name=name, value=value)
    if devices is None:
        if link is not None:
            raise ConfigError("link={link:g}: requires devices", link=link)
        return plan
    if reason := _inseparable(design):
        known = [name for name in names() if not _inseparable(name)]
        raise ConfigError(
            f"devices={devices}: the heads of {design} cannot be computed separately ({reason}); supported designs: "
            f"{', '.join(known)}"
        )
    table = spread_table(layers, devices, link=link, machine=machine)
    return replace(plan, tables=(*plan.tables, table))


def _inseparable(design: str) -> str:
    """Why `parallelize_heads` does not support a design; "" if it does."""
    from headwise.parallel.heads import head_parallel_plan  # imports torch.distributed

    with seeded(0):
        layer = design_of(design).build(4, 2)
    try:
        head_parallel_plan(layer)
    except ConfigError as error:
        return str(error)
    return ""


def spread_table(layers: Layers, devices: int, *, link: float | None = None, machine: Machine | None = None) -> Table:
    """A row for each way to partition attention over this number of devices; of None where a way is not possible in all
    layers, with the reason in the note. layers: each kind with its input, and how many there are."""
    made: dict[str, Callable[[Counts, Work, int], communication.Way]] = {
        "ring": communication.ring, "head-parallel": communication.head_parallel, "Ulysses": communication.ulysses
    }  # fmt: skip
    if between := _between(layers, devices):
        made["hybrid"] = partial(communication.hybrid, heads=between)
        made["heads by ring"] = partial(communication.heads_by_ring, heads=between)
    found, refused = [], {}
    for name, make in made.items():
        try:
            found.append([(make(counts, work, devices), counts, work, k) for (counts, work), k in layers.items()])
        except ConfigError as error:
            refused[name] = tr("{error}.", error=error)
    found.sort(key=lambda every: -sum(k * way.step for way, _, _, k in every))
    rows: list[tuple[Value, ...]] = []
    for every in found:
        sent = [
            sum(k * getattr(way, part) for way, _, _, k in every)
            for part in ("forward", "backward", "gradients", "weights", "kept")
        ]
        times: list[Value] = []
        if link is not None:
            times.append(sum(k * way.step for way, _, _, k in every) / link)
            if machine is not None:
                waits = sum(
                    k * communication.exposed_seconds(way, counts, work, devices, peak=machine.peak, link=link)
                    for way, counts, work, k in every
                )
                times.append(waits or tr("nothing"))
        rows.append((named(every[0][0].name), *sent, *times))
    notes = [tr(
        "Bytes per device: sent in a training step, weights, and memory kept for the backward pass. Weight gradients "
        "are summed where the sequence is partitioned; FSDP can partition those weights."
    )]  # fmt: skip
    if link is not None and machine is not None:
        given = [
            (communication.hiding_tokens(counts, work, machine.peak, link), work.queries / devices)
            for counts, work in layers
            if work.window is None and not work.cross
        ]
        if given:
            tokens, here = max(given)
            notes.append(tr(
                "A ring hides its forward transfers from {tokens:,.0f} tokens per device on; here each has "
                "{here:,.0f}. waits: the time of a forward pass that computation does not hide.",
                tokens=tokens, here=here,
            ))  # fmt: skip
    columns = WAYS + TIMES[: 0 if link is None else 1 if machine is None else 2]
    rows += [(named(name), *[None] * (len(columns) - 1)) for name in refused]
    title = tr("One layer over {devices:,} devices", devices=devices)
    if (count := sum(layers.values())) > 1:
        title = tr("The attention of {layers} layers over {devices:,} devices", layers=count, devices=devices)
    note = joined([*refused.values(), joined(notes, BLANK)], "\n")
    return Table("devices", title, columns, tuple(rows), note=note)


def _between(layers: Layers, devices: int) -> int | None:
    """The largest group size inside a ring at which every device has KV heads of its own in all layers, or None."""
    heads = gcd(*(counts.key_vectors for counts, _ in layers))
    fit = [u for u in range(2, min(heads, devices - 1) + 1) if devices % u == heads % u == 0]
    return max(fit, default=None)


SECONDS = 0.4  # for each of the two measurements with PyTorch
DTYPES = {"float32": 0, "bfloat16": 1}  # as native/headwise.h numbers them


def measured_machine(dtype: str = "float32") -> Machine:
    """Measure peak and bandwidth with the compiled kernels, or, if they are not built, with a PyTorch product of 1024³
    in that dtype and a copy of 128 MiB, the best of repeated calls. The peak is at least that of float32, in which
    dtypes without instructions of their own are computed."""
    return _compiled(dtype) or _torch(dtype)


def _compiled(dtype: str) -> Machine | None:
    handle = library().handle
    if handle is None or not hasattr(handle, "headwise_peak") or not hasattr(handle, "headwise_bandwidth"):
        return None
    handle.headwise_peak.restype = handle.headwise_bandwidth.restype = ctypes.c_double
    handle.headwise_peak.argtypes, handle.headwise_bandwidth.argtypes = [ctypes.c_int, ctypes.c_int], [ctypes.c_int]
    threads = torch.get_num_threads()
    peak = max(handle.headwise_peak(DTYPES.get(kind, 0), threads) for kind in {"float32", dtype})
    bandwidth = handle.headwise_bandwidth(threads)  # 0 if there is not enough memory
    by = tr("measured with {threads} by the compiled kernels", threads=_threads())
    return Machine(peak, bandwidth, by) if bandwidth else None


def _torch(dtype: str) -> Machine:
    n, count = 1024, 32 * 1024 * 1024
    seconds = []
    for kind in {"float32", dtype}:
        one, other, out = (torch.ones(n, n, dtype=getattr(torch, kind)) for _ in range(3))
        seconds.append(_best(partial(torch.mm, one, other, out=out)))
    source, target = torch.ones(count), torch.ones(count)  # both are written, so that no page fault is measured
    copy = _best(lambda: target.copy_(source))
    by = tr("measured with {threads} by torch.mm and Tensor.copy_", threads=_threads())
    return Machine(2 * n**3 / min(seconds), 2 * source.nbytes / copy, by)  # a copy reads and writes


def _threads() -> str:
    count = torch.get_num_threads()
    return tr("1 thread") if count == 1 else tr("{count} threads", count=count)


def _best(call: Callable[[], object]) -> float:
    """Seconds of the fastest call after one warm-up call."""
    call()
    best, begun = float("inf"), perf_counter()
    while best == float("inf") or perf_counter() - begun < SECONDS:
        start = perf_counter()
        call()
        best = min(best, perf_counter() - start)
    return best
