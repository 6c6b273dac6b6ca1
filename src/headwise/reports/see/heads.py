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
from headwise.reports.data import Comparison
from headwise.reports.messages import message
from headwise.reports.see.places import Places
from headwise.table import HeadColumn, HeadTable

LEAST = 8  # tokens for a comparison of heads
MOST = 512  # heads in a comparison
WINDOWS = 8  # windows of a long text that importance is computed on
LONGEST = 512  # tokens of such a window
WORK = 1e13  # operations for the ablation of every head, a minute or two


def comparisons(
    outputs: Sequence[Tensor], maps: Sequence[AttentionMap], places: Places
) -> tuple[list[Comparison], list[str]]:
    """Similarity of the heads by the CKA and the cosine of their outputs and by their maps; and notes on what is
    omitted. outputs: [] if unknown."""
    heads = len(places.indices)
    if maps[0].shape[2] < LEAST:
        return [], []
    if heads > MOST:
        return [], [message("not_compared", heads=heads, most=MOST)]
    if not outputs:
        return alike(maps, places), [message("maps_only")]
    if not all(bool(x.isfinite().all()) for x in outputs):
        compared = alike(maps, places)
        return compared, [message("maps_only_finite" if compared else "not_compared_finite")]
    found = output_similarities(outputs, ("cosine", "cka"))
    return [*(_comparison(found[kind], places, kind) for kind in ("cka", "cosine")), *alike(maps, places)], []


def alike(maps: Sequence[AttentionMap], places: Places) -> list[Comparison]:
    """Similarity of the heads by their maps; [] below LEAST tokens and above MOST heads."""
    if maps[0].shape[2] < LEAST or len(places.indices) > MOST:
        return []
    try:
        return [_comparison(map_divergence(maps), places, "maps")]
    except ConfigError:  # a weight is NaN, or in a sparse mixture two heads have no query in common
        return []


def importance(
    subject: LoadedModel, reading: TokenizedText, places: Places, progress: Progress | None = None
) -> tuple[HeadTable, list[str]]:
    """Importance of each head for the loss on the text, by ablation and by the gradient of a mask; and notes on what is
    omitted. A long text is represented by evenly spaced windows of the model's context. The table has no columns for a
    model without a loss and for a design whose heads cannot be masked."""
    loss_fn, sites = subject.loss_fn, subject.sites
    context = min(subject.context or LONGEST, LONGEST)
    windows = _windows(reading.ids, context, sum(leading(reading.special)))
    if loss_fn is None or not windows or not sites:
        return HeadTable({}), []
    tokens = sum(window.shape[1] - 1 for window in windows)
    weights = sum(p.numel() for p in subject.model.parameters())
    work = 2.0 * weights * tokens * (len(places.indices) + 1)
    notes: list[str] = []
    columns: dict[str, HeadColumn] = {}
    try:
        if work <= WORK:
            without = ablation_importance(subject.model, windows, loss_fn, sites=sites, progress=progress)
            columns["loss without it"] = _column(without, "about_ablation", windows)
        else:
            notes.append(message("gradient_only", heads=len(places.indices), work=work))
        slope = gradient_importance(subject.model, windows, loss_fn, sites=sites)
    except ConfigError:
        return HeadTable({}), []  # heads that depend on each other cannot be masked
    columns["gradient"] = _column(slope, "about_gradient", windows)
    return HeadTable(columns), notes


def _windows(ids: Tensor, context: int, lead: int = 0) -> list[Tensor]:
    """Windows [1, tokens + 1] of the text, each preceded by the `lead` special tokens at its beginning."""
    if len(ids) <= context + 1:
        return [ids[None]] if len(ids) >= LEAST else []
    length = context + 1 - lead
    last = len(ids) - length
    starts = np.unique(np.linspace(lead, last, min(WINDOWS, last // context + 2)).astype(int))
    return [torch.cat((ids[:lead], ids[start : start + length]))[None] for start in starts.tolist()]


def leading(special: Sequence[bool]) -> Iterator[bool]:
    """The special tokens at the start."""
    return itertools.takewhile(bool, special)


def _comparison(found: HeadSimilarity, places: Places, kind: str) -> Comparison:
    try:
        order = found.order
    except ConfigError:  # SciPy, which is optional, is not installed
        order = list(range(len(found.names)))
    order = [places.indices[i] for i in order]
    name, about = message(f"by_{kind}"), message(f"about_{kind}")
    return Comparison(name, places.square(found.matrix.numpy()), order, found.unit, about, found.small_is_alike)


def _column(found: HeadImportance, about: str, windows: Sequence[Tensor]) -> HeadColumn:
    description = message(about)
    if len(windows) > 1:
        description = message("on_windows", about=description, windows=len(windows), tokens=windows[0].shape[1] - 1)
    return HeadColumn(found.column, unit="nats", description=description, error=found.column.error)
