"""What a report shows, as plain data, and how its pages store the numbers.

Texts may be `Bilingual`; a view shows them in its language. Codes of weights are stored in the order of their contexts,
which compresses better than the order of rows. The context of a cell is a size on a logarithmic scale: that of the
codes above it and to its left. Codes of one context are alike, and the codes of each context follow those of the one
before. A reader that restores the cells row by row knows the context of the next cell, and takes the next code of that
context: see codes.js.
"""

import base64
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from headwise.analysis.head_roles.score import Label
from headwise.corpus.passages import Passages
from headwise.errors import ConfigError, ShapeError
from headwise.table import HeadTable
from headwise.table.show import Shown

SIDES = ("keys", "queries")


@dataclass(frozen=True)
class Patches:
    """An image (a data URL) in rows × columns patches, which are consecutive tokens of a passage, row by row, from
    `query` and `key` on; None if that side has none. Of width and height, in pixels, only the ratio matters."""

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


@dataclass(frozen=True)
class Writes:
    """What is known of the outputs and scores of all heads on a passage with exact weights; NaN where it is not.

    Attributes:
        norms: [layers, heads, Q] float32: the norm of each key's value after the output projection, ‖v_j W_O‖. Times a
            weight, it is the length ‖Δ‖ of what the key adds at a query. None if unknown.
        next_token: [layers, heads, P]: the direct effect on the logit of the token that follows. None if unknown.
        effects, tokens: [layers, heads, P, T]: the largest direct effects, and indices into `words` of their tokens.
            None if unknown.
        words: the texts of these tokens.
        queries, keys: [layers, heads, P or Q, C]: the C strongest channels of each head, with products that add up to
            scale · q·k over all channels. None if unknown.
        channels: [layers, heads, C]: the numbers of these channels. widths: [layers]: how many channels there are.
    """

    norms: np.ndarray | None = None
    next_token: np.ndarray | None = None
    effects: np.ndarray | None = None
    tokens: np.ndarray | None = None
    words: list[str] = field(default_factory=list)
    queries: np.ndarray | None = None
    keys: np.ndarray | None = None
    channels: np.ndarray | None = None
    widths: list[int] = field(default_factory=list)

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise ShapeError unless the arrays fit maps of this shape, [layers, heads, P, Q]."""
        layers, heads, rows, columns = shape
        sizes = {
            "norms": columns,
            "next_token": rows,
            "effects": rows,
            "tokens": rows,
            "queries": rows,
            "keys": columns,
        }
        for name, size in sizes.items():
            found = getattr(self, name)
            if found is not None and found.shape[:3] != (layers, heads, size):
                raise ShapeError(f"Writes({name}): shape {found.shape}, expected [{layers}, {heads}, {size}, …]")


# Cells above the end of a colour range have this share of a head's weight: otherwise the first rows, which have few
# keys, would determine the scale.
SATURATED = 0.05
LEVELS = 1023  # of the weights in a page
# Statistics are exact to this share of their size, or to a few roundings of a mass of 1: less is no difference.
ROUNDING, LEAST_RANGE = 1e-5, 5e-7


def value_range(values: np.ndarray) -> tuple[float, float]:
    """The least and the largest finite value; one number twice where only rounding differs, 0 without any."""
    known = values[np.isfinite(values)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 0.0)
    size = max(abs(low), abs(high))
    if high - low > max(ROUNDING * size, LEAST_RANGE):
        return low, high
    return (0.0, 0.0) if size <= LEAST_RANGE else (high, high)


def halves(weights: np.ndarray) -> tuple[np.ndarray, int]:
    """Weights >= 0 as float16 of weight * 2**shift, and the shift, so that small weights keep eleven bits."""
    most = float(weights.max())
    shift = 14 - int(np.ceil(np.log2(most))) if most > 0 else 0
    return np.ldexp(weights, shift).astype(np.float16), shift


def coded(weights: np.ndarray) -> np.ndarray:
    """Weights >= 0 as uint16: round(LEVELS · √(weight / top)), where top is the largest one. The error of
    top · (code / LEVELS)² is at most √(weight · top) / LEVELS, plus top / 4,000,000."""
    top = float(weights.max())
    share = weights.astype(np.float64) / top if top > 0 else np.zeros_like(weights)
    return np.rint(LEVELS * np.sqrt(share)).astype(np.uint16)


def colour_top(scaled: np.ndarray, shift: int) -> float:
    """The weight above which cells have the share `SATURATED` of all weight, from the result of `halves`; exact, by
    counting the 31,744 finite halves. 1 if all weights are zero."""
    counts = np.bincount(scaled.view(np.uint16).ravel(), minlength=1 << 16)[:0x7C00]
    weights = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    above = np.cumsum((counts * weights)[::-1])
    if not above[-1]:
        return 1.0
    at = 0x7C00 - 1 - int(np.searchsorted(above, SATURATED * above[-1]))
    return float(np.ldexp(weights[at], -shift))


def finite(maps: np.ndarray) -> np.ndarray:
    """Weights as float32, with 0 for non-finite ones."""
    return np.nan_to_num(maps.astype(np.float32, copy=False), posinf=0.0, neginf=0.0).clip(min=0)


def reduced(weights: np.ndarray, limit: int) -> np.ndarray:
    """[n, m] as at most [limit, limit]: the largest weight of each square."""
    step = -(-max(weights.shape) // limit)
    if step == 1:
        return weights
    rows, columns = (np.arange(0, size, step) for size in weights.shape)
    return np.maximum.reduceat(np.maximum.reduceat(weights, rows, axis=0), columns, axis=1)


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
        patterns: [layers][heads] the strongest pattern of each head in words; "" without one.
        labels: [layers][heads] the labels of each head, or its tendency, which give it a colour; [] if not computed.
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
    labels: list[list[list[Label]]] = field(default_factory=list)
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
        for name, rows in (("patterns", self.patterns), ("labels", self.labels or [[[]] * most] * layers)):
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


NEIGHBOURS = ((1, 0, 3), (2, 0, 1), (0, 1, 3), (0, 2, 1))  # rows above, columns to the left, share in eighths
CONTEXTS = 41


def sorted_codes(codes: np.ndarray, *, lower: bool) -> bytes:
    """Codes [heads, rows, columns] of weights as bytes: the number of codes of each context, in four bytes, then the
    codes, all high bytes before all low ones. lower: without the cells above the diagonal, whose codes are 0."""
    context = _contexts(codes)
    if lower:
        kept = np.tri(*codes.shape[1:], dtype=np.bool_)
        codes, context = codes[:, kept], context[:, kept]
    context = context.ravel()
    counts = np.bincount(context, minlength=CONTEXTS).astype(">u4")
    ordered = codes.ravel()[np.argsort(context, kind="stable")].astype(np.uint16)
    return counts.tobytes() + planes(ordered)


def _contexts(codes: np.ndarray) -> np.ndarray:
    """[heads, rows, columns] uint8: four contexts for each power of two of the neighbours' sum plus 8."""
    assert int(codes.max(initial=0)) <= LEVELS
    near = np.full(codes.shape, 8, np.int32)
    rows, columns = codes.shape[1:]
    for up, left, share in NEIGHBOURS:
        near[:, up:, left:] += share * codes[:, : max(rows - up, 0), : max(columns - left, 0)].astype(np.int32)
    power = np.frexp(near)[1] - 1  # 2**power <= near, at least 3
    return (4 * (power - 3) + ((near >> (power - 2)) & 3)).astype(np.uint8)


