"""The statistics of every head that a report shows."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from headwise.errors import check_choice
from headwise.stats import Measure, Tokens, describe, known, of_tokens, shown_in
from headwise.table import HeadColumn, HeadTable


def wanted(tokens: Tokens, *, causal: bool, crosses: bool = False) -> list[Measure]:
    """The measures of a report that can be computed with these tokens of the keys. Causal attention omits those that
    are always 0 there, cross attention those that depend on the distance of queries and keys."""
    found = []
    for name in shown_in("report"):
        if (causal and known(name).ahead) or (crosses and known(name).placed):
            continue
        if (measure := of_tokens(name, tokens)) is not None:
            found.append(measure)
    return found


def check_sort(sort: str | None, names: Iterable[str] | None = None) -> None:
    """Raise ConfigError if a table cannot be sorted by this name. names: the statistics of the table; None for all that
    any report has."""
    names = shown_in("report") if names is None else tuple(names)
    if sort is not None:
        check_choice("sort", sort, names)


def statistics(results: Sequence[Mapping[str, Tensor]], layers: Sequence[str]) -> HeadTable:
    """The measurements of every layer in one table (means over the batch). layers: their names."""
    columns = {name: column(name, [result[name].mean(0) for result in results]) for name in results[0]}
    return HeadTable(columns, layers=layers)


def column(name: str, values: Sequence[Any]) -> HeadColumn:
    """A measure, [heads] for each layer, with its unit, range and description."""
    words = describe(name, "en")
    if words is None:
        return HeadColumn(values)
    return HeadColumn(values, unit=words.unit, description=words.summary, range=words.range)
