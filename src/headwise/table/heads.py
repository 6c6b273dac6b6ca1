"""The table: layers, heads and named columns."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from headwise.errors import ConfigError, ShapeError, not_installed, unknown_name
from headwise.table.columns import HeadColumn
from headwise.table.files import Content, check_names, content_of, load, save
from headwise.table.show import html, text

MOST_HEADS = 1 << 16  # of a layer
Place = tuple[int, int]  # layer and head


class Rows:
    """The (layer, head) of every row. `heads` are ascending by layer, `index` the rows that they are in."""

    def __init__(self, places: Iterable[Place], layers: Sequence[str]) -> None:
        self.places, self.layers = tuple(places), tuple(layers)
        self._row = {place: row for row, place in enumerate(self.places)}
        if len(self._row) < len(self.places):
            twice = next(place for row, place in enumerate(self.places) if self._row[place] != row)
            raise ConfigError(f"heads: head {twice[1]} of layer {twice[0]} is there twice")
        by_layer: list[list[Place]] = [[] for _ in self.layers]
        for layer, head in sorted(self.places):
            if not 0 <= layer < len(self.layers):
                raise ConfigError(f"places: layer {layer}, expected 0 to {len(self.layers) - 1}")
            if not 0 <= head < MOST_HEADS:
                raise ConfigError(f"heads: {head} in layer {layer}, expected 0 to {MOST_HEADS - 1}")
            by_layer[layer].append((layer, head))
        self.heads = tuple(tuple(head for _, head in row) for row in by_layer)
        self.index = tuple(torch.tensor([self._row[place] for place in row], dtype=torch.long) for row in by_layer)

    def number(self, layer: int | str) -> int:
        """The number of a layer given by name or by number; ConfigError if the table has no such layer."""
        if isinstance(layer, str):
            if layer not in self.layers:
                raise unknown_name("layer", layer, self.layers, listed=f"the table has {_listed(self.layers)}")
            return self.layers.index(layer)
        if not -len(self.layers) <= layer < len(self.layers):
            raise ConfigError(f"layer {layer} is not in the table; it has {len(self.layers)} layers, counted from 0")
        return int(layer) % len(self.layers)

    def row(self, layer: int | str, head: int) -> int:
        """The row of a head; ConfigError if the table does not have it."""
        at = self._row.get((self.number(layer), head))
        if at is None:
            there = _listed(self.heads[self.number(layer)])
            raise ConfigError(f"table[{layer}, {head}]: the heads of layer {layer} are {there}")
        return at

    def matching(self, other: "Rows") -> Tensor:
        """The rows of `other`, which has the same heads, in the order of these."""
        return torch.tensor([other._row[place] for place in self.places], dtype=torch.long)

    def dense(self, flat: Tensor) -> Tensor:
        """A number a row as [layers, heads], NaN where there is no such head."""
        found = flat.new_full((len(self.layers), max((head + 1 for _, head in self.places), default=0)), torch.nan)
        if self.places:
            at = torch.tensor(self.places, device=flat.device)
            found[at[:, 0], at[:, 1]] = flat
        return found

    def difference(self, other: "Rows") -> str | None:
        """The first difference between the layers and heads of two tables, in words; None if they are the same."""
        if len(self.layers) != len(other.layers):
            return f"{len(other.layers)} layers, expected {len(self.layers)}"
        for i, (name, expected) in enumerate(zip(other.layers, self.layers, strict=True)):
            if name != expected:
                return f"layer {i} is {name!r}, expected {expected!r}"
        for i, (found, wanted) in enumerate(zip(other.heads, self.heads, strict=True)):
            if found != wanted:
                return f"layer {i} has the heads {_listed(found)}, expected {_listed(wanted)}"
        return None


def _listed(items: Iterable[Any], most: int = 12) -> str:
    words = [str(item) for item in items]
    return ", ".join(words[:most]) + (", …" if len(words) > most else "") if words else "none"


class HeadTable(Mapping[str, HeadColumn]):
    """Numbers of heads, in named columns; layers may differ in heads, and not all heads need to be there.

        table["entropy"]          a `HeadColumn`: table["entropy"][3] are the heads of layer 3, [heads]
        table[3], table[3, 5]     the rows of a layer as a table; the numbers of one head, by name
        table.dense("entropy")    [layers, heads], NaN where there is no such head
        table.top("entropy", 8)   the eight heads with the largest entropies

    A table is immutable: its methods return new ones. It prints itself, and is a Mapping from names to columns.

    Args:
        columns: name → `HeadColumn`, or what one is made from: one sequence of numbers a layer.
        layers: the name of each layer in the model; None if they have none. Layers can also be given by number, from 0.
        heads: the numbers of the heads of each layer, in the order of the values; None for all, from 0.
        title: one line, printed above the table. about: plain values for JSON that describe how the numbers were made.
    Attributes:
        layers: a name a layer, "" if it has none; places: (layer, head) of every row. title, about: as given.
    Raises:
        ConfigError, ShapeError: naming the column or argument that does not fit.
    """

    def __init__(
        self,
        columns: Mapping[str, Any],
        *,
        layers: Sequence[str] | None = None,
        heads: Sequence[Sequence[int]] | None = None,
        title: str = "",
        about: Mapping[str, Any] | None = None,
    ) -> None:
        check_names(columns)
        made = {name: x if isinstance(x, HeadColumn) else HeadColumn(x) for name, x in columns.items()}
        counts = {name: [len(layer) for layer in column] for name, column in made.items()}
        if heads is None:
            heads = [range(count) for count in next(iter(counts.values()), [0] * len(layers or ()))]
        for name, found in counts.items():
            if found != [len(row) for row in heads]:
                raise ShapeError(f"{name}: {found} heads in the layers, expected {[len(row) for row in heads]}")
        places = [(layer, int(head)) for layer, row in enumerate(heads) for head in row]
        if layers is not None and len(layers) != len(heads):
            raise ShapeError(f"layers: {len(layers)} names, expected {len(heads)}")
        self._fill(made, places, layers or [""] * len(heads), title, about or {})

    @classmethod
    def of_rows(
        cls,
        columns: Mapping[str, Any],
        places: Iterable[Place],
        *,
        layers: Sequence[str] | int | None = None,
        title: str = "",
        about: Mapping[str, Any] | None = None,
    ) -> "HeadTable":
        """A table of flat columns, a number for each of `places`, the (layer, head) of the rows in their order.

        A `HeadColumn` with one layer is such a column with a unit. layers: names, or how many there are.
        """
        check_names(columns)
        rows = [(int(layer), int(head)) for layer, head in places]
        if not isinstance(layers, Sequence):
            layers = [""] * (max((layer + 1 for layer, _ in rows), default=0) if layers is None else layers)
        made = {name: x if isinstance(x, HeadColumn) else HeadColumn([x]) for name, x in columns.items()}
        for name, column in made.items():
            if len(column.flat) != len(rows):
                raise ShapeError(f"{name}: {len(column.flat)} numbers, expected {len(rows)}, one for each of places")
        return cls.__new__(cls)._fill(made, rows, layers, title, about or {})

    def _fill(
        self, columns: Mapping[str, HeadColumn], places: Sequence[Place], layers: Sequence[str], title: str,
        about: Mapping[str, Any],
    ) -> "HeadTable":  # fmt: skip
        self._rows, self.title, self.about = Rows(places, layers), title, dict(about)
        every = torch.arange(len(self.places))
        self._columns = {name: column.taken(every, self._rows.index) for name, column in columns.items()}
        return self

    @property
    def places(self) -> tuple[Place, ...]:
        """(layer, head) of every row."""
        return self._rows.places

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers, "" for those that have none."""
        return self._rows.layers

    @property
    def heads(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the heads of each layer, ascending."""
        return self._rows.heads

    @overload
    def __getitem__(self, key: str) -> HeadColumn: ...
    @overload
    def __getitem__(self, key: int) -> "HeadTable": ...
    @overload
    def __getitem__(self, key: Place) -> dict[str, float]: ...
    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            if key not in self._columns:
                raise unknown_name("column", key, self._columns, listed="" if self._columns else "the table is empty")
            return self._columns[key]
        if isinstance(key, tuple):
            at = self._rows.row(*key)
            return {name: float(column.flat[at]) for name, column in self._columns.items()}
        number = self._rows.number(key)
        return self._taken([row for row, (layer, _) in enumerate(self.places) if layer == number])

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def get(self, name: str, default: Any = None) -> Any:
        """The column, or `default`."""
        return self._columns.get(name, default)

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def layer(self, name: str | int) -> "HeadTable":
        """The rows of a layer, by its name in the model or by its number."""
        return self[self._rows.number(name)]

    def column(self, name: str) -> Tensor:
        """The numbers of one column in the order of the rows, [rows]."""
        return self[name].flat

    def dense(self, name: str) -> Tensor:
        """The numbers of one column as [layers, heads], NaN where there is no such head."""
        return self._rows.dense(self[name].flat)

    def tensor(self, *names: str) -> Tensor:
        """Columns side by side, [rows, columns]; all of them if none is named."""
        found = [self.column(name) for name in names or self]
        return torch.stack(found, -1) if found else torch.empty(len(self.places), 0, dtype=torch.float64)

    def sort(self, column: str, *, descending: bool = True) -> "HeadTable":
        """The rows in the order of a column; rows with equal numbers stay in their order, NaN comes last."""
        x = self.column(column)
        key = torch.where(x.isnan(), torch.inf, -x if descending else x)
        # Twice, by the less important key first: NaN comes behind infinity.
        order = key.argsort(stable=True)
        return self._taken(order[x.isnan()[order].long().argsort(stable=True)].tolist())

    def top(self, column: str, k: int, *, descending: bool = True) -> "HeadTable":
        """The `k` rows with the largest numbers of a column (the least with descending=False), NaN left out."""
        if k < 0:
            raise ConfigError(f"top(k={k}): expected at least 0")
        known = int((~self.column(column).isnan()).sum())
        return self.sort(column, descending=descending)._taken(range(min(k, known)))

    def select(
        self,
        *columns: str,
        layers: Iterable[int | str] | None = None,
        heads: Iterable[int] | None = None,
        where: Any = None,
    ) -> "HeadTable":
        """Selected columns (all if none is named) and rows.

        layers: by number or name. heads: by number. where: a boolean a row, such as `table.column("entropy") > 2`.
        """
        chosen = {name: self[name] for name in columns or self}
        wanted = None if layers is None else {self._rows.number(layer) for layer in layers}
        numbers = None if heads is None else set(heads)
        keep = [True] * len(self.places) if where is None else torch.as_tensor(where).bool().tolist()
        if len(keep) != len(self.places):
            raise ShapeError(f"select(where): {len(keep)} values, expected {len(self.places)}, one a row")
        rows = [
            row
            for row, (layer, head) in enumerate(self.places)
            if keep[row] and (wanted is None or layer in wanted) and (numbers is None or head in numbers)
        ]
        return self._taken(rows, chosen)

    def renamed(self, names: Mapping[str, str]) -> "HeadTable":
        """A table with renamed columns, old → new."""
        for name in names:
            self[name]
        made = {names.get(name, name): column for name, column in self._columns.items()}
        if len(made) < len(self):
            raise ConfigError(f"renamed({dict(names)}): two columns would have the same name")
        check_names(made)
        return self._taken(range(len(self.places)), made)

    def titled(self, title: str, about: Mapping[str, Any] | None = None) -> "HeadTable":
        """A table with another title and, if given, another `about`."""
        return HeadTable.of_rows(
            self._columns, self.places, layers=self.layers, title=title, about=self.about if about is None else about
        )

    def merge(self, *others: "HeadTable") -> "HeadTable":
        """One table with the columns of several tables of the same heads; title and order of the rows are this one's.

        Raises:
            ConfigError: if layers or heads differ, or two tables have a column of the same name.
        """
        columns, about = dict(self._columns), dict(self.about)
        for number, other in enumerate(others, 1):
            if difference := self._rows.difference(other._rows):
                raise ConfigError(f"merge: table {number} is about other heads: {difference}")
            if both := [name for name in other if name in columns]:
                raise ConfigError(f"merge: table {number} also has {both[0]!r}; rename it with renamed({{…}}) first")
            rows = self._rows.matching(other._rows)
            columns |= {name: column.taken(rows, self._rows.index) for name, column in other.items()}
            about = {**other.about, **about}
        check_names(columns)
        return HeadTable.of_rows(columns, self.places, layers=self.layers, title=self.title, about=about)

    @classmethod
    def stack(cls, tables: Sequence["HeadTable"] | Mapping[str, "HeadTable"], *, title: str = "") -> "HeadTable":
        """Concatenate the rows of tables with the same columns; the layers of each follow those of the previous one. A
        Mapping gives the layers their names; each of its tables must have one layer."""
        every = list(tables.values()) if isinstance(tables, Mapping) else list(tables)
        if isinstance(tables, Mapping) and any(len(table.layers) != 1 for table in every):
            raise ShapeError("stack: names are for tables with one layer each")
        names = list(every[0]) if every else []
        for number, table in enumerate(every):
            if list(table) != names:
                raise ConfigError(f"stack: table {number} has the columns {list(table)}, expected {names}")
        places, layers = list[Place](), list[str]()
        for table in every:
            places += [(layer + len(layers), head) for layer, head in table.places]
            layers += table.layers
        columns = {name: HeadColumn.joined([table[name] for table in every], name) for name in names}
        return cls.of_rows(columns, places, layers=list(tables) if isinstance(tables, Mapping) else layers, title=title)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: the description of the table and its columns, and lists of numbers, one value a row.
        NaN is None, infinity "inf" or "-inf". Errors are under the name of their column followed by " error", or
        " low" and " high"."""
        return self._content.to_dict()

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` with one row a head; "module" is the name of the layer. ConfigError without pandas."""
        try:
            import pandas
        except ImportError:
            raise not_installed("HeadTable.to_pandas", "pandas") from None
        return pandas.DataFrame(self._content.table())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table as Parquet, CSV or JSON, by the suffix (.parquet, .csv, .json), whole or not at all. All
        hold everything that `HeadTable.load` restores. In CSV, the first row of the column "about" holds units and
        descriptions, and a text that a spreadsheet would compute has ' before it.

        Raises:
            ConfigError: for another suffix, or for Parquet without pyarrow. CheckpointError: if it cannot be written.
        """
        save(path, self._content)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "HeadTable":
        """Read a file that `save` wrote. CheckpointError, naming the file, if it is missing or damaged."""
        return load(path, cls._of)

    @property
    def _content(self) -> Content:
        return content_of(self.title, self.about, self.layers, self.places, self._columns)

    @classmethod
    def _of(cls, content: Content) -> "HeadTable":
        places = zip(content.layer, content.head, strict=True)
        made = {name: content.column(name) for name in content.columns}
        return cls.of_rows(made, places, layers=content.layers, title=content.title, about=content.about)

    def __repr__(self) -> str:
        return text(self.title, self.layers, self.places, self._columns)

    def _repr_html_(self) -> str:
        return html(self.title, self.layers, self.places, self._columns)

    def _taken(self, rows: Iterable[int], columns: Mapping[str, HeadColumn] | None = None) -> "HeadTable":
        kept = list(rows)
        at = torch.tensor(kept, dtype=torch.long)
        made = {name: column.taken(at, ()) for name, column in (columns or self).items()}
        places = [self.places[row] for row in kept]
        return HeadTable.of_rows(made, places, layers=self.layers, title=self.title, about=self.about)


class Tabled(ABC):
    """A result that prints itself as its table."""

    @property
    @abstractmethod
    def table(self) -> HeadTable:
        """The numbers as a table."""

    def __repr__(self) -> str:
        return repr(self.table)

    def _repr_html_(self) -> str:
        return self.table._repr_html_()
