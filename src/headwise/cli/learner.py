"""The commands tour and check."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headwise.cli.options import Lang, is_stream, stdin_text
from headwise.errors import ConfigError
from headwise.wording import in_language, language

MOST_SECONDS = 600.0


def tour(
    section: Annotated[
        list[str] | None,
        typer.Argument(help="A topic, or a section of your book, such as 11.2.1 or 5.3.4; default: a list."),
    ] = None,
    lang: Lang = None,
) -> None:
    """Walk through a topic of multi-head attention: formula, code with its output, claims, exercises."""
    from headwise.textbook.guide.finding import find
    from headwise.textbook.guide.registry import find_topic
    from headwise.textbook.guide.tour import print_places, print_topic, print_topics

    console = Console(highlight=False)
    if not section:
        print_topics(console, language())
        return
    found = find(" ".join(section))
    if len(found.topics) > 1:
        print_places(found.rows, console, language())
        return
    print_topic(find_topic(found.topics[0]), console, language(), found.rows)


def check(
    exercise: Annotated[
        str | None, typer.Argument(help="An exercise of the guide, or a topic; default: a list of all.")
    ] = None,
    file: Annotated[
        Path | None, typer.Argument(help="Your code, or - for standard input; default: print the task.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="CPU time that the code may take.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    lang: Lang = None,
) -> None:
    """Grade an exercise: run your function on random inputs, and show the smallest one with a wrong result.

    The code runs in a process of its own, with limits, without network, and cannot change your files.
    """
    from headwise.lm.texts import read_text
    from headwise.textbook.guide.grading.grade import grade, lines
    from headwise.textbook.guide.registry import find_exercise, topics
    from headwise.textbook.guide.tour import print_exercise, print_exercises

    if not 0.1 <= seconds <= MOST_SECONDS:
        given = f"--seconds {seconds:g}"
        raise ConfigError(f"{given}: expected 0.1 to {MOST_SECONDS:g}", f"{given}：应为 0.1 到 {MOST_SECONDS:g}")
    if not 0 <= seed < 2**32:
        raise ConfigError(f"--seed {seed}: expected 0 to 2³² − 1", f"--seed {seed}：应为 0 到 2³² − 1")
    console = Console(highlight=False, markup=False)
    if exercise is None:
        print_exercises(console, language())
        return
    if file is None and exercise.replace("-", "_") in topics():
        for one in topics()[exercise.replace("-", "_")].exercises:
            print_exercise(one, console, language())
        return
    wanted = find_exercise(exercise)
    if file is None:
        print_exercise(wanted, console, language())
        return
    source = stdin_text("FILE") if is_stream(file) else read_text(file)
    result = grade(wanted, source, file="-" if is_stream(file) else file.name, seconds=seconds, seed=seed)
    for line in lines(result, wanted):
        console.print(in_language(line, language()), soft_wrap=True)
    if not result.passed:
        raise typer.Exit(1)
