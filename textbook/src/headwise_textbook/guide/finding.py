"""From what a reader types, in English or Chinese, to places of the five texts.

A place is named by its text, its section, and the kind and number of a part of the section. A query is read the same
way: full-width and Chinese digits, punctuation and case do not matter, and what is not given may be anything.

>>> [row.where for row in find("教程一 第２部分，代码 1").rows], [row.where for row in find("eq. (5.3.7)").rows]
(['first tutorial part 2, listing 1'], ['§5.3.5, eq. (5.3.7)'])
>>> [row.where for row in find("第十一章").rows], [row.where for row in find("concatenation").rows]
(['11'], ['11.4.1', 'second tutorial part 5'])
>>> find("splitting").topic.name, find("切分成头").topic.name
('splitting', 'splitting')
"""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache

from headwise.errors import ConfigError
from headwise.wording import Bilingual, in_language
from headwise_textbook.guide.book import Row, rows
from headwise_textbook.guide.registry import topics
from headwise_textbook.guide.topic import Topic
from headwise_textbook.texts import COUNTED, TEXTS

DIGITS = {sign: str(value) for value, sign in enumerate("零一二三四五六七八九")} | {"〇": "0", "两": "2"}
# What words of a query mean: a kind of part, or how the next number is to be read.
WORDS: dict[str, str] = {
    word: meaning
    for meaning, words in {
        "equation": "equation equations eq eqs formula formulas formulae 式 公式 方程 等式",
        "table": "table tables tab 表 表格",
        "listing": "listing listings code 代码 程序 代码清单 清单",
        "figure": "figure figures fig figs picture 图 插图",
        "paragraph": "paragraph paragraphs 段 段落",
        "item": "item items 项",
        "section": "section sections sec part 节 小节 部分 of in from at 的 中 里",
        "chapter": "chapter ch 章",
        "ordinal": "第",
        "nothing": "the no number and 个 张 幅 条 号 和 与",
    }.items()
    for word in words.split()
}
_CHINESE_WORDS = sorted((word for word in WORDS if not word.isascii()), key=len, reverse=True)
TOKEN = re.compile(rf"\d+(?:\.\d+)*|\(|[a-z]+|{'|'.join(_CHINESE_WORDS)}|[^\s)]")
MOST = 3  # places that an error names


@dataclass(frozen=True)
class Found:
    """What a query finds: a topic by its name or title, or all places that it fits."""

    topic: Topic | None = None
    rows: tuple[Row, ...] = ()

    @property
    def topics(self) -> list[str]:
        """The names of the topics that show it."""
        return [self.topic.name] if self.topic else list(dict.fromkeys(row.shown.topic for row in self.rows))


@dataclass
class Wanted:
    """A reading of a query. text: its id. words: what is left, to be found in titles. Empty: not given."""

    text: str = ""
    section: str = ""
    kind: str = ""
    numbers: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)


def find(query: str) -> Found:
    """The topic of that name or title, or all places that the words fit.

    Raises:
        ConfigError: naming the nearest places if there is none.
    """
    name = "_".join(query.lower().replace("-", " ").split())
    for topic in topics().values():
        if name == topic.name or (query.strip() and _compact(query) in _titles(topic.title)):
            return Found(topic)
    every = list(rows())
    named = [(text, rest.replace(" ", "")) for text, rest in _without_text(_normal(query))]
    found = [row for row in every if row.kind == "section" and _is_title(named, row)]
    # A number in parentheses is that of an equation, or else of a section.
    readings = [list(_readings(form)) for form in (_normal(query), _normal(query).replace("(", " "))]
    for fitting in (_fitting, _beginning, _counted):
        for wanted in readings:
            fit = [] if found else [row for one in wanted for row in fitting(one, every)]
            found = found or [row for row in every if row in fit]
    if not found:
        near = _nearest(query, readings[0], every)
        chinese = "；".join(in_language(one, "zh") for one in near)
        raise ConfigError(
            f"section {query!r}: unknown; the nearest are {'; '.join(near)}",
            f"章节 {query!r}：没有这一处；最接近的是 {chinese}",
        )
    return Found(rows=tuple(found))


