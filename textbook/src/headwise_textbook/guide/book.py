"""The sections, equations, tables, listings and figures of five texts, what shows each of them, and the table of all.

>>> [row.where for row in rows() if row.shown.topic == "splitting"][:2]
['11.2.1', '11.2.1, figure 1']
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from headwise.errors import ConfigError
from headwise.wording import Bilingual, in_language
from headwise_textbook.claims.claim import Claim
from headwise_textbook.claims.registry import located
from headwise_textbook.guide.pages import cell
from headwise_textbook.guide.sections import SHOWN, Shown
from headwise_textbook.texts import COUNTED, TEXTS, Section, Text, everything

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
        "五篇关于多头注意力的文章：每一节、公式、表、代码与图，各有显示它的命令、输出中的一行，以及是否与原文相符。"
        "括号中是论断检验的结论（[论断](../../claims.zh.md)）。由 `python scripts/guide.py` 生成。",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A section, equation, table, listing or figure, and how it is shown."""

    text: Text
    section: Section
    kind: str
    number: str
    shown: Shown

    @property
    def claims(self) -> list[Claim]:
        """The claims made there: for a section all of it, for others those that cite them."""
        found = []
        for place, claim in located():
            if (place.text, place.section) != (self.text.id, self.section.number):
                continue
            cited = self.kind == "section" or (
                self.number in place.equations
                if self.kind == "equation"
                else str(getattr(place, self.kind)) == self.number
            )
            if cited and claim not in found:
                found.append(claim)
        return found

    @property
    def where(self) -> Bilingual:
        """The place in words, such as "11.7.1, table 1", which `headwise tour` finds."""
        place = self.text.label(self.section.number)
        if self.kind == "equation":
            return Bilingual(f"{place}, eq. ({self.number})", f"{place.zh}，式 ({self.number})")
        if self.kind in COUNTED:
            word, chinese = COUNTED[self.kind]
            return Bilingual(f"{place}, {word} {self.number}", f"{place.zh}，{chinese.format(self.number)}")
        return place

    @property
    def command(self) -> Bilingual:
        """The command that shows it."""
        if self.shown.command:
            return Bilingual(self.shown.command, self.shown.command)
        short = f"({self.number})" if self.kind == "equation" and "." in self.number else ""
        return Bilingual(_command(short or self.where), _command(short or self.where.zh))


def rows() -> Iterator[Row]:
    """Every section, equation, table, listing and figure of the five texts. ConfigError if one is not shown."""
    for text, section, kind, number in everything():
        key = (text.id, section.number) if kind == "section" else (text.id, section.number, kind, number)
        if key not in SHOWN:
            raise ConfigError(f"{' '.join(key)}: not in sections.SHOWN; expected the topic that shows it")
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
    """The line of a topic's output that is the result of a place. ConfigError if there is none."""
    for line in output.splitlines():
        if row.shown.line in line:
            return " ".join(line.split())
    raise ConfigError(f"{row.text.id} {row.where}: no line of topic {row.shown.topic!r} has {row.shown.line!r}")


def _command(place: str) -> str:
    name = place.removeprefix("§")
    return f"headwise tour {name}" if re.fullmatch(r"[\w.]+", name) else f'headwise tour "{name}"'


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
            colon, semicolon, brackets = ("：", "；", "（{}）") if lang == "zh" else (": ", "; ", " ({})")
            verdicts = semicolon.join(f"{one.id}{colon}{in_language(one.expected.words, lang)}" for one in row.claims)
            said = f"{differs}{colon}{cell(in_language(row.shown.differs, lang))}" if row.shown.differs else works
            said += brackets.format(verdicts) if verdicts else ""
            link = f"[`{in_language(row.command, lang)}{option}`]({row.shown.topic}.md)"
            lines.append(f"| {in_language(row.where, lang)} | {what} | {link} | `{out}` | {said} |")
        name = in_language(text.title, lang)
        parts += [f"## {name[0].upper()}{name[1:]}", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"
