"""Line plots and small matrices as plain data and as SVG: without scripts and a drawing library, a few kB each.

Colours of `svg` are defined by the style sheet of the page: line i has the class `line-i`, axes and grid have `ink` and
`grid`. (An SVG of matplotlib has some 20 kB and style attributes that a strict content security policy refuses.)
`diagram` is a document with its own colours.

>>> curve = Curve.of("work", "heads", "FLOPs", {"counted": {1: 8.0, 2: 8.0, 4: 8.0}}, log="x")
>>> svg(curve).startswith("<svg")
True
>>> import torch
>>> picture = Matrices((Matrix("weights", torch.eye(3), columns="abc"),))
>>> diagram(picture, "en").startswith("<svg")
True
"""

import html
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import torch

from headwise.errors import ConfigError
from headwise.reports.colours import font_face, stops
from headwise.wording import Bilingual, in_language

WIDTH, HEIGHT = 420, 270
LEFT, RIGHT, TOP, BOTTOM = 58, 22, 12, 46  # room for the numbers along the axes
COLOURS = 6  # classes line-0 … line-5
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

Lines = Mapping[str, Mapping[Any, float]] | Mapping[Bilingual, Mapping[Any, float]]  # name → x → y


@dataclass(frozen=True)
class Line:
    """One line: a value for each x. reference: whether it is claimed or computed by a formula instead of measured."""

    name: str
    y: tuple[float, ...]
    reference: bool = False


@dataclass(frozen=True)
class Curve:
    """Lines over one axis.

    x_name, y_name: labels of the axes, with units. x: numbers in ascending order. log_x, log_y: logarithmic axes, which
    show 0 at their lower end. Non-finite values are omitted.

    Raises ConfigError if lengths differ, x does not increase, or a value on a logarithmic axis is negative.
    """

    title: str
    x_name: str
    y_name: str
    x: tuple[float, ...]
    lines: tuple[Line, ...]
    log_x: bool = False
    log_y: bool = False

    def __post_init__(self) -> None:
        if not self.x or not self.lines or len(self.lines) > COLOURS:
            raise ConfigError(
                f"curve {self.title!r}: {len(self.x)} points and {len(self.lines)} lines; expected at least 1 point "
                f"and 1 to {COLOURS} lines"
            )
        for line in self.lines:
            if len(line.y) != len(self.x):
                raise ConfigError(
                    f"curve {self.title!r}: line {line.name!r} has {len(line.y)} values, expected {len(self.x)}"
                )
        if any(b <= a for a, b in pairwise(self.x)) or not all(map(math.isfinite, self.x)):
            raise ConfigError(f"curve {self.title!r}: expected x to be finite and increasing, got {self.x}")
        low = min((y for line in self.lines for y in line.y if math.isfinite(y)), default=0.0)
        for axis, log, least in (("x", self.log_x, self.x[0]), ("y", self.log_y, low)):
            if log and least < 0:
                raise ConfigError(f"curve {self.title!r}: {axis} is logarithmic, but {least} is negative")

    @classmethod
    def of(
        cls, title: str, x_name: str, y_name: str, lines: Lines, reference: Lines | None = None, *, log: str = "",
    ) -> "Curve":  # fmt: skip
        """A curve from lines x → y, all with the same x. reference: lines not measured. log: "x", "y", "xy" or ""."""
        every = [(name, line, False) for name, line in lines.items()]
        every += [(name, line, True) for name, line in (reference or {}).items()]
        x = tuple(sorted(every[0][1])) if every else ()
        for name, line, _ in every:
            if set(line) != set(x):
                raise ConfigError(f"curve {title!r}: line {name!r} has values for {sorted(line)}, expected {x}")
        drawn = tuple(Line(name, tuple(float(line[at]) for at in x), claimed) for name, line, claimed in every)
        return cls(title, x_name, y_name, tuple(map(float, x)), drawn, "x" in log, "y" in log)

    def worded(self, lang: str) -> "Curve":
        """The curve with title, axes and names in that language, as far as they have a version in it."""
        title, x_name, y_name = (in_language(words, lang) for words in (self.title, self.x_name, self.y_name))
        lines = tuple(replace(line, name=in_language(line.name, lang)) for line in self.lines)
        return replace(self, title=title, x_name=x_name, y_name=y_name, lines=lines)


