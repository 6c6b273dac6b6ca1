"""Maps and their tokens as passages of a report."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from headwise.map import AttentionMap
from headwise.progress import Progress, part
from headwise.reports.data import Passage
from headwise.reports.see.places import Places
from headwise.telemetry.lens import SIZE, Picture

REDUCES = "mean", "max"
CLOSERS = "”’」』\"'"  # belong to the sentence that they end


@dataclass(frozen=True)
class Side:
    """The tokens along one side of a map.

    Attributes:
        words: the text of each token. units: token ranges that are shown as one. special: tokens outside of the text.
    """

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

    Args:
        sides: of the queries, and of the keys in cross attention.
        places: the heads of these maps. layers: their indices in the report, () for all.
        first: the query and the key at which the sides begin, for exact maps.
    """
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
