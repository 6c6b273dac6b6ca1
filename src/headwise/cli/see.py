"""The commands see, trace, measures and view."""

import os
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headwise.base.files import check_apart, check_writable, taken
from headwise.cli.interruption import check_interrupted
from headwise.cli.options import (
    STREAM,
    AnyModel,
    Lang,
    check_file,
    is_stream,
    on_desktop,
    open_in_browser,
    progress_bar,
    say as tell,
    stdin_text,
    typed,
    written,
)
from headwise.errors import ConfigError
from headwise.wording import COMMA, in_language, language, tr

WIDE = 110  # terminal columns from which on all columns of the list of measures fit side by side


def see(
    text: Annotated[
        str | None, typer.Argument(help="The text, or - for standard input; default: a passage of Shakespeare.")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Read the text from a UTF-8 file; - is standard input.")] = None,
    model: AnyModel = None,
    out: Annotated[Path, typer.Option(help="HTML report to write; - is standard output.")] = Path("report.html"),
    png: Annotated[Path | None, typer.Option(help="Also write PNG heat maps to this folder.")] = None,
    views: Annotated[
        list[str] | None, typer.Option("--view", help="Also write another view: --view NAME=PATH; repeatable.")
    ] = None,
    sort: Annotated[str | None, typer.Option(help="Sort the table by this statistic.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Print all heads, all statistics that fit, and all remarks.")
    ] = False,
    cells: Annotated[
        int, typer.Option("--cells", min=8, max=1024, help="Longer texts are pooled to this many cells per axis.")
    ] = 384,
    window: Annotated[
        int | None,
        typer.Option(
            help="Tokens per window of a long text, 0 to read it whole; default: the length of the model's training."
        ),
    ] = None,
    sweep: Annotated[
        Path | None,
        typer.Option(help="Table of `headwise measure` of this model: show the strongest passages of each head."),
    ] = None,
    beside: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT_OR_FILE",
            help="A second text, or the file of one, to compare side by side; - is standard input.",
        ),
    ] = None,
    swap: Annotated[
        str | None,
        typer.Option(
            metavar="WORD=OTHER",
            help="Replace a word that the text has once, and list the heads that look elsewhere then.",
        ),
    ] = None,
    open_page: Annotated[
        bool | None,
        typer.Option(
            "--open/--no-open", help="Open the report in the browser; default: on a desktop, from a terminal."
        ),
    ] = None,
    lang: Lang = None,
) -> None:
    """Show what every head attends to in a text, as a table and an HTML report."""
    from headwise.reports.figure import figure_class
    from headwise.reports.see import Asked, report_of

    lang = language()
    if text is not None and file is not None:
        raise ConfigError(tr("give a text or --file, not both"))
    asked = Asked(model=model, cells=cells, window=window, sweep=sweep, sort=sort, lang=lang).checked()
    check_file("--out", out, "report.html", stream=True)
    if open_page and is_stream(out):
        raise ConfigError(tr("--open: the report goes to standard output; give --out a file, or --no-open"))
    if png is not None:
        figure_class()  # raises where matplotlib is missing
        check_writable(png, "--png", folder=True)
    others = _views(views or ())
    read = {"--file": file, "--model": model, "--sweep": sweep, "--beside": None if beside is None else Path(beside)}
    check_apart(
        [*((f"--view {name}", Path(path)) for name, path in others), ("--out", None if is_stream(out) else out)],
        {option: None if is_stream(path) else path for option, path in read.items()},
    )
    second = _beside(beside, taken=text == STREAM or is_stream(file))
    if text == STREAM or is_stream(file):
        text, file = stdin_text("TEXT" if file is None else "--file"), None
    elif text is not None:
        text = typed(text, "TEXT")
    asked = replace(asked, text=text, file=file, beside=second).checked()
    asked, swapped = (asked, None) if swap is None else _swapped(asked, swap)
    with nullcontext() if is_stream(out) else taken(out, "--out"):
        with progress_bar() as progress:
            report = report_of(asked, progress)
        _write(report, swapped, out, others, png, sort, open_page, lang, everything)


def _swapped(asked: Any, swap: str) -> tuple[Any, Any]:
    """The same with the text of --swap beside the first, and the comparison of both."""
    from headwise.analysis import counterfactual
    from headwise.lm.loading import load_model

    word, sign, other = swap.partition("=")
    if not sign:
        raise ConfigError("--swap {swap!r}: expected WORD=OTHER, for example tired=soft", swap=swap)
    if asked.beside is not None:
        raise ConfigError(tr("give --swap or --beside, not both"))
    if asked.text is None:
        raise ConfigError(tr("--swap: requires a text that has the word; give a text or --file"))
    model = load_model(asked.model)
    found = counterfactual(model, asked.text, word, other)
    return replace(asked, model=model, beside=found.texts[1]), found


