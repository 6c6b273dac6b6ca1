"""A topic in the terminal: prose, formula, code, what it prints now, the claims and the exercises."""

import re
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.markdown import Markdown
from rich.padding import Padding
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from headwise.wording import Bilingual, in_language, joined
from headwise_textbook.guide.book import Row, notes_on, result, sections_of
from headwise_textbook.guide.exercises import Exercise
from headwise_textbook.guide.narrow import narrow
from headwise_textbook.guide.outputs import COLUMNS, output
from headwise_textbook.guide.pages import WORDS, claims_of
from headwise_textbook.guide.prose import hanging, wrapped_off, wrapped_to
from headwise_textbook.guide.registry import topics
from headwise_textbook.guide.topic import Topic

SECTIONS = Bilingual("in textbooks", "教材章节")
MOST_PLACES = 4  # of which the line of the output is repeated
FITTING = 80  # terminal columns from which on the tables of commands have their rows in one line
WIDE = 110  # terminal columns from which on the sections have a column of their own
TOPICS = Bilingual("name", "名称")
SHOW = Bilingual(
    "headwise tour NAME runs a topic; headwise tour 11.2.1 or 5.3.4 finds the one for a section of your book.",
    "headwise tour 名称 运行一个主题；headwise tour 11.2.1 或 5.3.4 找到与书中某一节对应的主题。",
)
GRADE = Bilingual(
    "headwise check split-heads prints a task; headwise check split-heads answer.py grades your function.",
    "headwise check split-heads --lang zh 打印题目；headwise check split-heads answer.py --lang zh 批改你的函数。",
)
PLACE = Bilingual("place", "位置")
WHAT = Bilingual("what it is about", "内容")
CHOOSE = Bilingual("{count} places fit; name one of them: {command}", "有 {count} 处符合；请指定其中一处：{command}")


def print_topics(console: Console, lang: str) -> None:
    """All topics with their formulas and the sections of textbooks that they belong to."""
    wide = console.width >= WIDE
    table = Table(box=None, pad_edge=False, header_style="dim")
    heads = (TOPICS, WORDS["topic"], SECTIONS) if wide else (TOPICS, joined((WORDS["topic"], SECTIONS), "; ", "；"))
    for head in heads:
        table.add_column(in_language(head, lang), overflow="fold")
    every = list(topics().values())
    used = max(cell_len(topic.name) for topic in every) + 2
    used += max(cell_len(in_language(topic.title, lang)) for topic in every) + 2 if wide else 0
    for topic in every:
        name, title = Text(topic.name, style="bold"), Text(in_language(topic.title, lang))
        sections = Text(_sections(topic, lang, console.width - used), style="dim")
        cells = (title, sections) if wide else (Text("\n").join(filter(None, (title, sections))),)
        table.add_row(name, *cells)
    console.print(table)
    console.print(Text("\n" + wrapped_to(in_language(SHOW, lang), console.width), style="dim"))


def print_places(places: Sequence[Row], console: Console, lang: str) -> None:
    """Places of which a reader is to choose one: what each is about, and the topic that shows it."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in (PLACE, WHAT, WORDS["topic"]):
        table.add_column(in_language(head, lang), overflow="fold")
    for row in places:
        what, name = in_language(row.section.title, lang), Text(row.shown.topic, style="dim")
        table.add_row(Text(in_language(row.where, lang), style="bold"), Text(what), name)
    console.print(table)
    command = f"{places[0].command.zh} --lang zh" if lang == "zh" else places[0].command
    said = in_language(CHOOSE, lang).format(count=len(places), command=command)
    console.print(Text("\n" + wrapped_to(said, console.width), style="dim"))


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


def print_exercises(console: Console, lang: str) -> None:
    """The names of all exercises by topic, and how they are used."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in (WORDS["topic"], WORDS["exercises"]):
        table.add_column(in_language(head, lang).lower(), overflow="fold")
    for topic in topics().values():
        names = ("、" if lang == "zh" else ", ").join(one.name for one in topic.exercises)
        table.add_row(Text(in_language(topic.title, lang)), Text(names, style="cyan"))
    console.print(table)
    console.print(Text("\n" + wrapped_to(in_language(GRADE, lang), console.width), style="dim"))


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
