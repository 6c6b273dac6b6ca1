"""The heads of a decoder beside one another: which are alike on a text, and which its loss needs."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from headwise.anatomy import find_heads
from headwise.errors import ConfigError
from headwise.lm.loss import mean_loss
from headwise.lm.model import Decoder
from headwise.map import AttentionMap
from headwise.science.divergence import map_divergence
from headwise.science.importance import HeadImportance, ablation_importance, gradient_importance
from headwise.science.outputs import output_similarities
from headwise.science.similarity import HeadSimilarity
from headwise.see.places import Places
from headwise.tiles import Progress
from headwise.views.data import Comparison, Statistic

LEAST = 8  # tokens; fewer say nothing of how alike heads are
WINDOWS = 8  # of the model's context that importance is asked on: a long text's heads are judged by these


def comparisons(outputs: Sequence[Tensor], maps: Sequence[AttentionMap], places: Places) -> list[Comparison]:
    """How alike the heads are: by what they write, by what they say in any basis, by where they look."""
    if maps[0].shape[2] < LEAST:
        return []
    said = output_similarities(outputs, ("cosine", "cka"))
    found = [
        _comparison(
            said["cka"], places, "outputs (CKA)",
            "Linear CKA of the heads' outputs: 1 where they differ by a rotation, a scale and a shift; few tokens make "
            "it large.",
        ),
        _comparison(
            said["cosine"], places, "outputs (cosine)",
            "Cosine of the heads' outputs, each in its own basis: near 0 does not mean that they say different things.",
        ),
    ]  # fmt: skip
    try:
        looks = map_divergence(maps)
    except ConfigError:  # of a sparse mixture: two heads that no token has both chosen
        return found
    description = (
        "Jensen–Shannon divergence between the rows of their maps, mean over queries: 0 where they look alike."
    )
    return [*found, _comparison(looks, places, "where they look", description)]


def importance(decoder: Decoder, ids: Tensor, places: Places, progress: Progress | None = None) -> list[Statistic]:
    """What the loss on the text needs of each head: without it, and by the gradient of a mask. ids [n]; a long text is
    judged by some windows of the model's context, evenly spaced. [] for a design whose heads cannot be masked."""
    windows = _windows(ids, decoder.config.context)
    if not windows:
        return []
    try:
        sites = find_heads(decoder)
        without = ablation_importance(decoder, windows, mean_loss, sites=sites, progress=progress)
        slope = gradient_importance(decoder, windows, mean_loss, sites=sites)
    except ConfigError:
        return []  # heads that depend on each other have no masks of their own
    on = f" On {len(windows)} windows of {decoder.config.context} tokens." if len(windows) > 1 else ""
    missing = "Loss without the head, minus the loss with all."
    dimmed = "Slope of the loss as a mask dims the head (Michel et al. 2019)."
    return [
        _statistic(without, places, "loss without it", "nats", missing + on),
        _statistic(slope, places, "gradient", "nats", dimmed + on),
    ]


def _windows(ids: Tensor, context: int) -> list[Tensor]:
    """Windows [1, tokens + 1] of the text."""
    if len(ids) <= context + 1:
        return [ids[None]] if len(ids) >= LEAST else []
    last = len(ids) - context - 1
    starts = np.unique(np.linspace(0, last, min(WINDOWS, last // context + 2)).astype(int))
    return [ids[None, start : start + context + 1] for start in starts.tolist()]


def _comparison(found: HeadSimilarity, places: Places, name: str, description: str) -> Comparison:
    try:
        order = found.order
    except ConfigError:  # SciPy, which is optional, is not there
        order = list(range(len(found.names)))
    order = [places.indices[i] for i in order]
    return Comparison(name, places.square(found.matrix.numpy()), order, found.unit, description, found.small_is_alike)


def _statistic(found: HeadImportance, places: Places, name: str, unit: str, description: str) -> Statistic:
    return Statistic(name, places.stacked(found.values), unit, description)
