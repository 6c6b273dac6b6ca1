"""The command view."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headwise.cli.interruption import check_interrupted
from headwise.cli.options import AnyModel, Lang
from headwise.cli.streams import is_stream, stdin_text
from headwise.cli.words import say as tell


def view(
    model: AnyModel = None,
    file: Annotated[Path | None, typer.Option(help="Open this UTF-8 text file; - is standard input.")] = None,
    port: Annotated[int, typer.Option(help="Port; 0 selects a free one.")] = 0,
    no_open: Annotated[bool, typer.Option("--no-open", help="Print the address without opening a browser.")] = False,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="Maximum length of a text, in tokens.")
    ] = 131_072,
    lang: Lang = None,
) -> None:
    """Open a page in the browser that shows all heads on a long text and zooms into each map.

    Without --lang, the page is in the language of the browser.
    """
    from headwise.lm.loading import load_model
    from headwise.lm.texts import read_text
    from headwise.reports.viewer import check_serving, serve

    check_serving(port)
    console = Console(highlight=False, soft_wrap=True)
    text = stdin_text("--file") if is_stream(file) else None if file is None else read_text(file)

    def say(address: str) -> None:
        check_interrupted()
        tell(console, "serving", address=address)

    title = "" if file is None or is_stream(file) else file.name
    ended = serve(
        load_model(model), text=text, title=title, port=port, open_browser=not no_open,
        max_tokens=max_tokens, lang=lang, say=say,
    )  # fmt: skip
    if not ended:  # all output is written, and the model may still be computing
        console.file.flush()
        os._exit(0)
