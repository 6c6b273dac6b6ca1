"""Shared by all commands: the option --model, checks of output files, and the progress bar."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from headwise.cli.streams import is_stream
from headwise.errors import ConfigError
from headwise.outputs import check_writable

Model = Annotated[Path | None, typer.Option(help="Checkpoint folder or file; default: the embedded model.")]
AnyModel = Annotated[
    Path | None,
    typer.Option(
        help="A headwise checkpoint, a folder of a Hugging Face transformers model, its name in the local hub cache, or"
        " minilm; default: the embedded model.",
    ),
]


def check_file(option: str, path: Path | None, example: str, *, stream: bool = False) -> None:
    """Raise before any long computation if an output file cannot be written. stream: whether it may be `-`."""
    if path is None or (stream and is_stream(path)):
        return
    if is_stream(path):
        raise ConfigError(f"{option} '-': this output cannot go to standard output; expected a file, such as {example}")
    if os.path.isdir(path):
        raise ConfigError(f"{option} {str(path)!r}: is a folder; expected a file name, such as {example}")
    check_writable(path, option)


def load(model: Path | None) -> Any:
    """Decoder, tokenizer and info of a checkpoint, or of the embedded model."""
    from headwise.lm.checkpoint import load_checkpoint, load_pretrained

    return load_pretrained() if model is None else load_checkpoint(model)


@contextmanager
def progress_bar() -> Iterator[Any]:
    """A bar in a terminal, as the `progress=` of a call. It appears with the first report, so that an earlier error is
    printed alone, and disappears at the end."""
    columns = TextColumn("[progress.description]{task.description}"), BarColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task("", total=None)

    def progress(what: str, done: int, of: int) -> None:
        bar.start()
        bar.update(task, description=what, completed=done, total=of)

    try:
        yield progress
    finally:
        stop(bar)


def stop(bar: Progress) -> None:
    """Stop a progress bar; one that was never started leaves no empty line."""
    if bar.live.is_started:
        bar.stop()
