"""Whether methods agree on which heads matter: rank correlations, with intervals and p-values."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from headwise.analysis.importance.values import HeadImportance
from headwise.errors import ConfigError
from headwise.table import HeadTable
from headwise.table.show import Printed, plain


@dataclass(frozen=True, repr=False)
class Agreement(Printed):
    """Spearman's ρ between methods, over heads.

    Attributes:
        methods: k names. heads: the number of ranked heads.
        rho: [k, k]; NaN where a method gives all heads one value.
        low, high: [k, k], bootstrap interval over heads with the given confidence.
        p: [k, k], share of random permutations of the heads with at least this |ρ|, including the identity; 0 on the
            diagonal.
    """

    methods: tuple[str, ...]
    heads: int
    rho: np.ndarray
    low: np.ndarray
    high: np.ndarray
    p: np.ndarray
    confidence: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON; NaN becomes None."""
        matrices = {name: plain(getattr(self, name)) for name in ("rho", "low", "high", "p")}
        return {"methods": list(self.methods), "heads": self.heads, "confidence": self.confidence, **matrices}

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """Header and cells, a row a pair of methods."""
        body = []
        for i, j in combinations(range(len(self.methods)), 2):
            interval = f"{self.low[i, j]:+.2f} … {self.high[i, j]:+.2f}"
            body.append([self.methods[i], self.methods[j], f"{self.rho[i, j]:+.3f}", interval, f"{self.p[i, j]:.2g}"])
        return ["method", "and", "ρ", f"{self.confidence:.0%} interval", "p"], body

    @property
    def title(self) -> str:
        """One line: what the table shows."""
        return f"Spearman's rank correlation over {self.heads} heads; interval by bootstrap, p by permutation"


def rank_agreement(
    importances: Sequence[HeadImportance] | HeadTable, *, resamples: int = 2000, confidence: float = 0.95, seed: int = 0
) -> Agreement:
    """Spearman's rank correlation between every two methods.

    ρ is Pearson's correlation of the ranks; equal values share their mean rank. The interval is a percentile bootstrap
    over heads; p is from permutations of the heads of one method.

    Args:
        importances: at least two of the same heads, or a `HeadTable` whose columns are compared.
        resamples: the number of bootstrap samples and of permutations, drawn with `seed`.
        confidence: of the interval, between 0 and 1.
    Returns:
        An `Agreement` with ρ, interval and p of every two methods.
    Raises:
        ConfigError: naming the argument, or the method whose heads differ.
    Source: Spearman 1904; Efron & Tibshirani 1993, ch. 13 (percentiles) and 15 (permutations).
    """
    if isinstance(importances, HeadTable):
        tables = [importances.select(name) for name in importances]
    else:
        tables = [one.table for one in importances]
    methods = tuple(name for table in tables for name in table)
    if len(tables) < 2:
        raise ConfigError(f"importances: {len(tables)} given; expected at least 2 to compare")
    if resamples < 1 or not 0.0 < confidence < 1.0:
        raise ConfigError(f"resamples={resamples}, confidence={confidence}: expected at least 1, and between 0 and 1")
    first = tables[0]
    for method, table in zip(methods, tables, strict=True):
        if (table.layers, table.heads) != (first.layers, first.heads):
            raise ConfigError(
                f"importances: {method!r} is about other heads than {methods[0]!r}: "
                f"{list(map(len, table.heads))} in {list(table.layers)}, expected {list(map(len, first.heads))} in "
                f"{list(first.layers)}"
            )
    values = np.stack([np.concatenate(list(table[name])) for name, table in zip(methods, tables, strict=True)])
    heads = values.shape[1]
    if heads < 3:
        raise ConfigError(f"importances: {heads} heads; expected at least 3 to rank")
    ranked = ranks(values)
    rho = _correlations(ranked)
    generator = np.random.default_rng(seed)
    picked = [_correlations(ranks(values[:, generator.integers(heads, size=heads)])) for _ in range(resamples)]
    edges = (50 * (1 - confidence), 50 * (1 + confidence))
    low, high = _percentiles(np.stack(picked), edges)
    extreme = np.ones_like(rho)
    for _ in range(resamples):
        shuffled = ranked[:, generator.permutation(heads)]
        extreme += np.abs(_correlations(ranked, shuffled)) >= np.abs(rho) - 1e-12
    p = np.triu(np.where(np.isnan(rho), np.nan, extreme / (resamples + 1)), 1)
    p = p + p.T  # one triangle is enough: the other differs by the random draw only
    return Agreement(methods, heads, rho, low, high, p, confidence)


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks of every row of [k, heads], from 1; equal values share their mean rank."""
    found = np.empty(values.shape)
    for row, into in zip(values, found, strict=True):
        _, place, counts = np.unique(row, return_inverse=True, return_counts=True)
        into[:] = (np.cumsum(counts) - (counts - 1) / 2)[place.ravel()]
    return found


def _correlations(one: np.ndarray, other: np.ndarray | None = None) -> np.ndarray:
    """Pearson's correlation of all rows [k, heads] with all rows, [k, k]; NaN for constant rows."""
    first, second = (_unit(x) for x in (one, one if other is None else other))
    return np.clip(first @ second.T, -1.0, 1.0)


def _unit(rows: np.ndarray) -> np.ndarray:
    centred = rows - rows.mean(1, keepdims=True)
    norm = np.linalg.norm(centred, axis=1, keepdims=True)
    return np.divide(centred, norm, out=np.full_like(centred, np.nan), where=norm > 1e-9)


def _percentiles(samples: np.ndarray, edges: tuple[float, float]) -> tuple[np.ndarray, np.ndarray]:
    """Percentiles over the first axis, without NaN samples; NaN if all are."""
    k = samples.shape[1]
    low, high = np.full((k, k), np.nan), np.full((k, k), np.nan)
    for i, j in np.ndindex(k, k):
        known = samples[:, i, j][~np.isnan(samples[:, i, j])]
        if len(known):
            low[i, j], high[i, j] = np.percentile(known, edges)
    return low, high
