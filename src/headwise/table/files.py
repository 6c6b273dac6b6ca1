"""Tables on disk: Parquet, CSV and JSON, all with the same content."""

import csv
import io
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO, TypeVar

import torch
from torch import Tensor

from headwise.base.files import atomic_path
from headwise.base.read import Entry, each, number, one_line, parsed, reading, text_of, whole, word
from headwise.errors import CheckpointError, ConfigError, not_installed
from headwise.table.columns import INTERVAL, STANDARD, HeadColumn

FORMAT = "headwise-table-1"
# Spreadsheets compute what begins with these: such a text is written with ' before it, as OWASP advises.
FORMULA = re.compile("'*[-=+@\t\r\n＝＋－＠]")
PLACES = ("layer", "module", "head")
ABOUT = "about"  # the column of a CSV file that holds everything but the numbers
_ENDS = {None: ("",), STANDARD: ("", " error"), INTERVAL: ("", " low", " high")}
Made = TypeVar("Made")


@dataclass(frozen=True)
class Content:
    """The content of a table's file."""

    title: str
    about: dict[str, Any]
    columns: dict[str, dict[str, Any]]  # name → unit, description, range and kind of error
    layers: list[str]  # names, by number
    layer: list[int]  # of each row
    head: list[int]  # of each row
    values: dict[str, list[float]]  # name → one number a row; errors have names of their own

    def described(self) -> dict[str, Any]:
        """Everything but the rows."""
        return {
            "format": FORMAT, "title": self.title, "about": self.about, "columns": self.columns, "layers": self.layers
        }  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        values = {name: [_plain(x) for x in column] for name, column in self.values.items()}
        return {**self.described(), "layer": self.layer, "head": self.head, "values": values}

    def table(self) -> dict[str, list[Any]]:
        """Column → values, as in Parquet and CSV; "module" only where layers have names."""
        modules = {"module": [self.layers[layer] for layer in self.layer]} if any(self.layers) else {}
        return {"layer": self.layer, **modules, "head": self.head, **self.values}

    def column(self, name: str) -> HeadColumn:
        """The column of that name, with the numbers of all rows."""
        about = self.columns[name]
        ends = [torch.tensor(self.values[name + end], dtype=torch.float64) for end in _ENDS[about["error"]][1:]]
        return HeadColumn(
            [self.values[name]], unit=about["unit"], description=about["description"], range=about["range"],
            error=None if not ends else [ends[0] if len(ends) == 1 else torch.stack(ends, -1)],
        )  # fmt: skip


def content_of(
    title: str, about: Mapping[str, Any], layers: Sequence[str], places: Sequence[tuple[int, int]],
    columns: Mapping[str, HeadColumn],
) -> Content:  # fmt: skip
    """The content of a table as plain values."""
    kinds: dict[str, dict[str, Any]] = {}
    values: dict[str, list[float]] = {}
    for name, column in columns.items():
        kinds[name] = {
            "unit": column.unit, "description": column.description, "range": column.range, "error": column.error_kind
        }  # fmt: skip
        error = column.flat_error
        errors = () if error is None else (error,) if error.ndim == 1 else error.unbind(-1)
        parts: Iterable[Tensor] = (column.flat, *errors)
        values |= {name + end: part.tolist() for end, part in zip(_ENDS[column.error_kind], parts, strict=True)}
    layer, head = [layer for layer, _ in places], [head for _, head in places]
    return Content(title, dict(about), kinds, list(layers), layer, head, values)


def check_names(columns: Mapping[str, Any]) -> None:
    """Raise ConfigError for a name that would be ambiguous in a file."""
    taken = {*PLACES, ABOUT}
    for name, column in columns.items():
        if not isinstance(name, str) or not name:
            raise ConfigError(f"column {name!r}: expected a name that is a string, and not empty")
        for end in _ENDS[getattr(column, "error_kind", None)]:
            if name + end in taken:
                raise ConfigError(f"column {name!r}: {name + end!r} is the name of something else in the table's files")
            taken.add(name + end)


