"""What a report shows, as plain data: views draw it, and know nothing of models."""

from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module

import numpy as np

from headwise.errors import ShapeError


@dataclass(frozen=True)
class Statistic:
    """A number for each head.

    Attributes:
        values: [layers, heads]; unit and description are shown where there is room.
    """

    name: str
    values: np.ndarray
    unit: str
    description: str


@dataclass(frozen=True)
class Passage:
    """A text and the weights of all heads over it; or of a text over another one, in cross attention.

    Attributes:
        tokens: what stands at each place, such as single characters.
        maps: [layers, heads, P, Q] float32: exact weights if cell is 1, else the mean of each cell × cell square.
        peaks: the same shape, the largest weight of each square; None if cell is 1.
        sentences: token ranges to zoom to; [] in cross attention.
        keys: the tokens that are looked at, where they are another text than those that look; else None.
        layers: which of the report's layers the maps are of; [] for all.
        special, special_keys: the tokens that are none of the text, such as [SEP], and those of `keys`.
    """

    title: str
    tokens: list[str]
    maps: np.ndarray
    cell: int = 1
    peaks: np.ndarray | None = None
    sentences: list[tuple[int, int]] = field(default_factory=list)
    keys: list[str] | None = None
    layers: list[int] = field(default_factory=list)
    special: list[int] = field(default_factory=list)
    special_keys: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        keys = self.tokens if self.keys is None else self.keys
        if not self.tokens or not keys or self.cell < 1:
            raise ShapeError(f"Passage: {len(self.tokens)} tokens in cells of {self.cell}, expected at least one")
        if self.keys is not None and self.sentences:
            raise ShapeError("Passage(sentences): not supported in cross attention, which has two texts")
        for start, end in self.sentences:
            if not 0 <= start < end <= len(self.tokens):
                raise ShapeError(
                    f"Passage(sentences): ({start}, {end}), expected 0 <= start < end <= {len(self.tokens)}, the tokens"
                )
        rows, columns = (-(-len(tokens) // self.cell) for tokens in (self.tokens, keys))
        if self.maps.ndim != 4 or self.maps.shape[2:] != (rows, columns):
            raise ShapeError(
                f"Passage(maps): shape {self.maps.shape}, expected [layers, heads, {rows}, {columns}] for "
                f"{len(self.tokens)} tokens and {len(keys)} keys in cells of {self.cell}"
            )
        if self.layers and (len(self.layers) != len(self.maps) or sorted(set(self.layers)) != self.layers):
            raise ShapeError(f"Passage(layers): {self.layers}, expected {len(self.maps)} of them in ascending order")
        if (self.peaks is not None) != (self.cell > 1) or (
            self.peaks is not None and self.peaks.shape != self.maps.shape
        ):
            raise ShapeError("Passage(peaks): required in the shape of maps if and only if cell > 1")

    @cached_property
    def causal(self) -> bool:
        """Whether no head looks ahead: each weight above the diagonal is 0, and there is one."""
        side = self.maps.shape[-1]
        return self.keys is None and side > 1 and not self.maps[..., np.triu(np.ones((side, side), bool), 1)].any()


@dataclass(frozen=True)
class Comparison:
    """A number for each pair of heads, layer after layer.

    Attributes:
        values: [layers · heads, layers · heads]. order: all heads that there are, those that are alike side by side.
        small_is_alike: whether the numbers are small for heads that are alike, as a divergence is.
    """

    name: str
    values: np.ndarray
    order: list[int]
    unit: str
    description: str
    small_is_alike: bool = False

    def __post_init__(self) -> None:
        size = len(self.values)
        if self.values.shape != (size, size) or not set(self.order) <= set(range(size)):
            raise ShapeError(
                f"Comparison: values of shape {self.values.shape} and the order {self.order}: do not match"
            )
        if len(set(self.order)) < len(self.order):
            raise ShapeError(f"Comparison(order): {self.order} contains a head twice")


@dataclass(frozen=True)
class Report:
    """All that a report shows.

    Attributes:
        patterns: [layers][heads] the strongest pattern of each head in words.
        counts: heads of each layer, [] if all have as many; a layer's arrays are filled up where it has fewer.
        layers: what each layer is called in the model, [] if their numbers say enough.
        roles: [layers][heads] the roles that a head is sure to play, in words; [] if nobody asked.
        comparisons: of the heads with one another. importance: what each head does for the model, each number larger
            where the head matters more.
        facts: (name, value) lines under the title; notes: sentences to keep in mind.
    """

    title: str
    passages: list[Passage]
    statistics: list[Statistic]
    patterns: list[list[str]]
    facts: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    roles: list[list[list[str]]] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    importance: list[Statistic] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.passages:
            raise ShapeError("Report(passages): at least one passage is required")
        parts = [(len(self.shown_in(p)), p.maps.shape[1]) for p in self.passages if not p.layers]
        for part in (*parts, *(s.values.shape for s in (*self.statistics, *self.importance))):
            if part != self.shape:
                raise ShapeError(f"Report: a part has layers × heads {part}, expected {self.shape}")
        if any(p.maps.shape[1] != self.shape[1] for p in self.passages):
            raise ShapeError(f"Report(passages): maps of different numbers of heads, expected {self.shape[1]}")
        if self.layers and len(self.layers) != self.shape[0]:
            raise ShapeError(f"Report(layers): {len(self.layers)} names for {self.shape[0]} layers")
        if [len(row) for row in self.patterns] != [self.shape[1]] * self.shape[0]:
            raise ShapeError(f"Report(patterns): expected {self.shape[0]} rows of {self.shape[1]}")
        layers, most = self.shape
        if self.counts and (len(self.counts) != layers or not all(1 <= count <= most for count in self.counts)):
            raise ShapeError(f"Report(counts): {self.counts}, expected {layers} numbers from 1 to {most}")
        if self.roles and [len(row) for row in self.roles] != [self.shape[1]] * self.shape[0]:
            raise ShapeError(f"Report(roles): expected {self.shape[0]} rows of {self.shape[1]}, or none")
        for comparison in self.comparisons:
            if sorted(comparison.order) != [layer * self.shape[1] + head for layer, head in self.heads]:
                raise ShapeError(
                    f"Report(comparisons): {comparison.name} compares {len(comparison.order)} heads, "
                    f"expected {len(self.heads)}"
                )

    def __repr__(self) -> str:
        layers, count = self.shape[0], len(self.heads)
        passages = f"{len(self.passages)} passage" + "s" * (len(self.passages) > 1)
        tokens = sum(len(passage.tokens) for passage in self.passages)
        return f"Report({self.title!r}: {layers} layers, {count} heads; {passages}, {tokens} tokens)"

    def _repr_html_(self) -> str:
        framed = import_module("headwise.reports.html").framed  # the page draws reports, and imports this file
        return str(framed(self))

    @property
    def heads(self) -> list[tuple[int, int]]:
        """(layer, head) of every head that there is."""
        layers, most = self.shape
        return [(layer, head) for layer in range(layers) for head in range((self.counts or [most] * layers)[layer])]

    @property
    def shape(self) -> tuple[int, int]:
        """(layers, heads), of the layer that has most of them."""
        return max(self.shown_in(p)[-1] for p in self.passages) + 1, self.passages[0].maps.shape[1]

    @staticmethod
    def shown_in(passage: Passage) -> list[int]:
        """The layers that a passage has maps of."""
        return passage.layers or list(range(len(passage.maps)))


MARKS = {" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"}


def visible(token: str) -> str:
    """The token with white space and control characters as signs that can be seen."""
    return "".join(MARKS.get(c, c if c.isprintable() or ord(c) > 0x300 else f"U+{ord(c):04X}") for c in token)
