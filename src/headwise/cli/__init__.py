"""The command line: every command is one call into the library."""

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.main import get_command

from headwise.cli.change import budget, convert, prune
from headwise.cli.failures import in_words
from headwise.cli.judge import claims, doctor, plan
from headwise.cli.learn import train, write
from headwise.cli.learner import check, tour
from headwise.cli.look import measures, see, trace
from headwise.cli.measure import measure
from headwise.cli.options import Lang
from headwise.cli.streams import standard_streams
from headwise.cli.threads import settle
from headwise.cli.view import view
from headwise.cli.words import SENTENCES
from headwise.errors import HeadwiseError
from headwise.plugins import load
from headwise.wording import LANGUAGES, language, speaking

app = typer.Typer(
    help="Multi-head attention you can inspect.",
    add_completion=True,  # --install-completion and --show-completion, for bash, zsh, fish and PowerShell
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    see,
    view,
    train,
    write,
    trace,
    measures,
    measure,
    plan,
    prune,
    convert,
    budget,
    claims,
    tour,
    check,
    doctor,
):  # as --help lists them
    app.command()(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        typer.echo(f"headwise {metadata.version('headwise')}")
        raise typer.Exit


@app.callback()
def _top(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
    lang: Lang = None,
) -> None:
    settle(context.invoked_subcommand)


def main() -> None:
    """Run the command line; errors that the user can fix are printed as one line, with exit code 2."""
    with standard_streams(), speaking(_wanted(sys.argv[1:])), _lines():
        _main()


def command_line() -> Any:
    """All commands as one, with help in the user's language."""
    from headwise.cli.chinese import translate

    group = get_command(app)
    return translate(group) if language() == "zh" else group


def _wanted(arguments: list[str]) -> str | None:
    """The language that `--lang` chooses, known before the arguments are parsed; None if it chooses none."""
    given = arguments[: arguments.index("--")] if "--" in arguments else arguments
    for argument, following in zip(given, [*given, ""][1:], strict=True):
        name, _, value = argument.partition("=")
        if name == "--lang" and (chosen := value or following) in LANGUAGES:
            return chosen
    return None


def _main() -> None:
    try:
        load()
        # Some versions of typer give the code of an Exit back instead of raising it.
        code = command_line()(sys.argv[1:] or ["--help"], prog_name="headwise", standalone_mode=False)
        sys.stdout.flush()  # so that a full disk is reported
        if code:
            sys.exit(code)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except typer.Exit as leaving:
        sys.exit(leaving.exit_code)
    except Exception as error:
        message = in_words(error, sys.argv[1:], _language())
        if message is None:
            raise
        _fail(message)


def _lines() -> AbstractContextManager[None]:
    """How rich breaks lines in the user's language."""
    if _language() != "zh":
        return nullcontext()
    from headwise.cli.chinese import lines_of_characters

    return lines_of_characters()


def _language() -> str:
    try:
        return language()
    except HeadwiseError:  # HEADWISE_LANG is wrong, which the message says
        return "en"


def _fail(message: str) -> None:
    error = SENTENCES["error"][_language() == "zh"]
    Console(stderr=True).print(f"[bold red]{error}[/bold red] ", end="")
    Console(stderr=True, markup=False, highlight=False, soft_wrap=True).print(message)
    sys.exit(2)
