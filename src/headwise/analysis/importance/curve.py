"""Whether an order of importance is better than chance, and whether methods agree on it."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from torch import nn

from headwise.analysis.checks import head_name
from headwise.analysis.importance.ablation import Removal, checked_heads
from headwise.analysis.importance.losses import Head, HeadImportance, LossFunction, checked_inputs, standard_error
from headwise.base.run import Progress
from headwise.errors import ConfigError
from headwise.models.site import HeadSite
from headwise.table import HeadTable
from headwise.table.show import Printed, plain


@dataclass(frozen=True, repr=False)
class PruningCurve(Printed):
    """Losses while heads are removed, in the given order and in random orders.

    Attributes:
        order: the heads in the order of their removal. method: source of the order. by: replacement of their outputs.
        removed: [points], numbers of heads removed, from 0. total: the number of all heads.
        losses: [points, batches] in the given order; random_losses: [orders, points, batches] in random ones.
    """

    order: tuple[Head, ...]
    method: str
    by: str
    removed: np.ndarray
    total: int
    losses: np.ndarray
    random_losses: np.ndarray

    @property
    def kept(self) -> np.ndarray:
        """[points], numbers of heads left."""
        return self.total - self.removed

    @property
    def loss(self) -> np.ndarray:
        """[points], mean over batches."""
        return self.losses.mean(1)

    @property
    def errors(self) -> np.ndarray:
        """[points], standard error of the increase over the whole model's loss, paired by batch; NaN for one batch."""
        return standard_error((self.losses - self.losses[:1]).T)

    @property
    def random(self) -> np.ndarray:
        """[orders, points], mean over batches."""
        return self.random_losses.mean(2)

    @property
    def better(self) -> np.ndarray:
        """[points] bool: less than the mean of the random orders. False at both ends, where all orders agree."""
        return self._between & (self.loss < self.random.mean(0))

    @property
    def better_than_all(self) -> np.ndarray:
        """[points] bool: less than every random order. False at both ends."""
        return self._between & (self.loss < self.random.min(0))

    @property
    def better_everywhere(self) -> bool:
        """Whether it is better than the mean random order at all points between the ends; False without such points."""
        return bool(self._between.any() and self.better[self._between].all())

    def removable(self, rise: float = 0.01) -> int:
        """The largest number of heads, at these points, that can be removed in this order with the loss at most `rise`
        (0.01 is 1 %) above that of the whole model."""
        over = np.flatnonzero(~(self.loss <= self.loss[0] * (1 + rise)))  # NaN is not within it
        return int(self.removed[max(0, over[0] - 1)] if len(over) else self.removed[-1])

    @property
    def _between(self) -> np.ndarray:
        return (self.removed > 0) & (self.removed < self.total)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        errors = [None if np.isnan(x) else float(x) for x in self.errors]
        return {
            "method": self.method, "by": self.by, "order": [list(head) for head in self.order],
            "removed": self.removed.tolist(), "kept": self.kept.tolist(), "loss": self.loss.tolist(),
            "errors": errors, "random": self.random.tolist(), "better": self.better.tolist(),
            "better_than_all": self.better_than_all.tolist(), "better_everywhere": self.better_everywhere,
            "removable_at_1_percent": self.removable(),
        }  # fmt: skip

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """Header and cells, one row a point."""
        head = ["kept", "last removed", "loss", "rise", "±", "random", "least", "most", "better"]
        body = []
        for i, gone in enumerate(self.removed):
            chance = self.random[:, i]
            against = ["—"] * 4
            if self._between[i]:
                word = "than all" if self.better_than_all[i] else "than mean" if self.better[i] else "no"
                against = [f"{chance.mean():.4f}", f"{chance.min():.4f}", f"{chance.max():.4f}", word]
            error = "" if np.isnan(self.errors[i]) else f"{100 * self.errors[i] / self.loss[0]:.2g} %"
            rise = f"{100 * (self.loss[i] / self.loss[0] - 1):+.2f} %"
            last = head_name(*self.order[gone - 1]) if gone else ""
            body.append([str(self.kept[i]), last, f"{self.loss[i]:.4f}", rise, error, *against])
        return head, body

    @property
    def title(self) -> str:
        """One line: what was removed, and how it compares with random orders."""
        count, points, gone = len(self.random_losses), int(self._between.sum()), self.removable()
        heads = f"all {gone} heads" if gone == self.total else f"{gone} of {self.total} heads"
        return (
            f"heads removed by {self.method} (by={self.by!r}), and in {count} random orders; {heads} can be "
            f"removed for less than 1 % more loss; better than the average random order at "
            f"{int(self.better.sum())} of {points} points, and than all of them at {int(self.better_than_all.sum())}"
        )


def pruning_curve(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFunction,
    order: HeadImportance | Sequence[Head],
    *,
    by: str = "zero",
    points: Sequence[int] | None = None,
    random_orders: int = 5,
    seed: int = 0,
    reference: Iterable[Any] | None = None,
    sites: Sequence[HeadSite] | None = None,
    progress: Progress | None = None,
) -> PruningCurve:
    """The loss as heads are removed one after the other, in the given order and in random orders.

    The model is not trained in between, and the order is not updated after each step. Use other batches than those that
    the order was computed on. Heads are masked, so any order can empty a layer, which then outputs its bias alone; at
    the last point all are empty. `prune`, which deletes heads, leaves at least one.

    Args:
        model, batches, loss_fn, by, reference, sites, progress: as in `ablation_importance`.
        order: a `HeadImportance`, whose least important head is removed first, or all heads (layer, head) in the order
            of removal.
        points: numbers of heads removed at which the loss is computed; from 0 to all by default. 0 is always included.
        random_orders: their number; order r is drawn with seed + r. With by="resample" the donors are drawn with
            `seed`, the same for all orders.
    Returns:
        A `PruningCurve`.
    Raises:
        ConfigError, ShapeError: naming the argument, or the heads whose loss is not finite.
    Source: Michel et al. 2019, 1905.10650, §4 (figure 3), compared with random orders.
    """
    kept, places = checked_inputs(model, batches, loss_fn, sites)
    gone = checked_heads(order.order() if isinstance(order, HeadImportance) else order, places, "order")
    total = sum(site.num_heads for site in places)
    if len(gone) != total:
        raise ConfigError(f"order: {len(gone)} heads of {total}; expected all of them, in the order of removal")
    wanted = sorted({0, *range(total + 1)} if points is None else {0, *points})
    if wanted[0] < 0 or wanted[-1] > total:
        raise ConfigError(f"points: expected numbers from 0 to {total} heads removed, got {wanted[0]} to {wanted[-1]}")
    if random_orders < 1:
        raise ConfigError(f"random_orders={random_orders}: expected at least 1")
    orders = [gone]
    for r in range(random_orders):
        shuffled = np.random.default_rng(seed + r).permutation(total)
        orders.append([gone[i] for i in shuffled])
    sets = [heads[:count] for heads in orders for count in wanted[1:]]
    removal = Removal(by, places, reference, 1, seed)
    whole, *without = removal.losses(model, loss_fn, kept, sets, progress).T
    found = np.empty((len(orders), len(wanted), len(kept)))
    found[:, 0], found[:, 1:] = whole, np.reshape(without, (len(orders), len(wanted) - 1, len(kept)))
    method = order.method if isinstance(order, HeadImportance) else "a given order"
    return PruningCurve(tuple(gone), method, by, np.array(wanted), total, found[0], found[1:])


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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NaN where all samples are
        low, high = np.nanpercentile(np.stack(picked), edges, axis=0)
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