def _write(
    report: Any, swapped: Any, out: Path, others: list[tuple[str, str]], png: Path | None, sort: str | None,
    open_page: bool | None, lang: str, everything: bool,
) -> None:  # fmt: skip
    """Write the page, the other views and the pictures, and print what the report or the swap says, the paths last."""

    from headwise.reports.page import write_report
    from headwise.reports.pictures import write_pngs
    from headwise.reports.views import print_report, write_view

    console = Console(stderr=is_stream(out))
    last: list[Text] = []

    def say(sentence: str) -> None:
        last.append(Text.from_markup(in_language(sentence, lang)))

    with written(out) as page:
        write_report(report, page, lang=lang)
    if not is_stream(out):
        say(tr("Wrote the report to [bold]{path}[/bold]; open it in a browser.", path=str(out)))
        if on_desktop() if open_page is None else open_page:
            opened = open_in_browser(out)
            if open_page and not opened:
                say(tr("No browser could be opened here; open the file yourself."))
    for name, path in others:
        write_view(report, name, path, lang=lang)
        say(tr("Wrote {name} to [bold]{path}[/bold].", name=name, path=path))
    if png is not None:
        with progress_bar() as progress:
            pictures = write_pngs(report, png, progress=progress, lang=lang)
        say(tr("Wrote {count} heat maps to [bold]{path}[/bold].", count=len(pictures), path=str(png)))
    if swapped is None:
        print_report(report, console, sort=sort, lang=lang, everything=everything, last=last)
        return
    head, rows = swapped.rows()
    table = Table(*(in_language(name, lang) for name in head), box=None, header_style="bold", padding=(0, 1))
    for row in rows:
        table.add_row(*map(Text, row))
    if rows:
        console.print(table)
    console.print(Text(in_language(swapped.title, lang)))
    for line in last:
        console.print(line, highlight=False, soft_wrap=True)


def _views(given: Sequence[str]) -> list[tuple[str, str]]:
    """The names and paths of --view."""
    from headwise.reports.views import view_of

    found = []
    for name, _, path in (view.partition("=") for view in given):
        view = view_of(name)
        if not path:
            raise ConfigError("--view {name}: expected NAME=PATH, for example --view {name}=report-{name}", name=name)
        check_writable(path, "--view", folder=view.folder)
        found.append((name, path))
    return found


def _beside(given: str | None, *, taken: bool) -> str | None:
    """The text of --beside: of the file of that name if there is one. taken: whether standard input is another text."""
    from headwise.lm.texts import read_text

    if given is None:
        return None
    if given == STREAM:
        if taken:
            raise ConfigError(tr("--beside '-': standard input is the first text already; give one of them as a file"))
        return stdin_text("--beside")
    if os.path.isdir(given):
        raise ConfigError("--beside {given!r}: is a folder; expected a text, or a file with one", given=given)
    if os.path.isfile(given):
        return read_text(given)
    if re.fullmatch(r"\S*[\w/\\]\.(txt|md|csv|json|html?|py)", given):
        raise ConfigError(
            "--beside {given!r}: there is no such file; to compare with these words, pipe them into --beside -",
            given=given,
        )
    return typed(given, "--beside")


def measures(lang: Lang = None) -> None:
    """List all statistics with unit, range and source."""

    from headwise.stats import GIVEN, MEASURES
    from headwise.stats.base import words_of

    console, lang = Console(), language()
    wide = console.width >= WIDE
    headings = tr("name"), tr("unit"), tr("range"), tr("description"), tr("source")
    name, unit, span, about, source = (in_language(heading, lang) for heading in headings)
    table = Table(box=None, header_style="bold", padding=(0, 1))
    for column in (name, unit, span) if wide else (name,):
        table.add_column(column, no_wrap=True)
    comma, semicolon = in_language(COMMA, lang), in_language(tr("; "), lang)
    for column in (about, source) if wide else (semicolon.join((about, f"{unit}{comma}{span}", source)),):
        table.add_column(column, overflow="fold")
    kinds: dict[str, Any] = {**MEASURES, **GIVEN}
    for key, kind in kinds.items():
        words, found = words_of(kind, lang), in_language(kind.source, lang)
        what = Text(words.about)
        if wide:
            table.add_row(key, words.unit, words.range, what, Text(found, style="dim"))
        else:
            short = f"{words.unit}{comma}{words.range}{semicolon}{found}"
            table.add_row(key, what.append(f"\n{short}", style="dim"))
    console.print(table)


def view(
    model: AnyModel = None,
    file: Annotated[Path | None, typer.Option(help="Open this UTF-8 text file; - is standard input.")] = None,
    port: Annotated[int, typer.Option(help="Port; 0 selects a free one.")] = 0,
    no_open: Annotated[bool, typer.Option("--no-open", help="Print the address without opening a browser.")] = False,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="Maximum length of a text, in tokens.")
    ] = 131_072,
    lang: Lang = None,
) -> None:
    """Open a page in the browser that shows all heads on a long text and zooms into each map.

    Without --lang, the page is in the language of the browser.
    """
    from headwise.lm.loading import load_model
    from headwise.lm.texts import read_text
    from headwise.reports.viewer import check_serving, serve

    check_serving(port)
    console = Console(highlight=False, soft_wrap=True)
    text = stdin_text("--file") if is_stream(file) else None if file is None else read_text(file)

    def say(address: str) -> None:
        check_interrupted()
        tell(
            console,
            tr(
                "[bold]{address}[/bold]\nOnly this machine can open it, and only with this token. Ctrl-C stops the "
                "server.",
                address=address,
            ),
        )

    title = "" if file is None or is_stream(file) else file.name
    ended = serve(
        load_model(model), text=text, title=title, port=port, open_browser=not no_open,
        max_tokens=max_tokens, lang=lang, say=say,
    )  # fmt: skip
    if not ended:  # all output is written, and the model may still be computing
        console.file.flush()
        os._exit(0)