@lru_cache(4096)
def _normal(text: str) -> str:
    """In lower case, with ASCII digits and parentheses, and a space for other marks and for line breaks.

    >>> _normal("第十一章，式（５．３．７）"), _normal("§5.3.4 W_O")
    ('第11章 式(5.3.7)', 'section 5.3.4 w o')
    """
    text = unicodedata.normalize("NFKC", text).lower().replace("§", " section ")
    text = re.sub(r"[零〇一二两三四五六七八九十]+", lambda found: _number(found[0]), text)
    text = re.sub(r"(?<=\d)[.。](?=\d)", "\0", text)
    return " ".join(re.sub(r"[^\w()\0]|_", " ", text).replace("\0", ".").split())


def _number(chinese: str) -> str:
    """A Chinese number up to 99 in digits; of others, digit by digit."""
    if chinese.count("十") == 1:
        tens, ones = chinese.split("十")
        if len(tens) <= 1 and len(ones) <= 1:
            return DIGITS.get(tens, "1") + DIGITS.get(ones, "0")
    return "".join(DIGITS.get(sign, sign) for sign in chinese)


def _compact(text: str) -> str:
    return _normal(text).replace(" ", "")


def _titles(title: Bilingual) -> tuple[str, str]:
    return _compact(title), _compact(title.zh)


def _is_title(named: Sequence[tuple[str, str]], row: Row) -> bool:
    """Whether a query is the title of a section. named: the text that it may name, and the rest."""
    titles = _titles(row.section.title)
    return any(text in ("", row.text.id) and rest in titles for text, rest in named)


def _without_text(query: str) -> Iterator[tuple[str, str]]:
    """Each text that is named in a normal query, and the rest; at last no text, and all of it."""
    for text, name in _names():
        if found := name.search(query):
            yield text, f"{query[: found.start()]} {query[found.end() :]}"
    yield "", query


@lru_cache(1)
def _names() -> list[tuple[str, re.Pattern[str]]]:
    """Each name of each text, in a normal query."""
    found = []
    for text in TEXTS.values():
        for name in (text.title, text.title.zh, *text.also):
            spaced = r"\s*".join(map(re.escape, re.findall(r"[a-z]+|\d+|\S", _normal(name))))
            ends = r"(?!\.?\d)" if spaced[-1].isdigit() else "(?![a-z])"
            found.append((text.id, re.compile(rf"(?<![a-z]){spaced}{ends}")))
    return found


def _readings(query: str) -> Iterator[Wanted]:
    """All readings of a normal query, by the text that it may name."""
    for text, rest in _without_text(query):
        wanted = _read(rest)
        if wanted is not None and (text or wanted != Wanted()):
            wanted.text = text
            yield wanted


def _read(rest: str) -> Wanted | None:
    """A query without the name of a text; None if it makes no sense, as one with two sections."""
    wanted, sections, chapter, of_kind, before = Wanted(), list[str](), "", False, ""
    for token in TOKEN.findall(rest):
        meaning = "equation" if token == "(" and not wanted.kind else WORDS.get(token, "")
        if token[0].isdigit():
            number = ".".join(str(int(part)) for part in token.split("."))
            if of_kind and ("." not in number or wanted.kind == "equation"):
                wanted.numbers.append(number)
            elif before == "chapter" and not chapter:
                chapter = number
            else:
                sections.append(number)
                meaning = "counted" if before == "ordinal" else ""
        elif meaning in ("section", "ordinal"):
            of_kind = of_kind and meaning == "ordinal" and not wanted.numbers
        elif meaning == "chapter" and sections and not chapter:
            chapter = sections.pop()
            meaning = ""
        elif meaning == "equation" or meaning in COUNTED:
            if wanted.kind not in ("", meaning):
                return None
            wanted.kind, of_kind = meaning, True
            if before == "counted":  # the second figure, in Chinese
                wanted.numbers.append(sections.pop())
        elif not meaning and token != "(":
            wanted.words.append(token)
        before = before if meaning == "nothing" else meaning
    if chapter:
        within = [part if part.startswith(f"{chapter}.") else f"{chapter}.{part}" for part in sections]
        sections = within or [chapter]
    wanted.section = "".join(sections[:1])
    return None if len(sections) > 1 else wanted


