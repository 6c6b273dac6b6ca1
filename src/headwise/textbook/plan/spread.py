"""The attention of one layer or of all layers of a model, partitioned over devices: a comparison of the ways."""

from collections.abc import Callable, Mapping
from functools import partial
from math import gcd

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


Layers = Mapping[tuple[Counts, Work], int]


def spread_table(layers: Layers, devices: int, *, link: float | None = None, machine: Machine | None = None) -> Table:
    """Return a table with a row for each way to partition attention over this number of devices. A way that is not
    possible in all layers has a row of None, and the reason in the note.

    Args:
        layers: each kind of layer, with its input, and the number of such layers.
        link: bytes/s that a device can send; adds the minimum time of sending. machine: adds the time that a forward
            pass waits.
    """
    made: dict[str, Callable[[Counts, Work, int], Way]] = {
        "ring": ring, "head-parallel": head_parallel, "Ulysses": ulysses
    }  # fmt: skip
    if between := _between(layers, devices):
        made |= {"hybrid": partial(hybrid, heads=between), "heads by ring": partial(heads_by_ring, heads=between)}
    found, refused = [], {}
    for name, make in made.items():
        try:
            found.append([(make(counts, work, devices), counts, work, k) for (counts, work), k in layers.items()])
        except ConfigError as error:
            refused[name] = Bilingual(f"{error}.", f"{error.zh}。")
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
                    k * exposed_seconds(way, counts, work, devices, peak=machine.peak, link=link)
                    for way, counts, work, k in every
                )
                times.append(waits or term("nothing"))
        rows.append((named(every[0][0].name), *sent, *times))
    notes = [term("devices_note")]
    if link is not None and machine is not None:
        given = [
            (hiding_tokens(counts, work, machine.peak, link), work.queries / devices)
            for counts, work in layers
            if work.window is None and not work.cross
        ]
        if given:
            tokens, here = max(given)
            notes.append(term("ring_note", tokens=tokens, here=here))
    columns = COLUMNS + TIMES[: 0 if link is None else 1 if machine is None else 2]
    rows += [(named(name), *[None] * (len(columns) - 1)) for name in refused]
    count = sum(layers.values())
    code = "layer_devices_title" if count == 1 else "devices_title"
    title = term(code, layers=count, devices=devices)
    note = joined([*refused.values(), joined(notes, " ", "")], "\n", "\n")
    return Table("devices", title, columns, tuple(rows), note=note)


def _between(layers: Layers, devices: int) -> int | None:
    """The largest group size inside a ring at which every device has KV heads of its own in all layers, or None."""
    heads = gcd(*(counts.key_vectors for counts, _ in layers))
    fit = [u for u in range(2, min(heads, devices - 1) + 1) if devices % u == heads % u == 0]
    return max(fit, default=None)