def save(path: str | os.PathLike[str], content: Content) -> None:
    """Write a table in the format of the path's suffix, whole or not at all."""
    write = _form(path, "save")[0]
    try:
        json.dumps(content.described(), ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:  # ValueError: NaN, or half of a surrogate pair
        raise ConfigError(f"about, title, names: expected plain values for JSON: {one_line(error)}") from None
    if write is _write_parquet:
        arrow()
    with atomic_path(path) as temporary:
        write(temporary, content)


def load(path: str | os.PathLike[str], make: Callable[[Content], Made]) -> Made:
    """Read a file that `save` wrote; `make` turns its content into a table."""
    read = _form(path, "load")[1]
    with reading(path, "table", missing="HeadTable.save writes it"):
        return make(read(Path(path)))


def arrow() -> Any:
    """pyarrow with its Parquet module; ConfigError with the way to install it."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise not_installed("Parquet", "pyarrow") from None
    return pyarrow


def _write_json(path: Path, content: Content) -> None:
    path.write_text(json.dumps(content.to_dict(), ensure_ascii=False, allow_nan=False), encoding="utf-8")


def _read_json(path: Path) -> Content:
    found = Entry(parsed(text_of(path)))
    described = _described(found)
    values = found.named("values", lambda column, at: each(column, at, _number))
    return _checked(described, found.each("layer", whole), found.each("head", whole), values)


def _write_csv(path: Path, content: Content) -> None:
    columns = content.table()
    described = json.dumps(content.described(), ensure_ascii=False, allow_nan=False)
    with open(path, "w", encoding="utf-8", newline="") as file:
        write = csv_row(file)
        write([*columns, ABOUT])
        rows = zip(*columns.values(), strict=True) if content.layer else [[""] * len(columns)]
        for row, cells in enumerate(rows):
            write([*cells, "" if row else described])


def csv_row(file: TextIO) -> Callable[[Iterable[Any]], Any]:
    """A function that writes a row; texts so that no spreadsheet computes them, which `_text_in` restores."""

    # With this line end, Python before 3.13 quotes \r in a cell, too.
    writer = csv.writer(SimpleNamespace(write=lambda row: file.write(f"{row[:-2]}\n")), lineterminator="\r\n")
    return lambda cells: writer.writerow([f"'{x}" if isinstance(x, str) and FORMULA.match(x) else x for x in cells])


def _text_in(cell: str) -> str:
    return cell[1:] if cell.startswith("'") and FORMULA.match(cell) else cell


def _read_csv(path: Path) -> Content:
    content = text_of(path)
    before = csv.field_size_limit(len(content) + 1)  # the description may be longer than the usual limit
    try:
        rows = list(csv.reader(io.StringIO(content, newline=""), strict=True))
    except csv.Error as error:
        raise CheckpointError(f"not CSV: {one_line(error)}") from None
    finally:
        csv.field_size_limit(before)
    if len(rows) < 2 or not rows[0] or rows[0][-1] != ABOUT:
        raise CheckpointError(f"expected a last column {ABOUT!r}, whose first row describes the table")
    names = [_text_in(name) for name in rows[0][:-1]]
    for line, row in enumerate(rows[1:], 2):
        if len(row) != len(rows[0]):
            raise CheckpointError(f"line {line}: {len(row)} values, expected {len(rows[0])}")
    described = _described(Entry(parsed(rows[1][-1]), ABOUT))
    body = rows[1:] if any(rows[1][:-1]) or len(rows) > 2 else []
    columns = {name: [row[i] for row in body] for i, name in enumerate(names)}
    if len(columns) < len(names):
        raise CheckpointError("two columns have the same name")
    return _of_columns(described, columns, _whole_in, _number_in)


def _write_parquet(path: Path, content: Content) -> None:
    pyarrow = arrow()
    kinds = {"layer": pyarrow.int64(), "head": pyarrow.int64(), "module": pyarrow.string()}
    columns = content.table()
    described = json.dumps(content.described(), ensure_ascii=False, allow_nan=False)
    schema = pyarrow.schema(
        [(name, kinds.get(name, pyarrow.float64())) for name in columns], metadata={"headwise": described}
    )
    pyarrow.parquet.write_table(pyarrow.table(columns, schema=schema), path, compression="zstd")


def _read_parquet(path: Path) -> Content:
    pyarrow = arrow()
    try:
        found = pyarrow.parquet.read_table(path)
        columns = {name: found.column(name).to_pylist() for name in found.column_names}
        words = (found.schema.metadata or {}).get(b"headwise", b"").decode()
    except FileNotFoundError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, OverflowError, MemoryError) as error:
        raise CheckpointError(f"not Parquet, or damaged: {one_line(error)}") from None
    if not words:
        raise CheckpointError("it holds no HeadTable: its schema has no entry 'headwise'")
    return _of_columns(_described(Entry(parsed(words))), columns, whole, _number_or_nan)


def _of_columns(
    described: Content, columns: dict[str, list[Any]], read_whole: Callable[[Any, str], int],
    read_number: Callable[[Any, str], float],
) -> Content:  # fmt: skip
    """The content from a description and the values of each column by name."""
    for name in ("layer", "head"):
        if name not in columns:
            raise CheckpointError(f"column {name!r} is missing")
    layer, head = (each(columns[name], name, read_whole) for name in ("layer", "head"))
    values = {name: each(column, name, read_number) for name, column in columns.items() if name not in PLACES}
    return _checked(described, layer, head, values)


def _described(found: Entry) -> Content:
    """Everything but the rows."""
    if found.raw("format") != FORMAT:
        raise CheckpointError(f"it is not of the format {FORMAT!r}")
    columns, inner = {}, found.entry("columns")
    for name in inner:
        one = inner.entry(word(name, "columns"))
        kind = one.raw("error")
        if kind not in (None, STANDARD, INTERVAL):
            raise CheckpointError(f"columns.{name}.error: expected null, {STANDARD!r} or {INTERVAL!r}")
        columns[name] = {**{key: one.word(key) for key in ("unit", "description", "range")}, "error": kind}
    return Content(found.word("title"), found.entry(ABOUT).plain(), columns, found.each("layers", word), [], [], {})


def _checked(described: Content, layer: list[int], head: list[int], values: dict[str, list[float]]) -> Content:
    """The description with its rows; CheckpointError if they are not those of the described columns."""
    expected = [name + end for name, kind in described.columns.items() for end in _ENDS[kind["error"]]]
    if sorted(values) != sorted(expected):
        raise CheckpointError(f"it has the columns {', '.join(values)}; expected {', '.join(expected)}")
    for name, count in (("head", len(head)), *((name, len(column)) for name, column in values.items())):
        if count != len(layer):
            raise CheckpointError(f"{name}: {count} values, expected {len(layer)}, one a row")
    return Content(described.title, described.about, described.columns, described.layers, layer, head, values)


def _form(path: str | os.PathLike[str], what: str) -> tuple[Callable[[Path, Content], None], Callable[[Path], Content]]:
    suffix = Path(path).suffix.lower()
    if suffix not in _FORMS:
        raise ConfigError(f"{what}({os.fspath(path)!r}): expected a name that ends in {', '.join(_FORMS)}")
    return _FORMS[suffix]


def _plain(x: float) -> float | str | None:
    return x if math.isfinite(x) else None if math.isnan(x) else "inf" if x > 0 else "-inf"


def _number(x: Any, at: str) -> float:
    return math.nan if x is None else float(x) if x in ("inf", "-inf") else number(x, at)


def _number_or_nan(x: Any, at: str) -> float:
    return x if isinstance(x, float) else number(x, at)


def _number_in(x: str, at: str) -> float:
    try:
        return float(x)
    except ValueError:
        raise CheckpointError(f"{at}: expected a number, got {x[:40]!r}") from None


def _whole_in(x: str, at: str) -> int:
    if not (x.isascii() and x.isdecimal() and len(x) < 19):
        raise CheckpointError(f"{at}: expected a whole number, got {x[:40]!r}")
    return int(x)


_FORMS = {
    ".parquet": (_write_parquet, _read_parquet), ".csv": (_write_csv, _read_csv), ".json": (_write_json, _read_json)
}  # fmt: skip
