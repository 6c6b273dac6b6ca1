"""What a sweep gives back: the numbers over the whole corpus, which print themselves."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.analysis.given import head_name
from headwise.corpus.asked import Head
from headwise.corpus.moments import OfRows, OfWindows
from headwise.corpus.rows import columns, finished
from headwise.corpus.tally import Tally
from headwise.corpus.work import Work
from headwise.errors import ConfigError
from headwise.tables import as_html, as_text


@dataclass(frozen=True, eq=False)
class CorpusMeasures(Mapping[str, Tensor]):
    """Measures of heads over a corpus: `found["entropy"]` is [layers, heads] float64, NaN where there is no such head,
    or nothing was counted.

    Attributes:
        path: of the table. heads: that were kept. measures: with their units.
        total: what was added up over all files.
        about: how the numbers came to be: model, options, files, versions, and the counts of windows and tokens.
        new: whether this call measured them; False where the table was already there, of the same files and options.
    """

    path: Path
    heads: tuple[Head, ...]
    measures: tuple[OfRows | OfWindows, ...]
    total: Tally
    about: dict[str, Any]
    new: bool = True

    @classmethod
    def of(
        cls, work: Work, path: Path, total: Tally, about: Mapping[str, Any], *, new: bool = True
    ) -> "CorpusMeasures":
        """The sums of a sweep."""
        return cls(path, tuple(work.heads), work.asked.known(), total, dict(about), new)

    def __getitem__(self, name: str) -> Tensor:
        return self.column(name, "value")

    def __iter__(self) -> Iterator[str]:
        return (measure.name for measure in self.measures)

    def __len__(self) -> int:
        return len(self.measures)

    def column(self, name: str, column: str) -> Tensor:
        """A column of the table for one measure, [layers, heads]: value, mean, std, min, max or count."""
        table = torch.full((self.layers[-1] + 1, max(head.head for head in self.heads) + 1), torch.nan).double()
        places = torch.tensor([(head.layer, head.head) for head in self.heads])
        table[places[:, 0], places[:, 1]] = self.of_heads(name, column)
        return table

    def of_heads(self, name: str, column: str = "value") -> Tensor:
        """A column of the table for one measure and the heads that were kept, [heads]; NaN where nothing was
        counted."""
        names = list(self)
        if name not in names:
            raise ConfigError(f"{name!r} was not measured; available are {', '.join(names)}")
        numbers = finished(self.total.numbers, self.measures)
        if column not in numbers:
            raise ConfigError(f"column={column!r}: expected one of {', '.join(numbers)}")
        at = names.index(name)
        found = numbers[column][at]
        return found if column == "count" else found.masked_fill(numbers["count"][at] == 0, torch.nan)

    @property
    def layers(self) -> Sequence[int]:
        """The numbers of the layers that were kept."""
        return sorted({head.layer for head in self.heads})

    def columns(self) -> dict[str, list[Any]]:
        """The table over the whole corpus, column name → values."""
        return columns(self.total, self.heads, self.measures)

    def overview(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows as text, a row a measure: the mean over the heads, and the least and the largest of them."""
        body = []
        for measure in self.measures:
            values = self.of_heads(measure.name).tolist()
            known = [(value, head) for value, head in zip(values, self.heads, strict=True) if isfinite(value)]
            low, high = (pick(known, key=lambda one: one[0], default=None) for pick in (min, max))
            mean = f"{sum(value for value, _ in known) / len(known):.4g}" if known else "—"
            body.append([measure.name, measure.unit, mean, *_told(low), *_told(high)])
        return ["measure", "unit", "mean of heads", "least", "head", "largest", "head"], body

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows as text, a row a head: the value of every measure."""
        values = zip(*(self.of_heads(name).tolist() for name in self), strict=True)
        body = [
            [str(head.layer), str(head.head), *map(_number, row)] for head, row in zip(self.heads, values, strict=True)
        ]
        return ["layer", "head", *self], body

    def __repr__(self) -> str:
        counts = f"{self.total.windows:,} windows, {self.total.tokens:,} tokens"
        return f"CorpusMeasures({self.path}: {counts})\n{as_text(*self.overview(), words=2)}"

    def _repr_html_(self) -> str:
        return as_html(*self.table(), caption=str(self.path))


def _told(found: tuple[float, Head] | None) -> tuple[str, str]:
    return ("—", "") if found is None else (f"{found[0]:.4g}", head_name(found[1].layer, found[1].head))


def _number(value: float) -> str:
    return "—" if value != value else f"{value:.4g}"
