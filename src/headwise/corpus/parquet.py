"""Corpora in Parquet files, one text a row. Requires pyarrow, the `parquet` extra."""

from collections.abc import Iterator
from contextlib import contextmanager

from headwise.contents import one_line
from headwise.errors import TextError
from headwise.table.files import arrow

ROWS = 256  # read at once


def row_groups(path: str) -> tuple[int, ...]:
    """Bytes of each row group, the parts of a file that can be read independently."""
    with _reading(path):
        meta = arrow().parquet.ParquetFile(path).metadata
        return tuple(max(1, meta.row_group(i).total_byte_size) for i in range(meta.num_row_groups))


def check_column(path: str, field: str) -> None:
    """Raise TextError unless the file has a column of strings with that name."""
    pyarrow = arrow()
    with _reading(path):
        schema = pyarrow.parquet.ParquetFile(path).schema_arrow
    if field not in schema.names:
        raise TextError(f"{path!r} has no column {field!r}; it has {', '.join(schema.names)}: give --field")
    kind = schema.field(field).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise TextError(f"{path!r}: column {field!r} contains {kind}, expected strings")


def rows(path: str, group: int, field: str) -> Iterator[tuple[int, str]]:
    """(row in the file, text) of a row group; empty ones and null are left out."""
    with _reading(path):
        file = arrow().parquet.ParquetFile(path)
        row = sum(file.metadata.row_group(i).num_rows for i in range(group))
        batches = file.iter_batches(batch_size=ROWS, row_groups=[group], columns=[field])
    while True:
        with _reading(path):
            batch = next(batches, None)
            texts = [] if batch is None else batch.column(0).to_pylist()
        if batch is None:
            return
        for text in texts:
            if text:
                yield row, text
            row += 1


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Context that raises TextError for all errors of pyarrow on a damaged file."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (arrow().ArrowException, OSError, ValueError, OverflowError) as error:
        raise TextError(f"{path!r} is not a valid Parquet file: {one_line(error)}") from None
