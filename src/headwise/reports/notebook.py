"""What notebooks show of maps, reports, records and layers: pictures that need no script, under a page that zooms.

Everything is in the HTML itself: no network, no path, no script outside of a sandboxed frame. A notebook that removes
frames or forbids scripts, such as an untrusted one or GitHub's preview, leaves the pictures.
"""

import math
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
import torch
from torch import nn

from headwise.errors import KernelError
from headwise.kernels.graph import has_no_numbers
from headwise.map import AttentionMap
from headwise.nn import AttentionLayer, TransformerBlock
from headwise.nn.steps import Steps
from headwise.reports.colours import data_url, heat_png
from headwise.reports.data import Report, value_range
from headwise.reports.messages import message
from headwise.reports.page import page
from headwise.reports.watched import of_map
from headwise.reports.words import label, unit, words
from headwise.table import HeadTable
from headwise.table.show import as_html, number, register
from headwise.telemetry import Record
from headwise.telemetry.lens import Picture
from headwise.wording import in_language

CELLS = 48  # of a picture at most
SIDE = 64  # pixels of its longer side
MOST = 400  # pictures of a table


def small_maps(rows: Sequence[Sequence[np.ndarray]], layers: Sequence[int], lang: str) -> str:
    """Weights [queries, keys] of each head, a row a layer; layers: their numbers. Those beyond MOST are omitted."""
    table, shown, body = words(lang, "notebook"), 0, []
    for layer, heads in zip(layers, rows, strict=True):
        if shown + len(heads) > MOST:
            break
        shown += len(heads)
        name = table["layer_short"].format(layer=layer)
        cells = "".join(
            f"<td>{small(shares_of(weights, CELLS), table['short_name'].format(layer=layer, head=head))}</td>"
            for head, weights in enumerate(heads)
        )
        body.append(f"<tr><th>{name}</th>{cells}</tr>")
    widest = max(map(len, rows), default=0)
    head = "".join(f"<th>{table['head_short'].format(head=head)}</th>" for head in range(widest))
    left = sum(map(len, rows)) - shown
    more = f"<p>{table['more_heads'].format(count=left)}</p>" if left else ""
    return f"<table><tr><th></th>{head}</tr>{''.join(body)}</table>{more}<p>{escape(table['small_hint'])}</p>"


