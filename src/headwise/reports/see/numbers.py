"""What is measured of every head for a report."""

from collections.abc import Sequence

import numpy as np

from headwise.reports.data import Statistic
from headwise.reports.see.places import Places
from headwise.stats import Measure, Measurements, Tokens, describe, known, of_tokens, shown_in


def wanted(tokens: Tokens, *, causal: bool, crosses: bool = False) -> list[Measure]:
    """What to measure of maps over these keys, as far as their tokens are known: what reports show, but for what is
    always 0 in causal attention, and what depends on distances in cross attention, which has none."""
    found = []
    for name in shown_in("report"):
        if (causal and known(name).ahead) or (crosses and known(name).placed):
            continue
        if (measure := of_tokens(name, tokens)) is not None:
            found.append(measure)
    return found


def statistics(results: Sequence[Measurements], places: Places) -> list[Statistic]:
    """One `Statistic` a measure from the measurements of each layer (the mean over a batch)."""
    found = []
    for name in results[0]:
        values = places.stacked([result[name].mean(0).cpu().numpy() for result in results])
        found.append(statistic(name, values))
    return found


def statistic(name: str, values: np.ndarray) -> Statistic:
    """A measure of all heads with its unit and what it is."""
    words = describe(name)
    return Statistic(name, values, "", "") if words is None else Statistic(name, values, words.unit, words.summary)
