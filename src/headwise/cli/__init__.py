"""The command line: every command is one call into the library."""

import atexit
import signal
import sys

from headwise.cli.interruption import is_interruption, leave, noted, print_interrupted
from headwise.wording import LANGUAGES, speaking


def main() -> None:
    """Run the command line. Errors that the user can fix are printed as one line, with exit code 2; Ctrl-C ends every
    command with one line and exit code 130, also while it is still being imported."""
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # all is done then; Python would end by the signal
    with speaking(_wanted(sys.argv[1:])), noted():
        try:
            from headwise.cli.program import run  # the commands, with typer and rich: a tenth of a second

            run()
        except (KeyboardInterrupt, Exception) as error:
            if not is_interruption(error):
                raise
            print_interrupted()
            leave()


def _wanted(arguments: list[str]) -> str | None:
    """The language that `--lang` chooses, known before the arguments are parsed; None if it chooses none."""
    given = arguments[: arguments.index("--")] if "--" in arguments else arguments
    for argument, following in zip(given, [*given, ""][1:], strict=True):
        name, _, value = argument.partition("=")
        if name == "--lang" and (chosen := value or following) in LANGUAGES:
            return chosen
    return None
