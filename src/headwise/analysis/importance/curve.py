"""The loss against the heads that are kept: whether an order of importance is better than chance."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from headwise.analysis.checks import head_name
from headwise.analysis.importance.losses import Losses, LossFunction, asked, held_still
from headwise.analysis.importance.removal import Removal, checked_heads
from headwise.analysis.importance.values import Head, HeadImportance, standard_error
from headwise.errors import ConfigError
from headwise.models.site import HeadSite
from headwise.progress import Progress
from headwise.table.show import Printed


@dataclass(frozen=True, repr=False)
class PruningCurve(Printed):
    """Losses while heads go, in the order asked for and in random ones.

    Attributes:
        order: the heads, the first to go first. method: where the order came from. by: what they became.
        removed: [points] heads gone, from 0. total: heads there are.
        losses: [points, batches] in the order asked for; random_losses: [orders, points, batches] in random ones.
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
        """[points] heads left."""
        return self.total - self.removed

    @property
    def loss(self) -> np.ndarray:
        """[points], mean over batches."""
        return self.losses.mean(1)

    @property
    def errors(self) -> np.ndarray:
        """[points], standard error of the rise over the whole model's loss, batch by batch; NaN for one batch."""
        return standard_error((self.losses - self.losses[:1]).T)

    @property
    def random(self) -> np.ndarray:
        """[orders, points], mean over batches."""
        return self.random_losses.mean(2)

    @property
    def better(self) -> np.ndarray:
        """[points] bool: less than the mean of the random orders. False at both ends, where all orders are one."""
        return self._between & (self.loss < self.random.mean(0))

    @property
    def better_than_all(self) -> np.ndarray:
        """[points] bool: less than every random order. False at both ends."""
        return self._between & (self.loss < self.random.min(0))

    @property
    def better_everywhere(self) -> bool:
        """Whether it is better than the mean random order at every point between the ends (and there is one)."""
        return bool(self._between.any() and self.better[self._between].all())

    def removable(self, rise: float = 0.01) -> int:
        """The most heads that can go, in this order and at these points, before the loss is more than `rise` (0.01:
        one hundredth) above the whole model's."""
        over = np.flatnonzero(self.loss > self.loss[0] * (1 + rise))
        return int(self.removed[over[0] - 1] if len(over) else self.removed[-1])

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
        """Header and cells, a row a point."""
        head = ["kept", "last to go", "loss", "rise", "±", "random", "least", "most", "better"]
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
        """What the table shows, and what comes of it."""
        count, points, gone = len(self.random_losses), int(self._between.sum()), self.removable()
        heads = f"all {gone} heads" if gone == self.total else f"{gone} of {self.total} heads"
        return (
            f"heads removed by {self.method} (by={self.by!r}), and in {count} random orders; {heads} can go with the "
            f"loss less than 1 % up; better than the average random order at {int(self.better.sum())} of {points} "
            f"points, and than all of them at {int(self.better_than_all.sum())}"
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
    """The loss as heads are taken away one after the other, and the same in random orders.

    Nothing is trained again in between, and the order is fixed beforehand, not made anew after each step. Judge it on
    batches other than those that it was made on. Heads are masked, so an order, a random one too, may empty a layer,
    which then gives its output bias alone; at the last point all are empty. `prune`, which takes heads out, leaves one.

    Args:
        model, batches, loss_fn, by, reference, sites, progress: as in `ablation_importance`.
        order: a HeadImportance, of which the least important head goes first; or all heads (layer, head), the first
            to go first.
        points: numbers of heads removed at which the loss is asked for; every one from 0 to all by default. 0 is
            always asked for.
        random_orders: how many, order r drawn with seed + r. With by="resample" the donors are drawn with `seed`, the
            same for all orders.
    Returns:
        A `PruningCurve`.
    Raises:
        ConfigError, ShapeError: naming the argument, or the heads whose loss is not finite.
    Source: Michel et al. 2019, 1905.10650, §4 (figure 3), with random orders beside it.
    """
    kept, places = asked(model, batches, sites)
    gone = checked_heads(order.order() if isinstance(order, HeadImportance) else order, places, "order")
    total = sum(site.num_heads for site in places)
    if len(gone) != total:
        raise ConfigError(f"order: {len(gone)} heads of {total}; expected all of them, the first to go first")
    wanted = sorted({0, *range(total + 1)} if points is None else {0, *points})
    if wanted[0] < 0 or wanted[-1] > total:
        raise ConfigError(f"points: expected numbers from 0 to {total} heads removed, got {wanted[0]} to {wanted[-1]}")
    if random_orders < 1:
        raise ConfigError(f"random_orders={random_orders}: expected at least 1, to compare with")
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
    method = order.method if isinstance(order, HeadImportance) else "an order that was given"
    return PruningCurve(tuple(gone), method, by, np.array(wanted), total, found[0], found[1:])
