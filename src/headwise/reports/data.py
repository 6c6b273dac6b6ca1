"""What a report shows, as plain data. Texts may be `Bilingual`; a view shows them in its language."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from headwise.corpus.passages import Passages
from headwise.errors import ShapeError
from headwise.reports.patches import Patches
from headwise.reports.writes import Writes
from headwise.shown import Shown
from headwise.table import HeadTable


@dataclass(frozen=True)
class Passage:
    """A text and the attention weights of all heads on it.

    Attributes:
        tokens: the text of each query, such as a character.
        maps: [layers, heads, P, Q] float32: exact weights if cell is 1, else the mean of each cell × cell square.
        peaks: the same shape, the largest weight of each square; None if cell is 1.
        sentences: token ranges to zoom to; [] in cross attention.
        keys: the text of each key in cross attention, where it differs from that of the queries; None elsewhere.
        layers: the layers of the report that the maps belong to; [] for all.
        writes: what the heads write, for exact weights; None if unknown.
        special, special_keys: positions of tokens that are not part of the text, such as [SEP], in `tokens` and `keys`.
        image: whose patches are tokens of the passage, which the page shows under the weights; None without one.
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
    writes: Writes | None = None
    image: Patches | None = None

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
        if self.writes is not None:
            if self.cell > 1:
                raise ShapeError("Passage(writes): requires exact weights, that is cell=1")
            self.writes.check(self.maps.shape)
        if self.image is not None:
            self.image.check(len(self.tokens), len(keys))
            if self.keys is None and self.image.query != self.image.key:
                raise ShapeError("Passage(image): query and key differ, but both are the same tokens")

    @cached_property
    def causal(self) -> bool:
        """Whether every weight above the diagonal is 0, and there are such weights."""
        side = self.maps.shape[-1]
        return self.keys is None and side > 1 and not self.maps[..., np.triu(np.ones((side, side), bool), 1)].any()


@dataclass(frozen=True)
class Comparison:
    """A number for each pair of heads, layer after layer.

    Attributes:
        values: [layers · heads, layers · heads]. order: the indices of all existing heads, similar ones side by side.
        small_is_alike: whether similar heads have small numbers, as with a divergence.
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
class Report(Shown):
    """The content of a report. Arrays and lists by [layers, heads] are padded to the layer with the most heads.

    Attributes:
        statistics: a column per statistic. Its rows are all heads of the model, its layers have the names to show.
        patterns: [layers][heads] the strongest pattern of each head in words.
        roles: [layers][heads] the roles of each head with high confidence, in words; [] if not computed.
        comparisons: of the heads with one another.
        importance: a column per method, larger for more important heads; without columns if not computed.
        facts: (name, value) pairs shown under the title. notes: sentences shown below.
        corpus: passages of the heads in a corpus, None without them.
        lang: language in notebooks, None for that of the locale.
    """

    title: str
    passages: list[Passage]
    statistics: HeadTable
    patterns: list[list[str]]
    facts: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    roles: list[list[list[str]]] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    importance: HeadTable = field(default_factory=lambda: HeadTable({}))
    corpus: Passages | None = None
    lang: str | None = None

    def __post_init__(self) -> None:
        if not self.passages:
            raise ShapeError("Report(passages): at least one passage is required")
        heads = [list(row) for row in self.statistics.heads]
        if not heads or heads != [list(range(len(row) or 1)) for row in heads]:
            raise ShapeError(f"Report(statistics): layers with the heads {heads}, expected all heads of each, from 0")
        if len(self.importance) and self.importance.heads != self.statistics.heads:
            raise ShapeError(f"Report(importance): the heads are {self.importance.heads}, expected {heads}")
        layers, most = self.shape
        for passage in self.passages:
            shown, shape = self.shown_in(passage), passage.maps.shape[:2]
            if shown[-1] >= layers or shape[1] != most or not (passage.layers or len(shown) == layers):
                raise ShapeError(
                    f"Report(passages): {passage.title!r} has maps of {shape[0]} layers × {shape[1]} heads, expected "
                    f"{layers} × {most}: a report is of one model; make one for each"
                )
        for name, rows in (("patterns", self.patterns), ("roles", self.roles or [[[]] * most] * layers)):
            if [len(row) for row in rows] != [most] * layers:
                raise ShapeError(f"Report({name}): expected {layers} rows of {most}")
        for comparison in self.comparisons:
            if sorted(comparison.order) != [layer * most + head for layer, head in self.heads]:
                raise ShapeError(
                    f"Report(comparisons): {comparison.name} compares {len(comparison.order)} heads, "
                    f"expected {len(self.heads)}"
                )

    def __repr__(self) -> str:
        layers, count = self.shape[0], len(self.heads)
        passages = f"{len(self.passages)} passage" + "s" * (len(self.passages) > 1)
        tokens = sum(len(passage.tokens) for passage in self.passages)
        return f"Report({self.title!r}: {layers} layers, {count} heads; {passages}, {tokens} tokens)"

    @property
    def heads(self) -> list[tuple[int, int]]:
        """(layer, head) of every head, layer by layer."""
        return [(layer, head) for layer, count in enumerate(self.counts) for head in range(count)]

    @property
    def counts(self) -> list[int]:
        """The number of heads of each layer."""
        return [len(row) for row in self.statistics.heads]

    @property
    def layers(self) -> list[str]:
        """The name of each layer in the model; [] if the layers have no names."""
        return list(self.statistics.layers) if any(self.statistics.layers) else []

    @property
    def shape(self) -> tuple[int, int]:
        """(layers, heads of the layer with the most heads)."""
        return len(self.counts), max(self.counts)

    @staticmethod
    def shown_in(passage: Passage) -> list[int]:
        """The layers of the maps of a passage."""
        return passage.layers or list(range(len(passage.maps)))


MARKS = {" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"}


def visible(token: str) -> str:
    """The token with visible signs for white space and control characters."""
    return "".join(MARKS.get(c, c if c.isprintable() or ord(c) > 0x300 else f"U+{ord(c):04X}") for c in token)
