"""What the heads of a loaded model write on a text: values by key, direct effects on logits, channels of q·k."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from headwise.analysis import DirectEffects, direct_effects, value_norms
from headwise.errors import ConfigError
from headwise.lm.loading import LoadedModel, TokenizedText
from headwise.map import AttentionMap
from headwise.reports.see.places import Places
from headwise.reports.writes import Writes

CHANNELS = 6  # of q·k that are kept for each head
TOP = 3  # tokens with the largest direct effects
LEAST, SHARE = 0.5, 0.4  # of a logit, and of the largest effect of the head: smaller ones are not kept

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
        for part, x in zip(parts, (q.gather(2, at), k.gather(2, at), best), strict=True):
            part.append(x.cpu().numpy())
    queries, keys = (_alone(places.stacked(part), units) for part in parts[:2])
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
    kept = values >= np.maximum(LEAST, SHARE * tops)
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
