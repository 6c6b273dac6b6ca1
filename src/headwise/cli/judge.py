"""The command doctor."""

import sys
from typing import Annotated

import typer
from rich.console import Console

from headwise.cli.options import Lang


def doctor(
    measure: Annotated[bool, typer.Option("--measure", help="Also time each compiled target; a few seconds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for a bug report.")] = False,
    lang: Lang = None,
) -> None:
    """Report which kernels run on this machine, the compiled library and versions."""
    import json
    from dataclasses import asdict

    from headwise.cli.doctor import examine, print_examination

    if as_json:
        sys.stdout.write(json.dumps(asdict(examine(measure=measure)), indent=2) + "\n")
    else:
        print_examination(examine(measure=measure), Console())
