"""Weight on a class of keys: separators, punctuation, special tokens, or any other."""

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from headwise.errors import ConfigError, ShapeError
from headwise.masks import Grid, Span
from headwise.masks.given import as_given
from headwise.rule import Rule
from headwise.stats.base import RowMeasure, Tokens
from headwise.stats.statistic import MASS, Compiled, Statistic
from headwise.stats.values import SAME, RowValue
from headwise.stats.words import Chinese
from headwise.tiles import Tile
from headwise.wording import Bilingual


@dataclass(frozen=True, eq=False)
class KeyWeights(Statistic):
    """Σ_j p_ij·w_j for weights [1 or b, m] of the keys; two of them are the same only if they are one object."""

    weights: Tensor
    name = "key_weights"
    per = "query"
    joins = MASS
    placed = False

    @cached_property
    def compiled(self) -> Compiled:
        return Compiled("key_weights", keys=self.weights.detach().float())

    def at(self, cols: Span) -> Statistic:
        return KeyWeights(self.weights[:, cols.start : cols.stop])

    def rows(self, rows: Span) -> Statistic:
        return self

    def only(self, batch: int) -> Statistic:
        return KeyWeights(self.weights[batch : batch + 1]) if len(self.weights) > 1 else self


class ClassMass(RowMeasure):
    """Σ p_ij over the keys of a class of tokens, mean over queries.

    Args:
        members: boolean [m] or [b, m], True for keys of the class; or of all tokens, if a cache has dropped some.
        name: what to call it in the result, such as "punctuation_mass".
    """

    name, unit, range = "class_mass", "mass", "0 to 1"
    source = Bilingual(
        "Clark et al. 2019, 1906.04341 §3.2 (separators and punctuation)",
        "Clark et al. 2019, 1906.04341 §3.2（分隔符与标点）",
    )
    chinese: ClassVar[Chinese | None] = Chinese("词类权重", "一类词元之键上的 Σ p_ij，对查询取平均。")
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

    chinese: ClassVar[Chinese | None] = None
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
    chinese = Chinese("标点权重", "标点符号上的权重，对查询取平均。")
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
    chinese = Chinese("分隔符权重", "空白等分隔符上的权重，对查询取平均。")

    @staticmethod
    def belongs(piece: str) -> bool:
        return bool(piece) and all(unicodedata.category(sign)[0] == "Z" or sign.isspace() for sign in piece)


class SpecialMass(ClassMass):
    """Weight on special tokens such as [CLS], [SEP] and <s>, mean over queries."""

    name = "special_mass"
    requires = "SpecialMass(members) with a boolean [m] or [b, m], True for special tokens"
    chinese = Chinese("特殊词元权重", "[CLS]、[SEP]、<s> 等特殊词元上的权重，对查询取平均。")
    short = "special"
    shown: ClassVar[Mapping[str, int]] = {"report": 14}

    @classmethod
    def of(cls, tokens: Tokens) -> "ClassMass | None":
        return None if tokens.special is None or not bool(tokens.special.any()) else cls(tokens.special)


OF_PIECES: dict[str, type[OfPieces]] = {"punctuation": PunctuationMass, "separator": SeparatorMass}


def members(pieces: Sequence[str], kind: type[OfPieces]) -> Tensor:
    """Which of the tokens are of the class, boolean [m]."""
    return torch.tensor([kind.belongs(piece) for piece in pieces], dtype=torch.bool, device="cpu")
