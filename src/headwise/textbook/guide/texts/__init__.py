"""The sections, equations, listings, tables and figures of five textbooks and tutorials on multi-head attention.

A text is a module with a `TITLE` and its `PLACES`, in the order of the text.
"""

import re
from difflib import get_close_matches
from types import ModuleType

from headwise.errors import ConfigError
from headwise.textbook.guide.registry import find_topic, topics
from headwise.textbook.guide.texts.place import Place
from headwise.textbook.guide.topic import Topic

TEXTS: tuple[ModuleType, ...] = ()


def places() -> list[Place]:
    """All places of all texts."""
    return [place for text in TEXTS for place in text.PLACES]


def places_of(topic: str) -> list[Place]:
    """The sections that belong to a topic."""
    return [place for place in places() if place.topic == topic and place.kind == "section"]


def find_section(name: str) -> Topic:
    """The topic of that name, or the one for a section such as "11.2.1", "5.3.4", "(5.3.12)" or "tutorial 2".

    Raises:
        ConfigError: naming the nearest sections and topics if there is none.
    """
    wanted = " ".join(name.strip().lower().lstrip("§").split())
    if wanted.replace("-", "_") in topics():
        return find_topic(wanted.replace("-", "_"))
    every = {place.key.lower(): place for place in places()}
    if wanted in every:
        return find_topic(every[wanted].topic)
    raise ConfigError(f"section {name!r}: unknown; the nearest are {', '.join(_nearest(wanted, every))}")


def _nearest(wanted: str, every: dict[str, Place]) -> list[str]:
    """Sections with numbers close to the one wanted, or names that look like it."""
    numbers = _numbers(wanted)
    if numbers:
        scored = [(_apart(numbers, _numbers(key)), key) for key in every if _numbers(key) and key[0] == wanted[0]]
        scored = scored or [(_apart(numbers, _numbers(key)), key) for key in every if _numbers(key)]
        return [key for _, key in sorted(scored)[:3]]
    found = get_close_matches(wanted, [*topics(), *every], n=3, cutoff=0.4)
    return found or list(topics())


def _numbers(key: str) -> tuple[int, ...]:
    return tuple(int(x) for x in re.findall(r"\d+", key))


def _apart(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[float, ...]:
    """How far two section numbers are apart: the first place in which they differ counts most."""
    wide = max(len(a), len(b))
    return tuple(abs(x - y) for x, y in zip(a + (0,) * (wide - len(a)), b + (0,) * (wide - len(b)), strict=True)) + (
        0,
    ) * (4 - wide)
