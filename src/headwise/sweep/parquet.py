"""Corpora in Parquet files: a text a row. Needs pyarrow, the `parquet` extra."""

from collections.abc import Iterator
from typing import Any

from headwise.errors import TextError, not_installed

ROWS = 256  # read at once


def arrow() -> Any:
    """pyarrow with its Parquet part, or an error that says how to get it."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise not_installed("Parquet", "pyarrow") from None
    return pyarrow


def row_groups(path: str) -> tuple[int, ...]:
    """Bytes of each row group, the parts of a file that can be read by themselves."""
    meta = _opened(path).metadata
    return tuple(max(1, meta.row_group(i).total_byte_size) for i in range(meta.num_row_groups))


def check_column(path: str, field: str) -> None:
    """TextError if there is no column of that name, or it holds no strings."""
    pyarrow = arrow()
    schema = _opened(path).schema_arrow
    if field not in schema.names:
        raise TextError(f"{path!r} has no column {field!r}; it has {', '.join(schema.names)}: give --field")
    kind = schema.field(field).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise TextError(f"{path!r}: column {field!r} holds {kind}, expected strings")


def rows(path: str, group: int, field: str) -> Iterator[tuple[int, str]]:
    """(row in the file, text) of a row group; empty ones and null are left out."""
    file = _opened(path)
    row = sum(file.metadata.row_group(i).num_rows for i in range(group))
    for batch in file.iter_batches(batch_size=ROWS, row_groups=[group], columns=[field]):
        for text in batch.column(0).to_pylist():
            if text:
                yield row, text
            row += 1


def _opened(path: str) -> Any:
    pyarrow = arrow()
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, ValueError) as error:
        raise TextError(f"{path!r} is no Parquet file, or a broken one: {error}") from None