@dataclass(frozen=True)
class _Axis:
    """The positions of values, between `start` and `end` of the picture."""

    low: float
    high: float
    log: bool
    start: float
    end: float
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        """The position of a value."""
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        if self.log and value <= 0:
            return self.start
        part = ((math.log(value) if self.log else value) - low) / (high - low)
        foot = 0.08 * (self.end - self.start) if 0.0 in self.ticks and self.log else 0.0
        return self.start + foot + part * (self.end - self.start - foot)


def svg(curve: Curve) -> str:
    """The lines as one <svg> element; `legend` has their names."""
    values = [y for line in curve.lines for y in line.y if math.isfinite(y)]
    x = _axis(curve.x, curve.log_x, LEFT + 8, WIDTH - RIGHT, given=True)
    y = _axis(values or [0.0], curve.log_y, HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(_description(curve))}" '
        'fill="none" stroke="currentColor">'
    ]
    for value in y.ticks:
        at = _n(y.at(value))
        parts.append(f'<path class="grid" d="M{LEFT} {at}H{WIDTH - RIGHT}"/>')
        parts.append(_text(LEFT - 6, float(at) + 4, label(value), "end"))
    for value in x.ticks:
        parts.append(f'<path class="grid" d="M{_n(x.at(value))} {HEIGHT - BOTTOM}v4"/>')
        parts.append(_text(x.at(value), HEIGHT - BOTTOM + 17, label(value), "middle"))
    parts.append(f'<path class="ink" d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, curve.x_name, "middle"))
    for i, line in sorted(enumerate(curve.lines), key=lambda one: not one[1].reference):  # measured lines on top
        parts += _drawn(i, line, curve, x, y)
    return "".join([*parts, "</svg>"])


def legend(curve: Curve) -> str:
    """The names of the lines with a sample of each, as an HTML list."""
    items = [
        f'<li><svg viewBox="0 0 30 12" width="30" height="12" fill="none" stroke="currentColor" aria-hidden="true">'
        f'<path class="line-{i}{" reference" if line.reference else ""}" d="M1 6H29"/>'
        f"{'' if line.reference else _mark(i, 15, 6)}</svg>{html.escape(line.name)}</li>"
        for i, line in enumerate(curve.lines)
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'


def label(value: float) -> str:
    """A number for an axis: 4,096, 0.02, 3·10⁻⁷."""
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)) + 1e-9)
    if -3 <= exponent < 5:
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    factor = value / 10.0**exponent
    power = f"10{str(exponent).translate(RAISED)}"
    return power if abs(factor - 1) < 1e-6 else f"{factor:.3g}·{power}"


def _drawn(i: int, line: Line, curve: Curve, x: _Axis, y: _Axis) -> list[str]:
    """The path of a line, interrupted at missing values, and a mark with its numbers at each measured point."""
    path, marks, pen = [], [], "M"
    for a, b in zip(curve.x, line.y, strict=True):
        if not math.isfinite(b):
            pen = "M"
            continue
        path.append(f"{pen}{_n(x.at(a))} {_n(y.at(b))}")
        pen = "L"
        tip = html.escape(f"{line.name}: {label(a)} → {b:.4g}")
        if not line.reference and len(curve.x) <= 40:
            marks.append(_mark(i, x.at(a), y.at(b), tip))
    return [f'<path class="line-{i}{" reference" if line.reference else ""}" d="{"".join(path)}"/>', *marks]


def _mark(i: int, x: float, y: float, tip: str = "") -> str:
    """A mark; lines have different shapes, which are distinct without colours."""
    forms = "M-3.2 0a3.2 3.2 0 1 0 6.4 0a3.2 3.2 0 1 0-6.4 0", "M-3-3H3V3H-3Z", "M0-4L4 3H-4Z", "M0-4L4 0L0 4L-4 0Z"
    title = f"<title>{tip}</title>" if tip else ""
    return f'<path class="mark-{i}" transform="translate({_n(x)} {_n(y)})" d="{forms[i % len(forms)]}">{title}</path>'


