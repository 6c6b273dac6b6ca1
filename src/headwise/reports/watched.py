"""The report of a watched model, as `headwise see` writes it.

with hw.watch(model, maps="lazy") as record:
    model(**batch)
hw.report(record, "report.html", tokens=batch["input_ids"], tokenizer=tokenizer)
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.analysis.head_roles.result import Roles, roles
from headwise.analysis.head_roles.score import Label
from headwise.errors import ConfigError, ShapeError
from headwise.kernels.events import module_name
from headwise.map import AttentionMap
from headwise.models import input_embedding
from headwise.reports.data import Passage, Report
from headwise.reports.images import Images, images_of, with_patches
from headwise.reports.messages import message
from headwise.reports.numbers import alike, column, nonfinite_counts, nonfinite_notes, nonfinite_of_record, wanted
from headwise.reports.page import write_report
from headwise.reports.passages import Group, Places, Side, Text, groups_of, in_words, labels_of, passage, text_of
from headwise.reports.text import CELLS
from headwise.stats import Tokens, known
from headwise.table import HeadColumn, HeadTable
from headwise.telemetry import Record
from headwise.telemetry.ledger import Summary
from headwise.telemetry.lens import Picture
from headwise.wording import joined, language_of, scaled

ENTRIES = 4  # of a batch are shown by default


def report(
    record: Record,
    path: str | os.PathLike[str] | None = None,
    *,
    tokens: Any = None,
    pieces: Any = None,
    decoder_tokens: Any = None,
    decoder_pieces: Any = None,
    tokenizer: Any = None,
    written: str = "text",
    image: Any = None,
    grid: tuple[int, int] | None = None,
    image_start: int | Sequence[int] = 0,
    side: str = "keys",
    entries: int | Sequence[int] | None = None,
    title: str = "",
    cells: int = CELLS,
    lang: str | None = None,
) -> Report:
    """Report the last measured forward pass of a record: every map with its tokens, statistics, patterns and roles.

    Args:
        record: of `hw.watch(model, maps="lazy")`. With maps="pooled", the report has maps of at most 64 × 64 cells, the
            watched statistics and no roles.
        path: write the report to this HTML file, whole or not at all.
        tokens: the input ids, integers [m] or [b, m]; of all tokens so far, if a cache has dropped some.
        pieces: the text of each token, m strings or a list of them for each batch entry.
        decoder_tokens, decoder_pieces: the same for the decoder's input of an encoder-decoder model.
        tokenizer: converts tokens to pieces; as in `see`.
        written: how pieces are written: "text", as they are shown; or as raw tokens of a vocabulary: "byte_level"
            (Ġworld, æŃ¦), "sentencepiece" (▁world, <0xE6>) or "wordpiece" (##ing).
        image: the image that the model received, whose patches are tokens: the page shows it under the weights of a
            token. [H, W, 3] or [H, W], numbers from 0 to 1 or bytes; a PIL image; or a list with one for each batch
            entry. Processors crop images: give what the model saw.
        grid: rows and columns of its patches, row by row from the position `image_start` on (or a list with one for
            each entry), among the tokens, or in cross attention among the "keys" or "queries" by `side`.
        entries: indices of batch entries to show; None for the first four. Padding known from the mask is omitted.
        title, lang: of the page; lang is "en" or "zh", None for the language of the locale.
        cells: longer texts are pooled to this many cells.
    Returns:
        The report, which `headwise.reports` writes as a page, pictures or a table.
    Raises:
        ConfigError: if nothing was measured, or the record keeps no maps. ShapeError: if tokens do not fit the maps.
    """
    lang = language_of(lang)
    if not isinstance(record, Record):
        raise ConfigError(f"report(record): expected the record of headwise.watch, got {type(record).__name__}")
    if not record.maps:
        why = "keeps no maps; watch(model, maps='lazy') does" if record.latest.steps else "has not measured a forward"
        raise ConfigError(f"report(record): the record {why}")
    texts = (
        text_of("", tokens, pieces, tokenizer, written),
        text_of("decoder_", decoder_tokens, decoder_pieces, tokenizer, written),
    )
    name = type(record.model).__name__
    size = scaled(sum(p.numel() for p in record.model.parameters()))
    facts: list[tuple[str, str]] = [(message("model"), message("fact_model", name=name, size=size))]
    steps: list[tuple[str, str]] = [(message("steps"), message("fact_steps", count=record.totals.steps))]
    table, images = input_embedding(record.model), images_of(image, grid, image_start, side)
    found = of_maps(
        record.maps, texts, entries, title or name, cells, latest=record.latest, unnamed=name, table=table,
        images=images,
    )  # fmt: skip
    found = replace(found, facts=facts + found.facts + steps)
    if path is not None:
        write_report(found, path, lang=lang)
    return found


def of_map(
    amap: AttentionMap, texts: tuple[Text | None, Text | None], entries: int | Sequence[int] | None, title: str,
    cells: int, images: Images | None = None,
) -> Report:  # fmt: skip
    """The report of a map, named as its layer. That it is shown is no reading of it."""
    head = message("head_number", head=amap.first_head) if amap.shape[1] == 1 else ""
    name = joined(filter(None, (amap.layer, head))) if amap.layer else message("title_map")
    return of_maps({amap.layer: amap.using(amap.named)}, texts, entries, title or name, cells, images=images)


@torch.no_grad()
def of_maps(
    maps: Mapping[str, AttentionMap | Picture], texts: tuple[Text | None, Text | None],
    entries: int | Sequence[int] | None, title: str, cells: int, *, latest: Summary | None = None, unnamed: str = "",
    table: Tensor | None = None, images: Images | None = None,
) -> Report:  # fmt: skip
    """The report of maps by the names of their layers. latest: further statistics. unnamed: the name of layers that
    have none. table: the model's input embedding. images: of the tokens that are patches."""
    if cells < 1:
        raise ConfigError(f"cells={cells}: expected at least 1")
    groups = groups_of(maps)
    _check(groups, texts)
    places = Places(tuple(amap.shape[1] for amap in maps.values()))
    over = _images_of_groups(images, groups, texts)
    passages = [
        shown
        for group, image in zip(groups, over, strict=True)
        for shown in _passages(group, texts, groups, places, _entries(group, entries), cells, image)
    ]
    columns, labels = _numbers(maps, latest, groups, texts, places, table, over)
    heads = [range(count) for count in places.counts]
    statistics = HeadTable(columns, layers=[name or unnamed for name in maps], heads=heads)
    kernels = sorted({amap.kernel for amap in maps.values() if isinstance(amap, AttentionMap)})
    facts: list[tuple[str, str]] = [(message("kernel"), ", ".join(kernels))] if kernels else []
    notes = [message("explained"), *_notes(maps, groups, entries), *nonfinite_notes(_nonfinite(maps, latest))]
    compared = alike(groups[0].lazy, places) if len(groups) == 1 and groups[0].lazy else []
    patterns = [list(map(in_words, row)) for row in labels] or [[""] * places.most for _ in places.counts]
    return Report(title, passages, statistics, patterns, facts, notes, labels=labels, comparisons=compared)


def _images_of_groups(
    images: Images | None, groups: Sequence[Group], texts: tuple[Text | None, Text | None]
) -> list[Images | None]:
    """The images of each group whose tokens are patches."""
    if images is None:
        return [None] * len(groups)
    fitting = [
        not group.gap.size and (texts == (None, None) or _texts_of(group, texts, groups) != (None, None))
        for group in groups
    ]
    return [images if has else None for has in with_patches(images, groups, fitting)]


def _check(groups: Sequence[Group], texts: tuple[Text | None, Text | None]) -> None:
    """Raise ShapeError if a text fits no map."""
    for prefix, text in zip(("", "decoder_"), texts, strict=True):
        if text is None:
            continue
        if prefix and not any(group.crosses for group in groups):
            raise ShapeError(f"{prefix}tokens: the record contains no cross attention; give tokens or pieces only")
        if not any(text in _texts_of(group, texts, groups) for group in groups):
            sizes = sorted({size for group in groups for size in (group.size[1], group.size[2] + group.gap.size)})
            batch = sorted({group.size[0] for group in groups})
            raise ShapeError(
                f"{prefix}tokens, {prefix}pieces: {text.entries} × {text.length} of them, but the maps are of batches "
                f"of {', '.join(map(str, batch))} and {' or '.join(map(str, sizes))} tokens"
            )


def _texts_of(
    group: Group, texts: tuple[Text | None, Text | None], groups: Sequence[Group]
) -> tuple[Text | None, Text | None]:
    """The texts of the queries and of the keys; None where unknown or of another size."""
    first, second = texts
    both = any(other.crosses for other in groups)
    keys = second if both and group.causal else first
    queries = second if group.crosses else keys
    b, n, m = group.size
    tokens = m + group.gap.size
    size = n if group.crosses else tokens  # queries are aligned to the end of the keys
    return _fitting(queries, b, size), _fitting(keys, b, tokens)


def _fitting(text: Text | None, b: int, size: int) -> Text | None:
    return text if text is not None and text.length == size and text.entries in (1, b) else None


def _entries(group: Group, entries: int | Sequence[int] | None) -> list[int]:
    b = group.size[0]
    if entries is None:
        return list(range(min(b, ENTRIES)))
    chosen = [entries] if isinstance(entries, int) else list(entries)
    for entry in chosen:
        if not isinstance(entry, int) or not 0 <= entry < b:
            raise ConfigError(f"entries={entry!r}: expected numbers from 0 to {b - 1}, the entries of the batch")
    if not chosen:
        raise ConfigError("entries=(): give at least one, or None")
    return chosen


def _passages(
    group: Group, texts: tuple[Text | None, Text | None], groups: Sequence[Group], places: Places,
    entries: Sequence[int], cells: int, images: Images | None,
) -> list[Passage]:  # fmt: skip
    b, n, m = group.size
    queries, keys = _texts_of(group, texts, groups)
    own = Places(tuple(places.counts[layer] for layer in group.layers), places.most)
    layers = [] if len(groups) == 1 else group.layers
    found = []
    for entry in entries:
        rows, cols = _real(group, entry) if max(n, m) <= cells else (range(n), range(m))
        before = 0 if group.crosses else m - n
        at = range(rows.start + before, rows.stop + before)  # of the queries, among the keys
        of_queries, of_keys = (list(map(group.token, part)) for part in (at, cols))
        side = queries.side(entry, of_queries) if queries else Side.numbered(of_queries)
        other: Side | None = None
        if group.crosses or at != cols:
            other = keys.side(entry, of_keys) if keys else Side.numbered(of_keys)
        name = group.title(groups, len(rows), len(cols))
        title = joined(part for part in (name, message("title_entry", entry=entry) if b > 1 else "") if part)
        sides: tuple[Side, Side | None] = side, other
        patches: tuple[int | None, int | None] = None, None
        if images is not None:
            sides, patches = images.named(group, entry, sides, (at.start, cols.start))
        shown = passage(title, group.maps, entry, sides, own, cells, None, layers, (rows.start, cols.start))
        found.append(shown if images is None else images.over(shown, entry, sides, patches))
    return found


def _real(group: Group, entry: int) -> tuple[range, range]:
    """The rows and columns of an entry from the first to the last query that sees anything, and key with weight."""
    _, n, m = group.size
    if not group.lazy:
        return range(n), range(m)
    queries = torch.zeros(n, dtype=torch.bool)
    keys = torch.zeros(m, dtype=torch.bool)
    for amap in group.lazy:
        queries |= (amap.lse[entry] != -torch.inf).any(0).cpu()
        keys |= (amap[entry].amax((0, 1)) > 0).cpu()
    rows, cols = _from_first_to_last(queries), _from_first_to_last(keys)
    if group.crosses or n != m:
        return rows, cols
    both = range(min(rows.start, cols.start), max(rows.stop, cols.stop))
    return both, both


def _from_first_to_last(members: Tensor) -> range:
    at = members.nonzero()[:, 0].tolist()
    return range(at[0], at[-1] + 1) if at else range(len(members))


def _numbers(
    maps: Mapping[str, AttentionMap | Picture], latest: Summary | None, groups: Sequence[Group],
    texts: tuple[Text | None, Text | None], places: Places, table: Tensor | None, over: Sequence[Images | None],
) -> tuple[dict[str, HeadColumn], list[list[list[Label]]]]:  # fmt: skip
    """Statistics and labels of all layers."""
    values: dict[str, list[np.ndarray]] = {}

    def put(name: str, layer: int, numbers: np.ndarray) -> None:
        if name not in values:
            values[name] = [np.full(count, np.nan) for count in places.counts]
        values[name][layer] = numbers

    labels: list[list[list[Label]]] = [[[] for _ in range(places.most)] for _ in places.counts]
    for group, images in zip(groups, over, strict=True):
        keys = _texts_of(group, texts, groups)[1]
        if images is not None and not group.crosses:
            keys = images.text(keys)
        tokens = Tokens(keys.ids, keys.pieces, torch.tensor(keys.special)) if keys else Tokens()
        measures = wanted(tokens, causal=group.causal, crosses=group.crosses)
        for amap, layer in zip(group.lazy, group.layers, strict=False):
            for name, found in amap.measure(*measures).items():
                put(name, layer, found.mean(0).cpu().numpy())
            if not group.crosses:
                own = Places(places.counts[layer : layer + 1], places.most)
                labels[layer] = labels_of([_roles(amap, keys, table)], own)[0]
    names = [module_name(name) for name in maps]
    crossing = {layer for group in groups if group.crosses for layer in group.layers}
    watched = {} if latest is None else {name: latest[name].numpy() for name in latest}
    for name, kept in watched.items():
        for layer_name, numbers in zip(latest.layers if latest else (), kept, strict=True):
            for at in (at for at, module in enumerate(names) if module == layer_name):  # each of its calls
                if at in crossing and (kind := known(name)) is not None and kind.placed:
                    continue
                if name not in values or not np.isfinite(values[name][at]).any():
                    put(name, at, numbers[: places.counts[at]])
    columns = {name: column(name, every) for name, every in values.items()}
    return columns, labels if any(map(any, labels)) else []


def _roles(amap: AttentionMap, text: Text | None, table: Tensor | None) -> Roles:
    if text is None:
        return roles(amap)
    known = table is not None and text.ids is not None and 0 <= int(text.ids.min()) <= int(text.ids.max()) < len(table)
    return roles(amap, tokens=text.ids, pieces=text.pieces, embeddings=table if known else None)


def _nonfinite(
    maps: Mapping[str, AttentionMap | Picture], latest: Summary | None
) -> Iterator[Mapping[str, Tensor]]:  # fmt: skip
    """What there is of NaN and infinity in each layer; of pictures, what was counted when they were made."""
    for name, amap in maps.items():
        if isinstance(amap, AttentionMap):
            yield nonfinite_counts(amap)
        else:
            yield {} if latest is None else nonfinite_of_record(latest, module_name(name), amap.shape[1])


def _notes(maps: Iterable[str], groups: Sequence[Group], entries: int | Sequence[int] | None) -> list[str]:
    b = max(group.size[0] for group in groups)
    notes = {
        "over_batch": b > 1,
        "first_entries": entries is None and b > ENTRIES,
        "pooled_only": any(group.pooled for group in groups),
        "repeated_calls": any(module_name(name) != name for name in maps),
        "no_patterns": any(group.crosses for group in groups),
    }
    return [message(code, shown=ENTRIES, entries=b) for code, applies in notes.items() if applies]
