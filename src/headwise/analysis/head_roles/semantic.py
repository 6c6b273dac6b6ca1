"""Whether heads attend to tokens of similar meaning: by the model's own input embeddings, against matched pairs.

The similarity of two tokens is the cosine of their embeddings, centred by the mean over the tokens of the text: without
that, all embeddings share a large component, and every two tokens are similar (Mu & Viswanath 2018, 1702.01417). What
counts is the similarity beyond that of matched pairs: the mean over all queries of the same key, and the mean over all
pairs at the same distance. A head that selects keys by position alone, or the same keys for every query, then scores 0,
as does a uniform head. Pairs of equal tokens do not count either way.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from headwise.analysis.head_roles.sight import Sight
from headwise.analysis.head_roles.tally import Tally, tally
from headwise.map import AttentionMap
from headwise.stats import row_measure
from headwise.tiles import Tile

NEAR = 8  # distances up to this have a mean each; all farther pairs have one mean before the query, and one after it
FLAT = 1e-4  # least mean of the largest excess of each row: below it, no pair is more similar than another


class Similarity:
    """The excess similarity of all pairs of query and key under one rule.

    Args:
        sight: the keys in sight. ids: tokens [b or 1, m]; vectors: their embeddings, [b or 1, m, d].
        words: boolean [b or 1, m], the tokens that have a meaning; None for all.
    """

    def __init__(self, sight: Sight, ids: Tensor, vectors: Tensor, words: Tensor | None) -> None:
        members = sight.seen() if words is None else sight.seen() & words
        wide, m = max(len(members), len(ids)), sight.grid.m
        self._sight, self._positions = sight, torch.arange(sight.grid.n) + sight.grid.shift
        self._ids, self._members = ids.expand(wide, -1), members.expand(wide, -1)
        self._units = _directions(vectors.expand(wide, -1, -1), self._members)
        self._keys, self._offsets = torch.zeros(1, 1, m), torch.zeros(1, 1, 2 * NEAR + 3)
        self._keys = self._key_means()  # [b or 1, h or 1, m]
        self._offsets = self._offset_means()  # [b or 1, h or 1, 2·NEAR + 3]
        largest, self._uniform, choices = self._rows()
        self._eligible = (choices >= 2) & (largest > 0)
        count = self._eligible.sum(-1, keepdim=True).clamp_min(1)
        self._scale = (largest * self._eligible).sum(-1, keepdim=True) / count
        self._eligible &= self._scale > FLAT

    def tally(self, amap: AttentionMap) -> Tally:
        """The excess of the tokens that the heads of a layer attend to, over that of a head that always attends to the
        most similar token in sight; from tiles of the weights."""
        found = amap.measure(row_measure("semantic", self._of_tile), rows=True).rows["semantic"]
        scale = self._scale.clamp_min(FLAT)
        return tally(found / scale.to(found), self._eligible, self._uniform / scale, self._sight.tokens)

    def _of_tile(self, tile: Tile) -> Tensor:
        """Σ p_ij excess_ij over the keys of a tile, [b, h, r]."""
        excess, _ = self._counted(self._positions[slice(*tile.rows)], slice(*tile.cols))
        return (tile.weights * excess.to(tile.weights)).sum(-1)

    def _counted(self, positions: Tensor, cols: slice) -> tuple[Tensor, Tensor]:
        """The similarity above the means, [b or 1, h or 1, r, c], 0 for the pairs that do not count; and which do: two
        different tokens with a meaning, boolean [b or 1, 1, r, c]."""
        at, keys = positions.clamp_min(0), torch.arange(cols.start, cols.stop)
        queries = self._members[:, at] & (positions >= 0)
        pairs = queries[:, :, None] & self._members[:, None, cols]
        pairs = (pairs & (self._ids[:, at, None] != self._ids[:, None, cols]))[:, None]
        cosines = (self._units[:, at] @ self._units[:, cols].mT)[:, None]
        excess = cosines - self._keys[..., None, cols] - self._offsets[..., self._bins(positions, keys)]
        return excess * pairs, pairs

    def _blocks(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Blocks of rows: positions [r]; excess, which pairs count, which keys are in sight, [b or 1, h or 1, r, m]."""
        for allowed, rows in self._sight.blocks():
            positions = self._positions[rows]
            excess, pairs = self._counted(positions, slice(0, self._sight.grid.m))
            yield positions, excess * allowed, pairs & allowed, allowed

    def _key_means(self) -> Tensor:
        found = torch.zeros((), dtype=torch.float64)
        for _, excess, pairs, _ in self._blocks():
            found = found + torch.stack((excess.sum(2), pairs.sum(2)))
        return _means(found)

    def _offset_means(self) -> Tensor:
        found, keys = torch.zeros((), dtype=torch.float64), torch.arange(self._sight.grid.m)
        for positions, excess, pairs, _ in self._blocks():
            bins = self._bins(positions, keys).flatten()
            both = torch.stack((excess, pairs)).flatten(-2).double()
            found = found + both.new_zeros(*both.shape[:-1], 2 * NEAR + 3).index_add(-1, bins, both)
        return _means(found)

    def _bins(self, positions: Tensor, keys: Tensor) -> Tensor:
        """The index of the mean for the distance of each query and key, [r, c]."""
        gap = self._sight.grid.gap
        distances = keys - positions[:, None] - gap.size * (keys < gap.start)
        return distances.clamp(-NEAR - 1, NEAR + 1) + NEAR + 1

    def _rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of each query [b or 1, h or 1, n]: the largest excess, the mean over all keys in sight, and the number of
        keys that count."""
        parts = [
            (excess.amax(-1).clamp_min(0), excess.sum(-1) / allowed.sum(-1).clamp_min(1), pairs.sum(-1))
            for _, excess, pairs, allowed in self._blocks()
        ]
        largest, uniform, choices = (torch.cat(rows, -1) for rows in zip(*parts, strict=True))
        return largest.double(), uniform.double(), choices


def _means(found: Tensor) -> Tensor:
    """Totals and counts, stacked, as means; 0 of none."""
    return (found[0] / found[1].clamp_min(1)).float()


def _directions(vectors: Tensor, members: Tensor) -> Tensor:
    """Vectors [b, m, d] less their mean over the members, of length 1; those equal to the mean stay 0."""
    mine = members[..., None].to(vectors)
    centred = (vectors - (vectors * mine).sum(1, keepdim=True) / mine.sum(1, keepdim=True).clamp_min(1)) * mine
    return torch.nn.functional.normalize(centred.double(), dim=-1).float()
