"""An attention map in a notebook: a zoomable page of all heads, above small pictures of the first ones."""

import math
from collections.abc import Sequence
from html import escape

import numpy as np

from headwise.errors import KernelError
from headwise.kernels.graph import has_no_numbers
from headwise.map import AttentionMap
from headwise.pictures.png import data_url, heat_png
from headwise.reports.messages import message
from headwise.reports.notebook.frame import framed
from headwise.reports.see.watched import of_maps
from headwise.shown import register
from headwise.wording import in_language

SIDE = 144  # pixels of a picture's longer side
CELLS = 72  # of a picture
HEADS = 12  # with a picture
COMPUTED = 40_000_000  # the most weights that all pictures compute: less than a second on a few cores
STORED = 600_000  # the most numbers of the page in the frame, which is a megabyte or less
_LEAST = 12  # pixels of a picture's shorter side


def _map(amap: AttentionMap, lang: str) -> str:
    b, h, n, m = amap.shape
    shown = 0 if has_no_numbers(amap.lse) or not (b and n and m) else min(h, HEADS, COMPUTED // (n * m))
    own = amap.using(amap.named)  # that a map is shown is no reading of it
    try:
        heads = [(i, own.head(0, i).pool(CELLS)[0, 0].cpu().numpy()) for i in range(shown)]
        still = still_of(repr(amap), heads, in_language(note(amap.shape, shown), lang), lang)
        if not shown or h * n * m > COMPUTED:
            return still
        return framed(of_maps({"": own}, (None, None), 0, message("title_map"), cells_of(h, n, m)), lang, still)
    except KernelError as error:  # the named kernel does not support what is shown
        return still_of(repr(amap), [], str(error), lang)


def cells_of(h: int, n: int, m: int) -> int:
    """The number of cells along an axis that a page can show of so many heads: exact, or a mean and a maximum."""
    exact, pooled = (math.isqrt(STORED // (parts * h)) for parts in (1, 2))
    return max(n, m) if max(n, m) <= min(exact, 384) else max(8, min(pooled, 384))


def note(shape: tuple[int, int, int, int], shown: int) -> str:
    """What the small pictures show."""
    b, h, n, m = shape
    if not shown:
        return message("no_picture") if n * m > COMPUTED else ""
    cell = max(1, -(-max(n, m) // CELLS))
    return message("small_pictures" if cell == 1 else "small_pooled", shown=shown, heads=h, entries=b, cell=cell)


def still_of(facts: str, heads: Sequence[tuple[int, np.ndarray]], caption: str, lang: str) -> str:
    """Facts, pictures of weights [rows, columns] with the numbers of their heads, and a caption."""
    figures = "".join(_figure(in_language(message("head_number", head=i), lang), weights) for i, weights in heads)
    row = f'<div style="display: flex; flex-wrap: wrap; gap: 10px; margin: 6px 0">{figures}</div>' if figures else ""
    return f"<div><div>{escape(facts)}</div>{row}<div><small>{escape(caption)}</small></div></div>"


def _figure(name: str, weights: np.ndarray) -> str:
    """A head, coloured by the square root of the weight over the largest one, which shows small weights too."""
    weights = np.where(np.isfinite(weights), weights, 0.0)
    shares = np.sqrt(weights / (weights.max() or 1.0))
    rows, columns = weights.shape
    width, height = (max(_LEAST, round(SIDE * size / max(rows, columns))) for size in (columns, rows))
    image = (
        f'<img src="{data_url(heat_png(shares))}" alt="{escape(name)}" width="{width}" height="{height}" '
        'style="image-rendering: pixelated; max-width: none">'
    )
    return f'<figure style="margin: 0">{image}<figcaption><small>{escape(name)}</small></figcaption></figure>'


register(AttentionMap, _map)
