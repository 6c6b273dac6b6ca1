"""What commands share: the model that is asked for, and a bar that says how far they are."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

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


def load(model: Path | None) -> Any:
    """Decoder, tokenizer and info of a checkpoint, or of the embedded model."""
    from headwise.lm.checkpoint import load_model, load_pretrained

    return load_pretrained() if model is None else load_model(model)


@contextmanager
def progress() -> Iterator[Any]:
    """A progress bar for a call that says what it is doing; gone when it is done."""
    columns = TextColumn("[progress.description]{task.description}"), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, of: bar.update(task, description=what, completed=done, total=of)
