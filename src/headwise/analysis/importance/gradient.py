"""Importance by one backward pass a batch: how the loss changes when a head's output is scaled.

The output o_t of a head at token t, [d_v], is multiplied by a mask ξ = 1. By the chain rule,

    ∂L/∂ξ = Σ_t o_t · ∂L/∂o_t,

which is also the first-order Taylor estimate of L − L(ξ = 0).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headwise.analysis.importance.losses import (
    Losses,
    LossFunction,
    called,
    changed,
    checked_inputs,
    held_still,
    not_called,
)
from headwise.analysis.importance.values import HeadImportance, from_samples
from headwise.errors import ConfigError, check_choice
from headwise.models.site import Change, HeadSite
from headwise.progress import Progress


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
    """`reduce` applied to the gradients of all masks for each batch [samples, all heads], the mean loss, and the sites.
    A mask is [1, …, h], [rows, 1, …, h] or [rows, …, n, h] for the grain "batch", "row" or "token"."""
    kept, places = checked_inputs(model, batches, sites)
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
