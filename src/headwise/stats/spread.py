"""How sharp or spread the rows are: measures that read the weights and nothing about where they lie."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from headwise.errors import ConfigError
from headwise.rule import Rule
from headwise.stats.base import RowMeasure
from headwise.stats.rows import allowed_keys, learned_sink, ranges
from headwise.stats.statistics import CONCENTRATION, ENTROPY, LARGEST, Statistic, TopWeights
from headwise.tiles import Tile, tops


class MaxLogit(RowMeasure):
    """Largest score before the softmax, max_ij S_ij, after scale and mask.

    The number to watch for instability in training (QK-clip acts on it). Source: Kimi K2 (2507.20534), §2.1.
    """

    name, unit, range = "max_logit", "logit", "any"
    source = "Kimi K2, 2507.20534"
    reduce: ClassVar[str] = "max"

    def partial(self, tile: Tile) -> Tensor:
        return tile.largest_log_weight

    def combine(self, one: Tensor, other: Tensor) -> Tensor:
        return torch.maximum(one, other)

    def value(self, total: Tensor, lse: Tensor) -> Tensor:
        return total + lse

    def needs(self, rule: Rule) -> tuple[Statistic, ...] | None:
        return (LARGEST,)

    def from_rows(self, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> Tensor:
        return found[LARGEST] - lse

    def told(self, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> tuple[Tensor, None]:
        return found[LARGEST] - lse + lse, None  # NaN where a score is


class LogSumExp(RowMeasure):
    """LSE_i = ln Σ_j exp S_ij, mean over queries; it bounds the largest logit: LSE − ln m ≤ max ≤ LSE.

    With a learned sink the sum holds exp sink too, and only max ≤ LSE stays true.
    """

    name, unit, range = "logsumexp", "logit", "any"
    source = "Milakov & Gimelshein 2018, 1805.02867"

    def partial(self, tile: Tile) -> Tensor:
        return torch.zeros_like(tile.lse)

    def value(self, total: Tensor, lse: Tensor) -> Tensor:
        return lse

    def needs(self, rule: Rule) -> tuple[Statistic, ...] | None:
        return ()

    def from_rows(self, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> Tensor:
        return torch.zeros_like(lse)

    def told(self, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> tuple[Tensor, None]:
        return lse, None


class Entropy(RowMeasure):
    """H_i = −Σ_j p_ij ln p_ij in nats, mean over queries; 0 = one key, ln m = all keys alike.

    Over the keys only: with a learned sink p_ij sum to less than 1, and the sink's own term is not in it.
    """

    name, unit, range = "entropy", "nats", "0 to ln(keys)"
    source = "Clark et al. 2019, 1906.04341 §3.3"

    def partial(self, tile: Tile) -> Tensor:
        return tile.entropy

    def needs(self, rule: Rule) -> tuple[Statistic, ...] | None:
        return (ENTROPY,)

    def from_rows(self, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> Tensor:
        return found[ENTROPY]


class NormalizedEntropy(RowMeasure):
    """H_i / ln(keys that query i may see), mean over the queries that may see at least two."""

    name, unit, range = "normalized_entropy", "share", "0 to 1"
    source = "entropy over its maximum, ln of the allowed keys"

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

    def told(self, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
        keys = allowed_keys(rule, lse)
        return found[ENTROPY] / keys.clamp_min(2).log(), keys >= 2


class EffectiveKeys(RowMeasure):
    """(Σ_j p_ij)² / Σ_j p_ij², mean over queries: how many keys share the weight (the inverse participation ratio).

    It is of the keys alone: a learned sink takes the same part of all their weights, which cancels.
    """

    name, unit, range = "effective_keys", "keys", "1 to keys"
    source = "inverse Simpson index; Hill number of order 2"

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

    def needs(self, rule: Rule) -> tuple[Statistic, ...] | None:
        return (CONCENTRATION,)

    def from_rows(self, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> Tensor:
        one = torch.ones_like(lse)
        return torch.stack((torch.zeros_like(lse), one, found[CONCENTRATION]), -1)

    def told(self, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> tuple[Tensor, None]:
        return found[CONCENTRATION].reciprocal(), None  # 0 only in rows that do not count


class LearnedSinkMass(RowMeasure):
    """1 − Σ_j p_ij, mean over queries: what a learned sink (`SinkLogits`) takes of each row; 0 without one."""

    name, unit, range = "learned_sink_mass", "mass", "0 to 1"
    source = "gpt-oss, 2508.10925 (learned logit in the denominator)"

    def partial(self, tile: Tile) -> Tensor:
        return tile.sink_weight  # e^(sink − LSE), since the difference of 1 and a sum near it is nothing but rounding

    def combine(self, one: Tensor, other: Tensor) -> Tensor:
        return one

    def needs(self, rule: Rule) -> tuple[Statistic, ...] | None:
        return ()

    def from_rows(self, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> Tensor:
        return learned_sink(rule, lse)


class Top1Mass(RowMeasure):
    """max_j p_ij, mean over queries: the head's confidence (Voita et al. 2019, 1905.09418 §3)."""

    name, unit, range = "top1_mass", "mass", "0 to 1"
    source = "Voita et al. 2019, 1905.09418 (confidence)"

    def partial(self, tile: Tile) -> Tensor:
        return tile.largest_log_weight

    def combine(self, one: Tensor, other: Tensor) -> Tensor:
        return torch.maximum(one, other)

    def value(self, total: Tensor, lse: Tensor) -> Tensor:
        return total.clamp_max(0.0).exp()  # of logits whose rounding is large, the largest may exceed the log-sum-exp

    def needs(self, rule: Rule) -> tuple[Statistic, ...] | None:
        return (LARGEST,)

    def from_rows(self, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> Tensor:
        return found[LARGEST] - lse


class TopKMass(RowMeasure):
    """Σ of the k largest p_ij of a row, mean over queries; k = 8 unless given, as `TopKMass(k=32)`."""

    name, unit, range = "topk_mass", "mass", "0 to 1"
    source = "weight that a cache of k keys a query could keep (cf. H2O, 2306.14048)"

    def __init__(self, k: int = 8) -> None:
        if k < 1:
            raise ConfigError(f"TopKMass(k={k}): k must be >= 1")
        self.k = k

    def partial(self, tile: Tile) -> Tensor:
        return tile.weights.topk(min(self.k, tile.shape[-1]), sorted=False).values

    def combine(self, one: Tensor, other: Tensor) -> Tensor:
        both = torch.cat((one, other), -1)
        return both.topk(min(self.k, both.shape[-1]), sorted=False).values

    def value(self, total: Tensor, lse: Tensor) -> Tensor:
        return total.sum(-1)

    def needs(self, rule: Rule) -> tuple[Statistic, ...] | None:
        return (TopWeights(min(self.k, rule.grid.m)),)

    def from_rows(self, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> Tensor:
        return found[TopWeights(min(self.k, rule.grid.m))]
