"""Importance by gradients: of one backward pass a batch, or of gates that are learned.

The output o_t of a head at token t, [d_v], is multiplied by a mask ξ = 1. By the chain rule, ∂L/∂ξ = Σ_t o_t · ∂L/∂o_t,
which is also the first-order Taylor estimate of L − L(ξ = 0).

A hard concrete gate is sampled at each step from the parameter log α of the head and u ~ U(0, 1):

    s = σ((log u − log(1 − u) + log α) / β),   z = min(1, max(0, s (ζ − γ) + γ))

z is 0 or 1 with a probability above 0 and differentiable between them. The objective is the loss with all heads
multiplied by their z, plus λ Σ P(z ≠ 0), where P(z ≠ 0) = σ(log α − β log(−γ/ζ)).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headwise.analysis.importance.ablation import Removal
from headwise.analysis.importance.losses import (
    Head,
    HeadImportance,
    Losses,
    LossFunction,
    called,
    changed,
    checked_inputs,
    from_samples,
    held_still,
    not_called,
)
from headwise.base.run import Progress, devices_of, seeded, step_seed
from headwise.errors import ConfigError, check_choice
from headwise.models.site import Change, HeadSite, scale_heads
from headwise.table import HeadColumn, HeadTable
from headwise.table.show import Printed


def gradient_importance(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFunction,
    *,
    absolute: str = "each",
    per: str = "batch",
    sites: Sequence[HeadSite] | None = None,
    progress: Progress | None = None,
) -> HeadImportance:
    """|∂L/∂ξ_h| for every head, with a factor ξ_h = 1 on its output.

    Args:
        model: any that `find_heads` supports; it runs in eval mode and is unchanged afterwards.
        batches: iterated once; x below is one of them.
        loss_fn: (model, batch) → the batch's mean loss, a tensor of one number.
        absolute: "each" for E_x|∂L/∂ξ_h| (Michel et al.), "mean" for |E_x ∂L/∂ξ_h|: gradients of opposite signs in
            different batches add up in the first and cancel in the second.
        per: "batch", or "row", for which x is a row of a batch. "row" requires a loss that is a mean over rows of equal
            weight (as many tokens), and a model that keeps the batch as the first axis.
        sites: of `find_heads(model)` to score; all by default.
        progress: called after each run of the model.
    Returns:
        `HeadImportance` in the unit of the loss; `normalised()` divides each layer by its norm, as Michel et al. do.
        With "each", values depend on the size of x: the rows of a larger batch cancel more.
    Raises:
        ConfigError, ShapeError: naming the argument, or the layer and head with a non-finite gradient.
    Source: Michel et al. 2019, 1905.10650, eq. 2.
    """
    check_choice("absolute", absolute, ("each", "mean"))
    check_choice("per", per, ("batch", "row"))

    def own(calls: list[list[Tensor]]) -> Tensor:
        rows = torch.cat([torch.stack(masks).sum(0).flatten(0, -2) for masks in calls], -1)  # [rows or 1, all heads]
        return rows * len(rows)  # the loss is a mean over rows: undo the division

    signed, loss, places = _passes(model, batches, loss_fn, sites, per, own, progress)
    method = "gradient, E|dL/dξ|" if absolute == "each" else "gradient, |E dL/dξ|"
    method += " by rows" if per == "row" else ""
    found = np.abs(signed) if absolute == "each" else signed
    return from_samples(method, "loss", places, found, loss, absolute=absolute == "mean")


def taylor_importance(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFunction,
    *,
    sites: Sequence[HeadSite] | None = None,
    progress: Progress | None = None,
) -> HeadImportance:
    """E_x Σ_t |o_t · ∂L/∂o_t| for every head: the first-order Taylor estimate for each token.

    |o_t · ∂L/∂o_t| estimates the change of the loss if the head is zeroed at token t alone. Without the absolute value
    the sum is ∂L/∂ξ_h, so this is at least `gradient_importance(absolute="each")`, and equal if all tokens have the
    same sign: a head that helps some tokens and harms others as much is important here but not there.

    Args:
        model, batches, loss_fn, sites, progress: as in `gradient_importance`.
    Returns:
        HeadImportance in the loss's unit; errors as in `gradient_importance`.
    Source: Molchanov et al. 2017, 1611.06440, eqs. 6–8, with a head at a token in the place of an activation.
    """

    def summed(calls: list[list[Tensor]]) -> Tensor:
        return torch.cat([torch.cat([mask.flatten(0, -2) for mask in masks]).abs().sum(0) for masks in calls])[None]

    samples, loss, places = _passes(model, batches, loss_fn, sites, "token", summed, progress)
    return from_samples("taylor, E Σ|o·dL/do|", "loss", places, samples, loss)


def _passes(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFunction,
    sites: Sequence[HeadSite] | None,
    grain: str,
    reduce: Callable[[list[list[Tensor]]], Tensor],
    progress: Progress | None,
) -> tuple[np.ndarray, float, list[HeadSite]]:
    """`reduce` of the gradients of all masks for each batch [samples, all heads], the mean loss, and the sites. A mask
    is [1, …, h], [rows, 1, …, h] or [rows, …, n, h] for the grain "batch", "row" or "token"."""
    kept, places = checked_inputs(model, batches, loss_fn, sites)
    losses = Losses(model, loss_fn, places, len(kept), progress)
    samples, total = [], 0.0
    with held_still(model), torch.enable_grad():
        for number, batch in enumerate(kept):
            masks: list[list[Tensor]] = [[] for _ in places]
            with changed(places, {i: _masked(site, grain, masks[i]) for i, site in enumerate(places)}):
                loss = losses.of(batch, number)
            samples.append(reduce(_gradients(loss, masks, places, number)).cpu().numpy())
            total += float(loss.detach())
    return np.concatenate(samples), total / len(kept), places


def _masked(site: HeadSite, grain: str, masks: list[Tensor]) -> Change:
    """A change that multiplies heads by ones, appended to `masks` for each call of the site."""

    def change(concat: Tensor) -> Tensor:
        if grain == "row" and concat.ndim < 3:
            raise ConfigError(f"per='row': the heads of {site.name!r} have no axis of rows; use per='batch'")
        own_axes = {"batch": 0, "row": 1, "token": concat.ndim - 1}[grain]  # axes with separate masks
        shape = (*concat.shape[:own_axes], *[1] * (concat.ndim - 1 - own_axes), site.num_heads)
        mask = torch.ones(shape, dtype=concat.dtype, device=concat.device, requires_grad=True)
        masks.append(mask)
        return (concat.unflatten(-1, (site.num_heads, site.value_dim)) * mask[..., None]).flatten(-2)

    return change


def _gradients(loss: Tensor, masks: list[list[Tensor]], sites: list[HeadSite], number: int) -> list[list[Tensor]]:
    """∂L/∂mask in float64, a list of calls for each site; zeros where the loss does not depend on a head."""
    for site, calls in zip(sites, masks, strict=True):
        if not calls:
            raise not_called(site)
    if not loss.requires_grad:
        raise ConfigError(
            "loss_fn: its result has no gradient with respect to the heads; it must not run the model under "
            "torch.no_grad(), nor detach its outputs"
        )
    each = [mask for calls in masks for mask in calls]
    parts = iter(torch.autograd.grad(loss, each, allow_unused=True, materialize_grads=True))
    found = [[next(parts).double() for _ in calls] for calls in masks]
    for layer, calls in enumerate(found):
        for gradient in calls:
            bad = ~gradient.isfinite().flatten(0, -2).all(0)
            if bool(bad.any()):
                who = called(sites, layer, int(bad.nonzero()[0]))
                raise ConfigError(f"loss_fn: the gradient of {who} is not finite for batch {number}")
    return found


KEPT = 0.5  # a head that is open less often is closed
_EDGE = 1e-6  # distance of u from 0 and 1, for finite logarithms


@dataclass(frozen=True)
class HardConcrete:
    """The distribution of a gate: Louizos et al. 2018, 1712.01312, eqs. 10–12, with their values by default.

    Attributes:
        temperature: β; smaller values are closer to 0 or 1, with gradients of higher variance.
        low, high: γ and ζ, the ends of the stretched interval, below 0 and above 1.
    """

    temperature: float = 2.0 / 3.0
    low: float = -0.1
    high: float = 1.1

    def __post_init__(self) -> None:
        if not 0.0 < self.temperature <= 1.0:
            raise ConfigError(f"temperature={self.temperature}: expected more than 0 and at most 1")
        if not (self.low < 0.0 and self.high > 1.0):
            raise ConfigError(f"low={self.low}, high={self.high}: expected low < 0 and high > 1")

    def draw(self, log_alpha: Tensor, uniform: Tensor) -> Tensor:
        """z of each gate from uniform numbers in (0, 1); differentiable in log α."""
        u = uniform.clamp(_EDGE, 1.0 - _EDGE)
        return self._stretched(((u.log() - (-u).log1p() + log_alpha) / self.temperature).sigmoid())

    def settled(self, log_alpha: Tensor) -> Tensor:
        """The deterministic gate after training: min(1, max(0, σ(log α)(ζ − γ) + γ))."""
        return self._stretched(log_alpha.sigmoid())

    def open(self, log_alpha: Tensor) -> Tensor:
        """P(z ≠ 0)."""
        return (log_alpha - self.temperature * math.log(-self.low / self.high)).sigmoid()

    def log_alpha(self, probability: float) -> float:
        """The log α at which P(z ≠ 0) is `probability`."""
        return math.log(probability / (1.0 - probability)) + self.temperature * math.log(-self.low / self.high)

    def _stretched(self, s: Tensor) -> Tensor:
        return (s * (self.high - self.low) + self.low).clamp(0.0, 1.0)


@dataclass(frozen=True, repr=False)
class LearnedGates(Printed):
    """The gates of all heads after training.

    Attributes:
        table: "open", P(z ≠ 0) of each head; "log_alpha", the parameters; "gate", the settled gate, 0 to 1.
        penalty: λ, the price of an open head.
        history: [steps, 2]: loss of the step's batch with the drawn gates, and the expected number of open heads.
        whole, without: [batches], loss with all heads, and with the closed ones masked and the others unchanged.
    """

    table: HeadTable
    penalty: float
    history: np.ndarray
    whole: np.ndarray
    without: np.ndarray

    def kept(self, at_least: float = KEPT) -> list[Head]:
        """(layer, head) of the heads that are open with at least this probability."""
        return list(self.table.select(where=self.table.column("open") >= at_least).places)

    def removed(self, below: float = KEPT) -> list[Head]:
        """(layer, head) of the heads that are open with less than this probability, as `hw.edit.prune` takes them."""
        return list(self.table.select(where=~(self.table.column("open") >= below)).places)

    @property
    def importance(self) -> HeadImportance:
        """log α as an importance: it orders heads as P(z ≠ 0) does, and does not saturate."""
        loss = float(self.whole.mean())
        values = [row.numpy() for row in self.table["log_alpha"]]
        return HeadImportance.of("L0 gates", "log α", self.table.layers, values, loss=loss)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **self.table.to_dict(), "penalty": self.penalty, "kept": [list(head) for head in self.kept()],
            "whole_loss": float(self.whole.mean()), "kept_loss": float(self.without.mean()),
            "history": self.history.tolist(),
        }  # fmt: skip

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """Header and cells: P(z ≠ 0), a row a layer, a column a head; ● marks a head that is kept."""
        kept, most = set(self.kept()), max(map(len, self.table.heads))
        body = [
            [
                f"L{i} {name}".rstrip(),
                *(f"{p:.2f} {'●' if (i, h) in kept else '·'}" for h, p in enumerate(row)),
            ]
            + [""] * (most - len(row))
            for i, (name, row) in enumerate(zip(self.table.layers, map(Tensor.tolist, self.table["open"]), strict=True))
        ]
        return ["layer", *(f"H{head}" for head in range(most))], body

    @property
    def title(self) -> str:
        """The price, the number of heads kept, and the losses."""
        total = len(self.table.places)
        return (
            f"probability that a head is open, at a price of {self.penalty:g} a head; {len(self.kept())} of {total} "
            f"kept (●): loss {self.without.mean():.4f}, of the whole model {self.whole.mean():.4f}"
        )


def learn_gates(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFunction,
    penalty: float,
    *,
    steps: int = 500,
    lr: float = 0.05,
    start: float = 0.9,
    gate: HardConcrete = HardConcrete(),
    optimizer: torch.optim.Optimizer | None = None,
    seed: int = 0,
    sites: Sequence[HeadSite] | None = None,
    progress: Progress | None = None,
) -> LearnedGates:
    """Learn which heads are worth their price: minimise loss + penalty · (expected open heads) over gates of the heads.

    Args:
        model: any that `find_heads` supports. Its weights are unchanged, and it runs in eval mode; with `optimizer`
            they are trained too, in the current mode of the model.
        batches: one a step, shuffled for each round.
        loss_fn: (model, batch) to the batch's mean loss, a tensor of one number.
        penalty: λ, in the loss's unit: a head is closed if it reduces the loss by less. 0 keeps harmless heads.
        steps: of Adam on log α, with the learning rate `lr`.
        start: initial P(z ≠ 0) of every head.
        gate: the distribution; β = 2/3, γ = −0.1, ζ = 1.1 by default (Louizos et al.). The code published with Voita
            et al. has β = 0.33.
        optimizer: of the model's weights (or some of them), stepped with the gates, as Voita et al. do.
        seed: of the drawn gates, of the order of the batches, and of the model's own dropout with `optimizer`.
        sites: of `find_heads(model)` that get gates; all by default.
        progress: called after each run of the model.
    Returns:
        `LearnedGates`; `kept()` and `removed()` list heads, `importance` compares with other methods.
    Raises:
        ConfigError, ShapeError: naming the argument, or the step with a non-finite loss.
    Source: Louizos et al. 2018, 1712.01312, §2.2; Voita et al. 2019, 1905.09418, §5 (one gate a head; they start from
        a trained model too).
    """
    if not (penalty >= 0.0 and math.isfinite(penalty)):
        raise ConfigError(f"penalty={penalty}: expected a finite number of at least 0")
    if steps < 1 or not lr > 0.0:
        raise ConfigError(f"steps={steps}, lr={lr}: expected at least 1, and more than 0")
    if not 0.0 < start < 1.0:
        raise ConfigError(f"start={start}: expected a probability between 0 and 1")
    kept, places = checked_inputs(model, batches, loss_fn, sites)
    losses = Losses(model, loss_fn, places, 1 + steps + 2 * len(kept), progress)
    removal = Removal("zero", places, None, 1, seed)
    device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
    sizes = [site.num_heads for site in places]
    log_alpha = torch.full((sum(sizes),), gate.log_alpha(start), device=device, requires_grad=True)
    removal.measured(losses, kept[:1], [])  # raises for unusable inputs before the steps
    with nullcontext() if optimizer is not None else held_still(model):
        history = _learn(losses, kept, log_alpha, sizes, penalty, steps, lr, gate, optimizer, seed)
    settled = log_alpha.detach()
    columns = {
        "open": HeadColumn(gate.open(settled).cpu().split(sizes), unit="probability", description="P(z ≠ 0)"),
        "log_alpha": HeadColumn(settled.cpu().split(sizes), description="log α"),
        "gate": HeadColumn(gate.settled(settled).cpu().split(sizes), range="0 to 1", description="settled gate"),
    }
    whole, without = np.empty(len(kept)), np.empty(len(kept))
    table = HeadTable(columns, layers=[site.name for site in places], title="L0 gates")
    found = LearnedGates(table, penalty, history, whole, without)
    whole[:], without[:] = removal.measured(losses, kept, [found.removed()]).T
    return found


def _learn(
    losses: Losses,
    batches: list[Any],
    log_alpha: Tensor,
    sizes: list[int],
    penalty: float,
    steps: int,
    lr: float,
    gate: HardConcrete,
    optimizer: torch.optim.Optimizer | None,
    seed: int,
) -> np.ndarray:
    """Train log_alpha in place; return the history as in `LearnedGates`."""
    generator = torch.Generator().manual_seed(seed)
    adam = torch.optim.Adam([log_alpha], lr=lr)
    history = np.empty((steps, 2))
    devices = devices_of(losses.model)
    order: list[int] = []
    for step in range(steps):
        order = order or torch.randperm(len(batches), generator=generator).tolist()
        number = order.pop()
        uniform = torch.rand(len(log_alpha), generator=generator).to(log_alpha.device)
        with torch.enable_grad():
            drawn = gate.draw(log_alpha, uniform)
            with seeded(step_seed(seed, step), devices):
                with scale_heads(losses.sites, drawn.split(sizes)):
                    loss = losses.of(batches[number], number, f", at step {step} of the gates")
                opened = gate.open(log_alpha).sum()
                adam.zero_grad()
                if optimizer is not None:
                    optimizer.zero_grad()
                (loss + penalty * opened).backward()
        adam.step()
        if optimizer is not None:
            optimizer.step()
        history[step] = float(loss.detach()), float(opened.detach())
    if optimizer is not None:
        optimizer.zero_grad()
    return history
