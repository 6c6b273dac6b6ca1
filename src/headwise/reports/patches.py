"""Images whose patches are tokens of a passage."""

from dataclasses import dataclass
from typing import Any

from headwise.errors import ConfigError, ShapeError

SIDES = ("keys", "queries")


@dataclass(frozen=True)
class Patches:
    """An image in rows × columns patches, which are consecutive tokens of a passage, row by row.

    Attributes:
        source: the image as a data URL. width, height: its size in pixels, of which only the ratio matters.
        query, key: the first patch among the tokens of the queries and of the keys; None if that side has none.
    """

    source: str
    width: int
    height: int
    rows: int
    columns: int
    query: int | None = None
    key: int | None = None

    def check(self, queries: int, keys: int) -> None:
        """Raise ShapeError unless the patches are among that many tokens of each side."""
        if self.query is None and self.key is None:
            raise ShapeError("Patches: query, key or both are required")
        for name, first, size in (("query", self.query, queries), ("key", self.key, keys)):
            if first is not None and not 0 <= first <= size - self.rows * self.columns:
                raise ShapeError(
                    f"Patches({name}={first}): {self.rows} × {self.columns} patches from there on, but the passage has "
                    f"{size} tokens on that side"
                )


def name_of(row: int, column: int) -> str:
    """The text of a patch in place of a token's, counted from 0."""
    return f"[{row},{column}]"


def check_grid(grid: Any) -> None:
    """Raise ConfigError unless these are the rows and columns of patches."""
    if not isinstance(grid, tuple | list) or len(grid) != 2 or any(type(size) is not int or size < 1 for size in grid):
        raise ConfigError(f"grid={grid!r}: expected the numbers of rows and columns of patches")
