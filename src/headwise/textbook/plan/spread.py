"""One layer, or all of a model's, over many devices: the ways to do it beside one another."""

from collections.abc import Callable
from functools import partial

from headwise.costs import Counts, Machine, Work
from headwise.costs.communication import (
    Way,
    exposed_seconds,
    head_parallel,
    heads_by_ring,
    hiding_tokens,
    hybrid,
    ring,
    ulysses,
)
from headwise.errors import ConfigError
from headwise.textbook.plan.tables import Column, Table, Value

COLUMNS = (
    Column("way"), Column("forward", "bytes"), Column("backward", "bytes"),
    Column("weight gradients", "bytes", "weight_gradients"), Column("weights", "bytes"),
    Column("kept", "bytes", "kept_for_backward"),
)  # fmt: skip
TIMES = (Column("sending", "seconds"), Column("waits", "seconds", "waits_forward"))
MEANING = (
    "Bytes per device: sent in a training step, weights, and memory kept for the backward pass. Weight gradients "
    "are summed where the sequence is partitioned; FSDP can partition those weights."
)


def spread_table(
    counts: Counts, work: Work, devices: int, *, layers: int = 1, link: float | None = None,
    machine: Machine | None = None,
) -> Table:  # fmt: skip
    """A row for each way that so many devices allow.

    Args:
        layers: as many such layers. link: bytes/s that a device sends, for the time that sending takes at least; with a
            machine also for what a forward pass waits.
    Raises:
        ConfigError: if the design's heads cannot be computed apart.
    """
    made: dict[str, Callable[[Counts, Work, int], Way]] = {"head-parallel": head_parallel, "Ulysses": ulysses}
    if between := _between(counts, devices):
        made |= {"hybrid": partial(hybrid, heads=between), "heads by ring": partial(heads_by_ring, heads=between)}
    found, refused = [ring(counts, work, devices)], []
    for make in made.values():
        try:
            found.append(make(counts, work, devices))
        except ConfigError as error:
            refused.append(f"{error}.")
    found.sort(key=lambda way: -way.step)
    rows: list[tuple[Value, ...]] = []
    for way in found:
        sent = [layers * x for x in (way.forward, way.backward, way.gradients, way.weights, way.kept)]
        times: list[Value] = []
        if link is not None:
            times.append(layers * way.step / link)
            if machine is not None:
                waits = exposed_seconds(way, counts, work, devices, peak=machine.peak, link=link)
                times.append(layers * waits if waits else "nothing")
        rows.append((way.name, *sent, *times))
    notes = [MEANING, *refused]
    if link is not None and machine is not None:
        tokens = hiding_tokens(counts, work, machine.peak, link)
        notes.append(
            f"A ring hides its forward transfers from {tokens:,.0f} tokens per device on; here each has "
            f"{work.queries / devices:,.0f}. waits: what computing does not hide of a forward pass."
        )
    columns = COLUMNS + TIMES[: 0 if link is None else 1 if machine is None else 2]
    what = "One layer" if layers == 1 else f"The attention of {layers} layers"
    return Table("devices", f"{what} over {devices:,} devices", columns, tuple(rows), note=" ".join(notes))


def _between(counts: Counts, devices: int) -> int | None:
    """The largest group inside of a ring for which every device has key heads of its own, if there is one."""
    fit = [u for u in range(2, min(counts.key_vectors, devices - 1) + 1) if devices % u == counts.key_vectors % u == 0]
    return max(fit, default=None)
