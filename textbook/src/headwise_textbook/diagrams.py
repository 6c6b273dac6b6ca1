"""Small pictures as SVG files: matrices side by side, and line plots. Without scripts, fonts and a drawing library.

>>> import torch
>>> picture = Matrices((Matrix("weights", torch.eye(3), columns="abc"),))
>>> diagram(picture, "en").startswith("<svg")
True
"""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch

from headwise.errors import ConfigError
from headwise.reports import font_face, stops
from headwise.wording import in_language
from headwise_textbook import curves
from headwise_textbook.curves import Curve

SIDE = 190  # of a matrix's longer side, in pixels
GAP, TITLE, LABEL, MARGIN = 26, 20, 15, 12
MOST_WIDE = 1000  # matrices beyond it begin another row
NUMBERS = 12  # rows and columns at most to write the numbers into the cells
LINES = ("#3b4cc0", "#b4451f", "#1f8a70", "#8a3ffc", "#6b7280", "#c2185b")
STYLE = (
    "text{font:12px 'Headwise Han','Segoe UI',system-ui,'Noto Sans CJK SC','PingFang SC','Microsoft YaHei',sans-serif;"
    "fill:#1d1e26;"
    "stroke:none}.ink{stroke:#63656f}.grid{stroke:#dfddd3}.reference{stroke-dasharray:5 4}"
)


@dataclass(frozen=True)
class Matrix:
    """A matrix [rows, columns] with a title. Its largest number has the darkest colour, zero the colour of paper.

    rows, columns: a label for each. numbers: whether to write the numbers into the cells, where there is room.
    top: the number with the darkest colour; default: the largest.  The sign is not drawn.
    """

    title: str
    values: Any
    rows: Sequence[str] = ()
    columns: Sequence[str] = ()
    numbers: bool = False
    top: float | None = None

    @property
    def array(self) -> np.ndarray:
        """The numbers, float64."""
        array = torch.as_tensor(self.values).detach().double().numpy()
        if array.ndim != 2 or not array.size:
            raise ConfigError(f"matrix {self.title!r}: shape {array.shape}, expected [rows, columns]")
        return array


@dataclass(frozen=True)
class Matrices:
    """Matrices side by side. rows, columns: what the two axes of all of them are."""

    matrices: tuple[Matrix, ...]
    rows: str = ""
    columns: str = ""


Picture = Matrices | Curve


def diagram(picture: Picture, lang: str) -> str:
    """The picture as one SVG document, with a light background of its own."""
    return _plot(picture, lang) if isinstance(picture, Curve) else _matrices(picture, lang)


def _document(width: float, height: float, parts: Sequence[str], style: str = "") -> str:
    text = "".join(parts)
    wide = next((c for c in text if ord(c) > 0x2E7F), "")
    face = font_face(text) if wide else ""
    # Browsers draw the first text of each size with another font, while this one is being read, and remember how they
    # drew each word: invisible ones come first, words that do not occur.
    sizes = ["", *sorted(set(re.findall(r' style="font-size:[\d.]+px"', text)))] if wide else []
    first = "".join(f'<text opacity="0"{size}>{2 * wide}</text>' for size in sizes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}"><style>{face}{STYLE}{style}</style>'
        f'<rect width="100%" height="100%" rx="6" fill="#fff"/>{first}'
        f"{text}</svg>\n"
    )


def _matrices(picture: Matrices, lang: str) -> str:
    drawn = [_matrix(one, lang) for one in picture.matrices]
    lines: list[list[tuple[float, float, str]]] = [[]]
    for one in drawn:
        if lines[-1] and sum(width + GAP for width, _, _ in [*lines[-1], one]) > MOST_WIDE:
            lines.append([])
        lines[-1].append(one)
    left = 30.0 if picture.rows else float(MARGIN)
    parts, y, wide = [], float(MARGIN), 0.0
    for line in lines:
        x = left
        for width, _, svg in line:
            parts.append(f'<g transform="translate({x:.1f} {y:.1f})">{svg}</g>')
            x += width + GAP
        wide = max(wide, x - GAP + MARGIN)
        y += max(height for _, height, _ in line) + 12
    if picture.columns:
        parts.append(_text(left, y + 4, in_language(picture.columns, lang)))
        y += 18
    if picture.rows:
        name = html.escape(in_language(picture.rows, lang))
        parts.append(f'<text transform="translate(20 {y / 2:.1f}) rotate(-90)" text-anchor="middle">{name}</text>')
    needed = [8.0 * _length(in_language(picture.columns, lang)) + left + MARGIN]
    return _document(max(wide, *needed), y, parts)


