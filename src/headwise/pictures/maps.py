"""A few heads of an attention map as HTML for notebooks: small pictures side by side."""

from collections.abc import Sequence
from html import escape

import numpy as np

from headwise.pictures.png import data_url, heat_png

SIDE = 144  # pixels of a picture's longer side
_LEAST = 12  # of the shorter one


def maps_html(facts: str, maps: Sequence[tuple[str, np.ndarray]], note: str) -> str:
    """Facts, pictures of weights [rows, columns] with their names, and a note."""
    figures = "".join(map(_figure, maps))
    row = f'<div style="display: flex; flex-wrap: wrap; gap: 10px; margin: 6px 0">{figures}</div>' if maps else ""
    return f"<div><div>{escape(facts)}</div>{row}<div><small>{escape(note)}</small></div></div>"


def _figure(one: tuple[str, np.ndarray]) -> str:
    """A head, coloured by the square root of the weight over the largest one, which shows small weights too."""
    name, weights = one
    weights = np.where(np.isfinite(weights), weights, 0.0)
    shares = np.sqrt(weights / (weights.max() or 1.0))
    rows, columns = weights.shape
    width, height = (max(_LEAST, round(SIDE * size / max(rows, columns))) for size in (columns, rows))
    image = (
        f'<img src="{data_url(heat_png(shares))}" alt="{escape(name)}" width="{width}" height="{height}" '
        'style="image-rendering: pixelated; max-width: none">'
    )
    return f'<figure style="margin: 0">{image}<figcaption><small>{escape(name)}</small></figcaption></figure>'
