"""The entropy of rows: how many keys share the weight, in nats."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from headwise.rule import Rule
from headwise.stats.base import RowMeasure
from headwise.stats.rows import allowed_keys, ranges
from headwise.stats.statistic import Compiled, Join, OfWeights, Statistic
from headwise.stats.values import SAME, RowValue
from headwise.stats.words import Chinese
from headwise.tiles import Tile
from headwise.wording import Bilingual


class _ChainRule(Join):
    """Σ share · (x − ln share)."""

    def shared(self, x: Tensor, log_share: Tensor) -> Tensor:
        return log_share.exp() * (x - log_share.masked_fill(log_share == -torch.inf, 0.0))


ENTROPY = OfWeights("entropy", _ChainRule(), compiled=Compiled("entropy"))  # −Σ_j p ln p


class Entropy(RowMeasure):
    """H_i = −Σ_j p_ij ln p_ij in nats, mean over queries; 0 = one key, ln m = all keys alike.

    Over the keys only: with a learned sink p_ij sum to less than 1, and the sink's own term is not in it.
    """

    name, unit, range = "entropy", "nats", "0 to ln(keys)"
    source = "Clark et al. 2019, 1906.04341 §3.3"
    chinese = Chinese(
        "熵", "H_i = −Σ_j p_ij ln p_ij，以奈特计，对查询取平均；0 表示只关注一个键，ln m 表示均匀关注所有键。",
        range="0 至 ln(键数)",
    )  # fmt: skip
    placed = False
    shown: ClassVar[Mapping[str, int]] = {"report": 1, "viewer": 1, "watch": 2, "corpus": 2}

    def partial(self, tile: Tile) -> Tensor:
        return tile.entropy

    def row_value(self, rule: Rule) -> RowValue:
        return RowValue(SAME, ENTROPY)


class NormalizedEntropy(RowMeasure):
    """H_i / ln(keys that query i may see), mean over the queries that may see at least two."""

    name, unit, range = "normalized_entropy", "share", "0 to 1"
    source = Bilingual("entropy over its maximum, ln of the allowed keys", "熵除以其最大值，即可见键数的对数")
    chinese = Chinese("归一化熵", "H_i / ln(查询 i 可见的键数)，对至少可见两个键的查询取平均。")
    short, dispensable, placed = "norm.", 6, False
    shown: ClassVar[Mapping[str, int]] = {"report": 2, "viewer": 2}

    def partial(self, tile: Tile) -> Tensor:
        return torch.stack((tile.entropy, tile.allowed_keys), -1)

    def value(self, total: Tensor, lse: Tensor) -> Tensor:
        entropy, keys = total.unbind(-1)
        return entropy / keys.clamp_min(2).log()

    def counted(self, total: Tensor, lse: Tensor) -> Tensor:
        return total[..., 1] >= 2

    def needs(self, rule: Rule) -> tuple[Statistic, ...] | None:
        return (ENTROPY,) if ranges(rule) is not None else None

    def from_rows(self, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> Tensor:
        return torch.stack((found[ENTROPY], allowed_keys(rule, lse).expand(lse.shape)), -1)

    def row_values(self, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
        keys = allowed_keys(rule, lse)
        return found[ENTROPY] / keys.clamp_min(2).log(), keys >= 2
