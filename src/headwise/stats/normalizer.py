"""The denominator of a row: its log-sum-exp, and what a learned sink takes of it. Every kernel gives it."""

from collections.abc import Mapping

import torch
from torch import Tensor

from headwise.rule import Rule
from headwise.stats.base import RowMeasure
from headwise.stats.rows import learned_sink
from headwise.stats.statistic import Statistic
from headwise.stats.values import LOG_SUM, RowValue
from headwise.stats.words import Chinese
from headwise.tiles import Tile
from headwise.wording import Bilingual


class LogSumExp(RowMeasure):
    """LSE_i = ln Σ_j exp S_ij, mean over queries; it bounds the largest logit: LSE − ln m ≤ max ≤ LSE.

    With a learned sink the sum holds exp sink too, and only max ≤ LSE stays true.
    """

    name, unit, range = "logsumexp", "logit", "any"
    source = "Milakov & Gimelshein 2018, 1805.02867"
    chinese = Chinese("对数和指数", "LSE_i = ln Σ_j exp S_ij，对查询取平均；它界定最大分数：LSE − ln m ≤ max ≤ LSE。")
    placed = False

    def partial(self, tile: Tile) -> Tensor:
        return torch.zeros_like(tile.lse)

    def value(self, total: Tensor, lse: Tensor) -> Tensor:
        return lse

    def row_value(self, rule: Rule) -> RowValue:
        return RowValue(LOG_SUM)

    def from_rows(self, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> Tensor:
        return torch.zeros_like(lse)


class LearnedSinkMass(RowMeasure):
    """1 − Σ_j p_ij, mean over queries: what a learned sink (`SinkLogits`) takes of each row; 0 without one."""

    name, unit, range = "learned_sink_mass", "mass", "0 to 1"
    source = Bilingual(
        "gpt-oss, 2508.10925 (learned logit in the denominator)", "gpt-oss, 2508.10925（分母中的可学习分数）"
    )
    chinese = Chinese("可学习汇聚的权重", "1 − Σ_j p_ij，对查询取平均：可学习的 sink 从每行取走的权重；没有则为 0。")
    placed = False

    def partial(self, tile: Tile) -> Tensor:
        return tile.sink_weight  # e^(sink − LSE), since the difference of 1 and a sum near it is nothing but rounding

    def combine(self, one: Tensor, other: Tensor) -> Tensor:
        return one

    def needs(self, rule: Rule) -> tuple[Statistic, ...] | None:
        return ()

    def from_rows(self, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> Tensor:
        return learned_sink(rule, lse)
