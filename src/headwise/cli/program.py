"""The commands as one program of typer, and how it ends: errors as one line in the user's language.

Commands of other packages are listed by name and imported when they are called; `headwise.commands` says how a
package brings one. Those of the textbook are listed where it is not installed too, and say then how to install it.
"""

import os
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from functools import cache
from itertools import pairwise
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from headwise.cli.change import budget, convert, prune
from headwise.cli.interruption import CODE, check_interrupted, is_interruption, leave, print_interrupted, settle, spoken
from headwise.cli.learn import measure, merge, train, write
from headwise.cli.options import Lang, standard_streams
from headwise.cli.plan import plan
from headwise.cli.see import measures, see, view
from headwise.errors import HeadwiseError, not_installed, reason
from headwise.plugins import commands, imported, load
from headwise.wording import in_language, joined, language, tr

# Parts of typer's messages, in the order in which they are replaced, and what replaces them in another language.
OF_TYPER = {
    r"^No such option(?:: (\S+)| '([^']*)'\.?)": tr(r"no such option: \1\2"),
    r"^No such command ('[^']*')": tr(r"no such command: \1"),
    r"^Missing argument ": tr("missing argument "),
    r"^Missing option ": tr("missing option "),
    r"^Missing command$": tr("missing command"),
    r"^Got unexpected extra argument(?:s|\(s\))? \((.*)\)$": tr(r"unexpected extra arguments: \1"),
    r"^Option (\S+) requires an argument$": tr(r"option \1 requires an argument"),
    r"^Option (\S+) does not take a value$": tr(r"option \1 does not take a value"),
    r"^Invalid value for ('[^']*'): ": tr(r"invalid value for \1: "),
    r"(\S+) is not a valid int(eger)?( range)?\b": tr(r"\1 is not a whole number"),
    r"(\S+) is not a valid float( range)?\b": tr(r"\1 is not a number"),
    r"Input should be a valid integer.*": tr("expected a whole number"),
    r"Input should be a valid number.*": tr("expected a number"),
    r"Input should be greater than or equal to (\S+)": tr(r"expected at least \1"),
    r"Input should be less than or equal to (\S+)": tr(r"expected at most \1"),
    r"(\S+) is not in the range (\S+)": tr(r"\1 is not in the range \2"),
    r",? ?\(Possible options: (.+)\)": tr(r"; similar ones: \1"),
    r"[.;,]? ?\(?Did you mean (?:one of: )?([^?]+)\?\)?": tr(r"; did you mean \1?"),
}
OR_GIVE = tr("; or give ")  # before an argument, at the end of a message


def in_words(error: Exception, arguments: Sequence[str], options: Collection[str], lang: str) -> str | None:
    """The message of an error that the user can mend; None for others. options: those of the command."""
    if isinstance(error, HeadwiseError):
        return _with_options(in_language(error.message, lang), options, in_language(OR_GIVE, lang))
    if isinstance(error, OSError):
        return _of_system(error, arguments, lang)
    return _of_typer(error, lang) if hasattr(error, "format_message") else None


def _with_options(message: str, options: Collection[str], or_give: str) -> str:
    """A way out that names an argument of Python names the command's option instead, or the one of the design."""

    def option(found: re.Match[str]) -> str:
        name = f"--{found[2].replace('_', '-')}"
        return found[1] + (name if name in options else f"--set {found[2]}=…" if "--set" in options else found[2])

    return re.sub(rf"({re.escape(or_give)})(\w+)$", option, message)


def _of_typer(error: Any, lang: str) -> str:
    """An argument error of typer, of any version, in the form of our own errors."""
    message = " ".join(error.format_message().split()).rstrip(".")
    context = getattr(error, "ctx", None)
    if lang != "en":
        for english, words in OF_TYPER.items():
            message = re.sub(english, in_language(words, lang), message)
    if context is None:
        return message
    hint = in_language(tr("; {command} -h lists the options", command=context.command_path), lang)
    return message + (hint[1:] if message.endswith("？") else hint)


def _of_system(error: OSError, arguments: Sequence[str], lang: str) -> str:
    """An error of the system, such as a missing file, with the argument that names the file."""
    why = in_language(reason(error), lang)
    if not error.filename:
        return why
    name = str(error.filename)
    option = next((given for given, value in pairwise(arguments) if value == name), "")
    option = next((given[: -len(name) - 1] for given in arguments if given.endswith(f"={name}")), option)
    if name not in arguments and not option:
        return in_language(joined([why, repr(name)], tr(": ")), lang)
    argument = option if option.startswith("-") else "FILE"
    return in_language(joined([f"{argument} {name!r}", why], tr(": ")), lang)


