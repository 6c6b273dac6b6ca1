"""Numbers of a page as compressed elements: integers with the largest number of each head."""

import base64
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from headwise.reports.writes import Writes

LETTERS = str.maketrans("<>&", ",.:")  # what HTML would have to write in several letters
NOTHING = -32768  # the code of NaN, in two bytes
CHANNEL_LEVELS = 31  # of a channel of queries or keys, on either side of zero


def planes(codes: np.ndarray) -> bytes:
    """uint16 as their high bytes and then their low bytes, which compress better."""
    return (codes >> 8).astype(np.uint8).tobytes() + (codes & 255).astype(np.uint8).tobytes()


def blob(name: str, data: bytes) -> str:
    """Compressed bytes as an element of the page, in base 85: four bytes as five letters."""
    # Of numbers, zlib finds many short repetitions that take more bits than the numbers; Z_FILTERED ignores them.
    strategies = (zlib.Z_FILTERED, zlib.Z_DEFAULT_STRATEGY)
    shortest = min((_compressed(data, strategy) for strategy in strategies), key=len)
    code = base64.b85encode(shortest).decode("ascii").translate(LETTERS)
    return f'<script type="application/octet-stream" id="{name}">{code}</script>'


def _compressed(data: bytes, strategy: int) -> bytes:
    worker = zlib.compressobj(9, memLevel=9, strategy=strategy)
    return worker.compress(data) + worker.flush()


def packed(given: Writes, index: int, layers: Sequence[int], count: int) -> tuple[dict[str, Any], list[str]]:
    """What heads write as data and elements. index: of the passage. layers: of its arrays, among `count`; lists of all
    layers have null for the others."""
    entry: dict[str, Any] = {}
    blobs: list[str] = []

    def every(values: Sequence[Any]) -> list[Any]:
        found: list[Any] = [None] * count
        for layer, value in zip(layers, values, strict=True):
            found[layer] = value
        return found

    for name, levels, values in (
        ("norms", 1023, given.norms),
        ("logits", 1023, given.next_token),
        ("effects", 127, given.effects),
    ):
        if values is None:
            continue
        codes, tops = _signed(values, levels)
        entry[name] = {"levels": levels, "tops": every(tops.tolist())}
        blobs += [blob(f"{name}-{index}-{layer}", planes(block)) for layer, block in zip(layers, codes, strict=True)]
    if given.effects is not None and given.tokens is not None:
        entry["vocabulary"] = given.words
        blobs += [
            blob(
                f"tokens-{index}-{layer}",
                planes(block.astype(np.uint32) & 0xFFFF) + (block >> 16).astype(np.uint8).tobytes(),
            )
            for layer, block in zip(layers, given.tokens, strict=True)
        ]
    if given.queries is not None and given.keys is not None and given.channels is not None:
        entry["channels"] = {"which": every(given.channels.tolist()), "of": every(given.widths), "scales": {}}
        for side, values in (("queries", given.queries), ("keys", given.keys)):
            tops = np.nan_to_num(np.abs(values)).max(2)  # [layers, heads, C]
            shares = values / np.where(tops > 0, tops, 1)[:, :, None]
            codes = np.where(np.isnan(shares), -128, np.rint(np.nan_to_num(shares) * CHANNEL_LEVELS)).astype(np.int8)
            entry["channels"]["scales"][side] = every(
                [[[float(f"{t:.4g}") for t in h] for h in layer] for layer in tops]
            )
            for layer, block in zip(layers, codes.swapaxes(2, 3), strict=True):
                blobs.append(blob(f"{side}-{index}-{layer}", block.tobytes()))  # [heads, C, n]
    return entry, blobs


def _signed(values: np.ndarray, levels: int) -> tuple[np.ndarray, np.ndarray]:
    """[layers, heads, …] as uint16 of two's complement, levels · value / top, and the tops [layers, heads]."""
    tops = np.nan_to_num(np.abs(values)).reshape(*values.shape[:2], -1).max(2)
    shares = values / np.where(tops > 0, tops, 1).reshape(*tops.shape, *[1] * (values.ndim - 2))
    codes = np.where(np.isnan(shares), NOTHING, np.rint(np.nan_to_num(shares) * levels))
    return codes.astype(np.int16).view(np.uint16), tops
