"""Measures of what is attended to: classes of keys, matching tokens, and what each key receives."""

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

from headwise.errors import ConfigError, ShapeError
from headwise.masks import Grid, Span
from headwise.masks.given import as_given
from headwise.rule import Rule
from headwise.rule.tiles import Tile
from headwise.stats.base import Measure, RowMeasure, Tokens
from headwise.stats.statistic import (
    LARGEST_MASS,
    MASS,
    SAME,
    Alike,
    Compiled,
    RowValue,
    Slope,
    Statistic,
    allowed_keys,
    queries_of_keys,
    ranges,
    same_label,
)
from headwise.wording import tr


@dataclass(frozen=True, eq=False)
class KeyWeights(Alike):
    """Σ_j p_ij·w_j for weights [1 or b, m] of the keys; two of them are the same only if they are one object."""

    weights: Tensor
    name = "key_weights"
    per = "query"
    joins = MASS
    placed = False

    @cached_property
    def compiled(self) -> Compiled:
        return Compiled(self.name, keys=self.weights.detach().float())

    @property
    def slope(self) -> Slope | None:
        return Slope(keys=self.compiled.keys)

    def at(self, cols: Span) -> Statistic:
        return type(self)(self.weights[:, cols.start : cols.stop])

    def only(self, batch: int) -> Statistic:
        return type(self)(self.weights[batch : batch + 1]) if len(self.weights) > 1 else self


class LargestOther(KeyWeights):
    """The largest p_ij of the keys j ≠ i with a weight above 0; 0 without such keys."""

    name = "largest_other"
    joins = LARGEST_MASS
    placed = True

    @property
    def slope(self) -> None:
        return None


class ClassMass(RowMeasure):
    """Σ p_ij over the keys of a class of tokens, mean over queries.

    Args:
        members: boolean [m] or [b, m], True for keys of the class; or of all tokens, if a cache has dropped some.
        name: what to call it in the result, such as "punctuation_mass".
    """

    name, unit, range = "class_mass", "mass", "0 to 1"
    source = tr("Clark et al. 2019, 1906.04341 §3.2 (separators and punctuation)")
    placed = False
    requires = "ClassMass(members) with a boolean [m] or [b, m], or ClassMass.of_tokens(tokens, 'punctuation')"

    def __init__(self, members: Tensor, name: str | None = None) -> None:
        self.members = torch.atleast_2d(as_given(members).bool())
        self.name = name or type(self).name
        self._weights = KeyWeights(self.members)
        self._held: tuple[Grid, KeyWeights] | None = None  # those of the keys of a grid with a gap

    @classmethod
    def of(cls, tokens: Tokens) -> "ClassMass | None":
        return None

    @classmethod
    def of_tokens(cls, tokens: Sequence[str], kind: str = "punctuation") -> "ClassMass":
        """The class from the tokens' text: "punctuation" or "separator" (white space), by Unicode category.

        White space beside a mark, as in " ,", is ignored: a token with only marks and white space is punctuation.
        """
        if kind not in OF_PIECES:
            raise ConfigError(f"ClassMass.of_tokens(kind={kind!r}): expected 'punctuation' or 'separator'")
        return OF_PIECES[kind](members(tokens, OF_PIECES[kind]))

    def start(self, grid: Grid, like: Tensor, keep_rows: bool = False):  # type: ignore[no-untyped-def]
        self._check(grid)
        return super().start(grid, like, keep_rows)

    def _check(self, grid: Grid) -> None:
        b, m = self.members.shape
        if m not in (grid.m, grid.tokens) or b not in (1, grid.b):
            raise ShapeError(
                f"ClassMass(members): shape {(b, m)} does not fit {grid.m} keys; expected ({grid.m},) or "
                f"({grid.b}, {grid.m})"
            )

    def partial(self, tile: Tile) -> Tensor:
        members = tile.rule.grid.of_keys(self.members)[:, tile.cols.start : tile.cols.stop].to(tile.weights)
        if len(members) == 1:
            return tile.weights @ members[0]
        return (tile.weights @ members[:, None, :, None]).squeeze(-1)

    def row_value(self, rule: Rule) -> RowValue:
        grid = rule.grid
        self._check(grid)
        if self.members.shape[1] == grid.m:
            return RowValue(SAME, self._weights)
        if self._held is None or self._held[0] != grid:
            self._held = grid, KeyWeights(grid.of_keys(self.members))
        return RowValue(SAME, self._held[1])


class OfPieces(ClassMass, abstract=True):
    """A class of tokens that their text determines: `belongs` returns whether a piece is in it. Special tokens
    are in none."""

    requires = "the text of the tokens"

    @staticmethod
    def belongs(piece: str) -> bool:
        """Whether a token with this text is of the class."""
        raise NotImplementedError

    @classmethod
    def of(cls, tokens: Tokens) -> "ClassMass | None":
        if tokens.pieces is None:
            return None
        found = torch.stack([members(row, cls) for row in tokens.pieces])
        return cls(found if tokens.special is None else found & ~tokens.special)


class PunctuationMass(OfPieces):
    """Weight on punctuation marks, mean over queries."""

    name = "punctuation_mass"
    requires = "ClassMass.of_tokens(tokens, 'punctuation'), with the text of each token"
    short, dispensable = "punct.", 2
    shown: ClassVar[Mapping[str, int]] = {"report": 13}

    @staticmethod
    def belongs(piece: str) -> bool:
        text = piece.strip()
        return bool(text) and all(unicodedata.category(sign)[0] == "P" for sign in text)


