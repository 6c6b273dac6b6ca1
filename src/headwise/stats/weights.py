"""Measures of a row's weights, wherever they are: entropy, squares, the largest ones, the normalizer."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from headwise.errors import ConfigError
from headwise.rule import Rule
from headwise.rule.tiles import Tile, tops
from headwise.stats.base import RowMeasure
from headwise.stats.statistic import (
    INVERSE,
    LOG_SUM,
    LOGIT,
    SAME,
    SHARE,
    Alike,
    Compiled,
    Join,
    OfWeights,
    Part,
    RowValue,
    Slope,
    Statistic,
    allowed_keys,
    learned_sink,
    ranges,
)
from headwise.wording import tr


class _ChainRule(Join):
    """Σ share · (x − ln share)."""

    def shared(self, x: Tensor, log_share: Tensor) -> Tensor:
        return log_share.exp() * (x - log_share.masked_fill(log_share == -torch.inf, 0.0))


ENTROPY = OfWeights("entropy", _ChainRule(), compiled=Compiled("entropy"), slope=Slope(logs=-1.0))  # −Σ_j p ln p


class Entropy(RowMeasure):
    """H_i = −Σ_j p_ij ln p_ij in nats, mean over queries; 0 = one key, ln m = all keys alike.

    Over the keys only: with a learned sink p_ij sum to less than 1, and the sink's own term is not in it.
    """

    name, unit, range = "entropy", "nats", "0 to ln(keys)"
    source = "Clark et al. 2019, 1906.04341 §3.3"
    placed = False
    shown: ClassVar[Mapping[str, int]] = {"report": 1, "viewer": 1, "watch": 2, "corpus": 2}

    def partial(self, tile: Tile) -> Tensor:
        return tile.entropy

    def row_value(self, rule: Rule) -> RowValue:
        return RowValue(SAME, ENTROPY)


class NormalizedEntropy(RowMeasure):
    """H_i / ln(keys that query i may see), mean over the queries that may see at least two."""

    name, unit, range = "normalized_entropy", "share", "0 to 1"
    source = tr("entropy over its maximum, ln of the allowed keys")
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
    source = tr("inverse Simpson index; Hill number of order 2")
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
    source = tr("‖P‖²_F by rows")
    placed = False

    def partial(self, tile: Tile) -> Tensor:
        return tile.weights.square().sum(-1)

    def row_value(self, rule: Rule) -> RowValue:
        return RowValue(SAME, SQUARES)


class _Largest(Join):
    """max x, whatever the shares are."""

    empty = -torch.inf

    def shared(self, x: Tensor, log_share: Tensor) -> Tensor:
        return x

    def both(self, statistic: Statistic, one: Part, other: Part) -> Tensor:
        return torch.maximum(one.of[statistic], other.of[statistic])


# max_j S_ij; −∞ for a fully masked query
LARGEST = OfWeights("largest", _Largest(), compiled=Compiled("largest"), slope=Slope(largest=True))


class _OfLargest(RowMeasure, abstract=True):
    """A value of max_j S_ij; partials are ln of the largest weight."""

    def partial(self, tile: Tile) -> Tensor:
        return tile.largest_log_weight

    def combine(self, one: Tensor, other: Tensor) -> Tensor:
        return torch.maximum(one, other)

    def from_rows(self, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> Tensor:
        return found[LARGEST] - lse


class MaxLogit(_OfLargest):
    """Largest score before the softmax, max_ij S_ij, after scale and mask.

    The number to watch for instability in training (QK-clip acts on it). Source: Kimi K2 (2507.20534), §2.1.
    """

    name, unit, range = "max_logit", "logit", "any"
    source = "Kimi K2, 2507.20534"
    short, dispensable, placed = "logit", 3, False
    shown: ClassVar[Mapping[str, int]] = {"report": 5, "viewer": 4, "watch": 1, "corpus": 1}
    reduce: ClassVar[str] = "max"

    def value(self, total: Tensor, lse: Tensor) -> Tensor:
        return total + lse

    def row_value(self, rule: Rule) -> RowValue:
        return RowValue(LOGIT, LARGEST)


class Top1Mass(_OfLargest):
    """max_j p_ij, mean over queries: the head's confidence (Voita et al. 2019, 1905.09418 §3)."""

    name, unit, range = "top1_mass", "mass", "0 to 1"
    source = tr("Voita et al. 2019, 1905.09418 (confidence)")
    short, dispensable, placed = "top 1", 4, False
    shown: ClassVar[Mapping[str, int]] = {"report": 4, "watch": 4, "corpus": 4}

    def value(self, total: Tensor, lse: Tensor) -> Tensor:
        return total.clamp_max(0.0).exp()  # of logits whose rounding is large, the largest may exceed the log-sum-exp

    def row_value(self, rule: Rule) -> RowValue:
        return RowValue(SHARE, LARGEST)


@dataclass(frozen=True)
class _Top(Alike, abstract=True):
    count: int
    per = "query"
    joins = None
    placed = False
    dtype: ClassVar[torch.dtype]

    @cached_property
    def compiled(self) -> Compiled:
        return Compiled(self.name, count=self.count, dtype=self.dtype)


class TopWeights(_Top):
    """The `count` largest p_ij of a query, largest first: [b, h, n, count], 0 beyond what it may see."""

    name = "top_weights"
    dtype = torch.float32


class TopKeys(_Top):
    """The keys of the `count` largest p_ij of a query, int64 [b, h, n, count]: largest first, the lower key first where
    scores are equal, −1 beyond what it may see."""

    name = "top_keys"
    dtype = torch.int64


class TopKMass(RowMeasure):
    """Σ of the k largest p_ij of a row, mean over queries; k = 8 unless given, as `TopKMass(k=32)`."""

    name, unit, range = "topk_mass", "mass", "0 to 1"
    source = tr("weight that a cache of k keys a query could keep (cf. H2O, 2306.14048)")
    placed = False

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


class LogSumExp(RowMeasure):
    """LSE_i = ln Σ_j exp S_ij, mean over queries; it bounds the largest logit: LSE − ln m ≤ max ≤ LSE.

    With a learned sink the sum holds exp sink too, and only max ≤ LSE stays true.
    """

    name, unit, range = "logsumexp", "logit", "any"
    source = "Milakov & Gimelshein 2018, 1805.02867"
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
    source = tr("gpt-oss, 2508.10925 (learned logit in the denominator)")
    placed = False

    def partial(self, tile: Tile) -> Tensor:
        return tile.sink_weight  # e^(sink − LSE), since the difference of 1 and a sum near it is nothing but rounding

    def combine(self, one: Tensor, other: Tensor) -> Tensor:
        return one

    def needs(self, rule: Rule) -> tuple[Statistic, ...] | None:
        return ()

    def from_rows(self, found: Mapping[Statistic, Tensor], lse: Tensor, rule: Rule) -> Tensor:
        return learned_sink(rule, lse)
