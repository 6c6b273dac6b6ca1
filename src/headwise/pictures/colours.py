"""The colour maps of every picture, computed in OKLCH so that equal steps of weight look equally large.

Larger weights are darker on light pages and brighter on dark pages; zero has the colour of the page.
Source: Ottosson 2020, "A perceptual color space for image processing" (OKLab).
"""

import math
from itertools import pairwise

# (position, chroma, hue in degrees); lightness is linear between the ends.
_LIGHT = (0.975, 0.27, [(0.0, 0.008, 95), (0.18, 0.06, 165), (0.42, 0.105, 215), (0.72, 0.155, 268), (1.0, 0.11, 292)])
_DARK = (0.215, 0.965, [(0.0, 0.018, 285), (0.25, 0.13, 295), (0.5, 0.175, 350), (0.75, 0.155, 48), (1.0, 0.085, 100)])
STOPS = 33


def stops(theme: str) -> list[str]:
    """`STOPS` colours as "#rrggbb", evenly spaced over the weights 0 ... 1, for the theme "light" or "dark"."""
    first, last, anchors = {"light": _LIGHT, "dark": _DARK}[theme]
    out = []
    for step in range(STOPS):
        at = step / (STOPS - 1)
        chroma, hue = _between(anchors, at)
        out.append(_hex(first + (last - first) * at, chroma, hue))
    return out


def _between(anchors: list[tuple[float, float, int]], at: float) -> tuple[float, float]:
    for (x0, c0, h0), (x1, c1, h1) in pairwise(anchors):
        if at <= x1:
            part = (at - x0) / (x1 - x0)
            difference = (h1 - h0 + 180) % 360 - 180
            return c0 + (c1 - c0) * part, h0 + difference * part
    raise ValueError(at)


def _hex(lightness: float, chroma: float, hue: float) -> str:
    """The sRGB colour with that lightness and hue, with chroma reduced to fit into the gamut."""
    while True:
        rgb = _linear_rgb(lightness, chroma, hue)
        if chroma <= 0 or all(-1e-6 <= c <= 1 + 1e-6 for c in rgb):
            return "#" + "".join(f"{round(255 * _gamma(min(max(c, 0.0), 1.0))):02x}" for c in rgb)
        chroma = max(chroma - 0.002, 0.0)


def _linear_rgb(lightness: float, chroma: float, hue: float) -> tuple[float, float, float]:
    a, b = chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    return (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )


def _gamma(value: float) -> float:
    return 12.92 * value if value <= 0.0031308 else 1.055 * value ** (1 / 2.4) - 0.055
