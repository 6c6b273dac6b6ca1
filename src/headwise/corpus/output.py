"""The table on disk: Parquet, CSV or JSON lines by the suffix, written whole or not at all."""

import csv
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from headwise.corpus.rows import COLUMNS
from headwise.errors import CheckpointError, ConfigError
from headwise.files import atomic_path, sha256_of, write_text
from headwise.table.files import arrow

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
            raise ConfigError(f"out={str(path)!r}: expected a name that ends in {', '.join(SUFFIXES)}")
        if os.path.isdir(target):
            raise ConfigError(f"out={str(path)!r}: is a folder")
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
                found = json.loads(self.about.read_text(encoding="utf-8"))
                if found["sha256"] != sha256_of(self.path):
                    return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return found if isinstance(found, dict) else None

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
            raise CheckpointError(
                f"{error}; all measurements are kept in {str(self.path) + '.partial'!r}, and the same command resumes"
            ) from None


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
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(first)
        for columns in chain([first], parts):
            writer.writerows(zip(*columns.values(), strict=True))


def _jsonl(path: Path, parts: Iterator[Columns], about: Mapping[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for columns in parts:
            for row in zip(*columns.values(), strict=True):
                entry = dict(zip(columns, row, strict=True))
                file.write(json.dumps(entry, ensure_ascii=False, allow_nan=False) + "\n")


_WRITERS = {"parquet": _parquet, "csv": _csv, "jsonl": _jsonl}
