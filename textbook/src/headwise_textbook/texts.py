"""The five texts that the claims are taken from: an outline of each, and places in them.

The outline has what a reader can point at: sections with titles in our own words, numbered or counted equations,
paragraphs, list items, tables, listings and figures. The texts themselves are not part of headwise.

>>> text = TEXTS["treatment"]
>>> text.section("5.3.4").equations
('5.3.3', '5.3.4')
>>> Place("treatment", "5.3.4", Bilingual("heads are stacked by rows", "各头按行堆叠"), ("5.3.3",)).where.zh
'数学推导 §5.3.4，式 (5.3.3)'
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from headwise.errors import ConfigError, unknown_name
from headwise.wording import LIST, Bilingual, joined, tr, trn

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Section:
    """One section of a text, and how many parts of each kind it has, each counted from the top of the section."""

    number: str  # as printed, such as "5.3.4"; counted from 1 where the text numbers nothing
    title: Bilingual  # what it is about, in our words
    paragraphs: int = 0  # lines of running text; formulas and list items are not paragraphs
    items: int = 0
    equations: tuple[str, ...] = ()  # the printed numbers, such as "5.3.3", or "1", "2", … where none are printed
    tables: int = 0
    listings: int = 0
    figures: int = 0


@dataclass(frozen=True)
class Text:
    """A text."""

    id: str  # its short name
    title: Bilingual
    named: Bilingual  # how a section is named, with {} for its number
    sections: tuple[Section, ...]
    also: tuple[str, ...] = ()  # what else readers call the text, in either language
    is_counted: bool = False  # whether its sections are counted, so that a number alone names none of them

    def label(self, section: str) -> Bilingual:
        """A section as tables name it, such as "11.2.1", "§5.3.4" or "first tutorial part 2"."""
        en, zh = self.named.format(section), self.named.zh.format(section)
        return Bilingual(f"{self.title} {en}", f"{self.title.zh} {zh}") if self.is_counted else Bilingual(en, zh)

    def section(self, number: str) -> Section:
        """The section of that number; ConfigError if there is none."""
        for section in self.sections:
            if section.number == number:
                return section
        raise ConfigError(
            f"section={number!r}: not in the {self.title}; expected one of {', '.join(s.number for s in self.sections)}"
        )


@dataclass(frozen=True)
class Place:
    """A place in a text, and what the text says there."""

    text: str  # the `id` of a text
    section: str  # the number of a section of it
    says: Bilingual  # a paraphrase of the place, in our words
    equations: tuple[str, ...] = ()  # their numbers
    paragraph: int = 0  # which one of the section, as for the others; 0 for none
    item: int = 0
    table: int = 0
    listing: int = 0
    figure: int = 0

    def __post_init__(self) -> None:
        if self.text not in TEXTS:
            raise unknown_name("text", self.text, TEXTS)
        section = TEXTS[self.text].section(self.section)
        missing = [number for number in self.equations if number not in section.equations]
        if missing:
            has = ", ".join(section.equations) or "none"
            raise ConfigError(f"equation {missing[0]}: section {self.section} of the {self.text} has {has}")
        for kind in COUNTED:
            if not 0 <= getattr(self, kind) <= getattr(section, f"{kind}s"):
                raise ConfigError(
                    f"{kind}={getattr(self, kind)}: section {self.section} of the {self.text} has "
                    f"{getattr(section, f'{kind}s')}"
                )

    @property
    def where(self) -> Bilingual:
        """The place in words, such as "mathematical section §5.3.4, eq. 5.3.3"."""
        text = TEXTS[self.text]
        en, zh = text.named.format(self.section), text.named.zh.format(self.section)
        parts = [Bilingual(f"{text.title} {en}", f"{text.title.zh} {zh}")]
        if self.equations:
            numbers = joined((Bilingual(n, f"({n})") for n in self.equations), LIST)
            parts.append(trn("eq. {numbers}", "eqs. {numbers}", count=len(self.equations), numbers=numbers))
        for kind, words in COUNTED.items():
            if number := getattr(self, kind):
                parts.append(words.filled(number=number))
        return joined(parts)


# kind → words for one of it
COUNTED = {
    "paragraph": tr("paragraph {number}"),
    "item": tr("item {number}"),
    "table": tr("table {number}"),
    "listing": tr("listing {number}"),
    "figure": tr("figure {number}"),
}


def read_toml(package: str, name: str) -> dict[str, Any]:
    """The content of a TOML file of a package."""
    return tomllib.loads(files(package).joinpath(name).read_text(encoding="utf-8"))


def place(entry: Mapping[str, Any]) -> Place:
    """A place as TOML has it: text, section, `en` and `zh` of what it says, and what of the section it is."""
    return Place(says=words(entry), **_given(entry))


def words(entry: str | Mapping[str, Any]) -> Bilingual:
    """A text as TOML has it: one for both languages, or `en` and `zh`."""
    return Bilingual(entry, entry) if isinstance(entry, str) else Bilingual(entry["en"], entry["zh"])


def everything() -> Iterator[tuple[Text, Section, str, str]]:
    """All that a reader can point at: (text, section, kind, number). kind is "section", "equation", "table", "listing"
    or "figure"; a section has the number ""."""
    for text in TEXTS.values():
        for section in text.sections:
            yield text, section, "section", ""
            for number in section.equations:
                yield text, section, "equation", number
            for kind in ("table", "listing", "figure"):
                for index in range(getattr(section, f"{kind}s")):
                    yield text, section, kind, str(index + 1)


def _given(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What TOML says of a place or a section beside its words."""
    rest = {name: value for name, value in entry.items() if name not in ("en", "zh")}
    return {**rest, "equations": tuple(entry.get("equations", ()))}


TEXTS = {
    id: Text(
        id, words(entry["title"]), words(entry["named"]),
        tuple(Section(title=words(section), **_given(section)) for section in entry["sections"]),
        tuple(entry["also"]), entry.get("counted", False),
    )
    for id, entry in read_toml(__package__, "texts.toml").items()
}  # fmt: skip
