"""The help of the command line in Chinese: texts of the catalogue, found by the English ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.columns import Columns
from rich.table import Table
from rich.text import Text

from headwise.wording import breaks, in_language, looked_up, tr

# Headings and marks of typer, where its version has them, and what it says of its own options.
MARKS = {
    "ARGUMENTS_PANEL_TITLE": tr("Arguments"), "OPTIONS_PANEL_TITLE": tr("Options"),
    "COMMANDS_PANEL_TITLE": tr("Commands"), "ERRORS_PANEL_TITLE": tr("Error"),
    "DEFAULT_STRING": tr("[default: {}]"), "REQUIRED_LONG_STRING": tr("[required]"),
}  # fmt: skip
USAGE = tr("Usage:"), tr("[OPTIONS]"), tr("COMMAND [ARGS]...")
OF_TYPER = (
    tr("Install completion for the current shell."),
    tr("Show completion for the current shell, to copy it or customize the installation."),
    tr("Show this message and exit."),
)


@contextmanager
def lines_of_characters() -> Iterator[None]:
    """Within the block, rich breaks lines also between Chinese characters, but before no closing mark."""
    import rich.text as module

    before = getattr(module, "divide_line", None)  # private to rich: without it, lines stay as rich breaks them
    if before is None:
        yield
        return
    module.divide_line = breaks
    try:
        yield
    finally:
        module.divide_line = before


def translate(group: Any) -> Any:
    """A group of commands with its help in Chinese; what no catalogue has stays in English."""
    from typer import rich_utils

    marks = {name: in_language(words, "zh") for name, words in MARKS.items()}
    for name, value in {**marks, "Table": _Folded, "Columns": _Columns}.items():
        if hasattr(rich_utils, name):
            setattr(rich_utils, name, value)
    for command in _every(group):
        translate_command(command, "headwise")
    return group


def _every(command: Any) -> Iterator[Any]:
    """A command and all commands in it."""
    yield command
    for inner in getattr(command, "commands", {}).values():
        yield from _every(inner)


def translate_command(command: Any, package: str) -> None:
    """A command's help in Chinese, by the catalogue of its package and by that of headwise."""

    def shown(words: str | None) -> str | None:
        return words and (looked_up(words, package) or words)

    command.help, command.short_help = shown(command.help), shown(command.short_help)
    params, usage = command.get_params, command.get_usage

    def translated(context: Any) -> Any:
        found = params(context)
        for param in found:
            if getattr(param, "help", None):
                param.help = shown(param.help)
        return found

    command.get_params = translated
    command.get_usage = lambda context: _replaced(usage(context))


class _Folded(Table):
    """A table that breaks lines between any two characters: Chinese has no blanks to break at."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        super().add_row(*cells, **options)
        for column in self.columns:
            column.overflow = "fold"


class _Columns(Columns):
    """The same for texts side by side."""

    def __init__(self, renderables: Any = None, *args: Any, **options: Any) -> None:
        shown = list(renderables or ())
        for one in shown:
            if isinstance(one, Text):
                one.overflow = "fold"
        super().__init__(shown, *args, **options)


def _replaced(usage: str) -> str:
    for words in USAGE:
        usage = usage.replace(words, in_language(words, "zh"), 1)
    return usage
