"""The commands claims and doctor."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headwise.cli.options import Estimate, Lang, check_file, progress_bar
from headwise.cli.streams import is_stream, written
from headwise.cli.words import say
from headwise.errors import ConfigError
from headwise.wording import language


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
        raise ConfigError("give --json or --markdown, not both", "--json 与 --markdown 只能给出其一")
    if only and every:
        raise ConfigError("give --only or --all, not both", "--only 与 --all 只能给出其一")
    check_file("--html", html, "claims.html", stream=not (as_json or markdown))
    from headwise.table.show import duration
    from headwise.textbook.claims import choose, print_findings, run, to_json, to_markdown, write_page
    from headwise.textbook.claims.claim import expected_seconds

    speech = language()
    wanted = choose([name for part in only or [] for name in part.split(",") if name], slow=every or html is not None)
    if (seconds := expected_seconds(wanted)) >= Estimate.LONG:
        say(Console(stderr=True), "claims_take", count=len(wanted), time=duration(seconds, speech))
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
            say(Console(), "wrote_claims", path=html)
    if not all(finding.agrees for finding in found):
        raise typer.Exit(1)


def doctor(
    measure: Annotated[bool, typer.Option("--measure", help="Also time each compiled target; a few seconds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for a bug report.")] = False,
    lang: Lang = None,
) -> None:
    """Report which kernels run on this machine, the compiled library and versions."""
    import json
    from dataclasses import asdict

    from headwise.cli.examination import print_examination
    from headwise.doctor import examine

    if as_json:
        sys.stdout.write(json.dumps(asdict(examine(measure=measure)), indent=2) + "\n")
    else:
        print_examination(examine(measure=measure), Console())