def _axis(values: Sequence[float], log: bool, start: float, end: float, given: bool = False) -> _Axis:
    """An axis for these values. given: use the values themselves as ticks where they are few and far apart."""
    above = [v for v in values if v > 0] if log else list(values)
    low, high = (min(above), max(above)) if above else (1.0, 1.0)
    if not given:
        low, high = _rounded(low, high, log)
    if low == high:
        low, high = (low / 2, high * 2) if log else (low - 0.5, high + 0.5)
    zero = (0.0,) if log and min(values) <= 0 else ()
    axis = _Axis(low, high, log, start, end, zero)
    places = [axis.at(v) for v in values]
    if given and log and all(abs(b - a) > 26 for a, b in pairwise(places)):
        return _Axis(low, high, log, start, end, tuple(values))
    whole = given and all(v == int(v) for v in values)
    return _Axis(low, high, log, start, end, (*zero, *_ticks(low, high, log, whole)))


def _rounded(low: float, high: float, log: bool) -> tuple[float, float]:
    """The ends of an axis: from 0, or at the ticks around the values."""
    if log:
        if high / low < 1.5:
            low, high = low / 1.5, high * 1.5  # a constant line is in the middle
        ticks = [f * 10.0**e for e in range(-330 + 22, 308) for f in (1, 2, 5)]
        tolerance = 1 + 1e-9
        return max(t for t in ticks if t <= low * tolerance), min(t for t in ticks if t >= high / tolerance)
    low = min(low, 0.0)
    step = _step(high - low)
    return math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step


def _ticks(low: float, high: float, log: bool, whole: bool) -> tuple[float, ...]:
    """Round numbers from low to high. whole: integers only, on a linear axis."""
    if not log:
        step = max(_step(high - low), 1.0 if whole else 0.0)
        return tuple(i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1))
    decades = math.log10(high / low)
    factors = (1, 2, 5) if decades <= 2.1 else (1,)
    every = max(1, math.ceil(decades / 6))
    first, last = math.floor(math.log10(low) - 1e-9), math.ceil(math.log10(high) + 1e-9)
    found = [f * 10.0**e for e in range(first, last + 1) if e % every == 0 for f in factors]
    return tuple(t for t in found if low * (1 - 1e-9) <= t <= high * (1 + 1e-9))


def _step(span: float) -> float:
    """A round step for about five ticks."""
    if span <= 0:
        return 0.5
    power = 10.0 ** math.floor(math.log10(span / 4))
    return next(f * power for f in (1, 2, 2.5, 5, 10) if span / (f * power) <= 5.5)


def _description(curve: Curve) -> str:
    lines = "; ".join(f"{line.name}: {line.y[0]:.4g} … {line.y[-1]:.4g}" for line in curve.lines)
    return f"{curve.title}. {curve.y_name} over {curve.x_name}, {label(curve.x[0])} … {label(curve.x[-1])}. {lines}"


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
    x_name, y_name = in_language(curve.x_name, lang), in_language(curve.y_name, lang)
    inner = svg(replace(curve, x_name=x_name, y_name=y_name))
    inner = inner.replace("<svg ", f'<svg y="42" width="{WIDTH}" height="{HEIGHT}" ', 1)
    style = "".join(
        f".line-{i}{{stroke:{colour};stroke-width:2}}.mark-{i}{{fill:{colour};stroke:none}}"
        for i, colour in enumerate(LINES)
    )
    parts = [_text(MARGIN, 18, in_language(curve.title, lang)), _text(MARGIN, 36, y_name, size=11.0), inner]
    y = 42.0 + HEIGHT + 10
    for i, line in enumerate(curve.lines):
        kind = " reference" if line.reference else ""
        parts.append(f'<path class="line-{i}{kind}" d="M{MARGIN} {y - 4:.0f}h26"/>')
        parts.append(_text(MARGIN + 34, y, in_language(line.name, lang)))
        y += 18
    return _document(WIDTH + 10, y, parts, style)


def _text(x: float, y: float, words: str, anchor: str = "start", size: float = 12.0) -> str:
    smaller = "" if size == 12.0 else f' style="font-size:{size:.1f}px"'
    return f'<text x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}"{smaller}>{html.escape(words)}</text>'


def _length(words: str) -> float:
    """About how wide a text is, in narrow characters."""
    return sum(1.8 if ord(c) > 0x2E7F else 1.0 for c in words)


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
