"""What a report says of every head: statistics, similarity, importance, NaN or infinity, and what it writes."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.analysis import DirectEffects, direct_effects, value_norms
from headwise.analysis.importance.ablation import ablation_importance
from headwise.analysis.importance.gradients import gradient_importance
from headwise.analysis.importance.losses import HeadImportance
from headwise.analysis.information import output_similarities
from headwise.analysis.similarity import HeadSimilarity, map_divergence
from headwise.base.run import Progress
from headwise.errors import ConfigError, check_choice
from headwise.lm.loading import LoadedModel, TokenizedText
from headwise.map import AttentionMap
from headwise.reports.data import Comparison, Writes
from headwise.reports.messages import message
from headwise.reports.passages import Places
from headwise.stats import Measure, Tokens, describe, known, of_tokens, shown_in
from headwise.table import HeadColumn, HeadTable
from headwise.telemetry.ledger import Summary
from headwise.wording import Message


def wanted(tokens: Tokens, page: str = "report", *, causal: bool = False, crosses: bool = False) -> list[Measure]:
    """The measures of a page that can be computed with these tokens of the keys. Causal attention omits those that are
    always 0 there, cross attention those that depend on the distance of queries and keys."""
    kinds = [
        name for name in shown_in(page) if not ((causal and known(name).ahead) or (crosses and known(name).placed))
    ]
    found = (of_tokens(name, tokens) for name in kinds)
    return [measure for measure in found if measure is not None]


def check_sort(sort: str | None, names: Iterable[str] | None = None) -> None:
    """Raise ConfigError if a table cannot be sorted by this name. names: its statistics; None for all there are."""
    names = shown_in("report") if names is None else tuple(names)
    if sort is not None:
        check_choice("sort", sort, names)


def statistics(results: Sequence[Mapping[str, Tensor]], layers: Sequence[str]) -> HeadTable:
    """The measurements of every layer in one table (means over the batch). layers: their names."""
    columns = {name: column(name, [result[name].mean(0) for result in results]) for name in results[0]}
    return HeadTable(columns, layers=layers)


def column(name: str, values: Sequence[Any]) -> HeadColumn:
    """A measure, [heads] for each layer, with its unit, range and description."""
    words = describe(name, "en")
    if words is None:
        return HeadColumn(values)
    return HeadColumn(values, unit=words.unit, description=words.summary, range=words.range)


LEAST = 8  # tokens for a comparison of heads
MOST = 512  # heads in a comparison
WINDOWS = 8  # windows of a long text that importance is computed on
LONGEST = 512  # tokens of such a window
WORK = 1e13  # operations for the ablation of every head, a minute or two


def comparisons(
    outputs: Sequence[Tensor], maps: Sequence[AttentionMap], places: Places
) -> tuple[list[Comparison], list[str]]:
    """Similarity of the heads by outputs ([] if unknown; CKA and cosine) and by maps; and notes on what is omitted."""
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
    """Importance of each head for the loss on the text (of a long one: evenly spaced windows), by ablation and by the
    gradient of a mask; and notes on what is omitted. No columns without a loss, or for heads that cannot be masked."""
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
    order = [places.indices[i] for i in found.order]
    name, about = message(f"by_{kind}"), message(f"about_{kind}")
    return Comparison(name, places.square(found.matrix.numpy()), order, found.unit, about, found.small_is_alike)


def _column(found: HeadImportance, about: str, windows: Sequence[Tensor]) -> HeadColumn:
    description = message(about)
    if len(windows) > 1:
        description = message("on_windows", about=description, windows=len(windows), tokens=windows[0].shape[1] - 1)
    return HeadColumn(found.column, unit="nats", description=description, error=found.column.error)


SHOWN = 6  # heads of which a report says so, each on a line
SCORES, VALUES, SOME_VALUES = "not_finite", "values_not_finite", "windows_values_not_finite"  # names of messages


def nonfinite_counts(amap: AttentionMap) -> dict[str, Tensor]:
    """What there is of NaN and infinity: the message of it → a count for each head, [h]."""
    found = {SCORES: (amap.lse.isnan() | (amap.lse == float("inf"))).sum((0, 2))}
    if amap.nonfinite_values is not None:
        values = amap.nonfinite_values.sum(0)
        found[VALUES] = values.repeat_interleave(amap.shape[1] // len(values))
    return found


def nonfinite_of_record(summary: Summary, layer: str, heads: int) -> dict[str, Tensor]:
    """The same of a layer of a record."""
    found = {code: torch.zeros(heads) for code in (SCORES, VALUES)}
    for (name, head), (rows, _, _, values) in zip(summary.places, summary.nonfinite.tolist(), strict=True):
        if name == layer and head < heads:
            found[SCORES][head], found[VALUES][head] = rows, values
    return {code: count.long() for code, count in found.items()}


def nonfinite_remarks(layer: int, counts: Mapping[str, Tensor]) -> list[Message]:
    """One for each head of a layer, and each kind of count."""
    return [
        message(code, layer=layer, head=head, count=count)
        for code, of_heads in counts.items()
        for head, count in enumerate(of_heads.tolist())
        if count
    ]


def nonfinite_notes(layers: Iterable[Mapping[str, Tensor]]) -> list[str]:
    """Those of all layers, for a report: of the first heads, and how many more there are."""
    each = list(layers)
    found = [note for layer, counts in enumerate(each) for note in nonfinite_remarks(layer, counts)]
    if len(found) <= SHOWN + 1:
        return list(found)
    heads = sum(int(torch.stack(list(counts.values())).any(0).sum()) for counts in each if counts)
    return [*found[:SHOWN], message("more_not_finite", heads=heads)]


CHANNELS = 6  # of q·k that are kept for each head
TOP = 3  # tokens with the largest direct effects
LEAST_NORM, SHARE = 0.5, 0.4  # of a logit, and of the largest effect of the head: smaller ones are not kept

Units = Sequence[tuple[int, int]]


def writes(subject: LoadedModel, reading: TokenizedText, maps: Sequence[AttentionMap], places: Places) -> Writes | None:
    """What is known of a model: values need heads with an output projection, direct effects a decoder that ends in a
    norm, channels self attention. None if nothing is known."""
    units = reading.units
    names = [name for name in subject.layers if "#" not in name]
    if len(names) != len(subject.layers):
        return None  # a layer that is called several times has one set of matrices and several inputs

    def run() -> object:
        return subject.maps(reading.ids)

    norms = _norms(subject, run, places, units)
    found = _effects(subject, reading.ids, run)
    effects, tokens, words = (None, None, []) if found is None else _promoted(subject, found, places, units)
    following = None if found is None else _of_queries(places.stacked(_numpy(found.next_token)), units)
    queries, keys, channels, widths = channels_of(maps, places, units)
    if norms is None and following is None and channels is None:
        return None
    return Writes(norms, following, effects, tokens, words, queries, keys, channels, widths)


def channels_of(
    maps: Sequence[AttentionMap], places: Places, units: Units
) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None, list[int]]:
    """Queries (times the scale) and keys in the strongest channels of each head, their numbers, and the widths."""
    widths = [amap.q.shape[-1] for amap in maps]
    count = min(CHANNELS, *widths)
    if any(
        amap.k.shape[-1] != width or amap.shape[2] != amap.shape[3] for amap, width in zip(maps, widths, strict=True)
    ):
        return None, None, None, []
    parts: tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]] = ([], [], [])
    for amap in maps:
        q = amap.q[0].float() * amap.rule.scale  # [h, n, d]
        k = amap.k[0].float().repeat_interleave(q.shape[0] // amap.k.shape[1], 0)
        best = (q.abs().mean(1) * k.abs().mean(1)).topk(count).indices.sort().values  # [h, C]
        at = best[:, None].expand(-1, q.shape[1], -1)
        for found, x in zip(parts, (q.gather(2, at), k.gather(2, at), best), strict=True):
            found.append(x.cpu().numpy())
    queries, keys = (_alone(places.stacked(found), units) for found in parts[:2])
    return queries, keys, places.stacked(parts[2], 0), widths


def _norms(subject: LoadedModel, run: object, places: Places, units: Units) -> np.ndarray | None:
    try:
        found = value_norms(subject.model, run, sites=subject.sites) if subject.sites else {}  # type: ignore[arg-type]
    except ConfigError:
        return None
    if list(found) != list(subject.layers):
        return None
    return _alone(places.stacked([norms[0].float().cpu().numpy() for norms in found.values()]), units)


def _effects(subject: LoadedModel, ids: Tensor, run: object) -> DirectEffects | None:
    matrix = subject.unembedding
    if matrix is None or not subject.sites or len(ids) < 2:
        return None
    try:
        top = min(TOP, len(matrix))
        return direct_effects(subject.model, run, ids, matrix, sites=subject.sites, top=top)  # type: ignore[arg-type]
    except ConfigError:
        return None


def _promoted(
    subject: LoadedModel, found: DirectEffects, places: Places, units: Units
) -> tuple[np.ndarray | None, np.ndarray | None, list[str]]:
    if not found.values:
        return None, None, []
    values = _of_queries(places.stacked(_numpy(found.values)), units)
    tokens = _of_queries(places.stacked(_numpy(found.tokens), 0), units)
    tops = np.nan_to_num(values).max((2, 3), keepdims=True)
    kept = values >= np.maximum(LEAST_NORM, SHARE * tops)
    ids, at = np.unique(tokens[kept], return_inverse=True)
    which = np.zeros_like(tokens)
    which[kept] = at
    return np.where(kept, values, np.nan), which, subject.pieces(ids.tolist())


def _numpy(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    return [tensor.cpu().numpy() for tensor in tensors]


def _of_queries(values: np.ndarray, units: Units) -> np.ndarray:
    """[layers, heads, tokens, …] at the last token of each unit, which predicts the next unit."""
    return values[:, :, [end - 1 for _, end in units]]


def _alone(values: np.ndarray, units: Units) -> np.ndarray:
    """[layers, heads, tokens, …] of units of one token; NaN for the others, which have no single value."""
    found = values[:, :, [start for start, _ in units]].astype(np.float32)
    found[:, :, [i for i, (start, end) in enumerate(units) if end - start > 1]] = np.nan
    return found
