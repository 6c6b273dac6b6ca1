"""Comparison of the heads of a model: their similarity on a text, and their importance for its loss."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from headwise.analysis.divergence import map_divergence
from headwise.analysis.importance import HeadImportance, ablation_importance, gradient_importance
from headwise.analysis.outputs import output_similarities
from headwise.analysis.similarity import HeadSimilarity
from headwise.errors import ConfigError
from headwise.lm.loading import LoadedModel, TokenizedText
from headwise.map import AttentionMap
from headwise.progress import Progress
from headwise.reports.data import Comparison, Statistic
from headwise.reports.see.places import Places

LEAST = 8  # tokens; fewer say nothing of how alike heads are
MOST = 512  # heads that are compared with one another
WINDOWS = 8  # of the model's context that importance is asked on: a long text's heads are judged by these
LONGEST = 512  # tokens of such a window
WORK = 1e13  # operations that taking away one head after the other may take: a minute or two


def comparisons(
    outputs: Sequence[Tensor], maps: Sequence[AttentionMap], places: Places
) -> tuple[list[Comparison], list[str]]:
    """Similarity of the heads by the cosine and the CKA of their outputs and by their maps; and notes on what is
    omitted. `outputs` may be []."""
    heads = len(places.indices)
    if maps[0].shape[2] < LEAST:
        return [], []
    if heads > MOST:
        return [], [f"The {heads:,} heads are not compared: a picture holds at most {MOST}."]
    found: list[Comparison] = []
    notes: list[str] = []
    if outputs:
        said = output_similarities(outputs, ("cosine", "cka"))
        found = [
            _comparison(
                said["cka"], places, "outputs (CKA)",
                "Linear CKA of the heads' outputs: 1 if they differ by a rotation, a scale and a shift only; "
                "few tokens increase it.",
            ),
            _comparison(
                said["cosine"], places, "outputs (cosine)",
                "Cosine of the heads' outputs, each in its own basis: near 0 does not mean that they carry different "
                "things.",
            ),
        ]  # fmt: skip
    else:
        notes.append("The outputs of each head are not known for this model: heads are compared by their maps only.")
    return [*found, *alike(maps, places)], notes


def alike(maps: Sequence[AttentionMap], places: Places) -> list[Comparison]:
    """Similarity of the heads by their maps; [] for few tokens and for very many heads."""
    if maps[0].shape[2] < LEAST or len(places.indices) > MOST:
        return []
    try:
        looks = map_divergence(maps)
    except ConfigError:  # of a sparse mixture: two heads that no token has both chosen
        return []
    description = "Jensen–Shannon divergence between the rows of their maps, mean over queries: 0 for equal attention."
    return [_comparison(looks, places, "attention maps", description)]


def importance(
    subject: LoadedModel, reading: TokenizedText, places: Places, progress: Progress | None = None
) -> tuple[list[Statistic], list[str]]:
    """Importance of each head for the loss on the text: by ablation and by the gradient of a mask; and notes on what is
    left out. A long text is judged by some windows of the model's context, evenly spaced. [] for a model without a
    loss, and for a design whose heads cannot be masked."""
    loss_fn, sites = subject.loss_fn, subject.sites
    context = min(subject.context or LONGEST, LONGEST)
    windows = _windows(reading.ids, context, sum(_leading(reading.special)))
    if loss_fn is None or not windows or not sites:
        return [], []
    tokens = sum(window.shape[1] - 1 for window in windows)
    weights = sum(p.numel() for p in subject.model.parameters())
    work = 2.0 * weights * tokens * (len(places.indices) + 1)
    notes: list[str] = []
    found: list[Statistic] = []
    on = f" On {len(windows)} windows of {windows[0].shape[1] - 1} tokens." if len(windows) > 1 else ""
    try:
        if work <= WORK:
            without = ablation_importance(subject.model, windows, loss_fn, sites=sites, progress=progress)
            missing = "Loss without the head, minus the loss with all heads."
            found.append(_statistic(without, places, "loss without it", "nats", missing + on))
        else:
            notes.append(
                f"Ablating each of the {len(places.indices)} heads would take {work:.0e} operations, so importance "
                f"is estimated by the gradient of the loss only; headwise.analysis.ablation_importance computes it."
            )
        slope = gradient_importance(subject.model, windows, loss_fn, sites=sites)
    except ConfigError:
        return [], []  # heads that depend on each other have no masks of their own
    dimmed = "Gradient of the loss with respect to a mask of the head (Michel et al. 2019)."
    return [*found, _statistic(slope, places, "gradient", "nats", dimmed + on)], notes


def _windows(ids: Tensor, context: int, lead: int = 0) -> list[Tensor]:
    """Windows [1, tokens + 1] of the text, each preceded by the `lead` special tokens at its beginning."""
    if len(ids) <= context + 1:
        return [ids[None]] if len(ids) >= LEAST else []
    length = context + 1 - lead
    last = len(ids) - length
    starts = np.unique(np.linspace(lead, last, min(WINDOWS, last // context + 2)).astype(int))
    return [torch.cat((ids[:lead], ids[start : start + length]))[None] for start in starts.tolist()]


def _leading(special: Sequence[bool]) -> Iterator[bool]:
    """Those at the start."""
    return itertools.takewhile(bool, special)


def _comparison(found: HeadSimilarity, places: Places, name: str, description: str) -> Comparison:
    try:
        order = found.order
    except ConfigError:  # SciPy, which is optional, is not there
        order = list(range(len(found.names)))
    order = [places.indices[i] for i in order]
    return Comparison(name, places.square(found.matrix.numpy()), order, found.unit, description, found.small_is_alike)


def _statistic(found: HeadImportance, places: Places, name: str, unit: str, description: str) -> Statistic:
    return Statistic(name, places.stacked([layer.numpy() for layer in found.column]), unit, description)
