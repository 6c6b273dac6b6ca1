"""Small pictures of many heads in a table, layers × heads. They need neither scripts nor style sheets."""

from collections.abc import Sequence
from html import escape

import numpy as np

from headwise.pictures.png import data_url, heat_png
from headwise.reports.data import Report
from headwise.reports.words import words
from headwise.wording import in_language

CELLS = 48  # of a picture at most
SIDE = 64  # pixels of its longer side
MOST = 400  # pictures of a table


def still_of(report: Report, lang: str) -> str:
    """The title of a report and a small picture of each head on its first passage."""
    first = report.passages[0]
    layers = report.shown_in(first)
    rows = [list(block[: report.counts[layer]]) for layer, block in zip(layers, first.maps, strict=True)]
    title = f"<p><b>{escape(in_language(report.title, lang))}</b></p>"
    return title + small_maps(rows, layers, lang)


def small_maps(rows: Sequence[Sequence[np.ndarray]], layers: Sequence[int], lang: str) -> str:
    """Weights [queries, keys] of each head, a row a layer; layers: their numbers. Those beyond MOST are omitted."""
    table, shown, body = words(lang, "notebook"), 0, []
    for layer, heads in zip(layers, rows, strict=True):
        if shown + len(heads) > MOST:
            break
        shown += len(heads)
        name = table["layer_short"].format(layer=layer)
        cells = "".join(
            f"<td>{small(shares_of(weights), table['short_name'].format(layer=layer, head=head))}</td>"
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


def shares_of(weights: np.ndarray) -> np.ndarray:
    """The square root of each weight over the largest one, which shows small weights too; at most CELLS wide."""
    weights = reduced(np.where(np.isfinite(weights), weights, 0.0), CELLS)
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