def _fitting(wanted: Wanted, every: Sequence[Row]) -> list[Row]:
    """The places that have all that a reading gives; a section without a text is one with a number of its own."""
    found = [row for row in every if wanted.section in ("", _section(row)) and _rest_fits(wanted, row)]
    numbered = [row for row in found if wanted.section and not (wanted.text or row.text.is_counted)]
    return numbered or found


def _beginning(wanted: Wanted, every: Sequence[Row]) -> list[Row]:
    """The sections that begin with that of a reading: 11.2.1 with 11.2."""
    begin = f"{wanted.section}."
    return [row for row in every if wanted.section and _section(row).startswith(begin) and _rest_fits(wanted, row)]


def _counted(wanted: Wanted, every: Sequence[Row]) -> list[Row]:
    """The third table of a text, where tables have no numbers."""
    if wanted.section or wanted.words or not wanted.numbers:
        return []
    found = []
    for text in [wanted.text] if wanted.text else TEXTS:
        of_kind = [row for row in every if row.kind == wanted.kind and text == row.text.id]
        found += [row for at, row in enumerate(of_kind, 1) if str(at) in wanted.numbers]
    return found


def _rest_fits(wanted: Wanted, row: Row) -> bool:
    """Whether a place has the text, the kind, the number and the words of a reading."""
    titles = _titles(row.section.title)
    if wanted.text not in ("", row.text.id) or any(all(word not in one for one in titles) for word in wanted.words):
        return False
    if wanted.kind in ("", "paragraph", "item"):  # of which there are no rows of their own
        count = getattr(row.section, f"{wanted.kind}s") if wanted.kind else 0
        return row.kind == "section" and all(1 <= int(number) <= count for number in wanted.numbers)
    return row.kind == wanted.kind and (not wanted.numbers or row.number in wanted.numbers)


def _section(row: Row) -> str:
    """The number of a section as readings have it: "3" for "Part 3" and "03"."""
    return ".".join(str(int(part)) for part in re.findall(r"\d+", row.section.number))


def _nearest(query: str, readings: Sequence[Wanted], every: Sequence[Row]) -> Sequence[str]:
    """The names of the places that are nearest: parts of the section, sections by number, or what is spelled alike."""
    for wanted in sorted(readings, key=lambda one: len(one.words)):
        texts = [row for row in every if wanted.text in ("", row.text.id) and (wanted.text or not row.text.is_counted)]
        sections = {_section(row): row for row in texts if row.kind == "section"}
        if wanted.section in sections:
            inside = [row for row in texts if _section(row) == wanted.section]
            return [row.where for row in sorted(inside, key=lambda row: row.kind != wanted.kind)][:MOST]
        if wanted.section and (wanted.text or "." in wanted.section):
            return [
                sections[near].where for near in sorted(sections, key=lambda one: _apart(wanted.section, one))[:MOST]
            ]
        if wanted.numbers:
            of_kind = [row for row in every if row.kind == wanted.kind and wanted.text in ("", row.text.id)]
            return [row.where for row in sorted(of_kind, key=lambda row: _apart(wanted.numbers[0], row.number))[:MOST]]
    names: dict[str, str] = {
        title: row.where for row in every for title in (*_titles(row.section.title), _compact(row.where))
    }
    names |= {word: topic.name for topic in topics().values() for word in (*_titles(topic.title), _compact(topic.name))}
    close = get_close_matches(_compact(query), names, n=2 * MOST, cutoff=0.4)
    return list(dict.fromkeys(names[one] for one in close))[:MOST] or list(topics())[:MOST]


def _apart(one: str, other: str) -> list[int]:
    """How far two section numbers are apart: the first place in which they differ counts most."""
    a, b = ([int(part) for part in number.split(".")] for number in (one, other))
    return [abs((a[i] if i < len(a) else 0) - (b[i] if i < len(b) else 0)) for i in range(4)]
