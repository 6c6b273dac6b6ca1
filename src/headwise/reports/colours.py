"""Colours, the packaged font, and matrices as PNG: what pages and pictures share, without a drawing library.

Colour maps are computed in OKLCH so that equal steps of weight look equally large. Larger weights are darker on light
pages and brighter on dark pages; zero has the colour of the page.
Source: Ottosson 2020, "A perceptual color space for image processing" (OKLab).

>>> import numpy as np
>>> heat_png(np.eye(3))[:4]
b'\x89PNG'
"""

import base64
import io
import math
import struct
import threading
import zlib
from copy import copy
from functools import cache, lru_cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

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


SHADES = 256


def heat_png(values: np.ndarray, theme: str = "light") -> bytes:
    """A matrix of numbers from 0 to 1 in the colours of weights; others are clipped, NaN has the colour of 0."""
    if values.ndim != 2 or not values.size:
        raise ValueError(f"values: shape {values.shape}, expected [rows, columns] with at least one of each")
    shades = (np.nan_to_num(values, nan=0.0).clip(0, 1) * (SHADES - 1)).round().astype(np.uint8)
    lines = np.concatenate((np.zeros((len(shades), 1), np.uint8), shades), 1)  # each row begins with its filter, none
    size = struct.pack(">IIBBBBB", shades.shape[1], shades.shape[0], 8, 3, 0, 0, 0)  # 8 bits, with a palette
    return _file((b"IHDR", size), (b"PLTE", _palette(theme)), (b"IDAT", zlib.compress(lines.tobytes(), 6)))


def rgb_png(colours: np.ndarray) -> bytes:
    """Colours [rows, columns, 3] of bytes."""
    rows, columns = colours.shape[:2]
    above = np.concatenate((np.zeros_like(colours[:1]), colours[:-1]))  # filter 2: each row less the one above
    lines = np.concatenate((np.full((rows, 1), 2, np.uint8), (colours - above).reshape(rows, -1)), 1)
    size = struct.pack(">IIBBBBB", columns, rows, 8, 2, 0, 0, 0)  # 8 bits, three channels
    return _file((b"IHDR", size), (b"IDAT", zlib.compress(lines.tobytes(), 6)))


def data_url(png: bytes) -> str:
    """A picture as the URL of an <img>."""
    return f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"


@cache
def _palette(theme: str) -> bytes:
    anchors = np.array([[int(stop[i : i + 2], 16) for i in (1, 3, 5)] for stop in stops(theme)], np.float64)
    at = np.linspace(0, 1, SHADES)
    channels = [np.interp(at, np.linspace(0, 1, STOPS), channel) for channel in anchors.T]
    return np.stack(channels, 1).round().astype(np.uint8).tobytes()


def _file(*parts: tuple[bytes, bytes]) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*part) for part in (*parts, (b"IEND", b"")))


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


FAMILY = "Headwise Han"
SIGNS = "␣↵⇥␍"  # for a space, line break, tab and return
# Wide in Chinese and narrow elsewhere; in both fonts.
QUOTES = frozenset(map(ord, "—‘’“”…·"))
MOST_GLYPHS = 3000  # of a page; further characters use the fonts of the machine


def font_path() -> Path:
    """The path of the OpenType file."""
    return Path(str(files("headwise.reports") / "fonts" / "HeadwiseHan.otf"))


@cache
def covered() -> frozenset[int]:
    """The code points of the font."""
    return frozenset(_font().getBestCmap())


@cache
def _font() -> Any:
    """The font as a `TTFont` that has read all but the outlines."""
    from fontTools.ttLib import TTFont

    font = TTFont(io.BytesIO(font_path().read_bytes()), lazy=True)
    font.ensureDecompiled(recurse=False)
    return font


def font_face(text: str) -> str:
    """CSS @font-face rules with the wide characters of `text` that the font has, and the signs.

    About 200 bytes per Han character. With Han characters, quotation marks and dashes are in a separate family for the
    text only, because they are narrow in English sentences of the page.
    """
    points = set(map(ord, text)) & covered()
    wide = {p for p in points if p >= 0x2E80} | set(map(ord, SIGNS))
    rules = _rule(FAMILY, (*sorted(wide)[:MOST_GLYPHS],), "U+2190-21FF,U+2400-243F,U+2E80-10FFFF")
    if points & QUOTES and any(0x3400 <= p <= 0x9FFF for p in points):
        rules += _rule(f"{FAMILY} Quotes", (*sorted(points & QUOTES),), "U+B7,U+2014-2026")
    return rules


EM = 1000  # units of the font, and the width that outlines do not state
_READING = threading.Lock()  # the outlines of one file, at one place at a time


@lru_cache(maxsize=32)  # pages of the same texts, and those without Chinese, need the same
def _rule(family: str, points: tuple[int, ...], span: str) -> str:
    """A font with some code points. span: the code points that a browser uses it for; without it, the blank of the font
    would determine the unit `ch`.

    No outline of the packaged font refers to another, so that each is copied as it is, without being read.
    """
    from fontTools.fontBuilder import FontBuilder

    whole, builder, out = _font(), FontBuilder(EM, isTTF=False), io.BytesIO()
    names = whole.getBestCmap()
    glyphs = [".notdef", *dict.fromkeys(names[point] for point in points)]
    builder.setupGlyphOrder(glyphs)
    builder.setupCharacterMap({point: names[point] for point in points})
    for table in ("head", "hhea", "maxp", "OS/2", "name", "post"):
        builder.font[table] = copy(whole[table])
    builder.setupHorizontalMetrics({glyph: whole["hmtx"][glyph] for glyph in glyphs})
    with _READING:
        top = whole["CFF "].cff[0]
        outlines = {glyph: top.CharStrings[glyph] for glyph in glyphs}
        builder.setupCFF(whole["name"].getDebugName(6), {}, outlines, {"defaultWidthX": EM})
        builder.font.recalcBBoxes, builder.font.flavor = False, "woff"
        builder.font.save(out)
    code = base64.b64encode(out.getvalue()).decode("ascii")
    source = f'url(data:font/woff;base64,{code}) format("woff")'
    return f'@font-face{{font-family:"{family}";src:{source};unicode-range:{span};font-display:block}}\n'
