"""The loss by the number of heads kept: whether an order of importance is better than chance."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from headwise.analysis.checks import head_name
from headwise.analysis.importance.ablation import Removal, checked_heads
from headwise.analysis.importance.losses import Losses, LossFunction, checked_inputs, held_still
from headwise.analysis.importance.values import Head, HeadImportance, standard_error
from headwise.errors import ConfigError
from headwise.models.site import HeadSite
from headwise.progress import Progress
from headwise.table.show import Printed


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
    kept, places = checked_inputs(model, batches, sites)
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
    removal = Removal(by, places, reference, 1, seed)
    losses = Losses(model, loss_fn, places, removal.runs(kept, len(orders) * (len(wanted) - 1)), progress)
    found = np.empty((len(orders), len(wanted), len(kept)))
    with held_still(model):
        removal.learn(losses, kept)
        for number, batch in enumerate(kept):
            found[:, 0, number] = removal.whole(losses, batch, number)
            for o, heads in enumerate(orders):
                for p, count in enumerate(wanted[1:], 1):
                    found[o, p, number] = removal.without(losses, batch, number, heads[:count])
    method = order.method if isinstance(order, HeadImportance) else "a given order"
    return PruningCurve(tuple(gone), method, by, np.array(wanted), total, found[0], found[1:])
