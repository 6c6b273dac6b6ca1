"""Damage to files, drawn with a seed: what disks, editors, transfers and people do to them."""

import json
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

VALUES = (
    None, True, False, 0, -1, 0.5, 10**15, -(10**15), 10**40, float("nan"), float("inf"), "", "wings", "\ud800", [],
    {}, [[]], [1, "a", None], {"kind": "And"}, "\x00", "9" * 5000,
)  # fmt: skip


def damaged(data: bytes, times: int, seed: int = 0) -> Iterator[bytes]:
    """So many damaged versions of a file, each different from it."""
    drawn = random.Random(seed)
    found = 0
    while found < times:
        kinds = [*BYTES, *(TEXTS if _is_text(data) else ()), *(HEADERS if _has_header(data) else ())]
        try:
            made = drawn.choice(kinds)(data, drawn)
        except (ValueError, IndexError):  # there is nothing of that kind in the file
            continue
        if made != data:
            found += 1
            yield made


def _flip(data: bytes, drawn: random.Random) -> bytes:
    made = bytearray(data)
    for _ in range(drawn.choice((1, 1, 1, 8))):
        made[drawn.randrange(len(made))] ^= 1 << drawn.randrange(8)
    return bytes(made)


def _truncate(data: bytes, drawn: random.Random) -> bytes:
    return data[: drawn.choice((0, 1, len(data) // 2, len(data) - 1, drawn.randrange(len(data))))]


def _insert(data: bytes, drawn: random.Random) -> bytes:
    at = drawn.randrange(len(data) + 1)
    return data[:at] + drawn.choice((b"\x00", b"\xff\xfe", b"\n", b'"', b"{", drawn.randbytes(9))) + data[at:]


def _remove(data: bytes, drawn: random.Random) -> bytes:
    start, stop = _span(data, drawn)
    return data[:start] + data[stop:]


def _double(data: bytes, drawn: random.Random) -> bytes:
    start, stop = _span(data, drawn)
    return data[:stop] + data[start:]


def _zero(data: bytes, drawn: random.Random) -> bytes:
    start, stop = _span(data, drawn)
    return data[:start] + bytes(stop - start) + data[stop:]


def _twice(data: bytes, drawn: random.Random) -> bytes:
    return data + data


def _span(data: bytes, drawn: random.Random) -> tuple[int, int]:
    start = drawn.randrange(len(data))
    return start, min(len(data), start + drawn.choice((1, 3, 8, 64, len(data))))


def _value(text: bytes, drawn: random.Random) -> bytes:
    """Another value at some place of a JSON file, or of a line of one."""
    lines = text.splitlines() if b"\n{" in text else [text]
    at = drawn.randrange(len(lines))
    lines[at] = _changed(lines[at], drawn)
    return b"\n".join(lines)


def _deep(text: bytes, drawn: random.Random) -> bytes:
    return drawn.choice((b"[" * 100_000, b'{"a":' * 100_000, b"[" * 100_000 + b"]" * 100_000))


def _changed(text: bytes, drawn: random.Random) -> bytes:
    value = json.loads(text)
    places = list(_places(value))
    if not places:
        raise ValueError("nothing to change")
    inside, key = drawn.choice(places)
    what = drawn.choice(("replace", "replace", "remove", "move", "nest", "grow"))
    if what == "remove":
        del inside[key]
    elif what == "move":
        other, name = drawn.choice(places)
        inside[key], other[name] = other[name], inside[key]
    elif what == "nest":
        inside[key] = [inside[key]]
    elif what == "grow" and isinstance(inside, dict):
        inside["wings"] = inside[key]
    else:
        inside[key] = drawn.choice(VALUES)
    return json.dumps(value).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(entries):
        yield value, key
        yield from _places(inner)


def _header(data: bytes, drawn: random.Random) -> bytes:
    """Another value in the header of a safetensors file."""
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    inner = [name for name, text in header.get("__metadata__", {}).items() if text[:1] in ("{", "[")]
    if inner and drawn.random() < 0.5:
        name = drawn.choice(inner)
        header["__metadata__"][name] = _changed(header["__metadata__"][name].encode(), drawn).decode()
        made = json.dumps(header).encode()
    else:
        made = _changed(data[8 : 8 + size], drawn)
    return struct.pack("<Q", len(made)) + made + data[8 + size :]


def _length(data: bytes, drawn: random.Random) -> bytes:
    return struct.pack("<Q", drawn.choice((0, 1, 2**63, 2**64 - 1, len(data), len(data) - 8))) + data[8:]


def _is_text(data: bytes) -> bool:
    return data[:1] in (b"{", b"[")


def _has_header(data: bytes) -> bool:
    return data[8:9] == b"{"


Damage = Callable[[bytes, random.Random], bytes]
BYTES: tuple[Damage, ...] = (_flip, _flip, _truncate, _insert, _remove, _double, _zero, _twice)
TEXTS: tuple[Damage, ...] = (*[_value] * 12, _deep)
HEADERS: tuple[Damage, ...] = (*[_header] * 8, _length)
