"""The command line: every command is one call into the library."""

import sys

import typer
from rich.console import Console

from headwise.cli.change import budget, convert, prune
from headwise.cli.judge import claims, doctor, plan
from headwise.cli.learn import train, write
from headwise.cli.look import SAMPLE as SAMPLE, measures, see, trace
from headwise.cli.measure import measure
from headwise.cli.view import view
from headwise.errors import HeadwiseError

app = typer.Typer(
    help="Multi-head attention you can see.",
    no_args_is_help=True,
    add_completion=False,
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
    doctor,
):  # as --help lists them
    app.command()(command)


def main() -> None:
    """Run; what the user can mend comes as one line, with exit code 2."""
    try:
        # Some versions of typer give the code of an Exit back instead of raising it.
        if code := app(standalone_mode=False):
            sys.exit(code)
    except HeadwiseError as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{error.strerror or error}" + (f": {error.filename!r}" if error.filename else ""))
    except KeyboardInterrupt:
        sys.exit(130)
    except typer.Exit as leaving:
        sys.exit(leaving.exit_code)
    except Exception as error:
        show = getattr(error, "show", None)  # typer's own usage errors know how to print themselves
        if show is None:
            raise
        show()
        sys.exit(getattr(error, "exit_code", 2))


def _fail(message: str) -> None:
    Console(stderr=True).print("[bold red]error:[/bold red] ", end="")
    Console(stderr=True, markup=False, highlight=False, soft_wrap=True).print(message)
    sys.exit(2)
