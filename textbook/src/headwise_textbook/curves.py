"""Line plots as plain data and as SVG for HTML pages: without scripts and styles, a few kB each.

Colours are defined by the style sheet of the page: line i has the class `line-i`, axes and grid have `ink` and `grid`.
(An SVG of matplotlib has some 20 kB and style attributes that a strict content security policy refuses.)

>>> curve = Curve.of("work", "heads", "FLOPs", {"counted": {1: 8.0, 2: 8.0, 4: 8.0}}, log="x")
>>> svg(curve).startswith("<svg")
True
"""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from headwise.errors import ConfigError
from headwise.wording import Bilingual, Message, in_language

WIDTH, HEIGHT = 420, 270
LEFT, RIGHT, TOP, BOTTOM = 58, 22, 12, 46  # room for the numbers along the axes
COLOURS = 6  # classes line-0 … line-5
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

Lines = (
    Mapping[str, Mapping[Any, float]] | Mapping[Bilingual, Mapping[Any, float]] | Mapping[Message, Mapping[Any, float]]
)  # name → x → y


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


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}">{html.escape(words)}</text>'


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
