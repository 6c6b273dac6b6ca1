"""A topic in the terminal: prose, formula, code, what it prints now, the claims and the exercises."""

from collections.abc import Sequence

from rich.console import Console
from rich.markdown import Markdown
from rich.padding import Padding
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from headwise.textbook.guide.book import sections_of
from headwise.textbook.guide.outputs import output
from headwise.textbook.guide.page import WORDS, claims_of
from headwise.textbook.guide.prose import wrapped_off, wrapped_to
from headwise.textbook.guide.registry import topics
from headwise.textbook.guide.topic import Exercise, Topic
from headwise.wording import Bilingual, in_language

SECTIONS = Bilingual("in textbooks", "教材章节")
TOPICS = Bilingual("name", "名称")
SHOW = Bilingual(
    "headwise tour NAME runs a topic; headwise tour 11.2.1 or 5.3.4 finds the one for a section of your book.",
    "headwise tour 名称 运行一个主题；headwise tour 11.2.1 或 5.3.4 找到与书中某一节对应的主题。",
)


def print_topics(console: Console, lang: str) -> None:
    """All topics with their formulas and the sections of textbooks that they belong to."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in (TOPICS, WORDS["topic"], SECTIONS):
        table.add_column(in_language(name, lang), overflow="fold")
    for topic in topics().values():
        table.add_row(
            Text(topic.name, style="bold"), Text(in_language(topic.title, lang)), Text(_sections(topic), style="dim")
        )
    console.print(table)
    console.print(Text("\n" + in_language(SHOW, lang), style="dim"))


def print_topic(topic: Topic, console: Console, lang: str, notes: Sequence[tuple[Bilingual, Bilingual]] = ()) -> None:
    """Walk through a topic; its code runs now. notes: where a text differs from what is shown, and how."""
    console.rule(Text(f"{topic.name} · {in_language(topic.title, lang)}", style="bold"), align="left")
    if sections := _sections(topic):
        console.print(Text(f"{in_language(SECTIONS, lang)}{'：' if lang == 'zh' else ': '}{sections}", style="dim"))
    for where, differs in notes:
        said = f"{in_language(where, lang)}{'：' if lang == 'zh' else ': '}{in_language(differs, lang)}"
        console.print(Text(wrapped_to(said, console.width), style="yellow"))
    console.print()
    _print_prose(topic.intro, console, lang)
    console.print(Padding(Text(in_language(topic.plain, lang), style="bold cyan"), (1, 4)))
    code = topic.code_in(lang)
    kind = "console" if topic.is_command else "python"
    console.print(Syntax(code, kind, background_color="default", word_wrap=True))  # without a frame, to be copied
    console.print()
    console.print(Text(output(topic, lang)))
    console.print()
    _print_prose(topic.reading, console, lang)
    if topic.claims:
        console.print(Text("\n" + in_language(WORDS["claims"], lang), style="bold"))
        for name, said, verdict in claims_of(topic, lang):
            line = Text(f"  {name}", style="cyan") + Text(f"  {said} → ", style="default") + Text(verdict, style="bold")
            console.print(line)
    console.print(Text("\n" + in_language(WORDS["exercises"], lang), style="bold"))
    for one in topic.exercises:
        print_exercise(one, console, lang)


def print_exercise(one: Exercise, console: Console, lang: str) -> None:
    """The task of an exercise, the first line of the function, and the command that grades it."""
    option = " --lang zh" if lang == "zh" else ""
    console.print(Text(f"  {one.name}  ", style="cyan") + Text(in_language(one.task, lang).replace("`", "")))
    for line in filter(None, one.skeleton.splitlines()):
        console.print(Text(f"    {line}", style="dim"))
    console.print(Text(f"    headwise check {one.name} answer.py{option}", style="dim"))


def _sections(topic: Topic) -> str:
    return ", ".join(sections_of(topic.name))


def _print_prose(text: Bilingual, console: Console, lang: str) -> None:
    prose = wrapped_off(in_language(text, lang))
    if lang == "zh":  # rich breaks lines at spaces only
        console.print(Text(wrapped_to(prose.replace("`", "").replace("**", ""), console.width)))
    else:
        console.print(Markdown(prose))
