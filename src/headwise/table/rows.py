"""The rows of a table: which heads of which layers, in which order."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.errors import ConfigError, unknown_name

MOST_HEADS = 1 << 16  # of a layer
Place = tuple[int, int]  # layer and head


class Rows:
    """The (layer, head) of every row, each once.

    Attributes:
        places: (layer, head) of the rows, in their order; layers: a name a layer, "" for none.
        heads: the numbers of the heads of each layer, ascending; index: the rows that they are in, layer by layer.
    Raises:
        ConfigError: for a head that is given twice, or a layer or head out of range.
    """

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
