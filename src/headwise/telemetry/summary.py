"""The statistics of all heads of one step or of many."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from headwise.errors import unknown_name
from headwise.stats import describe
from headwise.table import HeadColumn, HeadTable
from headwise.table.show import plain

NONFINITE = ("rows", "queries", "keys", "values")  # where NaN and infinity are counted, for each head


@dataclass(frozen=True, eq=False)
class Summary(Mapping[str, Tensor]):
    """Measures of heads of a step, or of many: `summary.table` is the `HeadTable` of them, and `summary["entropy"]` one
    measure as [layers, heads] float32, NaN where a layer has no such head.

    Attributes:
        step: the last of its steps; steps: their number.
        places: (layer, head) of each row, in the order of the calls.
        names: of the measures.
        numbers: [rows, measures] float32 on the CPU; NaN where the head did not run.
        nonfinite: [rows, 4] counts of NaN and infinity: rows of scores, and entries of queries, keys and values.
        nonfinite_result: whether a result of the model had NaN or +infinity in this step; it is looked at where there
            is a `NonFiniteAlarm`.
    """

    step: int
    steps: int
    places: tuple[tuple[str, int], ...]
    names: tuple[str, ...]
    numbers: Tensor
    nonfinite: Tensor
    nonfinite_result: bool = False

    def __getitem__(self, name: str) -> Tensor:
        column = self.numbers[:, self._column(name)]
        layers = self.layers
        table = torch.full((len(layers), max((head for _, head in self.places), default=-1) + 1), torch.nan)
        index = {layer: i for i, layer in enumerate(layers)}
        for (layer, head), value in zip(self.places, column.tolist(), strict=True):
            table[index[layer], head] = value
        return table

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers, in the order of the calls."""
        return tuple(dict.fromkeys(layer for layer, _ in self.places))

    def column(self, name: str) -> Tensor:
        """A measure of every row of `places`, [rows]."""
        return self.numbers[:, self._column(name)]

    @cached_property
    def table(self) -> HeadTable:
        """The numbers as a `HeadTable`, with units; counts of NaN and infinity are columns where there are any."""
        index = {layer: i for i, layer in enumerate(self.layers)}
        columns = {name: _column(name, self.numbers[:, i]) for i, name in enumerate(self.names)}
        for i, what in enumerate(NONFINITE):
            if bool(self.nonfinite[:, i].any()):
                columns[f"nonfinite_{what}"] = HeadColumn(
                    [self.nonfinite[:, i]], description="NaN and infinity, counted."
                )
        places = [(index[layer], head) for layer, head in self.places]
        about = {"step": self.step, "steps": self.steps}
        return HeadTable.of_rows(columns, places, layers=self.layers, title=self._title(), about=about)

    def to_dict(self) -> dict[str, Any]:
        """Numbers for JSON: step, steps, and for each layer its heads and their measures; None for NaN and infinity,
        whose counts are included where there are any."""
        layers: dict[str, Any] = {}
        for layer in self.layers:
            at = [i for i, (name, _) in enumerate(self.places) if name == layer]
            entry: dict[str, Any] = {"heads": [self.places[i][1] for i in at]}
            entry |= {name: plain(self.numbers[at, i].numpy()) for i, name in enumerate(self.names)}
            if bool(self.nonfinite[at].any()):
                entry["nonfinite"] = {
                    what: self.nonfinite[at, i].long().tolist() for i, what in enumerate(NONFINITE)
                }  # fmt: skip
            layers[layer] = entry
        return {"step": self.step, "steps": self.steps, "layers": layers}

    def __repr__(self) -> str:
        return repr(self.table)

    def _repr_html_(self) -> str:
        return self.table._repr_html_()

    def _title(self) -> str:
        if not self.steps:
            return "no step measured yet"
        return f"step {self.step}" if self.steps == 1 else f"{self.steps} steps, the last of them step {self.step}"

    def _column(self, name: str) -> int:
        if name not in self.names:
            raise unknown_name("measure", name, self.names, listed="" if self.names else "nothing was measured")
        return self.names.index(name)


def _column(name: str, values: Tensor) -> HeadColumn:
    """The column of a measure, with unit and description if its name is registered."""
    if (words := describe(name, "en")) is None:
        return HeadColumn([values])
    return HeadColumn([values], unit=words.unit, description=words.summary, range=words.range)


class History(Sequence[Summary]):
    """The latest measured steps, oldest first; `history["max_logit"]` is [steps, layers, heads]."""

    def __init__(self, summaries: Sequence[Summary]) -> None:
        self._summaries = tuple(summaries)

    def __len__(self) -> int:
        return len(self._summaries)

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return self._summaries[key]
        tables = [summary[key] for summary in self._summaries]
        if not tables:
            return torch.empty(0, 0, 0)
        layers, heads = max(len(table) for table in tables), max(table.shape[1] for table in tables)
        grown = torch.full((len(tables), layers, heads), torch.nan)
        for i, table in enumerate(tables):
            grown[i, : len(table), : table.shape[1]] = table
        return grown

    @property
    def steps(self) -> list[int]:
        """The number of each step."""
        return [summary.step for summary in self._summaries]

    @property
    def nbytes(self) -> int:
        """Size of the numbers in bytes."""
        return sum(s.numbers.nbytes + s.nonfinite.nbytes for s in self._summaries)

    def to_dict(self) -> list[dict[str, Any]]:
        """`Summary.to_dict` of each."""
        return [summary.to_dict() for summary in self._summaries]

    def __repr__(self) -> str:
        if not self._summaries:
            return "History(no step measured yet)"
        return f"History({len(self)} steps, {self.steps[0]} to {self.steps[-1]}; {', '.join(self._summaries[-1])})"
