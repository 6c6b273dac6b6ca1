"""Run a model on batches without changing it, and check its losses."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.checks import head_name
from headwise.errors import ConfigError, ShapeError
from headwise.models.find import find_heads
from headwise.models.site import Change, HeadSite
from headwise.models.taps import record_heads, tapped
from headwise.progress import Progress

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
    model: nn.Module, batches: Iterable[Any], sites: Sequence[HeadSite] | None
) -> tuple[list[Any], list[HeadSite]]:
    """The batches as a list, since they are iterated several times, and the sites of the heads, all by default."""
    kept = list(batches)
    if not kept:
        raise ConfigError("batches: got none; expected at least one")
    places = list(find_heads(model) if sites is None else sites)
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
