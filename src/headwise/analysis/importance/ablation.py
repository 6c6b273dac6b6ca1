"""Importance by ablation: the loss with a head zeroed, averaged or resampled, minus the loss of the whole model."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from torch import nn

from headwise.analysis.importance.losses import Losses, LossFunction, checked_inputs, held_still
from headwise.analysis.importance.removal import Removal, checked_heads
from headwise.analysis.importance.values import Head, HeadImportance, from_samples
from headwise.models.site import HeadSite
from headwise.progress import Progress


def ablation_importance(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFunction,
    *,
    by: str = "zero",
    reference: Iterable[Any] | None = None,
    draws: int = 1,
    seed: int = 0,
    sites: Sequence[HeadSite] | None = None,
    progress: Progress | None = None,
) -> HeadImportance:
    """L(without h) − L for every head, one ablated at a time; negative where the model is better without it.

    Args:
        model: any that `find_heads` supports; it runs in eval mode and is unchanged afterwards.
        batches: each runs once unchanged, and once for every head (and draw).
        loss_fn: (model, batch) → the batch's mean loss, a tensor of one number.
        by: the replacement of a head's output: "zero"; "mean", its mean over all tokens of the reference; "resample",
            its output at the same position of another sequence of the batch. Zeros can be outside the distribution
            that the layers above were trained on; the others are not.
        reference: batches for the mean of "mean", `batches` by default; padding is included.
        draws: of "resample": the number of pairings of the sequences of a batch that are averaged. Draw r of batch i
            pairs them along a random cycle, seeded with seed + 1,000,003 · r + i, so that none is its own donor.
        sites: of `find_heads(model)` to score; all by default.
        progress: called after each run of the model.
    Returns:
        `HeadImportance` in the unit of the loss. `samples` are the paired differences of each batch; the errors of the
        table are the standard errors of their means.
    Raises:
        ConfigError, ShapeError: naming the argument, or the layer and head whose loss is not finite.
    Source: zero: Michel et al. 2019, 1905.10650, §3; mean: Wang et al. 2022, 2211.00593, §2.1; resample: Chan et al.
        2022, causal scrubbing.
    """
    kept, places = checked_inputs(model, batches, sites)
    every = [(layer, head) for layer, site in enumerate(places) for head in range(site.num_heads)]
    removal = Removal(by, places, reference, draws, seed)
    losses = Losses(model, loss_fn, places, removal.runs(kept, len(every)), progress)
    whole = np.empty(len(kept))
    samples = np.empty((len(kept), len(every)))
    with held_still(model):
        removal.learn(losses, kept)
        for number, batch in enumerate(kept):
            whole[number] = removal.whole(losses, batch, number)
            for i, head in enumerate(every):
                samples[number, i] = removal.without(losses, batch, number, [head]) - whole[number]
    return from_samples(f"ablation, {by}", "loss", places, samples, float(whole.mean()))


def losses_without(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFunction,
    heads: Sequence[Head],
    *,
    by: str = "zero",
    reference: Iterable[Any] | None = None,
    draws: int = 1,
    seed: int = 0,
    sites: Sequence[HeadSite] | None = None,
    progress: Progress | None = None,
) -> np.ndarray:
    """The loss of each batch, [batches] float64, with all given heads (layer, head) ablated together.

    Args:
        heads: (layer, head) pairs.
        model, batches, loss_fn, by, reference, draws, seed, sites, progress: as in `ablation_importance`.
    Returns:
        [batches] float64. Layers are numbered as in `find_heads` (or `sites`).
    """
    kept, places = checked_inputs(model, batches, sites)
    gone = checked_heads(heads, places)
    removal = Removal(by, places, reference, draws, seed)
    losses = Losses(model, loss_fn, places, removal.runs(kept, 1), progress)
    found = np.empty(len(kept))
    with held_still(model):
        removal.learn(losses, kept)
        for number, batch in enumerate(kept):
            removal.whole(losses, batch, number)
            found[number] = removal.without(losses, batch, number, gone)
    return found
