"""The commands trace, claims, tour, check, audit, reconstruct and train demonstration of `headwise`."""

import secrets
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headwise.commands import (
    Estimate,
    Lang,
    check_file,
    check_writable,
    duration,
    is_stream,
    progress_bar,
    read_from,
    stdin_text,
    taken,
    written,
)
from headwise.errors import ConfigError
from headwise.wording import in_language, language, tr

MOST_SECONDS = 600.0


def trace(
    seq: Annotated[int, typer.Option(help="Sequence length.")] = 4,
    d_model: Annotated[int, typer.Option(help="Model width.")] = 8,
    num_heads: Annotated[int, typer.Option(help="Query heads.")] = 2,
    num_kv_heads: Annotated[int | None, typer.Option(help="KV heads.")] = None,
    design: Annotated[str, typer.Option(help="An attention design, for example latent.")] = "multi_head",
    options: Annotated[
        list[str] | None, typer.Option("--set", help="An option of the design: --set latent_dim=4; repeatable.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    causal: Annotated[bool, typer.Option("--causal/--full", help="Causal or full attention.")] = False,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    lang: Lang = None,
) -> None:
    """Print every step of an attention design with shapes and numbers."""
    from headwise.nn import read_options
    from headwise_textbook.trace import print_trace, trace as follow

    steps = follow(
        seq, d_model, num_heads, design=design, num_kv_heads=num_kv_heads, options=read_options(options or []),
        batch=batch, causal=causal, seed=seed, lang=language(),
    )  # fmt: skip
    print_trace(steps, Console())


def claims(
    only: Annotated[list[str] | None, typer.Option(help="Test only these claims: --only ID,ID; repeatable.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Include the slow claims.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON with unrounded numbers.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown, as in docs/claims.md.")] = False,
    html: Annotated[
        Path | None, typer.Option(help="Also write an HTML page with plots to this file; - is standard output.")
    ] = None,
    lang: Lang = None,
) -> None:
    """Test textbook claims by measurement. Exits with code 1 if a verdict is unexpected."""
    if as_json and markdown:
        raise ConfigError(tr("give --json or --markdown, not both"))
    if only and every:
        raise ConfigError(tr("give --only or --all, not both"))
    check_file("--html", html, "claims.html", stream=not (as_json or markdown))
    from headwise_textbook.claims import choose, print_findings, run, to_json, to_markdown, write_page
    from headwise_textbook.claims.claim import expected_seconds

    speech = language()
    wanted = choose([name for part in only or [] for name in part.split(",") if name], slow=every or html is not None)
    if (seconds := expected_seconds(wanted)) >= Estimate.LONG:
        time = duration(seconds)
        said = tr(
            "{count} claims take about {time} on an idle machine; --only ID tests one.", count=len(wanted), time=time
        )
        _say(Console(stderr=True), said)
    with progress_bar() as progress:
        found = run(wanted, progress)
    if as_json or markdown:
        sys.stdout.write(to_json(found, speech) if as_json else to_markdown(found, speech))
    else:
        console = Console(stderr=is_stream(html))
        print_findings(found, console, skipped=0 if only else len(choose(slow=True)) - len(found), lang=speech)
    if html is not None:
        with written(html) as page:
            write_page(found, page, lang=speech)
        if not (as_json or markdown or is_stream(html)):
            named = f"[bold]{escape(str(html))}[/bold]"
            said = tr("\nWrote the page with plots to {named}; open it in a browser.", named=named)
            _say(Console(), said)
    if not all(finding.agrees for finding in found):
        raise typer.Exit(1)


def tour(
    section: Annotated[
        list[str] | None,
        typer.Argument(help="A topic, or a section of your book, such as 11.2.1 or 5.3.4; default: a list."),
    ] = None,
    lang: Lang = None,
) -> None:
    """Walk through a topic of multi-head attention: formula, code with its output, claims, exercises."""
    from headwise_textbook.places import find
    from headwise_textbook.topics import find_topic
    from headwise_textbook.tour import print_places, print_topic, print_topics

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
    seed: Annotated[int | None, typer.Option(help="Of the random inputs; default: 0, of a class a hidden one.")] = None,
    whole_class: Annotated[
        Path | None, typer.Option("--class", help="Grade a class: a folder with a folder of answers for each pupil.")
    ] = None,
    module: Annotated[
        str | None, typer.Option(help="Of multi-head-class: the class, where the file has several.")
    ] = None,
    lang: Lang = None,
) -> None:
    """Grade an exercise: run your function on random inputs, and show the smallest one with a wrong result.

    The exercise multi-head-class compares your own class of multi-head attention with the definition, and names the
    first step that differs.

    The code runs in a process of its own, with limits, without network, and cannot change your files.
    """
    from headwise.lm import read_text
    from headwise_textbook.exercises import CLASS
    from headwise_textbook.exercises.classes import TASK, grade_class
    from headwise_textbook.exercises.grade import grade, lines
    from headwise_textbook.topics import find_exercise, topics
    from headwise_textbook.tour import print_exercise, print_exercises

    _check_seconds(seconds)
    if seed is not None and not 0 <= seed < 2**32:
        raise ConfigError("--seed {seed}: expected 0 to 2³² − 1", seed=seed)
    console = Console(highlight=False, markup=False)
    if whole_class is not None:
        if file is not None or module is not None:
            raise ConfigError(tr("give --class alone, or with an exercise"))
        _check_class(whole_class, exercise, console, seconds=seconds, seed=seed)
        return
    seed = seed or 0
    if exercise is None:
        print_exercises(console, language())
        return
    if file is None and exercise.replace("-", "_") in topics():
        for one in topics()[exercise.replace("-", "_")].exercises:
            print_exercise(one, console, language())
        return
    own = exercise.replace("_", "-") == CLASS
    if module is not None and not own:
        raise ConfigError(tr("--module is for multi-head-class only"))
    if file is None:
        if own:
            console.print(in_language(TASK, language()))
        else:
            print_exercise(find_exercise(exercise), console, language())
        return
    wanted = None if own else find_exercise(exercise)
    source = stdin_text("FILE") if is_stream(file) else read_text(file)
    limits: dict[str, Any] = {"file": "-" if is_stream(file) else file.name, "seconds": seconds, "seed": seed}
    if wanted is None:
        report = grade_class(source, only=module, **limits)
        said, passed = report.lines, report.passed
    else:
        result = grade(wanted, source, **limits)
        said, passed = tuple(lines(result, wanted)), result.passed
    for line in said:
        console.print(in_language(line, language()), soft_wrap=True)
    if not passed:
        raise typer.Exit(1)


def _check_class(folder: Path, exercise: str | None, console: Console, *, seconds: float, seed: int | None) -> None:
    """Grade a class, one answer after another, each in a process of its own."""
    from headwise_textbook.exercises import CLASS
    from headwise_textbook.exercises.classroom import found_answers, mark, notes, table
    from headwise_textbook.topics import exercises, find_exercise

    if not folder.is_dir():
        raise ConfigError("--class {folder}: expected a folder", folder=str(folder))
    known = {**exercises(), CLASS: None}
    only = None
    if exercise is not None:
        only = CLASS if exercise.replace("_", "-") == CLASS else find_exercise(exercise).name
    answers, unknown = found_answers(folder, known, only)
    if not answers:
        raise ConfigError(
            "--class {folder}: no answers; expected a folder for each pupil, with files such as split_heads.py",
            folder=str(folder),
        )
    seed = secrets.randbelow(2**32) if seed is None else seed
    marks = {}
    with progress_bar() as progress:
        single = [(key, files[0]) for key, files in answers.items() if len(files) == 1]
        for done, (key, path) in enumerate(single):
            progress("comparing", done, len(single))
            marks[key] = mark(known[key[1]], path, seconds=seconds, seed=seed)
    columns, rows = table(answers, marks)
    pupil, right = (in_language(word, language()) for word in (tr("pupil"), tr("right")))
    grid = Table(pupil, *columns, right, box=None, pad_edge=False, header_style="dim")
    for row in rows:
        grid.add_row(*row)
    console.print(grid)
    for line in notes(folder, answers, unknown, marks, seed):
        console.print(in_language(line, language()), soft_wrap=True)


def audit(
    file: Annotated[Path, typer.Argument(help="A chapter, Markdown or plain text in UTF-8; - is standard input.")],
    seconds: Annotated[float, typer.Option(help="CPU time that its listings may take.")] = 10.0,
    lang: Lang = None,
) -> None:
    """Audit a chapter: run its listings, and compare shapes, outputs, calculations, tables and formulas.

    What is not read is counted. The listings run in a process of its own, with limits, without network, and cannot
    change your files. Exits with code 1 if something disagrees.
    """
    from headwise.lm import read_text
    from headwise_textbook.audit import audit as audited

    _check_seconds(seconds)
    text = stdin_text("FILE") if is_stream(file) else read_text(file)
    found = audited(text, file="-" if is_stream(file) else file.name, seconds=seconds)
    console = Console(highlight=False, markup=False)
    for line in found.lines():
        console.print(in_language(line, language()), soft_wrap=True)
    if found.findings:
        raise typer.Exit(1)


def reconstruct(
    file: Annotated[Path, typer.Argument(help="UTF-8 text, a sentence or paragraph on a line; - is standard input.")],
    out: Annotated[Path, typer.Option(help="Folder for the report.")],
    length: Annotated[
        int | None, typer.Option(help="Characters of the longest sentence; longer lines are split.")
    ] = None,
    png: Annotated[
        Path | None, typer.Option(help="Also write a PNG for each sentence and head to this folder.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    lang: Lang = None,
) -> None:
    """Train attention to rebuild its own embeddings, with and without a mask, as tutorials do."""
    from headwise.reports import figure_class, write_panels, write_report
    from headwise_textbook.reconstruct import MOST_CHARACTERS, reconstruct as rebuild

    if png is not None:
        figure_class()  # raises where matplotlib is missing
        check_writable(png, "--png", folder=True)
    console, page = Console(), out / "report.html"
    with taken(page, "--out"), read_from(file, "FILE") as text:
        with progress_bar() as progress:
            report = rebuild(text, length=MOST_CHARACTERS if length is None else length, seed=seed, progress=progress)
        write_report(report, page, lang=language())
        facts = (tr("{fact}: {value}", fact=fact, value=value) for fact, value in report.facts)
        named = f"[bold]{escape(str(page))}[/bold]"
        wrote = tr("Wrote the report to {named}; open it in a browser.", named=named)
        for line in (*facts, *report.notes, wrote):
            _say(console, line)
        if png is not None:
            with progress_bar() as progress:
                pictures = write_panels(report, png, views=(2, 0, 1), progress=progress, lang=language())
            named, count = f"[bold]{escape(str(png))}[/bold]", len(pictures)
            _say(console, tr("Wrote {count} heat maps to {named}.", count=count, named=named))


def demonstration(
    out: Annotated[Path, typer.Option(help="Folder for the pictures and the report.")] = Path("demonstration"),
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    lang: Lang = None,
) -> None:
    """Draw the twelve heat maps of the Water Margin demonstration, and say what is bright.

    A layer of four heads is trained on three passages of the novel, which come with headwise: a minute.
    """
    from headwise.reports import figure_class, write_panels, write_report
    from headwise_textbook.demonstration import BRIGHT, brightness, demonstrate

    figure_class()  # raises where matplotlib is missing
    check_writable(out, "--out", folder=True)
    console, page = Console(), out / "report.html"
    with progress_bar() as progress:
        found = demonstrate(seed=seed, progress=progress)
        pictures = write_panels(found.report, out, views=(2,), theme="dark", progress=progress, lang=language())
    write_report(found.report, page, lang=language())
    facts = dict(found.report.facts)
    n = max(len(passage.tokens) for passage in found.report.passages)
    for fact in (*facts,)[1:3]:
        _say(console, tr("{fact}: {value}", fact=fact, value=facts[fact]))
    _say(
        console,
        tr(
            "Weights before dropout, relative to the uniform weight 1/{n}; bright: at least {bright:g} times as large, "
            "which {share:.0%} of all cells are.", n=n, bright=BRIGHT, share=found.bright,
        ),
    )  # fmt: skip
    console.print(brightness(found, language()))
    first, last = (f"[bold]{escape(str(path))}[/bold]" for path in (pictures[0], pictures[-1]))
    for line in (
        tr(
            "The brighter a cell, the larger the weight, as in the tutorial; dropout makes a tenth of the cells black "
            "at random. Heads are numbered from 0: the tutorial's head 1 is head 0."
        ),
        tr("Another --seed gives other bright pairs: nothing was learned of language."),
        tr("Wrote {count} pictures, {first} … {last}", count=len(pictures), first=first, last=last),
        tr("Wrote the report, with padding masked beside it, to {named}", named=f"[bold]{escape(str(page))}[/bold]"),
    ):  # fmt: skip
        _say(console, line)


def _check_seconds(seconds: float) -> None:
    if not 0.1 <= seconds <= MOST_SECONDS:
        given = f"--seconds {seconds:g}"
        raise ConfigError("{given}: expected 0.1 to {most_seconds:g}", given=given, most_seconds=MOST_SECONDS)


def _say(console: Console, line: str) -> None:
    """Print a line, with markup of rich, in the user's language."""
    console.print(in_language(line, language()), highlight=False, soft_wrap=True)
