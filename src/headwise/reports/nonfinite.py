"""Remarks on heads with NaN or infinity."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from headwise.map import AttentionMap
from headwise.reports.messages import message
from headwise.telemetry.ledger import Summary
from headwise.wording import Message

SHOWN = 6  # heads of which a report says so, each on a line
SCORES, VALUES, SOME_VALUES = "not_finite", "values_not_finite", "windows_values_not_finite"  # names of messages


def counted(amap: AttentionMap) -> dict[str, Tensor]:
    """What there is of NaN and infinity: the message of it → a count for each head, [h]."""
    found = {SCORES: (amap.lse.isnan() | (amap.lse == float("inf"))).sum((0, 2))}
    if amap.nonfinite_values is not None:
        values = amap.nonfinite_values.sum(0)
        found[VALUES] = values.repeat_interleave(amap.shape[1] // len(values))
    return found


def watched(summary: Summary, layer: str, heads: int) -> dict[str, Tensor]:
    """The same of a layer of a record."""
    found = {code: torch.zeros(heads) for code in (SCORES, VALUES)}
    for (name, head), (rows, _, _, values) in zip(summary.places, summary.nonfinite.tolist(), strict=True):
        if name == layer and head < heads:
            found[SCORES][head], found[VALUES][head] = rows, values
    return {code: count.long() for code, count in found.items()}


def added(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The counts of both."""
    return {code: sum(x[code] for x in (one, other) if code in x) for code in {**one, **other}}  # type: ignore[misc]


def in_windows(counts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The counts of a window, whose values are partly those of others too: that there are some is all that is known."""
    return {SOME_VALUES if code == VALUES else code: count for code, count in counts.items()}


def remarks(layer: int, counts: Mapping[str, Tensor]) -> list[Message]:
    """One for each head of a layer, and each kind of count."""
    return [
        message(code, layer=layer, head=head, count=count)
        for code, of_heads in counts.items()
        for head, count in enumerate(of_heads.tolist())
        if count
    ]


def notes(layers: Iterable[Mapping[str, Tensor]]) -> list[str]:
    """Those of all layers, for a report: of the first heads, and how many more there are."""
    each = list(layers)
    found = [note for layer, counts in enumerate(each) for note in remarks(layer, counts)]
    if len(found) <= SHOWN + 1:
        return list(found)
    heads = sum(int(torch.stack(list(counts.values())).any(0).sum()) for counts in each if counts)
    return [*found[:SHOWN], message("more_not_finite", heads=heads)]
