"""What shows each place of the five texts, and what differs from the text: sections.toml.

`SHOWN` has an entry for every section, and for equations and others that are shown by something else than their
section. The keys are those of `headwise_textbook.texts`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from headwise.wording import Bilingual
from headwise_textbook.data import read_toml
from headwise_textbook.texts import words


@dataclass(frozen=True)
class Shown:
    """How a place is shown.

    topic: the topic of the guide. line: part of the line of its output that is this place's result.
    differs: what differs from the text, and why; None if it works as the text says. command: another one than `tour`.
    """

    topic: str
    line: str
    differs: Bilingual | None = None
    command: str = ""


Key = tuple[str, ...]  # text, section, and for others than the section itself its kind and number


def _shown() -> Iterator[tuple[Key, Shown]]:
    for text, entries in read_toml(__package__, "sections.toml").items():
        for entry in entries:
            part = (entry["kind"], entry["number"]) if "kind" in entry else ()
            differs = words(entry) if "en" in entry else None
            yield (
                (text, entry["section"], *part),
                Shown(entry["topic"], entry["line"], differs, entry.get("command", "")),
            )


SHOWN: dict[Key, Shown] = dict(_shown())
