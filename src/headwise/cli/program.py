"""The commands as one program of typer, and how it ends."""

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup
from typer.main import get_command

from headwise.cli.change import budget, convert, prune
from headwise.cli.failures import in_words
from headwise.cli.interruption import CODE, check_interrupted, is_interruption, leave, print_interrupted
from headwise.cli.judge import doctor, plan
from headwise.cli.learn import train, write
from headwise.cli.look import measures, see
from headwise.cli.measure import measure
from headwise.cli.options import Lang
from headwise.cli.others import OF_TEXTBOOK, Listed, other_commands
from headwise.cli.streams import standard_streams
from headwise.cli.threads import settle
from headwise.cli.view import view
from headwise.cli.words import SENTENCES
from headwise.errors import HeadwiseError
from headwise.plugins import load
from headwise.wording import language

NARROWEST = 40  # columns


class _Group(TyperGroup):
    """typer would end a command that is interrupted without a line. Commands of other packages are found when the list
    is printed, or another name is given, and imported when they are called."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        with _with_a_line():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        with _with_a_line():
            return super().invoke(ctx)

    def list_commands(self, ctx: Any) -> list[str]:
        self.commands.update(other_commands(self.commands))
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:
            self.list_commands(ctx)
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command.loaded() if isinstance(command, Listed) else command, rest


@contextmanager
def _with_a_line() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        print_interrupted()
        raise typer.Exit(CODE) from None


app = typer.Typer(
    cls=_Group,
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
    "trace",
    measures,
    measure,
    plan,
    prune,
    convert,
    budget,
    "claims",
    "tour",
    "check",
    "reconstruct",
    doctor,
):  # as --help lists them
    if isinstance(command, str):
        app.command(command, cls=Listed, help=OF_TEXTBOOK[command])(lambda: None)
    else:
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


def run() -> None:
    """Run the command that the arguments name, in the user's language, and end the process with its exit code."""
    _widen()
    with standard_streams(), _lines():
        _run()


def _widen() -> None:
    """Some programs set COLUMNS=0 where they do not know the width, and tables lose columns below `NARROWEST`."""
    if os.environ.get("COLUMNS", "").isdigit() and int(os.environ["COLUMNS"]) < NARROWEST:
        os.environ["COLUMNS"] = str(NARROWEST)


def command_line() -> Any:
    """All commands as one, with help in the user's language."""
    return _commands(language())


@cache  # typer reads the signatures of all commands each time: a hundredth of a second
def _commands(lang: str) -> Any:
    from headwise.cli.chinese import translate

    group = get_command(app)
    return translate(group) if lang == "zh" else group


def _run() -> None:
    try:
        load()
        check_interrupted()
        # Some versions of typer give the code of an Exit back instead of raising it.
        code = command_line()(sys.argv[1:] or ["--help"], prog_name="headwise", standalone_mode=False)
        sys.stdout.flush()  # so that a full disk is reported
        if code:
            _leave(code)
    except (KeyboardInterrupt, typer.Abort):
        print_interrupted()
        leave()
    except typer.Exit as leaving:
        _leave(leaving.exit_code)
    except Exception as error:
        if is_interruption(error):
            print_interrupted()
            leave()
        message = in_words(error, sys.argv[1:], _options(sys.argv[1:]), _language())
        if message is None:
            raise
        _fail(message)


def _options(arguments: list[str]) -> set[str]:
    """The options of the command that the arguments name; none if they name none."""
    commands = _commands(_language()).commands
    command = next((found for name, found in commands.items() if name in arguments), None)
    command = getattr(command, "real", None) or command
    return {option for parameter in command.params for option in parameter.opts} if command is not None else set()


def _leave(code: int) -> None:
    if code == CODE:  # of a command that printed how to resume
        leave()
    sys.exit(code)


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
