"""The attention of one layer or of all layers of a model, partitioned over devices: a comparison of the ways."""

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
    """Return a table with a row for each way to partition attention that is possible on this number of devices.

    Args:
        layers: number of such layers.
        link: bytes/s that a device can send; adds the minimum time of sending. machine: adds the time that a forward
            pass waits.
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
            f"{work.queries / devices:,.0f}. waits: the time of a forward pass that computation does not hide."
        )
    columns = COLUMNS + TIMES[: 0 if link is None else 1 if machine is None else 2]
    what = "One layer" if layers == 1 else f"The attention of {layers} layers"
    return Table("devices", f"{what} over {devices:,} devices", columns, tuple(rows), note=" ".join(notes))


def _between(counts: Counts, devices: int) -> int | None:
    """The largest group size inside a ring at which every device has KV heads of its own, or None."""
    fit = [u for u in range(2, min(counts.key_vectors, devices - 1) + 1) if devices % u == counts.key_vectors % u == 0]
    return max(fit, default=None)
