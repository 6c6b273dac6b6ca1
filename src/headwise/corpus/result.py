"""The result of a sweep: numbers over the whole corpus, which print themselves."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from headwise.analysis.checks import head_name
from headwise.corpus.moments import OfRows, OfWindows
from headwise.corpus.output import columns, finished
from headwise.corpus.passages import Passages
from headwise.corpus.selection import Head
from headwise.corpus.tally import Tally
from headwise.corpus.work import Work
from headwise.errors import ConfigError
from headwise.table import HeadColumn, HeadTable
from headwise.table.show import as_text


@dataclass(frozen=True, eq=False)
class CorpusMeasures:
    """Measures of heads over a corpus: `found.table` is the `HeadTable` of their values, with a column a measure.

    Attributes:
        path: of the table on disk. heads: the selected ones. measures: with their units.
        total: the sums over all files.
        passages: the strongest of each head, and a sample; empty if none were kept.
        about: model, options, files, versions, and the numbers of windows and tokens.
        new: whether this call measured them; False if the table with the same files and options existed.
    """

    path: Path
    heads: tuple[Head, ...]
    measures: tuple[OfRows | OfWindows, ...]
    total: Tally
    passages: Passages
    about: dict[str, Any]
    new: bool = True

    @classmethod
    def of(
        cls, work: Work, path: Path, total: Tally, passages: Passages, about: Mapping[str, Any], *, new: bool = True
    ) -> "CorpusMeasures":
        """The result of the sums and passages of a sweep."""
        return cls(path, tuple(work.heads), work.selection.known(), total, passages, dict(about), new)

    @classmethod
    def of_nothing(cls, work: Work, path: Path) -> "CorpusMeasures":
        """The result of a process that is not the first one."""
        return cls.of(work, path, work.nothing(), Passages.nothing(work.by), {}, new=False)

    @cached_property
    def table(self) -> HeadTable:
        """The value of every measure, NaN where nothing was counted."""
        return self.moment("value")

    def moment(self, name: str) -> HeadTable:
        """A statistic of every measure over the corpus: value, mean, std, min, max or count."""
        numbers = finished(self.total.numbers, self.measures)
        if name not in numbers:
            raise ConfigError(f"moment({name!r}): expected one of {', '.join(numbers)}")
        found = numbers[name]
        if name != "count":
            found = found.masked_fill(numbers["count"] == 0, torch.nan)
        columns = {
            measure.name: HeadColumn([row], unit="" if name == "count" else measure.unit)
            for measure, row in zip(self.measures, found, strict=True)
        }
        names = {head.layer: head.name for head in self.heads}
        counts = {"windows": self.total.windows, "tokens": self.total.tokens}
        return HeadTable.of_rows(
            columns, [(head.layer, head.head) for head in self.heads],
            layers=[names.get(layer, "") for layer in range(max(names) + 1)],
            title=f"{self.path}: {self.total.windows:,} windows, {self.total.tokens:,} tokens",
            about={"path": str(self.path), "number": name, **counts},
        )  # fmt: skip

    def columns(self) -> dict[str, list[Any]]:
        """The table over the whole corpus, column name → values."""
        return columns(self.total, self.heads, self.measures)

    def overview(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows as text, one row a measure: the mean over the heads, the least and the largest value."""
        body = []
        for measure in self.measures:
            values = self.table.column(measure.name).tolist()
            known = [(value, head) for value, head in zip(values, self.heads, strict=True) if isfinite(value)]
            low, high = (pick(known, key=lambda one: one[0], default=None) for pick in (min, max))
            mean = f"{sum(value for value, _ in known) / len(known):.4g}" if known else "—"
            body.append([measure.name, measure.unit, mean, *_cells(low), *_cells(high)])
        return ["measure", "unit", "mean of heads", "least", "head", "largest", "head"], body

    def __repr__(self) -> str:
        counts = f"{self.total.windows:,} windows, {self.total.tokens:,} tokens"
        return f"CorpusMeasures({self.path}: {counts})\n{as_text(*self.overview(), words=2)}"

    def _repr_html_(self) -> str:
        return self.table._repr_html_()


def _cells(found: tuple[float, Head] | None) -> tuple[str, str]:
    return ("—", "") if found is None else (f"{found[0]:.4g}", head_name(found[1].layer, found[1].head))