PACKAGE = "headwise-textbook"
# Its commands, with the first paragraph of their help.
OF_TEXTBOOK = {
    "trace": tr("Print every step of an attention design with shapes and numbers."),
    "claims": tr("Test textbook claims by measurement. Exits with code 1 if a verdict is unexpected."),
    "tour": tr("Walk through a topic of multi-head attention: formula, code with its output, claims, exercises."),
    "check": tr(
        "Grade an exercise: run your function on random inputs, and show the smallest one with a wrong result."
    ),
    "audit": tr("Audit a chapter: run its listings, and compare shapes, outputs, calculations, tables and formulas."),
    "reconstruct": tr("Train attention to rebuild its own embeddings, with and without a mask, as tutorials do."),
    "train demonstration": tr("Draw the twelve heat maps of the Water Margin demonstration, and say what is bright."),
}


class Listed(TyperCommand):
    """A command of another package, of which the name and a line of help are known."""

    real: Any = None  # the command itself, once it was called

    def loaded(self) -> Any:
        """Import the command. ConfigError if its package is missing or cannot be imported."""
        if self.real is None:
            entry = commands().get((self.name or "").replace(" ", "-"))
            if entry is None:
                raise not_installed(f"headwise {self.name}", PACKAGE)
            function = imported(entry)
            program = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            program.command(self.name)(function)
            self.real = get_command(program)
            if language() == "zh":
                from headwise.cli.chinese import translate_command

                translate_command(self.real, function.__module__.partition(".")[0])
        return self.real


def other_commands(known: Collection[str]) -> dict[str, Listed]:
    """The commands of other packages whose names are not among the known ones, by name."""
    known = {name.replace(" ", "-") for name in known}
    found = {name: entry.dist.name if entry.dist else entry.value for name, entry in sorted(commands().items())}
    return {name: Listed(name, help=package) for name, package in found.items() if name not in known}


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
        if " ".join(args[:2]) in self.commands:  # a name of two words
            args = [" ".join(args[:2]), *args[2:]]
        name, command, rest = super().resolve_command(ctx, args)
        return name, command.loaded() if isinstance(command, Listed) else command, rest


@contextmanager
def _with_a_line() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        print_interrupted()
        raise typer.Exit(CODE) from None


def doctor(
    measure: Annotated[bool, typer.Option("--measure", help="Also time each compiled target; a few seconds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for a bug report.")] = False,
    lang: Lang = None,
) -> None:
    """Report which kernels run on this machine, the compiled library and versions."""
    from json import dumps

    from headwise.cli.doctor import examine, print_examination

    if as_json:
        sys.stdout.write(dumps(asdict(examine(measure=measure)), indent=2) + "\n")
    else:
        print_examination(examine(measure=measure), Console())


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
    merge,
    prune,
    convert,
    budget,
    "claims",
    "tour",
    "check",
    "audit",
    "reconstruct",
    "train demonstration",
    doctor,
):  # as --help lists them
    if isinstance(command, str):
        app.command(command, cls=Listed, help=OF_TEXTBOOK[command])(lambda: None)
    else:
        app.command()(command)
app.add_typer(plan)


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
    # Some programs set COLUMNS=0 where they do not know the width, and tables lose columns below `NARROWEST`.
    if os.environ.get("COLUMNS", "").isdigit() and int(os.environ["COLUMNS"]) < NARROWEST:
        os.environ["COLUMNS"] = str(NARROWEST)
    lines: AbstractContextManager[None] = nullcontext()
    if spoken() == "zh":
        from headwise.cli.chinese import lines_of_characters

        lines = lines_of_characters()
    with standard_streams(), lines:
        _run()


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
        message = in_words(error, sys.argv[1:], _options(sys.argv[1:]), spoken())
        if message is None:
            raise
        _fail(message)


def _options(arguments: list[str]) -> set[str]:
    """The options of the command that the arguments name, or of the program."""
    command: Any = _commands(spoken())
    while inner := next((found for name, found in getattr(command, "commands", {}).items() if name in arguments), None):
        command = inner
    command = getattr(command, "real", None) or command
    return {option for parameter in command.params for option in parameter.opts}


def _leave(code: int) -> None:
    if code == CODE:  # of a command that printed how to resume
        leave()
    sys.exit(code)


def _fail(message: str) -> None:
    Console(stderr=True).print(f"[bold red]{in_language(tr('error:'), spoken())}[/bold red] ", end="")
    Console(stderr=True, markup=False, highlight=False, soft_wrap=True).print(message)
    sys.exit(2)
