"""Maps and their tokens as passages of a report, and the patterns of heads in a few words."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.analysis.head_roles import Label, Roles
from headwise.analysis.head_roles.score import is_marker
from headwise.base.run import Progress, part
from headwise.errors import DTypeError, ShapeError
from headwise.lm.loading.base import units_of
from headwise.lm.loading.characters import decoded_tokens
from headwise.map import AttentionMap
from headwise.reports.data import Passage
from headwise.reports.sources import Places, decoded
from headwise.telemetry.lens import SIZE, Picture
from headwise.wording import joined

REDUCES = "mean", "max"
CLOSERS = "”’」』\"'"  # belong to the sentence that they end


@dataclass(frozen=True)
class Side:
    """The tokens along one side of a map: their texts, the ranges that are shown as one, and those outside of the
    text."""

    words: list[str]
    units: list[tuple[int, int]]
    special: list[bool]

    def cut(self, exact: bool) -> tuple[list[str], list[int]]:
        """The text of each cell (units if cells are exact, tokens otherwise) and the indices of special ones."""
        ranges = self.units if exact else [(i, i + 1) for i in range(len(self.words))]
        shown = ["".join(self.words[a:b]) for a, b in ranges]
        return shown, [i for i, (a, b) in enumerate(ranges) if all(self.special[a:b])]


def passage(
    title: str, maps: Sequence[AttentionMap], entry: int, sides: tuple[Side, Side | None], places: Places, cells: int,
    progress: Progress | None, layers: Sequence[int] = (), first: tuple[int, int] = (0, 0),
) -> Passage:  # fmt: skip
    """The maps of one batch entry: exact weights up to `cells` tokens, otherwise mean and maximum in `cells` cells.
    layers: their indices in the report, () for all. first: the query and the key at which the sides begin, for exact
    maps."""
    queries, keys = sides
    n, m = len(queries.words), len((keys or queries).words)
    exact = max(n, m) <= cells
    cell, peaks = 1, None
    if exact:
        rows, columns = (slice(at, at + size) for at, size in zip(first, (n, m), strict=True))
        weights = places.stacked([amap[entry, :, rows, columns].cpu().numpy() for amap in maps], 0.0)
        means = _by_units(weights, queries, keys or queries)
    else:
        cell = -(-max(maps[0].shape[2:]) // cells)
        high, wide = -(-n // cell), -(-m // cell)
        means, peaks = (_pooled(maps, entry, places, cells, reduce, progress)[..., :high, :wide] for reduce in REDUCES)
    return _passage(title, means, cell, peaks, sides, layers)


def picture_passage(
    title: str, pictures: Sequence[Picture], entry: int, sides: tuple[Side, Side | None], places: Places,
    layers: Sequence[int] = (),
) -> Passage:  # fmt: skip
    """A passage from pictures of maps; arguments as in `passage`."""
    means = places.stacked([picture.mean[entry].cpu().numpy() for picture in pictures], 0.0)
    peaks = places.stacked([picture.largest[entry].cpu().numpy() for picture in pictures], 0.0)
    cell = -(-max(pictures[0].shape[2:]) // SIZE)
    if cell > 1:
        return _passage(title, means, cell, peaks, sides, layers)
    return _passage(title, _by_units(means, sides[0], sides[1] or sides[0]), 1, None, sides, layers)


def composed_passage(title: str, means: np.ndarray, cell: int, peaks: np.ndarray | None, side: Side) -> Passage:
    """A passage from pictures of all layers and heads whose cells are squares of `cell` × `cell` tokens."""
    if cell == 1:
        means = _by_units(means, side, side)
    return _passage(title, means, cell, peaks, (side, None), ())


def _pooled(
    maps: Sequence[AttentionMap], entry: int, places: Places, cells: int, reduce: str, progress: Progress | None
) -> np.ndarray:
    """[layers, heads, P, Q], with P and Q at most `cells`."""
    pictures = []
    for i, amap in enumerate(maps):
        one = [amap] if amap.shape[0] == 1 else [amap.head(entry, head) for head in range(amap.shape[1])]
        within = part(progress, f"pooling ({reduce})", i, len(maps))
        pooled = [head.pool(cells, reduce, progress=within)[0].cpu().numpy() for head in one]
        pictures.append(np.concatenate(pooled))
    return places.stacked(pictures, 0.0)


def sentences(tokens: list[str], special: Collection[int] = ()) -> list[tuple[int, int]]:
    """Token ranges of the sentences, which end at 。！？!?…, a full stop before white space, or a line end; special
    tokens at the end belong to the last one."""
    ends, start = [], 0
    for i, token in enumerate(tokens):
        after = tokens[i + 1] if i + 1 < len(tokens) else "\n"
        last = token.strip(" ")[-1:]
        closes = last in "。！？!?…\n" or (last == "." and after[:1].isspace())
        if last and closes and not (after and after[0] in "。！？!?…" + CLOSERS + "\n"):
            if any(not t.isspace() for t in tokens[start : i + 1]):
                ends.append((start, i + 1))
            start = i + 1
    if any(not tokens[i].isspace() and i not in special for i in range(start, len(tokens))):
        ends.append((start, len(tokens)))
    elif ends and start < len(tokens) and special:
        ends[-1] = ends[-1][0], len(tokens)
    return ends if len(ends) > 1 else []


def _passage(
    title: str, means: np.ndarray, cell: int, peaks: np.ndarray | None, sides: tuple[Side, Side | None],
    layers: Sequence[int],
) -> Passage:  # fmt: skip
    queries, keys = sides
    words, special = queries.cut(cell == 1)
    other, special_keys = (None, []) if keys is None else keys.cut(cell == 1)
    return Passage(
        title, words, means, cell, peaks, [] if keys else sentences(words, special), keys=other, layers=list(layers),
        special=special, special_keys=special_keys,
    )  # fmt: skip


def _by_units(weights: np.ndarray, queries: Side, keys: Side) -> np.ndarray:
    """[layers, heads, units, units]: the mean over the queries and the sum over the keys of a unit, so that rows sum to
    one."""
    if len(keys.units) < weights.shape[3]:
        weights = np.add.reduceat(weights, [start for start, _ in keys.units], axis=3)
    if len(queries.units) < weights.shape[2]:
        sizes = np.array([end - start for start, end in queries.units], np.float32)
        weights = np.add.reduceat(weights, [start for start, _ in queries.units], axis=2) / sizes[:, None]
    return weights


@dataclass(frozen=True, eq=False)
class Text:
    """The tokens of a batch: ids [b or 1, m], None if only their text is known; of each entry the text of the tokens,
    with the blanks between words, None without text, and which tokens are not part of it."""

    ids: Tensor | None
    pieces: list[list[str]] | None
    special: list[list[bool]]

    @property
    def length(self) -> int:
        """The number of tokens of an entry."""
        return len(self.special[0])

    @property
    def entries(self) -> int:
        """The number of entries; one may apply to the whole batch."""
        return len(self.special)

    def side(self, entry: int, tokens: Sequence[int]) -> Side:
        """Tokens of an entry as a side of a map."""
        at = entry if self.entries > 1 else 0
        special = [self.special[at][i] for i in tokens]
        if self.pieces is None:
            assert self.ids is not None
            names = [str(int(self.ids[at, i])) for i in tokens]
            return Side(names, units_of(names), [True] * len(names))
        words = [self.pieces[at][i] for i in tokens]
        return Side(words, units_of(words), special)


def numbered(tokens: Sequence[int]) -> Side:
    """Positions without known tokens, shown as numbers."""
    names = [str(i) for i in tokens]
    return Side(names, units_of(names), [True] * len(names))


def text_of(name: str, tokens: Any, pieces: Any, tokenizer: Any, written: str = "text") -> Text | None:
    """The tokens given by the arguments `tokens` and `pieces`; None if both are None. name: the prefix of the arguments
    in messages. written: how pieces are written, as in `decoded_tokens`."""
    if tokens is None and pieces is None:
        return None
    ids = None if tokens is None else _ids(f"{name}tokens", tokens)
    if pieces is not None:
        raw = _texts(f"{name}pieces", pieces)
        if ids is not None and (len(raw) != len(ids) or len(raw[0]) != ids.shape[1]):
            raise ShapeError(
                f"{name}pieces: {len(raw)} × {len(raw[0])} of them for {name}tokens of {tuple(ids.shape)}; expected "
                f"one for each token"
            )
        shown = [decoded_tokens(row, written) for row in raw]
        return Text(ids, shown, [[is_marker(piece) for piece in row] for row in raw])
    assert ids is not None
    if tokenizer is None:
        return Text(ids, None, [[False] * ids.shape[1]] * len(ids))
    rows = [decoded(tokenizer, row) for row in ids.tolist()]
    return Text(ids, [row.texts for row in rows], [row.special for row in rows])


def _ids(name: str, tokens: Any) -> Tensor:
    ids = torch.as_tensor(tokens)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise DTypeError(f"{name}: expected integers [m] or [b, m], got {ids.dtype}")
    ids = torch.atleast_2d(ids).cpu().long()
    if ids.ndim != 2 or 0 in ids.shape:
        raise ShapeError(f"{name}: shape {tuple(ids.shape)}, expected [m] or [b, m]")
    return ids


def _texts(name: str, pieces: Any) -> list[list[str]]:
    flat = not isinstance(pieces, str) and all(isinstance(piece, str) for piece in pieces)
    rows = [list(pieces)] if flat else [list(row) for row in pieces if not isinstance(row, str)]
    if isinstance(pieces, str) or not rows or not all(isinstance(piece, str) for row in rows for piece in row):
        raise DTypeError(f"{name}: expected the text of each token, a list of strings or one list per batch entry")
    if not rows[0] or len({len(row) for row in rows}) > 1:
        raise ShapeError(
            f"{name}: lists of {[len(row) for row in rows][:6]}; all entries of a batch must have the same "
            f"number of tokens"
        )
    return rows


def labels_of(found: Sequence[Roles], places: Places) -> list[list[list[Label]]]:
    """What each head is named by, `Roles.pattern`, from the roles of each layer; [] where a layer has no such head."""
    return [
        [layer.pattern(0, head) if head < count else [] for head in range(places.most)]
        for layer, count in zip(found, places.counts, strict=True)
    ]


def in_words(labels: Sequence[Label]) -> str:
    """The clearest two of a head's labels, with their scores."""
    return joined(label.words for label in labels[:2])
