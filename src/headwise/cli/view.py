"""The command that starts the viewer."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headwise.cli.given import AnyModel
from headwise.errors import ConfigError


def view(
    model: AnyModel = None,
    file: Annotated[Path | None, typer.Option("--file", help="Read this UTF-8 file at once.")] = None,
    port: Annotated[int, typer.Option("--port", help="0 takes any that is free.")] = 0,
    no_open: Annotated[bool, typer.Option("--no-open", help="Only print the address.")] = False,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="The longest text.")] = 131_072,
    lang: Annotated[
        str | None, typer.Option("--lang", help="Language of the page, en or zh; the browser's own if left out.")
    ] = None,
) -> None:
    """Look at all heads on a text of up to 100,000 tokens, and zoom into each: a page in the browser, served here."""
    from headwise.lm.loading import load_model
    from headwise.lm.text_files import read_text
    from headwise.reports.viewer import serve
    from headwise.reports.words import LANGUAGES

    if lang not in (None, *LANGUAGES):
        raise ConfigError(f"lang={lang!r}: expected {' or '.join(map(repr, LANGUAGES))}")
    console = Console(highlight=False, soft_wrap=True)
    text = None if file is None else read_text(file)

    def say(address: str) -> None:
        console.print(
            f"[bold]{address}[/bold]\nOnly this machine can open it, and only with this token. Ctrl-C ends it."
        )

    ended = serve(
        load_model(model), text=text, title="" if file is None else file.name, port=port, open_browser=not no_open,
        max_tokens=max_tokens, lang=lang, say=say,
    )  # fmt: skip
    if not ended:  # nothing is left to be written, and the model's own code may take its time
        console.file.flush()
        os._exit(0)