def _matrix(one: Matrix, lang: str) -> tuple[float, float, str]:
    """Width, height and content of a matrix with its title and labels."""
    array = one.array
    rows, columns = array.shape
    cell = min(SIDE / max(rows, columns), 34.0)
    wide = max((_length(label) for label in one.rows), default=0) * 7.0 + (6 if one.rows else 0)
    tall = LABEL if one.columns else 0
    top = one.top or float(np.nanmax(np.abs(array))) or 1.0
    shares = np.nan_to_num(np.abs(array) / top).clip(0, 1)
    palette = stops("light")
    levels = (shares * (len(palette) - 1)).round().astype(int)
    title = in_language(one.title, lang)
    parts = [_text(wide, 12, title)]
    y0 = TITLE + tall
    parts.append(f'<g transform="translate({wide:.1f} {y0})" shape-rendering="crispEdges">')
    paths: dict[int, list[str]] = {}
    for i, line in enumerate(levels):
        j = 0
        for level, run in groupby(line.tolist()):
            count = len(list(run))
            paths.setdefault(level, []).append(
                f"M{_n(j * cell)} {_n(i * cell)}h{_n(count * cell)}v{_n(cell)}h-{_n(count * cell)}z"
            )
            j += count
    for level, path in sorted(paths.items()):
        parts.append(f'<path fill="{palette[level]}" d="{"".join(path)}"/>')
    parts.append(f'<rect width="{_n(columns * cell)}" height="{_n(rows * cell)}" fill="none" class="grid"/></g>')
    if one.numbers and max(rows, columns) <= NUMBERS:
        for i in range(rows):
            for j in range(columns):
                colour = "#fff" if shares[i, j] > 0.6 else "#1d1e26"
                said = f"{array[i, j]:.2f}".rstrip("0").rstrip(".") if cell > 22 else f"{array[i, j]:.1f}"
                at = wide + (j + 0.5) * cell, y0 + (i + 0.5) * cell + 3.5
                parts.append(
                    f'<text x="{_n(at[0])}" y="{_n(at[1])}" text-anchor="middle" '
                    f'style="font-size:{min(10.5, cell / 2.6):.1f}px;fill:{colour}">{said}</text>'
                )
    for j, label in enumerate(one.columns):
        parts.append(_text(wide + (j + 0.5) * cell, y0 - 4, label, "middle", min(11.0, cell + 2)))
    for i, label in enumerate(one.rows):
        parts.append(_text(wide - 4, y0 + (i + 0.5) * cell + 4, label, "end", min(11.0, cell + 2)))
    return max(wide + columns * cell, wide + 7.0 * _length(title)), y0 + rows * cell, "".join(parts)


def _plot(curve: Curve, lang: str) -> str:
    """The line plot with its title, and the names of its lines below."""
    inner = curves.svg(_in(curve, lang)).replace(
        "<svg ", f'<svg y="42" width="{curves.WIDTH}" height="{curves.HEIGHT}" ', 1
    )
    style = "".join(
        f".line-{i}{{stroke:{colour};stroke-width:2}}.mark-{i}{{fill:{colour};stroke:none}}"
        for i, colour in enumerate(LINES)
    )
    named = in_language(curve.y_name, lang)
    parts = [_text(MARGIN, 18, in_language(curve.title, lang)), _text(MARGIN, 36, named, size=11.0), inner]
    y = 42.0 + curves.HEIGHT + 10
    for i, line in enumerate(curve.lines):
        kind = " reference" if line.reference else ""
        parts.append(f'<path class="line-{i}{kind}" d="M{MARGIN} {y - 4:.0f}h26"/>')
        parts.append(_text(MARGIN + 34, y, in_language(line.name, lang)))
        y += 18
    return _document(curves.WIDTH + 10, y, parts, style)


def _in(curve: Curve, lang: str) -> Curve:
    """The curve with the names of its axes in a language."""
    return replace(curve, x_name=in_language(curve.x_name, lang), y_name=in_language(curve.y_name, lang))


def _text(x: float, y: float, words: str, anchor: str = "start", size: float = 12.0) -> str:
    smaller = "" if size == 12.0 else f' style="font-size:{size:.1f}px"'
    return f'<text x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}"{smaller}>{html.escape(words)}</text>'


def _length(words: str) -> float:
    """About how wide a text is, in narrow characters."""
    return sum(1.8 if ord(c) > 0x2E7F else 1.0 for c in words)


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
