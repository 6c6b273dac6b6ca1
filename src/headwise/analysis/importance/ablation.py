"""Importance by taking heads away: the loss with a head silenced, averaged out, or swapped, less the loss with it."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from torch import nn

from headwise.analysis.importance.losses import Losses, LossFunction, asked, held_still
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
    """L(without h) − L of every head, one left out at a time; negative where the model does better without it.

    Args:
        model: any that `find_heads` knows; asked in eval mode, and left as it was.
        batches: each is run once as it is, and once for every head (and draw).
        loss_fn: (model, batch) to the batch's mean loss, a tensor of one number.
        by: what a head's output becomes: "zero"; "mean", its mean over all tokens of the reference; "resample", its
            output at the same position of another sequence of the batch, so that it says what a head says, but of
            another text. Zeros may be nothing that the layers above have ever seen; the others are.
        reference: batches whose tokens "mean" is taken over, `batches` by default; padding counts as it comes.
        draws: of "resample": the mean over so many ways to pair the sequences of a batch. Draw r of batch i pairs them
            along a random circle, seeded with seed + 1,000,003 · r + i, so that none is its own donor.
        sites: those of `find_heads(model)` to ask for; all by default.
        progress: called after each run of the model.
    Returns:
        HeadImportance in the loss's unit. `samples` are the differences, batch by batch, and `errors` the standard
        errors of their means: what all batches share cancels.
    Raises:
        ConfigError, ShapeError: naming the argument, or the layer and head whose loss is not finite.
    Source: zero: Michel et al. 2019, 1905.10650, §3; mean: Wang et al. 2022, 2211.00593, §2.1; resample: Chan et al.
        2022, causal scrubbing.
    """
    kept, places = asked(model, batches, sites)
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
    """The loss of each batch, [batches] float64, with the heads (layer, head) taken away together; none for none.

    Args:
        heads: (layer, head) pairs.
        model, batches, loss_fn, by, reference, draws, seed, sites, progress: as in `ablation_importance`.
    Returns:
        [batches] float64. Layers are counted as `find_heads` (or `sites`) lists them.
    """
    kept, places = asked(model, batches, sites)
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
