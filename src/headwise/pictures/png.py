"""Matrices and colours as PNG files with one pixel per number or colour.

>>> import numpy as np
>>> heat_png(np.eye(3))[:4]
b'\\x89PNG'
"""

import base64
import struct
import zlib
from functools import cache

import numpy as np

from headwise.pictures.colours import STOPS, stops

SHADES = 256


def heat_png(values: np.ndarray, theme: str = "light") -> bytes:
    """A matrix [rows, columns] of numbers from 0 to 1 in the colours of attention weights. Numbers outside are clipped,
    NaN has the colour of 0."""
    if values.ndim != 2 or not values.size:
        raise ValueError(f"values: shape {values.shape}, expected [rows, columns] with at least one of each")
    shades = (np.nan_to_num(values, nan=0.0).clip(0, 1) * (SHADES - 1)).round().astype(np.uint8)
    lines = np.concatenate((np.zeros((len(shades), 1), np.uint8), shades), 1)  # each row begins with its filter, none
    size = struct.pack(">IIBBBBB", shades.shape[1], shades.shape[0], 8, 3, 0, 0, 0)  # 8 bits, with a palette
    return _file((b"IHDR", size), (b"PLTE", _palette(theme)), (b"IDAT", zlib.compress(lines.tobytes(), 9)))


def rgb_png(colours: np.ndarray) -> bytes:
    """Colours [rows, columns, 3] of bytes."""
    rows, columns = colours.shape[:2]
    above = np.concatenate((np.zeros_like(colours[:1]), colours[:-1]))  # filter 2: each row less the one above
    lines = np.concatenate((np.full((rows, 1), 2, np.uint8), (colours - above).reshape(rows, -1)), 1)
    size = struct.pack(">IIBBBBB", columns, rows, 8, 2, 0, 0, 0)  # 8 bits, three channels
    return _file((b"IHDR", size), (b"IDAT", zlib.compress(lines.tobytes(), 9)))


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