LETTERS = str.maketrans("<>&", ",.:")  # what HTML would have to write in several letters
NOTHING = -32768  # the code of NaN, in two bytes
CHANNEL_LEVELS = 31  # of a channel of queries or keys, on either side of zero


def planes(codes: np.ndarray) -> bytes:
    """uint16 as their high bytes and then their low bytes, which compress better."""
    return (codes >> 8).astype(np.uint8).tobytes() + (codes & 255).astype(np.uint8).tobytes()


def blob(name: str, data: bytes) -> str:
    """Compressed bytes as an element of the page, in base 85: four bytes as five letters."""
    # Of numbers, zlib finds many short repetitions that take more bits than the numbers; Z_FILTERED ignores them.
    strategies = (zlib.Z_FILTERED, zlib.Z_DEFAULT_STRATEGY)
    workers = [zlib.compressobj(9, memLevel=9, strategy=strategy) for strategy in strategies]
    shortest = min((worker.compress(data) + worker.flush() for worker in workers), key=len)
    code = base64.b85encode(shortest).decode("ascii").translate(LETTERS)
    return f'<script type="application/octet-stream" id="{name}">{code}</script>'


def packed(given: Writes, index: int, layers: Sequence[int], count: int) -> tuple[dict[str, Any], list[str]]:
    """What heads write as data and elements. index: of the passage. layers: its arrays are of, among `count`."""
    entry: dict[str, Any] = {}
    blobs: list[str] = []

    def every(values: Sequence[Any]) -> list[Any]:
        found: list[Any] = [None] * count
        for layer, value in zip(layers, values, strict=True):
            found[layer] = value
        return found

    for name, levels, values in (
        ("norms", 1023, given.norms),
        ("logits", 1023, given.next_token),
        ("effects", 127, given.effects),
    ):
        if values is None:
            continue
        codes, tops = _signed(values, levels)
        entry[name] = {"levels": levels, "tops": every(tops.tolist())}
        blobs += [blob(f"{name}-{index}-{layer}", planes(block)) for layer, block in zip(layers, codes, strict=True)]
    if given.effects is not None and given.tokens is not None:
        entry["vocabulary"] = given.words
        blobs += [
            blob(
                f"tokens-{index}-{layer}",
                planes(block.astype(np.uint32) & 0xFFFF) + (block >> 16).astype(np.uint8).tobytes(),
            )
            for layer, block in zip(layers, given.tokens, strict=True)
        ]
    if given.queries is not None and given.keys is not None and given.channels is not None:
        entry["channels"] = {"which": every(given.channels.tolist()), "of": every(given.widths), "scales": {}}
        for side, values in (("queries", given.queries), ("keys", given.keys)):
            tops = np.nan_to_num(np.abs(values)).max(2)  # [layers, heads, C]
            shares = values / np.where(tops > 0, tops, 1)[:, :, None]
            codes = np.where(np.isnan(shares), -128, np.rint(np.nan_to_num(shares) * CHANNEL_LEVELS)).astype(np.int8)
            entry["channels"]["scales"][side] = every(
                [[[float(f"{t:.4g}") for t in h] for h in layer] for layer in tops]
            )
            for layer, block in zip(layers, codes.swapaxes(2, 3), strict=True):
                blobs.append(blob(f"{side}-{index}-{layer}", block.tobytes()))  # [heads, C, n]
    return entry, blobs


def _signed(values: np.ndarray, levels: int) -> tuple[np.ndarray, np.ndarray]:
    """[layers, heads, …] as uint16 of two's complement, levels · value / top, and the tops [layers, heads]."""
    tops = np.nan_to_num(np.abs(values)).reshape(*values.shape[:2], -1).max(2)
    shares = values / np.where(tops > 0, tops, 1).reshape(*tops.shape, *[1] * (values.ndim - 2))
    codes = np.where(np.isnan(shares), NOTHING, np.rint(np.nan_to_num(shares) * levels))
    return codes.astype(np.int16).view(np.uint16), tops
