"""What commands share: the model that is asked for, the files that they write, and a bar that says how far they are."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from headwise.errors import ConfigError
from headwise.outputs import check_writable

Model = Annotated[
    Path | None, typer.Option("--model", help="Checkpoint folder or file; the embedded model if left out.")
]
AnyModel = Annotated[
    Path | None,
    typer.Option(
        "--model",
        help="A checkpoint of headwise, or a folder of Hugging Face transformers with config.json, *.safetensors and "
        "its tokenizer; the embedded model if left out.",
    ),
]


def check_file(option: str, path: Path | None, example: str) -> None:
    """Raise, before anything takes long, where a file is to be written and cannot be."""
    if path is None:
        return
    if os.path.isdir(path):
        raise ConfigError(f"{option} {str(path)!r}: is a folder; expected the name of a file, such as {example}")
    check_writable(path, option)


def load(model: Path | None) -> Any:
    """Decoder, tokenizer and info of a checkpoint, or of the embedded model."""
    from headwise.lm.checkpoint import load_checkpoint, load_pretrained

    return load_pretrained() if model is None else load_checkpoint(model)


@contextmanager
def progress() -> Iterator[Any]:
    """A progress bar for a call that says what it is doing; there from the first step on, so that an error before it
    stands alone, and gone when it is done."""
    columns = TextColumn("[progress.description]{task.description}"), BarColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task("", total=None)

    def step(what: str, done: int, of: int) -> None:
        bar.start()
        bar.update(task, description=what, completed=done, total=of)

    try:
        yield step
    finally:
        stop(bar)


def stop(bar: Progress) -> None:
    """End a bar; one that was never started leaves no empty line."""
    if bar.live.is_started:
        bar.stop()
