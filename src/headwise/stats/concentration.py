"""Squared weights of rows: how many keys share the weight, and the norm of the matrix."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from headwise.rule import Rule
from headwise.stats.base import RowMeasure
from headwise.stats.statistic import Compiled, Join, OfWeights, Statistic
from headwise.stats.values import INVERSE, SAME, RowValue
from headwise.stats.words import Chinese
from headwise.tiles import Tile, tops
from headwise.wording import Bilingual


class _Squares(Join):
    """Σ share² · x."""

    def shared(self, x: Tensor, log_share: Tensor) -> Tensor:
        return log_share.exp().square() * x


class _AmongKeys(_Squares):
    """Σ share² · x, the shares being those of the keys alone; a sink changes nothing."""

    def beside_sink(self, x: Tensor, log_share: Tensor) -> Tensor:
        return x


SQUARES = OfWeights("squares", _Squares(), compiled=Compiled("squares"))  # Σ_j p²
# Σ_j p² / (Σ_j p)², which no sink changes
CONCENTRATION = OfWeights("concentration", _AmongKeys(), compiled=Compiled("concentration"))


class EffectiveKeys(RowMeasure):
    """(Σ_j p_ij)² / Σ_j p_ij², mean over queries: how many keys share the weight (the inverse participation ratio).

    It is of the keys alone: a learned sink takes the same part of all their weights, which cancels.
    """

    name, unit, range = "effective_keys", "keys", "1 to keys"
    source = Bilingual("inverse Simpson index; Hill number of order 2", "逆辛普森指数；二阶 Hill 数")
    chinese = Chinese(
        "有效键数", "(Σ_j p_ij)² / Σ_j p_ij²，对查询取平均：权重分给多少个键（逆参与率）。", range="1 至键数"
    )
    short, placed = "keys", False
    shown: ClassVar[Mapping[str, int]] = {"report": 3, "viewer": 3, "watch": 3, "corpus": 3}

    def partial(self, tile: Tile) -> Tensor:
        top, e = tile.among_keys
        return torch.stack((top, e.sum(-1), e.square().sum(-1)), -1)

    def combine(self, one: Tensor, other: Tensor) -> Tensor:
        top, a, b = tops(one[..., 0], other[..., 0])
        mass, squares = (a * one[..., 1] + b * other[..., 1], a * a * one[..., 2] + b * b * other[..., 2])
        return torch.stack((top, mass, squares), -1)

    def value(self, total: Tensor, lse: Tensor) -> Tensor:
        _, mass, squares = total.unbind(-1)
        return mass.square() / squares.masked_fill(squares == 0, 1.0)

    def row_value(self, rule: Rule) -> RowValue:
        return RowValue(INVERSE, CONCENTRATION)  # 0 only in rows that do not count

    def from_rows(self, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> Tensor:
        one = torch.ones_like(lse)
        return torch.stack((torch.zeros_like(lse), one, found[CONCENTRATION]), -1)


class SquaredWeights(RowMeasure):
    """Σ_j p_ij², mean over queries; over all rows these sum to ‖P‖²_F."""

    name, unit, range = "squared_weights", "probability", "0 to 1"
    source = Bilingual("‖P‖²_F by rows", "‖P‖²_F 按行计")
    chinese = Chinese("权重平方和", "Σ_j p_ij²，对查询取平均；各行之和为 ‖P‖²_F。")
    placed = False

    def partial(self, tile: Tile) -> Tensor:
        return tile.weights.square().sum(-1)

    def row_value(self, rule: Rule) -> RowValue:
        return RowValue(SAME, SQUARES)
