"""A topic in the terminal: prose, formula, code, what it prints now, the claims and the exercises.

Prose is brought into lines of the terminal's width; code fits one of 80 columns, and keeps its lines in a narrower one.

>>> wrapped_off("one\\ntwo\\n\\nthree"), wrapped_off("注意力\\n头")
('one two\\n\\nthree', '注意力头')
>>> wrapped_to("每个头都有自己的投影。", 12).splitlines()
['每个头都有自', '己的投影。']
>>> hanging("  name  每个头都有自己的投影。", 16)
'  name  每个头都\\n    有自己的投\\n    影。'
"""

import re
from collections.abc import Sequence
from itertools import pairwise

from rich.cells import cell_len
from rich.console import Console
from rich.markdown import Markdown
from rich.padding import Padding
from rich.syntax import Syntax
from rich.table import Column, Table
from rich.text import Text

from headwise.wording import Bilingual, breaks, in_language, joined, tr
from headwise_textbook.exercises import Exercise
from headwise_textbook.places import Row, notes_on, result, sections_of
from headwise_textbook.topics import COLUMNS, WORDS, Topic, claims_of, output, topics

SECTIONS = tr("in textbooks")
MOST_PLACES = 4  # of which the line of the output is repeated
FITTING = 80  # terminal columns from which on the tables of commands have their rows in one line
WIDE = 110  # terminal columns from which on the sections have a column of their own
TOPICS = tr("name")
SHOW = tr("headwise tour NAME runs a topic; headwise tour 11.2.1 or 5.3.4 finds the one for a section of your book.")
GRADE = tr("headwise check split-heads prints a task; headwise check split-heads answer.py grades your function.")
OWN = tr("headwise check multi-head-class answer.py compares your class of multi-head attention with the definition.")
PLACE = tr("place")
WHAT = tr("what it is about")
CHOOSE = tr("{count} places fit; name one of them: {command}")


def print_topics(console: Console, lang: str) -> None:
    """All topics with their formulas and the sections of textbooks that they belong to."""
    wide = console.width >= WIDE
    heads = (TOPICS, WORDS["topic"], SECTIONS) if wide else (TOPICS, joined((WORDS["topic"], SECTIONS), tr("; ")))
    every = list(topics().values())
    used = max(cell_len(topic.name) for topic in every) + 2
    used += max(cell_len(in_language(topic.title, lang)) for topic in every) + 2 if wide else 0
    rows = []
    for topic in every:
        name, title = Text(topic.name, style="bold"), Text(in_language(topic.title, lang))
        sections = Text(_sections(topic, lang, console.width - used), style="dim")
        rows.append((name, title, sections) if wide else (name, Text("\n").join(filter(None, (title, sections)))))
    _print_table(console, [in_language(head, lang) for head in heads], rows, in_language(SHOW, lang))


def print_places(places: Sequence[Row], console: Console, lang: str) -> None:
    """Places of which a reader is to choose one: what each is about, and the topic that shows it."""
    rows = [
        (Text(in_language(row.where, lang), style="bold"), Text(in_language(row.section.title, lang)),
         Text(row.shown.topic, style="dim"))
        for row in places
    ]  # fmt: skip
    command = f"{places[0].command.zh} --lang zh" if lang == "zh" else places[0].command
    said = in_language(CHOOSE, lang).format(count=len(places), command=command)
    _print_table(console, [in_language(head, lang) for head in (PLACE, WHAT, WORDS["topic"])], rows, said)


def print_exercises(console: Console, lang: str) -> None:
    """The names of all exercises by topic, and how they are used."""
    comma = "、" if lang == "zh" else ", "
    rows = [
        (Text(in_language(topic.title, lang)), Text(comma.join(one.name for one in topic.exercises), style="cyan"))
        for topic in topics().values()
        if topic.exercises
    ]
    heads = [in_language(head, lang).lower() for head in (WORDS["topic"], WORDS["exercises"])]
    _print_table(console, heads, rows, f"{in_language(GRADE, lang)}\n{in_language(OWN, lang)}")


def _print_table(console: Console, heads: Sequence[str], rows: Sequence[tuple[Text, ...]], foot: str) -> None:
    """A table with a sentence on how it is used."""
    table = Table(*(Column(head, overflow="fold") for head in heads), box=None, pad_edge=False, header_style="dim")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(Text("\n" + wrapped_to(foot, console.width), style="dim"))


