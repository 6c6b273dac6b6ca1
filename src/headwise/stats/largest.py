"""The largest score of a row: the largest logit, and the weight of the key that has it."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from headwise.rule import Rule
from headwise.stats.base import RowMeasure
from headwise.stats.statistic import Compiled, Join, OfWeights, Part, Statistic
from headwise.stats.values import LOGIT, SHARE, RowValue
from headwise.stats.words import Chinese
from headwise.tiles import Tile
from headwise.wording import Bilingual


class _Largest(Join):
    """max x, whatever the shares are."""

    empty = -torch.inf

    def shared(self, x: Tensor, log_share: Tensor) -> Tensor:
        return x

    def both(self, statistic: Statistic, one: Part, other: Part) -> Tensor:
        return torch.maximum(one.of[statistic], other.of[statistic])


LARGEST = OfWeights("largest", _Largest(), compiled=Compiled("largest"))  # max_j S_ij; −∞ for a fully masked query


class MaxLogit(RowMeasure):
    """Largest score before the softmax, max_ij S_ij, after scale and mask.

    The number to watch for instability in training (QK-clip acts on it). Source: Kimi K2 (2507.20534), §2.1.
    """

    name, unit, range = "max_logit", "logit", "any"
    source = "Kimi K2, 2507.20534"
    chinese = Chinese("最大分数", "softmax 之前的最大分数 max_ij S_ij，已乘缩放、已加掩码。")
    short, dispensable, placed = "logit", 3, False
    shown: ClassVar[Mapping[str, int]] = {"report": 5, "viewer": 4, "watch": 1, "corpus": 1}
    reduce: ClassVar[str] = "max"

    def partial(self, tile: Tile) -> Tensor:
        return tile.largest_log_weight

    def combine(self, one: Tensor, other: Tensor) -> Tensor:
        return torch.maximum(one, other)

    def value(self, total: Tensor, lse: Tensor) -> Tensor:
        return total + lse

    def row_value(self, rule: Rule) -> RowValue:
        return RowValue(LOGIT, LARGEST)

    def from_rows(self, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> Tensor:
        return found[LARGEST] - lse


class Top1Mass(RowMeasure):
    """max_j p_ij, mean over queries: the head's confidence (Voita et al. 2019, 1905.09418 §3)."""

    name, unit, range = "top1_mass", "mass", "0 to 1"
    source = Bilingual("Voita et al. 2019, 1905.09418 (confidence)", "Voita et al. 2019, 1905.09418（置信度）")
    chinese = Chinese("最大权重", "max_j p_ij，对查询取平均：注意力头的置信度。")
    short, dispensable, placed = "top 1", 4, False
    shown: ClassVar[Mapping[str, int]] = {"report": 4, "watch": 4, "corpus": 4}

    def partial(self, tile: Tile) -> Tensor:
        return tile.largest_log_weight

    def combine(self, one: Tensor, other: Tensor) -> Tensor:
        return torch.maximum(one, other)

    def value(self, total: Tensor, lse: Tensor) -> Tensor:
        return total.clamp_max(0.0).exp()  # of logits whose rounding is large, the largest may exceed the log-sum-exp

    def row_value(self, rule: Rule) -> RowValue:
        return RowValue(SHARE, LARGEST)

    def from_rows(self, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> Tensor:
        return found[LARGEST] - lse
