"""A topic in the terminal: prose, formula, code, what it prints now, the claims and the exercises.

Prose and code are brought into lines of the terminal's width; code is still the same code.

>>> wrapped_off("one\\ntwo\\n\\nthree"), wrapped_off("注意力\\n头")
('one two\\n\\nthree', '注意力头')
>>> wrapped_to("每个头都有自己的投影。", 12).splitlines()
['每个头都有自', '己的投影。']
>>> hanging("  name  每个头都有自己的投影。", 16)
'  name  每个头都\\n    有自己的投\\n    影。'
>>> print(narrow("total = add(first_number, second_number)  # of both", 30))
# of both
total = add(first_number,
            second_number)
>>> print(narrow('print(f"one long text of {10 + 3} letters")', 30))
print(f"one long text of "
      f"{10 + 3} letters")
>>> print(narrow('pairs = (("one", 1), ("two", 2), ("three", 3))', 30))
pairs = (("one", 1),
         ("two", 2),
         ("three", 3))
"""

import io
import re
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from keyword import iskeyword

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
    code = topic.code_in(lang) if topic.is_command else narrow(topic.code_in(lang), console.width)
    kind = "console" if topic.is_command else "python"
    console.print(Syntax(code, kind, background_color="default", word_wrap=True))  # without a frame, to be copied
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


# Code.
_OPEN, _CLOSE = frozenset("([{"), frozenset(")]}")
_BOUND = _CLOSE | {",", ":", "."}  # no line begins with one
_F_STRING = {"FSTRING_START": 1, "FSTRING_END": -1}  # since Python 3.12, the parts of an f-string are tokens


@dataclass(frozen=True)
class _Break:
    """A column at which a line can be broken. end, begin: what then ends this line and begins the next one.

    bracket: the column after the bracket in which it is, None if that is on a line above.
    """

    column: int
    depth: int
    bracket: int | None
    comma: bool = False
    end: str = ""
    begin: str = ""

    @property
    def cost(self) -> float:
        """The outermost bracket is best, then a comma; a line that ends with an open bracket is worst."""
        return self.depth + 0.5 * (not self.comma) + (self.column == self.bracket)

    def ended(self, line: str) -> str:
        """The beginning of a line up to this column."""
        return line + self.end if self.end else line.rstrip()


def narrow(code: str, width: int) -> str:
    """The code in lines of at most `width` columns, where it can be broken; comments move above their lines."""
    lines: list[str] = []
    tokens = list(tokenize.generate_tokens(io.StringIO(code).readline))
    comments = {token.start[0]: token.start[1] for token in tokens if token.type == tokenize.COMMENT}
    breaks = _breaks(tokens)
    for number, line in enumerate(code.splitlines(), 1):
        indent, comment = line[: len(line) - len(line.lstrip())], comments.get(number, 0)
        if cell_len(line) > width and line[:comment].strip():
            lines.append(indent + line[comment:])
            line = line[:comment].rstrip()
        at, begin = 0, ""
        shifts = {0: 0}  # from columns of this line to columns of the new ones, by where these begin
        while cell_len(begin + line[at:]) > width:
            room = [one for one in breaks.get(number, []) if at + width // 3 < one.column]
            first = {one: begin + one.ended(line[at : one.column]) for one in room}
            fitting = [one for one in room if cell_len(first[one]) <= width]
            if not fitting:
                break
            best = min(fitting, key=lambda one: (one.cost, -one.column))
            lines.append(first[best])
            margin = len(indent)
            if best.bracket is not None:
                margin = best.bracket + shifts[max(start for start in shifts if start <= best.bracket)]
                if margin > width // 2 or best.column == best.bracket:
                    margin = len(indent) + 4
            at, begin = best.column, " " * margin + best.begin
            shifts[at] = len(begin) - at
        lines.append(begin + line[at:])
    return "\n".join(lines)


def _breaks(tokens: list[tokenize.TokenInfo]) -> dict[int, list[_Break]]:
    """For each line, where it can be broken: before tokens within brackets, and at spaces of strings there."""
    found: dict[int, list[_Break]] = {}
    brackets: list[tuple[int, int]] = []  # the row and the column after each open one
    start = None
    for token, following in pairwise(tokens):
        if (change := _F_STRING.get(tokenize.tok_name[token.type], 0)) > 0:
            start = start or token
        inside = start is not None
        if token.type == tokenize.STRING and not inside:
            found.setdefault(token.start[0], []).extend(_in_string(token, token.start[1], brackets))
        elif change < 0 and start is not None:
            found.setdefault(token.start[0], []).extend(_in_string(token, start.start[1], brackets))
            start, inside = None, False
        if token.type == tokenize.OP and not inside:
            if token.string in _OPEN:
                brackets.append(token.end)
            elif token.string in _CLOSE:
                brackets.pop()
        free = brackets and not inside and token.string != "." and following.string not in _BOUND
        if free and token.end[0] == following.start[0] and not _called(token, following):
            row, column = following.start
            one = _Break(column, len(brackets), _bracket(brackets, row), comma=token.string == ",")
            found.setdefault(row, []).append(one)
    return found


def _called(token: tokenize.TokenInfo, following: tokenize.TokenInfo) -> bool:
    """Whether the next token opens the arguments of a call or an index."""
    ends = token.type in (tokenize.NAME, tokenize.STRING) and not iskeyword(token.string)
    return following.string in ("(", "[") and (ends or token.string in _CLOSE)


def _bracket(brackets: list[tuple[int, int]], row: int) -> int | None:
    """The column after the innermost open bracket, None if it is not in this row."""
    opened, column = brackets[-1]
    return column if opened == row else None


def _in_string(token: tokenize.TokenInfo, start: int, brackets: list[tuple[int, int]]) -> list[_Break]:
    """The words of a string within brackets, outside of the braces of an f-string. token: its last one."""
    line, end = token.line, token.end[1]
    opening = re.match(r"[fF]?([\"'])(?!\1)", line[start:end])
    if opening is None or not brackets:
        return []
    depth, bracket = len(brackets), _bracket(brackets, token.start[0])
    braces, found = 0, []
    for column in range(start + opening.end(), end - 1):
        braces += (line[column] == "{") - (line[column] == "}")
        if line[column - 1] == " " and not braces - (line[column] == "{") and line[column] != " ":
            found.append(_Break(column, depth + 1, bracket, end=opening[1], begin=opening[0]))
    return found
