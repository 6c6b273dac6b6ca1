"""The result of a sweep, which prints itself, and its files: Parquet, CSV or JSON lines."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.analysis.checks import head_name
from headwise.base.files import atomic_path, sha256_of, write_text
from headwise.corpus.passages import Passages, passages_path
from headwise.corpus.select import NOTHING, Head, OfRows, OfWindows, measures_for
from headwise.corpus.tally import Tally
from headwise.corpus.work import Work
from headwise.errors import CheckpointError, ConfigError
from headwise.table import HeadColumn, HeadTable
from headwise.table.files import arrow, csv_row
from headwise.table.show import as_text
from headwise.wording import LIST, joined

SUFFIXES = (".parquet", ".csv", ".jsonl")
Columns = Mapping[str, list[Any]]


@dataclass(frozen=True)
class Output:
    """The path and format of the table."""

    path: Path
    kind: str

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> "Output":
        """Raise ConfigError for another suffix, a folder, or Parquet without pyarrow."""
        target = Path(path)
        if target.suffix.lower() not in SUFFIXES:
            raise ConfigError(
                "out={path!r}: expected a name that ends in {suffixes}", path=str(path), suffixes=joined(SUFFIXES, LIST)
            )
        if os.path.isdir(target):
            raise ConfigError("out={path!r}: is a folder", path=str(path))
        if target.suffix.lower() == ".parquet":
            arrow()
        return cls(target, target.suffix.lower()[1:])

    @property
    def about(self) -> Path:
        """The file with the description of the sweep: the table itself, or one beside it for CSV and JSON lines."""
        return self.path if self.kind == "parquet" else self.path.with_name(f"{self.path.name}.about.json")

    def read_about(self) -> dict[str, Any] | None:
        """The description of an existing table; None if `write` did not write it, or it was changed afterwards."""
        try:
            if self.kind == "parquet":
                words = arrow().parquet.read_schema(self.path).metadata[b"headwise"]
                found = json.loads(words)
            else:
                found = json.loads(self.about.read_text(encoding="utf-8")) if self.about.is_file() else None
                if found is None or found["sha256"] != sha256_of(self.path):
                    return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return found if isinstance(found, dict) else None

    def write_passages(self, passages: Passages) -> str | None:
        """Write the passages beside the table, and return the SHA-256 of the file; without passages, remove a file of
        an earlier sweep. CheckpointError if it cannot be written."""
        path = passages_path(self.path)
        try:
            if not len(passages):
                path.unlink(missing_ok=True)
                return None
            passages.save(path)
        except (CheckpointError, OSError) as error:
            raise CheckpointError(f"{error}; {self._kept}") from None
        return sha256_of(path)

    def read_passages(self, sha256: str) -> Passages:
        """The passages that `write_passages` wrote. ValueError if they are missing, or were changed afterwards."""
        path = passages_path(self.path)
        try:
            if sha256_of(path) != sha256:
                raise ValueError
            return Passages.load(path)
        except (OSError, CheckpointError):
            raise ValueError from None

    @property
    def _kept(self) -> str:
        return f"all measurements are kept in {str(self.path) + '.partial'!r}, and the same command resumes"

    def write(self, parts: Iterable[Columns], about: Mapping[str, Any]) -> None:
        """Write the table part by part. about: the description of the sweep, for JSON. CheckpointError if it cannot be
        written."""
        try:
            with atomic_path(self.path) as temporary:
                _WRITERS[self.kind](temporary, iter(parts), about)
            if self.about != self.path:
                about = {**about, "sha256": sha256_of(self.path)}
                write_text(self.about, json.dumps(about, ensure_ascii=False, indent=1) + "\n")
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {self._kept}") from None


def _parquet(path: Path, parts: Iterator[Columns], about: Mapping[str, Any]) -> None:
    pyarrow = arrow()
    kinds = {
        int: pyarrow.int64(), float: pyarrow.float64(), str: pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
    }  # fmt: skip
    first = next(parts)
    words = {"headwise": json.dumps(about, ensure_ascii=False)}
    schema = pyarrow.schema([(name, kinds[COLUMNS[name]]) for name in first], metadata=words)
    with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for columns in chain([first], parts):
            writer.write_table(pyarrow.table(dict(columns), schema=schema))


def _csv(path: Path, parts: Iterator[Columns], about: Mapping[str, Any]) -> None:
    first = next(parts)
    with open(path, "w", encoding="utf-8", newline="") as file:
        write = csv_row(file)
        write(first)
        for columns in chain([first], parts):
            for row in zip(*columns.values(), strict=True):
                write(row)


def _jsonl(path: Path, parts: Iterator[Columns], about: Mapping[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for columns in parts:
            for row in zip(*columns.values(), strict=True):
                entry = dict(zip(columns, row, strict=True))
                file.write(json.dumps(entry, ensure_ascii=False, allow_nan=False) + "\n")


_WRITERS = {"parquet": _parquet, "csv": _csv, "jsonl": _jsonl}


COLUMNS: dict[str, type] = {
    "file": str, "layer": int, "module": str, "head": int, "measure": str, "value": float, "mean": float, "std": float,
    "min": float, "max": float, "count": int, "unit": str, "per": str, "nonfinite": int,
}  # fmt: skip


def columns(
    tally: Tally, heads: Sequence[Head], measures: Sequence[OfRows | OfWindows], file: str | None = None
) -> dict[str, list[Any]]:
    """Column name → values, head by head and measure by measure; "file" only if given. None if nothing was counted."""
    found: dict[str, list[Any]] = {name: [] for name in COLUMNS if name != "file" or file is not None}
    numbers = {name: value.T.tolist() for name, value in finished(tally.numbers, measures).items()}
    nonfinite = tally.lost[0].long().tolist()
    for i, head in enumerate(heads):
        for j, measure in enumerate(measures):
            row = {
                "layer": head.layer, "module": head.name, "head": head.head, "measure": measure.name,
                "unit": measure.unit, "per": measure.per, "nonfinite": nonfinite[i],
                **({} if file is None else {"file": file}),
            }  # fmt: skip
            count = int(numbers["count"][i][j])
            row |= {name: numbers[name][i][j] if count else None for name in ("value", "mean", "std", "min", "max")}
            row["count"] = count
            for name, into in found.items():
                into.append(row[name])
    return found


def finished(numbers: Tensor, measures: Sequence[OfRows | OfWindows]) -> dict[str, Tensor]:
    """Column → [measures, heads] float64 from moments [measures, 5, heads], without −0. std divides by n."""
    count, mean, squares, least, largest = (numbers + 0.0).unbind(1)
    take = torch.tensor([measure.largest for measure in measures])[:, None]
    return {
        "value": torch.where(take, largest, mean), "mean": mean, "std": (squares / count.clamp_min(1)).sqrt(),
        "min": least, "max": largest, "count": count,
    }  # fmt: skip


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
        cls, path: Path, total: Tally, passages: Passages, about: Mapping[str, Any], *, new: bool = True
    ) -> "CorpusMeasures":
        """The result of the sums and passages of a sweep, and its description."""
        measures = tuple(measures_for(NOTHING, about["options"]["measures"]))
        return cls(path, tuple(Head(*one) for one in about["heads"]), measures, total, passages, dict(about), new)

    @classmethod
    def of_nothing(cls, work: Work, path: Path) -> "CorpusMeasures":
        """The result of a process that is not the first one."""
        nothing = Passages.nothing(work.options.strongest_by)
        about = {"options": vars(work.options), "heads": [list(vars(head).values()) for head in work.heads]}
        return cls.of(path, work.nothing(), nothing, about, new=False)

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