def small(shares: np.ndarray, name: str) -> str:
    """One picture of numbers from 0 to 1."""
    shares = np.kron(shares, np.ones((max(1, SIDE // max(shares.shape)),) * 2))  # no frontend blurs its cells
    rows, columns = shares.shape
    width, height = (max(8, round(SIDE * size / max(rows, columns))) for size in (columns, rows))
    url = data_url(heat_png(shares))
    return f'<img src="{url}" alt="{escape(name)}" title="{escape(name)}" width="{width}" height="{height}">'


def shares_of(weights: np.ndarray, cells: int) -> np.ndarray:
    """The square root of each weight over the largest one, which shows small weights too; at most `cells` wide."""
    weights = reduced(np.where(np.isfinite(weights), weights, 0.0), cells)
    return np.sqrt(weights.clip(0) / (weights.max() or 1.0))


def reduced(matrix: np.ndarray, cells: int) -> np.ndarray:
    """Means over squares, such that neither side has more than `cells`."""
    step = -(-max(matrix.shape) // cells)
    if step == 1:
        return matrix
    rows, columns = (np.arange(0, size, step) for size in matrix.shape)
    sums = np.add.reduceat(np.add.reduceat(matrix.astype(np.float64), rows, 0), columns, 1)
    high, wide = (np.diff([*at, size]) for at, size in zip((rows, columns), matrix.shape, strict=True))
    return sums / np.outer(high, wide)


HEIGHT = 760  # pixels
_LOOK = (
    f"grid-area: 1 / 1; z-index: 1; box-sizing: border-box; width: 100%; height: {HEIGHT}px; margin: 0; "
    "border: 1px solid #8884; border-radius: 6px"
)


def framed(report: Report, lang: str, still: str | None = None) -> str:
    """The page of a report in a sandboxed frame: its scripts cannot reach the notebook. still: pictures below the
    frame; None for small ones of the report's heads."""
    first = report.passages[0]
    layers = report.shown_in(first)
    rows = [list(block[: report.counts[layer]]) for layer, block in zip(layers, first.maps, strict=True)]
    inside = f"<p><b>{escape(in_language(report.title, lang))}</b></p>{small_maps(rows, layers, lang)}"
    source = escape(page(report, lang, still=inside))
    frame = (
        f'<iframe srcdoc="{source}" sandbox="allow-scripts allow-downloads" title="headwise" style="{_LOOK}"></iframe>'
    )
    look = f"grid-area: 1 / 1; max-height: {HEIGHT}px; overflow: auto; padding: 0 8px"
    below = f'<div style="{look}">{inside if still is None else still}</div>'
    return f'<div style="display: grid; grid-template-columns: minmax(0, 1fr)">{below}{frame}</div>'


register(Report, lambda report, lang: framed(report, report.lang or lang))


MAP_SIDE = 144  # pixels of a picture's longer side
MAP_CELLS = 72  # of a picture
MAP_HEADS = 12  # with a picture
COMPUTED = 40_000_000  # the most weights that all pictures compute: less than a second on a few cores
STORED = 600_000  # the most numbers of the page in the frame, which is a megabyte or less
_LEAST = 12  # pixels of a picture's shorter side


def _map(amap: AttentionMap, lang: str) -> str:
    b, h, n, m = amap.shape
    shown = 0 if has_no_numbers(amap.lse) or not (b and n and m) else min(h, MAP_HEADS, COMPUTED // (n * m))
    own = amap.using(amap.named)  # that a map is shown is no reading of it
    try:
        heads = [(own.first_head + i, own.head(0, i).pool(MAP_CELLS)[0, 0].cpu().numpy()) for i in range(shown)]
        still = still_of_map(repr(amap), heads, in_language(note(amap.shape, shown), lang), lang)
        if not shown or h * n * m > COMPUTED:
            return still
        return framed(of_map(amap, (None, None), 0, "", cells_of(h, n, m)), lang, still)
    except KernelError as error:  # the named kernel does not support what is shown
        return still_of_map(repr(amap), [], str(error), lang)


def cells_of(h: int, n: int, m: int) -> int:
    """The number of cells along an axis that a page can show of so many heads: exact, or a mean and a maximum."""
    exact, pooled = (math.isqrt(STORED // (parts * h)) for parts in (1, 2))
    return max(n, m) if max(n, m) <= min(exact, 384) else max(8, min(pooled, 384))


def note(shape: tuple[int, int, int, int], shown: int) -> str:
    """What the small pictures show."""
    b, h, n, m = shape
    if not shown:
        return message("no_picture") if n * m > COMPUTED else ""
    cell = max(1, -(-max(n, m) // MAP_CELLS))
    return message("small_pictures" if cell == 1 else "small_pooled", shown=shown, heads=h, entries=b, cell=cell)


def still_of_map(facts: str, heads: Sequence[tuple[int, np.ndarray]], caption: str, lang: str) -> str:
    """Facts, pictures of weights [rows, columns] with the numbers of their heads, and a caption."""
    figures = "".join(_figure(in_language(message("head_number", head=i), lang), weights) for i, weights in heads)
    row = f'<div style="display: flex; flex-wrap: wrap; gap: 10px; margin: 6px 0">{figures}</div>' if figures else ""
    return f"<div><div>{escape(facts)}</div>{row}<div><small>{escape(caption)}</small></div></div>"


def _figure(name: str, weights: np.ndarray) -> str:
    url, (rows, columns) = data_url(heat_png(shares_of(weights, MAP_CELLS))), weights.shape
    width, height = (max(_LEAST, round(MAP_SIDE * size / max(rows, columns))) for size in (columns, rows))
    image = (
        f'<img src="{url}" alt="{escape(name)}" width="{width}" height="{height}" '
        'style="image-rendering: pixelated; max-width: none">'
    )
    return f'<figure style="margin: 0">{image}<figcaption><small>{escape(name)}</small></figcaption></figure>'


register(AttentionMap, _map)


def _record(record: Record, lang: str) -> str:
    """The maps as small multiples if there are any, then each statistic as layers × heads, then the numbers."""
    table, parts = record.table(), [f"<p><b>{escape(repr(record))}</b></p>"]
    maps = list(record.maps.values())
    heads = sum(kept.shape[1] for kept in maps)
    work = sum(kept.shape[1] * kept.shape[2] * kept.shape[3] for kept in maps if isinstance(kept, AttentionMap))
    if maps and heads <= MOST and work <= COMPUTED:
        parts.append(small_maps([_pooled(kept) for kept in maps], range(len(maps)), lang))
    elif maps:
        parts.append(f"<p>{escape(in_language(message('no_picture_of_record'), lang))}</p>")
    parts += [_statistics(table, lang), table._repr_html_()]
    if maps:
        parts.append(f"<p>{escape(in_language(message('record_more'), lang))}</p>")
    return f"<div>{''.join(parts)}</div>"


def _pooled(kept: AttentionMap | Picture) -> list[np.ndarray]:
    """A picture of each head, of the first entry of the batch."""
    if isinstance(kept, Picture):
        return list(kept.mean[0].float().cpu().numpy())
    own = kept.using(kept.named)
    return [own.head(0, head).pool(CELLS)[0, 0].cpu().numpy() for head in range(kept.shape[1])]


def _statistics(table: HeadTable, lang: str) -> str:
    """Each statistic as a picture, a row a layer and a column a head."""
    if not table.places:
        return ""
    cells = []
    for name, column in table.items():
        values = table.dense(name).numpy(force=True)
        if not np.isfinite(values).any():
            continue
        low, high = value_range(values)
        shares = (values - low) / (high - low) if high > low else np.zeros_like(values)
        title = f"{label(name, lang)}: {number(low)} – {number(high)} {unit(column.unit, lang)}"
        cells.append((escape(title), small(shares, title)))
    head = "".join(f"<th>{title}</th>" for title, _ in cells)
    row = "".join(f"<td>{picture}</td>" for _, picture in cells)
    hint = escape(words(lang, "notebook")["statistics_hint"])
    return f"<table><tr>{head}</tr><tr>{row}</tr></table><p>{hint}</p>" if cells else ""


register(Record, _record)


TOKENS = 3  # of the input on which the steps are noted; their values are not shown


def _layer(layer: AttentionLayer, lang: str) -> str:
    table = words(lang, "notebook")
    sizes = {name: getattr(layer, name) for name in ("d_model", "num_heads", "num_kv_heads", "head_dim", "value_dim")}
    title = f"{type(layer).__name__}({', '.join(f'{name}={size}' for name, size in sizes.items())})"
    parts = [f"<p><b>{escape(title)}</b></p>"]
    if (notes := getattr(layer, "notes", None)) is not None:
        summary = in_language(notes.summary, lang)
        parts.append(f"<p>{escape(summary)} <small>{escape(notes.source)}</small></p>")
    if (steps := _steps(layer, lang)) is not None:
        head = [table[name] for name in ("step", "formula", "shape", "meaning")]
        parts.append(as_html(head, [[step.name, step.formula, step.axes, step.words] for step in steps.steps]))
    return f"<div>{''.join(parts)}{_parameters(layer, lang)}</div>"


def _block(block: TransformerBlock, lang: str) -> str:
    inside = _parameters(block, lang) + _layer(block.attention, lang)
    return f"<div><p><b>{escape(type(block).__name__)}</b></p>{inside}</div>"


def _steps(layer: AttentionLayer, lang: str) -> Steps | None:
    """The steps on a short input; None for a design that does not describe them, or cannot run here."""
    steps = Steps(lang, causal=False)
    parameter = next(layer.parameters(), torch.zeros(()))
    training = layer.training
    try:
        with torch.no_grad():
            layer.eval().steps(parameter.new_zeros(1, TOKENS, layer.d_model), steps)
    except (NotImplementedError, RuntimeError):
        return None
    finally:
        layer.train(training)
    return steps


def _parameters(module: nn.Module, lang: str) -> str:
    table = words(lang, "notebook")
    sizes: list[tuple[str, Any]] = [(name, tuple(p.shape)) for name, p in module.named_parameters()]
    rows = [[name, " × ".join(map(str, size)), f"{torch.Size(size).numel():,}"] for name, size in sizes]
    total = sum(p.numel() for p in module.parameters())
    rows.append([table["total"], "", f"{total:,}"])
    return as_html([table["parameter"], table["shape"], table["count"]], rows)


register(AttentionLayer, _layer)
register(TransformerBlock, _block)
