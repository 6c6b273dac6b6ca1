"""The places of the five texts, what shows each of them, and how they are found from what a reader types.

Every section, equation, table, listing and figure is shown by a topic; sections.toml says by which line of its output,
and what differs from the text. A query names a text, a section, and the kind and number of a part of the section, in
English or Chinese: full-width and Chinese digits, punctuation and case do not matter, and what is not given may be
anything.

>>> [row.where for row in rows() if row.shown.topic == "splitting"][:2]
['11.2.1', '11.2.1, figure 1']
>>> [row.where for row in find("教程一 第２部分，代码 1").rows], [row.where for row in find("eq. (5.3.7)").rows]
(['first tutorial part 2, listing 1'], ['§5.3.5, eq. (5.3.7)'])
>>> [row.where for row in find("第十一章").rows], [row.where for row in find("concatenation").rows]
(['11'], ['11.4.1', 'second tutorial part 5'])
>>> find("splitting").topic.name, find("切分成头").topic.name
('splitting', 'splitting')
>>> find("GQA").topic.name, find("因果掩码").topic.name, [row.where for row in find("為什麼要轉置").rows]
('kv_sharing', 'masks', ['11.2.2'])
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache

from headwise.errors import ConfigError
from headwise.wording import Bilingual, in_language, joined, tr
from headwise_textbook.claims import Claim, located
from headwise_textbook.texts import COUNTED, TEXTS, Place, Section, Text, everything, read_toml, words
from headwise_textbook.topics import Topic, cell, find_topic, page, stored_output, topics

# Of the page: its title, the heads of the columns, two words and the lead.
HEAD = (
    tr("Your book's section"), tr("place"), tr("what it is about"), tr("command"), tr("what came out"),
    tr("as in the text?"), tr("works"), tr("differs"),
    tr(
        "Sections, equations, tables, listings and figures of five texts on multi-head attention, the command that "
        "shows each, a line of what it prints, and whether that is what the text says. Verdicts of claims are in "
        "parentheses ([claims](../../claims.md)); [statements](statements.md) has what the texts say. Made by "
        "`python scripts/guide.py`."
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Shown:
    """How a place is shown."""

    topic: str  # of the guide
    line: str  # part of the line of its output that is this place's result
    differs: Bilingual | None = None  # what differs from the text, and why; None if it works as the text says
    command: str = ""  # another one than `tour`


# By text, section, and for others than the section itself kind and number: an entry for every section, and for what is
# shown by something else than its section.
SHOWN: dict[tuple[str, ...], Shown] = {
    (text, entry["section"], *((entry["kind"], entry["number"]) if "kind" in entry else ())): Shown(
        entry["topic"], entry["line"], words(entry) if "en" in entry else None, entry.get("command", "")
    )
    for text, entries in read_toml(__package__, "sections.toml").items()
    for entry in entries
}


@dataclass(frozen=True)
class Row:
    """A section, equation, table, listing or figure, and how it is shown."""

    text: Text
    section: Section
    kind: str
    number: str
    shown: Shown

    @property
    def cited(self) -> list[tuple[Place, Claim]]:
        """The claims made there, and their places: for a section all of it, for others those that cite them."""
        return [
            (place, claim)
            for place, claim in located()
            if (place.text, place.section) == (self.text.id, self.section.number)
            and (
                self.kind == "section"
                or (self.kind == "equation" and self.number in place.equations)
                or str(getattr(place, self.kind, "")) == self.number
            )
        ]

    @property
    def claims(self) -> list[Claim]:
        """Those claims, each once."""
        return list(dict.fromkeys(claim for _, claim in self.cited))

    @property
    def where(self) -> Bilingual:
        """The place in words, such as "11.7.1, table 1", which `headwise tour` finds."""
        place = self.text.label(self.section.number)
        if self.kind == "equation":
            return tr("{place}, eq. ({number})", place=place, number=self.number)
        if self.kind in COUNTED:
            return joined([place, COUNTED[self.kind].filled(number=self.number)])
        return place

    @property
    def command(self) -> Bilingual:
        """The command that shows it."""
        if self.shown.command:
            return Bilingual(self.shown.command, self.shown.command)
        short = f"({self.number})" if self.kind == "equation" and "." in self.number else ""
        names = (place.removeprefix("§") for place in (short or self.where, short or self.where.zh))
        return Bilingual(
            *(f"headwise tour {x}" if re.fullmatch(r"[\w.]+", x) else f'headwise tour "{x}"' for x in names)
        )


def rows() -> Iterator[Row]:
    """Every section, equation, table, listing and figure of the five texts. ConfigError if one is not shown."""
    for text, section, kind, number in everything():
        key = (text.id, section.number) if kind == "section" else (text.id, section.number, kind, number)
        if key not in SHOWN:
            raise ConfigError(f"{' '.join(key)}: not in sections.toml; expected the topic that shows it")
        yield Row(text, section, kind, number, SHOWN[key])


def notes_on(places: Iterable[Row]) -> list[tuple[Bilingual, Bilingual]]:
    """Where places, or parts of sections among them, differ from what headwise shows: the place, and the difference."""
    asked = list(places)
    notes: dict[Bilingual, Bilingual] = {}
    for row in rows():
        inside = row in asked or any(one.kind == "section" and one.section is row.section for one in asked)
        if inside and row.shown.differs is not None:
            notes.setdefault(row.shown.differs, row.where)
    return [(where, differs) for differs, where in notes.items()]


def sections_of(topic: str) -> list[Bilingual]:
    """The sections that a topic shows."""
    return [
        text.label(section.number)
        for text in TEXTS.values()
        for section in text.sections
        if SHOWN[text.id, section.number].topic == topic
    ]


def result(row: Row, output: str) -> str:
    """The line of a topic's output that is the result of a place. ConfigError if there is none.

    Code prints the same lines in both languages; the line is named by its English words.
    """
    topic = find_topic(row.shown.topic)
    english = output if topic.is_command else stored_output(page(topic.name, "en"))[1]
    for known, line in zip(english.splitlines(), output.splitlines(), strict=False):
        if row.shown.line in known:
            return " ".join(line.split())
    raise ConfigError(f"{row.text.id} {row.where}: no line of topic {row.shown.topic!r} has {row.shown.line!r}")


def table(outputs: dict[str, str], lang: str) -> str:
    """The page of all places: the command, the result in what each topic prints, and whether it is as in the text."""
    title, *head, works, differs, lead = (in_language(words, lang) for words in HEAD)
    colon, semicolon, brackets = ("：", "；", "（{}）") if lang == "zh" else (": ", "; ", " ({})")
    option = " --lang zh" if lang == "zh" else ""
    lines = []
    for row in rows():
        what = in_language(row.section.title, lang) if row.kind == "section" else ""
        out = cell(result(row, outputs[row.shown.topic]))
        verdicts = semicolon.join(f"{one.id}{colon}{in_language(one.expected.words, lang)}" for one in row.claims)
        said = f"{differs}{colon}{cell(in_language(row.shown.differs, lang))}" if row.shown.differs else works
        said += brackets.format(verdicts) if verdicts else ""
        link = f"[`{in_language(row.command, lang)}{option}`]({row.shown.topic}.md)"
        lines.append((row.text.id, (in_language(row.where, lang), what, link, f"`{out}`", said)))
    return paged("sections", lang, [title, lead], [("", head), *lines])


def paged(name: str, lang: str, lead: Sequence[str], lines: Sequence[tuple[str, Sequence[str]]]) -> str:
    """A page with a table for each text. lead: its title, and prose. lines: cells of a text, or of all with ""."""
    other, folder = ("English", "en") if lang == "zh" else ("中文", "zh")
    links = f"[{in_language(tr('The guide'), lang)}](index.md) · [{other}](../{folder}/{name}.md)"
    parts = [f"# {lead[0]}", links, *lead[1:]]
    for text in TEXTS.values():
        head, *rest = (f"| {' | '.join(cells)} |" for of, cells in lines if of in ("", text.id))
        title = in_language(text.title, lang)
        rule = f"|{' --- |' * len(lines[0][1])}"
        parts += [f"## {title[0].upper()}{title[1:]}", "\n".join([head, rule, *rest])]
    return "\n\n".join(parts) + "\n"


# Finding.
DIGITS = {sign: str(value) for value, sign in enumerate("零一二三四五六七八九")} | {"〇": "0", "两": "2"}
_FINDING = read_toml(__package__, "finding.toml")
SIMPLIFIED = str.maketrans(*_FINDING["characters"].values())  # from traditional characters
TERMS: dict[str, list[str]] = _FINDING["terms"]  # by the topic that explains them
WORDS: dict[str, str] = {word: meaning for meaning, said in _FINDING["words"].items() for word in said.split()}
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
    """The topic of that name or title, or all places that the words fit. ConfigError with the nearest if none does."""
    name = "_".join(query.lower().replace("-", " ").split())
    for topic in topics().values():
        if name == topic.name or (query.strip() and _compact(query) in _titles(topic.title)):
            return Found(topic)
    every = list(rows())
    named = [(text, rest.replace(" ", "")) for text, rest in _without_text(_normal(query))]
    found = [
        row
        for row in every
        if row.kind == "section"
        and any(text in ("", row.text.id) and rest in _titles(row.section.title) for text, rest in named)
    ]
    # A number in parentheses is that of an equation, or else of a section.
    readings = [list(_readings(form)) for form in (_normal(query), _normal(query).replace("(", " "))]
    for fitting in (_fitting, _beginning, _counted):
        for wanted in readings:
            fit = [] if found else [row for one in wanted for row in fitting(one, every)]
            found = found or [row for row in every if row in fit]
    if not found:
        for name, terms in TERMS.items():
            if _compact(query) in map(_compact, terms):
                return Found(topics()[name])
    if not found:
        near = joined(_nearest(query, readings[0], every), tr("; "))
        raise ConfigError("section {query!r}: unknown; the nearest are {near}", query=query, near=near)
    return Found(rows=tuple(found))


@lru_cache(4096)
def _normal(text: str) -> str:
    """In lower case, with ASCII digits and parentheses, and a space for other marks and for line breaks.

    >>> _normal("第十一章，式（５．３．７）"), _normal("§5.3.4 W_O")
    ('第11章 式(5.3.7)', 'section 5.3.4 w o')
    """
    text = unicodedata.normalize("NFKC", text).lower().translate(SIMPLIFIED).replace("§", " section ")
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
