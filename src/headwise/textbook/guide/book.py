"""From a section of a textbook to the topic that shows it, and the table of all places of the five texts.

>>> find_section("5.3.4").name, find_section("(5.3.12)").name, find_section("tutorial 6").name
('splitting', 'mixtures', 'parameters')
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches

from headwise.errors import ConfigError
from headwise.textbook.claims.claim import Claim
from headwise.textbook.claims.registry import located
from headwise.textbook.guide.page import cell
from headwise.textbook.guide.registry import find_topic, topics
from headwise.textbook.guide.sections import SHOWN, Shown
from headwise.textbook.guide.topic import Topic
from headwise.textbook.texts import COUNTED, TEXTS, Section, Text, everything
from headwise.wording import Bilingual, in_language

# How the sections of each text are named on the command line; those of two texts have numbers of their own.
PREFIXES = {
    "chapter": "",
    "treatment": "",
    "tutorial": "tutorial ",
    "notes": "notes ",
    "demonstration": "demonstration ",
}
NUMBER = re.compile(r"\d+")
# Of the page: its title, the heads of the columns, two words and the lead.
HEAD = {
    "en": (
        "Your book's section", "place", "what it is about", "command", "what came out", "as in the text?", "works",
        "differs",
        "Sections, equations, tables, listings and figures of five texts on multi-head attention, the command that "
        "shows each, a line of what it prints, and whether that is what the text says. Verdicts of claims are in "
        "parentheses ([claims](../../claims.md)). Made by `python scripts/guide.py`.",
    ),
    "zh": (
        "书中章节与命令对照表", "位置", "内容", "命令", "结果", "与原文相符？", "相符", "不同",
        "五篇多头注意力文字的每一节、公式、表、代码与图：显示它的命令、输出中的一行，以及是否与原文相符。"
        "括号中是论断检验的结论（[论断](../../claims.zh.md)）。由 `python scripts/guide.py` 生成。",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A section, equation, table, listing or figure, how it is shown, and the claims made there."""

    text: Text
    section: Section
    kind: str
    number: str
    shown: Shown
    claims: tuple[Claim, ...]

    @property
    def name(self) -> str:
        """The section as `headwise tour` takes it, such as "5.3.4" or "tutorial 2"."""
        return _name(self.text.id, self.section.number)

    @property
    def where(self) -> Bilingual:
        """The place in words, such as "11.7.1, table 1"."""
        en, zh = self.text.named.format(self.section.number), self.text.named.zh.format(self.section.number)
        if self.kind == "equation":
            sign = self.number if "." in self.number else f"{self.number}"
            return Bilingual(f"{en}, eq. ({sign})", f"{zh}，式 ({sign})")
        if self.kind in COUNTED:
            word, chinese = COUNTED[self.kind]
            return Bilingual(f"{en}, {word} {self.number}", f"{zh}，{chinese.format(self.number)}")
        return Bilingual(en, zh)

    @property
    def command(self) -> str:
        """The command that shows it."""
        if self.shown.command:
            return self.shown.command
        number = f"({self.number})" if self.kind == "equation" and "." in self.number else self.name
        return f"headwise tour {number}" if " " not in number and "(" not in number else f'headwise tour "{number}"'


def rows() -> Iterator[Row]:
    """Every section, equation, table, listing and figure of the five texts. ConfigError if one is not shown."""
    for text, section, kind, number in everything():
        key = (text.id, section.number) if kind == "section" else (text.id, section.number, kind, number)
        if key not in SHOWN:
            raise ConfigError(f"{' '.join(key)}: not in sections.SHOWN; expected the topic that shows it")
        yield Row(text, section, kind, number, SHOWN[key], _claims(text, section, kind, number))


def find_section(name: str) -> Topic:
    """The topic of that name, or the one for a section such as "11.2.1", "5.3.4", an equation such as "(5.3.12)", or
    "tutorial 2", "notes 3", "demonstration 03".

    Raises:
        ConfigError: naming the nearest sections and topics if there is none.
    """
    wanted = " ".join(name.lower().replace("（", "(").replace("）", ")").lstrip("§ ").split())
    if wanted.replace("-", "_") in topics():
        return find_topic(wanted.replace("-", "_"))
    every = _names()
    for form in (
        wanted,
        re.sub(r"^(\w+) (\d)$", r"\1 0\2", wanted),
        re.sub(r"^eq\.? ?\(?([\d.]+)\)?$", r"(\1)", wanted),
    ):
        if form in every:
            return find_topic(every[form])
    inside = [key for key in every if key.startswith(f"{wanted}.")]
    if inside:  # 11.2 is the beginning of 11.2.1
        return find_topic(every[inside[0]])
    raise ConfigError(f"section {name!r}: unknown; the nearest are {', '.join(_nearest(wanted, every))}")