class SeparatorMass(OfPieces):
    """Weight on separators such as white space, mean over queries."""

    name = "separator_mass"
    requires = "ClassMass.of_tokens(tokens, 'separator'), with the text of each token"

    @staticmethod
    def belongs(piece: str) -> bool:
        return bool(piece) and all(unicodedata.category(sign)[0] == "Z" or sign.isspace() for sign in piece)


class SpecialMass(ClassMass):
    """Weight on special tokens such as [CLS], [SEP] and <s>, mean over queries."""

    name = "special_mass"
    requires = "SpecialMass(members) with a boolean [m] or [b, m], True for special tokens"
    short = "special"
    shown: ClassVar[Mapping[str, int]] = {"report": 14}

    @classmethod
    def of(cls, tokens: Tokens) -> "ClassMass | None":
        return None if tokens.special is None or not bool(tokens.special.any()) else cls(tokens.special)


OF_PIECES: dict[str, type[OfPieces]] = {"punctuation": PunctuationMass, "separator": SeparatorMass}


def members(pieces: Sequence[str], kind: type[OfPieces]) -> Tensor:
    """Which of the tokens are of the class, boolean [m]."""
    return torch.tensor([kind.belongs(piece) for piece in pieces], dtype=torch.bool, device="cpu")


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
    """Σ p_ij over the earlier keys j with ids[j − shift] = ids[i], per eligible query (one that has such keys); with
    `uniform`, of a head looking at all allowed keys alike: the baseline. ids: [m] or [b, m], or of all tokens."""

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
    source = tr("Wang et al. 2022, 2211.00593 (duplicate token heads)")
    requires = "DuplicateMass(ids) with integer tokens [m] or [b, m]"


class InductionMass(_Match):
    """Weight on the tokens that followed earlier places of the query's token, per query that has one.

    On repeated random tokens this is the induction score per eligible query: a perfect head gets 1.
    Source: Olsson et al. 2022, 2209.11895 (prefix matching).
    """

    name, shift = "induction_mass", 1
    source = tr("Olsson et al. 2022, 2209.11895 (prefix matching)")
    requires = "InductionMass(ids) with integer tokens [m] or [b, m]"


@dataclass(frozen=True)
class _ColumnMass(Alike):
    name = "column_mass"
    per = "key"
    joins = None  # a row's part of it depends on the log-sum-exp over all keys
    placed = False
    compiled = Compiled("column_mass", per="key")


COLUMN_MASS = _ColumnMass()  # Σ_i p, what each key receives: [b, h, m]


@dataclass
class ColumnState:
    """Per key: the mass received and the queries that may see it, [b, h, m] in float64; pooled after a merge."""

    mass: Tensor
    eligible: Tensor
    largest: Tensor | None = None  # [b, h], once no more is added


class ReceivedMass(Measure):
    """max_j (Σ_i p_ij / queries that may see j): the mean weight of the key that gets most.

    Above 0.3 the key is commonly called a sink. Merging keeps the largest over the inputs. `amap.received()`
    gives Σ_i p_ij of every key.
    """

    name, unit, range = "received_mass", "mass", "0 to 1"
    source = tr("Gu et al. 2024, 2410.10781 (sink metric)")
    short, dispensable, placed = "received", 7, False
    shown: ClassVar[Mapping[str, int]] = {"report": 12}

    def start(self, grid: Grid, like: Tensor) -> ColumnState:
        zero = torch.zeros(grid.b, grid.h, grid.m, dtype=torch.float64, device=like.device)
        return ColumnState(zero, torch.zeros_like(zero))

    def update(self, state: ColumnState, tile: Tile) -> None:
        cols = slice(tile.cols.start, tile.cols.stop)
        state.mass[..., cols] += tile.weights.sum(-2)
        rows = tile.shape[2]
        state.eligible[..., cols] += rows if tile.allowed is None else tile.allowed.sum(-2)

    def needs(self, rule: Rule) -> tuple[Statistic, ...] | None:
        return (COLUMN_MASS,) if ranges(rule) is not None else None

    def take(self, state: ColumnState, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> None:
        state.mass += found[COLUMN_MASS]
        state.eligible += queries_of_keys(rule, lse)

    def of_blocks(self) -> Mapping[str, Literal["sum", "max"]]:
        return {"mass": "sum", "eligible": "sum"}

    def closed(self, state: ColumnState) -> ColumnState:
        return ColumnState(state.mass[:0], state.eligible[:0], self._largest(state))

    def merge(self, one: ColumnState, other: ColumnState) -> ColumnState:
        both = torch.cat((self._largest(one), self._largest(other)))
        largest = (both if len(both) else both.new_zeros(1, both.shape[1])).amax(0, keepdim=True)
        return ColumnState(one.mass[:0], one.eligible[:0], largest)

    def finish(self, state: ColumnState) -> Tensor:
        return self._largest(state).float()

    def _largest(self, state: ColumnState) -> Tensor:
        if state.largest is not None:
            return state.largest
        received = state.mass / state.eligible.clamp_min(1)
        return received.amax(-1) if received.shape[-1] else received.sum(-1)  # no keys receive 0
