"""Weight on keys that match the query's token: repeats, and what followed them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from headwise.errors import ShapeError
from headwise.masks import Grid, Span
from headwise.masks.given import as_given
from headwise.rule import Rule
from headwise.stats.base import RowMeasure, Tokens
from headwise.stats.rows import allowed_keys, ranges, same_label
from headwise.stats.statistic import Compiled, Statistic
from headwise.stats.words import Chinese
from headwise.tiles import Tile
from headwise.wording import Bilingual


@dataclass(frozen=True, eq=False)
class SameLabel(Statistic):
    """Σ p_ij over the keys j < position + ahead that have the query's label.

    Labels are int32, of the keys [1 or b, m] and of the queries [1 or b, n]; −1 is the same as none. Two of these are
    the same only if they are one object.
    """

    keys: Tensor
    queries: Tensor
    ahead: int
    name = "same_label"
    per = "query"
    joins = None  # labels are of all queries, and a block of ring attention has some of them
    placed = True

    @cached_property
    def compiled(self) -> Compiled:
        return Compiled("same_label", (self.ahead,), self.keys.int(), self.queries.int())

    def at(self, cols: Span) -> Statistic:
        return SameLabel(self.keys[:, cols.start : cols.stop], self.queries, self.ahead)

    def rows(self, rows: Span) -> Statistic:
        return SameLabel(self.keys, self.queries[:, slice(*rows)], self.ahead)

    def only(self, batch: int) -> Statistic:
        keys, queries = (x if len(x) == 1 else x[batch : batch + 1] for x in (self.keys, self.queries))
        return SameLabel(keys, queries, self.ahead)


class _Match(RowMeasure, abstract=True):
    """Σ p_ij over the earlier keys j with token[j − shift] = token[i], per eligible query (one that has such keys).

    Args:
        ids: integer tokens of the keys, [m] or [b, m]; or of all tokens, if a cache has dropped some.
        uniform: instead of the head's weight, that of a head looking at all allowed keys alike: the baseline.
    """

    shift: int
    unit, range = "mass", "0 to 1"
    placed = True

    def __init__(self, ids: Tensor, *, uniform: bool = False) -> None:
        self.ids = torch.atleast_2d(as_given(ids))
        self.uniform = uniform
        if uniform:
            self.name = f"{self.name}_uniform"
        self._statistic: tuple[Grid, SameLabel] | None = None

    @classmethod
    def of(cls, tokens: Tokens) -> "_Match | None":
        return None if tokens.ids is None else cls(tokens.ids)

    def start(self, grid: Grid, like: Tensor, keep_rows: bool = False):  # type: ignore[no-untyped-def]
        self._all(grid)
        return super().start(grid, like, keep_rows)

    def _all(self, grid: Grid) -> Tensor:
        """The tokens, also those that are no keys any more; these are 0 if nothing depends on them."""
        b, m = self.ids.shape
        if b not in (1, grid.b) or m not in (grid.m, grid.tokens):
            raise ShapeError(
                f"{type(self).__name__}(ids): shape {(b, m)} does not fit {grid.m} keys of {grid.b} batch entries"
            )
        if m == grid.tokens:
            return self.ids
        if grid.extra:
            return self.ids[:, grid.extra :]
        gap = grid.gap
        if self.shift:
            raise ShapeError(
                f"{type(self).__name__}(ids): shape {(b, m)} are the tokens of the keys; expected those of all "
                f"{grid.tokens} tokens, as it depends on token {gap.stop - 1}, which the cache has dropped"
            )
        return torch.cat((self.ids[:, : gap.start], self.ids.new_zeros(b, gap.size), self.ids[:, gap.start :]), 1)

    def partial(self, tile: Tile) -> Tensor:
        ids = self._all(tile.rule.grid).to(tile.lse.device)
        of_query = ids[:, tile.positions.clamp_min(0)]  # of a query before the first key: nothing is earlier
        before = tile.keys - self.shift
        of_key = ids[:, before.clamp_min(0)]
        match = (of_query[:, :, None] == of_key[:, None, :]) & (before >= 0) & (before < tile.positions[:, None])
        match = match[:, None]
        if tile.allowed is not None:
            match = match & tile.allowed
        found = match.sum(-1).to(tile.lse).expand(tile.lse.shape)
        if self.uniform:
            return torch.stack((found, found, tile.allowed_keys), -1)
        mass = (tile.weights * match).sum(-1) if bool(match.any()) else torch.zeros_like(tile.lse)
        return torch.stack((mass, found), -1)

    def needs(self, rule: Rule) -> tuple[Statistic, ...] | None:
        grid = rule.grid
        if ranges(rule) is None or not grid.at_end or not 0 <= grid.shift < grid.m:
            return None
        if self.ids.shape[1] not in (grid.m, grid.tokens):
            return None  # `start` raises
        return () if self.uniform else (self._labels(rule.grid),)

    def from_rows(self, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> Tensor:
        labels = self._labels(rule.grid)
        count = same_label(rule, labels.keys, labels.queries, self.shift, lse)
        parts = (count, count, allowed_keys(rule, lse)) if self.uniform else (found[labels], count)
        return torch.stack([part.expand(lse.shape) for part in parts], -1)

    def _labels(self, grid: Grid) -> SameLabel:
        """The tokens as labels, a key having that of the token `shift` before it; one object for each grid."""
        if self._statistic is None or self._statistic[0] != grid:
            labels = self._all(grid).cpu().unique(return_inverse=True)[1].int()
            keys = torch.nn.functional.pad(labels, (self.shift, 0), value=-1)[:, : grid.tokens]
            self._statistic = grid, SameLabel(grid.of_keys(keys, fill=-1), labels[:, grid.first_token :], self.shift)
        return self._statistic[1]

    def value(self, total: Tensor, lse: Tensor) -> Tensor:
        return total[..., 0] / total[..., 2].clamp_min(1) if self.uniform else total[..., 0]

    def counted(self, total: Tensor, lse: Tensor) -> Tensor:
        return total[..., 1] > 0


class DuplicateMass(_Match):
    """Weight on earlier places of the query's own token, per query that has one (duplicate-token heads)."""

    name, shift = "duplicate_mass", 0
    source = Bilingual(
        "Wang et al. 2022, 2211.00593 (duplicate token heads)", "Wang et al. 2022, 2211.00593（重复词元头）"
    )
    chinese = Chinese("重复词元权重", "此前相同词元处的权重，对有这样的键的查询取平均（重复词元头）。")
    requires = "DuplicateMass(ids) with integer tokens [m] or [b, m]"


class InductionMass(_Match):
    """Weight on the tokens that followed earlier places of the query's token, per query that has one.

    On repeated random tokens this is the induction score per eligible query: a perfect head gets 1.
    Source: Olsson et al. 2022, 2209.11895 (prefix matching).
    """

    name, shift = "induction_mass", 1
    source = Bilingual("Olsson et al. 2022, 2209.11895 (prefix matching)", "Olsson et al. 2022, 2209.11895（前缀匹配）")
    chinese = Chinese("归纳权重", "此前相同词元之后的那个词元上的权重，对有这样的键的查询取平均（归纳头）。")
    requires = "InductionMass(ids) with integer tokens [m] or [b, m]"