def notes_on(name: str) -> list[tuple[Bilingual, Bilingual]]:
    """Where a section, or a part of it, differs from what headwise shows: the place, and the difference."""
    wanted = name.strip().lstrip("§ ").lower()
    return [
        (row.where, row.shown.differs)
        for row in rows()
        if row.shown.differs is not None and wanted in (row.name.lower(), f"({row.number})")
    ]


def sections_of(topic: str) -> list[str]:
    """The names of the sections that a topic shows."""
    return [
        _name(text.id, section.number)
        for text in TEXTS.values()
        for section in text.sections
        if SHOWN[text.id, section.number].topic == topic
    ]


def result(row: Row, output: str) -> str:
    """The line of a topic's output that is the result of a place. ConfigError if there is none."""
    for line in output.splitlines():
        if row.shown.line in line:
            return " ".join(line.split())
    raise ConfigError(f"{row.text.id} {row.where}: no line of topic {row.shown.topic!r} has {row.shown.line!r}")


def _name(text: str, section: str) -> str:
    return f"{PREFIXES[text]}{section}"


def _names() -> dict[str, str]:
    """Everything that `find_section` finds, with its topic."""
    found = {}
    for row in rows():
        if row.kind == "section":
            found[row.name.lower()] = row.shown.topic
        elif row.kind == "equation" and "." in row.number:
            found[f"({row.number})"] = row.shown.topic
    return found


def _claims(text: Text, section: Section, kind: str, number: str) -> tuple[Claim, ...]:
    """The claims made at a place: for a section all of it, for others those that cite them."""
    found = []
    for place, claim in located():
        if (place.text, place.section) != (text.id, section.number):
            continue
        cited = kind == "section" or (
            number in place.equations if kind == "equation" else str(getattr(place, kind)) == number
        )
        if cited and claim not in found:
            found.append(claim)
    return tuple(found)


def _nearest(wanted: str, every: dict[str, str]) -> list[str]:
    """Sections with numbers close to the one wanted, or names that look like it."""
    numbers = tuple(map(int, NUMBER.findall(wanted)))
    start = wanted.split()[0] if not wanted[:1].isdigit() and wanted else ""
    known = {key: tuple(map(int, NUMBER.findall(key))) for key in every if NUMBER.search(key)}
    same = {key: value for key, value in known.items() if key.startswith(start) and key[0] != "("} if start else {}
    plain = {key: value for key, value in known.items() if key[0].isdigit()}
    if numbers and (same or not start):
        return sorted(same or plain, key=lambda key: _apart(numbers, known[key]))[:3]
    return get_close_matches(wanted, [*topics(), *every], n=3, cutoff=0.4) or list(topics())[:5]


def _apart(a: tuple[int, ...], b: tuple[int, ...]) -> list[int]:
    """How far two section numbers are apart: the first place in which they differ counts most."""
    return [abs((a[i] if i < len(a) else 0) - (b[i] if i < len(b) else 0)) for i in range(4)]


def table(outputs: dict[str, str], lang: str) -> str:
    """The page with every place of the texts: the command, what came out, and whether it is what the text says.

    Args:
        outputs: what the code of each topic prints.
    """
    title, *head, works, differs, lead = HEAD[lang]
    other = f"[{'English' if lang == 'zh' else '中文'}](../{'en' if lang == 'zh' else 'zh'}/sections.md)"
    parts = [f"# {title}", f"[{'指南' if lang == 'zh' else 'The guide'}](index.md) · {other}", lead]
    option = " --lang zh" if lang == "zh" else ""
    for text in TEXTS.values():
        lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
        for row in (row for row in rows() if row.text is text):
            what = in_language(row.section.title, lang) if row.kind == "section" else ""
            out = cell(result(row, outputs[row.shown.topic]))
            verdicts = "; ".join(f"{one.id}: {in_language(one.expected.words, lang)}" for one in row.claims)
            said = (
                f"{differs}{'：' if lang == 'zh' else ': '}{cell(in_language(row.shown.differs, lang))}"
                if row.shown.differs
                else works
            )
            said += f" ({verdicts})" if verdicts else ""
            link = f"[`{row.command}{option}`]({row.shown.topic}.md)"
            lines.append(f"| {in_language(row.where, lang)} | {what} | {link} | `{out}` | {said} |")
        name = in_language(text.title, lang)
        parts += [f"## {name[0].upper()}{name[1:]}", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"