def print_topic(topic: Topic, console: Console, lang: str, places: Sequence[Row] = ()) -> None:
    """Walk through a topic; its code runs now. places: of a text, whose results and differences are pointed out."""
    console.rule(Text(f"{topic.name} · {in_language(topic.title, lang)}", style="bold"), align="left")
    colon = "：" if lang == "zh" else ": "
    head = f"{in_language(SECTIONS, lang)}{colon}"
    if sections := _sections(topic, lang, console.width, cell_len(head)):
        console.print(Text(head + sections, style="dim"))
    for where, differs in notes_on(places):
        said = f"{in_language(where, lang)}{colon}{in_language(differs, lang)}"
        console.print(Text(wrapped_to(said, console.width), style="yellow"))
    console.print()
    _print_prose(topic.intro, console, lang)
    console.print(Padding(Text(in_language(topic.plain, lang), style="bold cyan"), (1, 4)))
    syntax = Syntax("", "console" if topic.is_command else "python", background_color="default")
    console.print(syntax.highlight(topic.code_in(lang)), soft_wrap=True, end="")  # whole lines, to be copied
    console.print()
    printed = output(topic, lang, columns=min(console.width, COLUMNS))
    console.print(Text(printed))
    for row in places[:MOST_PLACES] if console.width >= FITTING else ():
        said = f"{in_language(row.where, lang)} → {result(row, printed)}"
        console.print(Text(hanging(said, console.width), style="bold green"))
    console.print()
    _print_prose(topic.reading, console, lang)
    if topic.claims:
        console.print(Text("\n" + in_language(WORDS["claims"], lang), style="bold"))
        for name, said, verdict in claims_of(topic, lang):
            line = Text(hanging(f"  {name}  {said} → {verdict}", console.width))
            line.stylize("cyan", 0, len(name) + 2)
            line.stylize("bold", line.plain.rindex("→") + 1)
            console.print(line)
    if topic.exercises:
        console.print(Text("\n" + in_language(WORDS["exercises"], lang), style="bold"))
    for one in topic.exercises:
        print_exercise(one, console, lang)


def print_exercise(one: Exercise, console: Console, lang: str) -> None:
    """The task of an exercise, the first line of the function, and the command that grades it."""
    option = " --lang zh" if lang == "zh" else ""
    task = Text(hanging(f"  {one.name}  {in_language(one.task, lang).replace('`', '')}", console.width))
    task.stylize("cyan", 0, len(one.name) + 2)
    console.print(task)
    for line in filter(None, one.skeleton.splitlines()):
        console.print(Text(f"    {line}", style="dim"), soft_wrap=True)
    console.print(Text(f"    headwise check {one.name} answer.py{option}", style="dim"))


def _sections(topic: Topic, lang: str, width: int, used: int = 0) -> str:
    """The sections of textbooks that a topic shows, in lines broken between them. used: columns of the first line."""
    places = [in_language(place, lang) for place in sections_of(topic.name)]
    mark, lines = ("、" if lang == "zh" else ", "), [""]
    for place in (f"{place}{mark}" for place in places):
        if lines[-1] and used + cell_len(lines[-1] + place.rstrip()) > width:
            lines, used = [*lines, ""], 0
        lines[-1] += place
    return "\n".join(line.rstrip() for line in lines).removesuffix(mark.strip())


def _print_prose(text: Bilingual, console: Console, lang: str) -> None:
    prose = wrapped_off(in_language(text, lang))
    if lang == "zh":  # rich breaks lines at spaces only
        plain = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", prose)  # links
        console.print(Text(wrapped_to(plain.replace("`", "").replace("**", ""), console.width)))
    else:
        console.print(Markdown(prose))


# Prose.
_WIDE = "\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef\u3000-\u303f“”‘’"
_MARKS = "，。、；：？！）》」』”’"  # no line begins with one
_OPENING = "（《「『“‘"  # no line ends with one


def wrapped_off(text: str) -> str:
    """The text with one line for each paragraph. Lists, tables and code blocks keep their lines."""
    parts = re.split(r"\n\s*\n", text.strip())
    kept = ("```", "|", "-", "1.", "$$")
    lines = ("\n".join(line.strip() for line in part.strip().splitlines()) for part in parts)
    return "\n\n".join(part if part.startswith(kept) else _joined(part) for part in lines)


def wrapped_to(text: str, width: int) -> str:
    """A text with Chinese characters in lines of at most `width` columns, broken between characters or at spaces."""
    lines = []
    for line in text.split("\n"):
        ends = [0, *breaks(line, width), len(line)]
        lines += [line[start:end].rstrip() for start, end in pairwise(ends)]
    return "\n".join(lines)


def hanging(text: str, width: int, by: int = 4) -> str:
    """A text as by `wrapped_to`, with its first line as it is and the others indented."""
    first, *others = wrapped_to(text, width).splitlines()
    rest = " ".join(others) if not others else text.strip()[len(first.strip()) :].lstrip()
    return "\n".join([first, *(f"{' ' * by}{line}" for line in wrapped_to(rest, width - by).splitlines() if line)])


def _joined(paragraph: str) -> str:
    """In one line: no space between two wide characters, or beside a wide punctuation mark."""
    text = re.sub(rf"(?<=[{_WIDE}])\n(?=[{_WIDE}])|(?<=[{_MARKS}])\n|\n(?=[{_OPENING}{_MARKS}])", "", paragraph)
    return text.replace("\n", " ")
