"""Commands of other packages: listed by name, imported when they are called.

`headwise.commands` says how a package brings one. Those of the textbook are listed where it is not installed too, and
say then how to install it.
"""

import sys
from collections.abc import Collection
from typing import Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

from headwise.errors import not_installed
from headwise.plugins import commands, imported
from headwise.wording import language

PACKAGE = "headwise-textbook"
# Its commands, with the first paragraph of their help.
OF_TEXTBOOK = {
    "trace": "Print every step of an attention design with shapes and numbers.",
    "claims": "Test textbook claims by measurement. Exits with code 1 if a verdict is unexpected.",
    "tour": "Walk through a topic of multi-head attention: formula, code with its output, claims, exercises.",
    "check": "Grade an exercise: run your function on random inputs, and show the smallest one with a wrong result.",
    "reconstruct": "Train attention to rebuild its own embeddings, with and without a mask, as tutorials do.",
}


class Listed(TyperCommand):
    """A command of another package, of which the name and a line of help are known."""

    real: Any = None  # the command itself, once it was called

    def loaded(self) -> Any:
        """Import the command. ConfigError if its package is missing or cannot be imported."""
        if self.real is None:
            entry = commands().get(self.name or "")
            if entry is None:
                raise not_installed(f"headwise {self.name}", PACKAGE)
            function = imported(entry)
            program = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            program.command(self.name)(function)
            self.real = get_command(program)
            if language() == "zh":
                from headwise.cli.chinese import translate_command

                translate_command(self.real, getattr(sys.modules[function.__module__], "CHINESE", {}))
        return self.real


def other_commands(known: Collection[str]) -> dict[str, Listed]:
    """The commands of other packages whose names are not among the known ones, by name."""
    found = {name: entry.dist.name if entry.dist else entry.value for name, entry in sorted(commands().items())}
    return {name: Listed(name, help=package) for name, package in found.items() if name not in known}
