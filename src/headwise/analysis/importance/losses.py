"""The losses of a model that is not changed, and how much each of its heads matters to them."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headwise.analysis.checks import head_name
from headwise.base.run import Progress
from headwise.errors import ConfigError, ShapeError
from headwise.models.find import find_heads
from headwise.models.hooks import call_of
from headwise.models.site import Change, HeadSite, record_heads, tapped
from headwise.table import HeadColumn, HeadTable
from headwise.table.show import grid, numbers

Head = tuple[int, int]  # layer and head, counted from 0 as in `find_heads`
_MOST = 5  # heads in the title


@dataclass(frozen=True)
class HeadImportance:
    """How much each head matters to a loss, by one method: a `HeadTable` with its samples.

    Attributes:
        table: one column, named after the method; larger is more important. Its layers are named as in `find_heads`.
            Means of `samples` have their standard errors, NaN for one sample. `one.table.merge(other.table)` puts
            several methods side by side.
        samples: [batches (or rows), heads of all layers]; the values are their mean (or its absolute value).
        loss: mean loss of the unchanged model; NaN if unknown.
    """

    table: HeadTable
    samples: np.ndarray | None
    loss: float

    @classmethod
    def of(
        cls,
        method: str,
        unit: str,
        names: Sequence[str],
        values: Sequence[np.ndarray],
        errors: Sequence[np.ndarray] | None = None,
        *,
        samples: np.ndarray | None = None,
        loss: float = float("nan"),
    ) -> "HeadImportance":
        """Make one from values [heads] for each layer, with standard errors of the same shapes."""
        column = HeadColumn(values, unit=unit, description="Larger is more important.", error=errors)
        return cls(HeadTable({method: column}, layers=names), samples, loss)

    @property
    def method(self) -> str:
        """The name of the table's column."""
        return next(iter(self.table))

    @property
    def column(self) -> HeadColumn:
        """The values: `importance.column[layer][head]`, and their `error`."""
        return self.table[self.method]

    @property
    def flat(self) -> np.ndarray:
        """The values of all layers, concatenated."""
        return self.column.flat.numpy().copy()

    def order(self) -> list[Head]:
        """All heads, the least important first; equal ones in the order of the model.

            hw.edit.prune(model, importance.order()[:2])        # the two that matter least

        `prune` numbers the layers of the whole model, as importance does without `sites=`.
        """
        return list(self.table.sort(self.method, descending=False).places)

    def normalised(self) -> "HeadImportance":
        """Each layer divided by the Euclidean norm of its values, so that layers are comparable (Michel et al. 2019,
        after Molchanov et al. 2017); zeros are unchanged. Without samples, as they are not those of the quotients."""
        norms = [float(row.norm()) or 1.0 for row in self.column]

        def over(rows: Iterable[Tensor]) -> list[np.ndarray]:
            return [row.numpy() / norm for row, norm in zip(rows, norms, strict=True)]

        error = self.column.error
        return HeadImportance.of(
            f"{self.method}, by layer", "share of the layer's norm", self.table.layers, over(self.column),
            None if error is None else over(error), loss=self.loss,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """For JSON: `HeadTable.to_dict`, with method and loss; NaN becomes None."""
        loss = None if np.isnan(self.loss) else self.loss
        return {"method": self.method, "loss": loss, **self.table.to_dict()}

    @property
    def title(self) -> str:
        """One line: the method, and the largest values with their standard errors."""
        top = self.table.top(self.method, _MOST)
        words = zip(top.places, numbers(top[self.method]), strict=True)
        loss = "" if np.isnan(self.loss) else f"; loss {self.loss:.4f}"
        most = ", ".join(f"{head_name(*head)} {word}" for head, word in words)
        return f"{self.method} ({self.column.unit}{loss}); most: {most}"

    def __repr__(self) -> str:
        return f"{self.title}\n{grid(self.table.layers, self.table.heads, self.column)}"

    def _repr_html_(self) -> str:
        return self.table.titled(self.title)._repr_html_()


def from_samples(
    method: str, unit: str, sites: Sequence[HeadSite], samples: np.ndarray, loss: float, *, absolute: bool = False
) -> HeadImportance:
    """Means of samples [count, heads of all layers] with their standard errors; with `absolute`, absolute values."""
    mean = samples.mean(0)
    values, errors = by_layer(np.abs(mean) if absolute else mean, sites), by_layer(standard_error(samples), sites)
    return HeadImportance.of(method, unit, [site.name for site in sites], values, errors, samples=samples, loss=loss)


def by_layer(flat: np.ndarray, sites: Sequence[HeadSite]) -> tuple[np.ndarray, ...]:
    """Values of all heads, split into layers."""
    ends = np.cumsum([site.num_heads for site in sites])[:-1]
    return tuple(np.split(np.asarray(flat, dtype=np.float64), ends))


def standard_error(samples: np.ndarray) -> np.ndarray:
    """Standard error of the mean over the first axis; NaN for one sample."""
    count = len(samples)
    return samples.std(0, ddof=1) / np.sqrt(count) if count > 1 else np.full(samples.shape[1:], np.nan)


LossFunction = Callable[[nn.Module, Any], Tensor]  # (model, batch) → the batch's mean loss, one number
RUNNING = "running the model"  # what is reported to `progress=`


@contextmanager
def held_still(model: nn.Module) -> Iterator[None]:
    """Context in which the model is in eval mode without gradients of its weights; restores all modules and weights."""
    modes = [(module, module.training) for module in model.modules()]
    required = [(weight, weight.requires_grad) for weight in model.parameters()]
    try:
        model.eval()
        for weight, _ in required:
            weight.requires_grad_(False)
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for weight, before in required:
            weight.requires_grad_(before)


@contextmanager
def changed(sites: Sequence[HeadSite], changes: dict[int, Change]) -> Iterator[None]:
    """Context in which changes[i] is applied between the heads of sites[i] and their output projection."""
    with ExitStack() as stack:
        for layer, change in changes.items():
            stack.enter_context(tapped(sites[layer], change))
        yield


def checked_inputs(
    model: nn.Module, batches: Iterable[Any], loss_fn: LossFunction, sites: Sequence[HeadSite] | None
) -> tuple[list[Any], list[HeadSite]]:
    """The batches as a list, since they are iterated several times, and the sites of the heads, all by default. Where
    the model has none of a known kind, they are recognised in the first call of the model that loss_fn makes."""
    kept = list(batches)
    if not kept:
        raise ConfigError("batches: got none; expected at least one")
    if sites is None:
        try:
            sites = find_heads(model)
        except ConfigError as error:
            try:
                with held_still(model), torch.no_grad():
                    batch = call_of(model, lambda: loss_fn(model, kept[0]))
            except Exception as raised:
                raise ConfigError(f"{error}; loss_fn raises {type(raised).__name__}: {raised}") from raised
            sites = find_heads(model, batch)
    places = list(sites)
    if not places:
        raise ConfigError("sites: got none; leave it out for all heads of the model")
    return kept, places


class Losses:
    """Losses of a model on batches, each one finite number; otherwise an error names the head that is not finite."""

    def __init__(
        self, model: nn.Module, loss_fn: LossFunction, sites: Sequence[HeadSite], total: int, progress: Progress | None
    ) -> None:
        self.model, self.loss_fn, self.sites = model, loss_fn, sites
        self.done, self.total, self.progress = 0, total, progress

    def of(self, batch: Any, number: int, with_what: str = "") -> Tensor:
        """The loss of batch `number`, with its graph if gradients are on."""
        loss = self.loss_fn(self.model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ShapeError(
                f"loss_fn: returned {what} for batch {number}; expected a tensor of one number, the mean loss"
            )
        if not math.isfinite(float(loss.detach())):
            where = with_what or self._culprit(batch)
            raise ConfigError(
                f"loss_fn: returned {float(loss.detach())} for batch {number}{where}; expected a finite number"
            )
        self.done += 1
        if self.progress is not None:
            self.progress(RUNNING, self.done, self.total)
        return loss.reshape(())

    def value(self, batch: Any, number: int, changes: dict[int, Change], with_what: str = "") -> float:
        """The loss as a number, with changed heads."""
        with torch.no_grad(), changed(self.sites, changes):
            return float(self.of(batch, number, with_what))

    def _culprit(self, batch: Any) -> str:
        """The first head whose output is not finite, in words."""
        with torch.no_grad(), record_heads(self.sites) as outputs:
            self.loss_fn(self.model, batch)
        for layer, output in enumerate(outputs):
            bad = ~output.isfinite().all(-1).all(-1).all(0)
            if bool(bad.any()):
                head = int(bad.nonzero()[0])
                return f"; the first output that is not finite is that of {called(self.sites, layer, head)}"
        return "; the outputs of all heads are finite"


def called(sites: Sequence[HeadSite], layer: int, head: int) -> str:
    """The name of a head with its module."""
    return f"{head_name(layer, head)} ({sites[layer].name!r})"


def not_called(site: HeadSite) -> ConfigError:
    """The error for a site that the model does not call."""
    return ConfigError(
        f"sites: {site.name!r} is never called by loss_fn, so its heads cannot be scored; give sites= without it"
    )
