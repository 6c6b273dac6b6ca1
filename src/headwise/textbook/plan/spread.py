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
from headwise.textbook.plan.words import named, term
from headwise.wording import Bilingual, joined

COLUMNS = (
    Column(term("way")), Column(term("forward"), "bytes"), Column(term("backward"), "bytes"),
    Column(term("weight gradients"), "bytes", "weight_gradients"), Column(term("weights"), "bytes"),
    Column(term("kept"), "bytes", "kept_for_backward"),
)  # fmt: skip
TIMES = (Column(term("sending"), "seconds"), Column(term("waits"), "seconds", "waits_forward"))


def spread_table(
    counts: Counts, work: Work, devices: int, *, layers: int = 1, link: float | None = None,
    machine: Machine | None = None,
) -> Table:  # fmt: skip
    """Return a table with a row for each way to partition attention over this number of devices. A way that is not
    possible has a row of None, and the reason in the note.

    Args:
        layers: number of such layers.
        link: bytes/s that a device can send; adds the minimum time of sending. machine: adds the time that a forward
            pass waits.
    """
    made: dict[str, Callable[[Counts, Work, int], Way]] = {"head-parallel": head_parallel, "Ulysses": ulysses}
    if between := _between(counts, devices):
        made |= {"hybrid": partial(hybrid, heads=between), "heads by ring": partial(heads_by_ring, heads=between)}
    found, refused = [ring(counts, work, devices)], {}
    for name, make in made.items():
        try:
            found.append(make(counts, work, devices))
        except ConfigError as error:
            refused[name] = Bilingual(f"{error}.", f"{error.zh}。")
    found.sort(key=lambda way: -way.step)
    rows: list[tuple[Value, ...]] = []
    for way in found:
        sent = [layers * x for x in (way.forward, way.backward, way.gradients, way.weights, way.kept)]
        times: list[Value] = []
        if link is not None:
            times.append(layers * way.step / link)
            if machine is not None:
                waits = exposed_seconds(way, counts, work, devices, peak=machine.peak, link=link)
                times.append(layers * waits if waits else term("nothing"))
        rows.append((named(way.name), *sent, *times))
    notes = [term("devices_note")]
    if link is not None and machine is not None:
        tokens = hiding_tokens(counts, work, machine.peak, link)
        notes.append(term("ring_note", tokens=tokens, here=work.queries / devices))
    columns = COLUMNS + TIMES[: 0 if link is None else 1 if machine is None else 2]
    rows += [(named(name), *[None] * (len(columns) - 1)) for name in refused]
    code = "layer_devices_title" if layers == 1 else "devices_title"
    title = term(code, layers=layers, devices=devices)
    note = joined([*refused.values(), joined(notes, " ", "")], "\n", "\n")
    return Table("devices", title, columns, tuple(rows), note=note)


def _between(counts: Counts, devices: int) -> int | None:
    """The largest group size inside a ring at which every device has KV heads of its own, or None."""
    fit = [u for u in range(2, min(counts.key_vectors, devices - 1) + 1) if devices % u == counts.key_vectors % u == 0]
    return max(fit, default=None)
