"""Shared by all commands: the option --model, checks of output files, and the progress bar."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from headwise.cli.interruption import check_interrupted
from headwise.cli.streams import is_stream
from headwise.cli.words import say, work
from headwise.errors import ConfigError
from headwise.outputs import check_writable
from headwise.wording import LANGUAGES, check_language, language

Model = Annotated[Path | None, typer.Option(help="Checkpoint folder or file; default: the embedded model.")]
AnyModel = Annotated[
    Path | None,
    typer.Option(
        help="A headwise checkpoint, a folder of a Hugging Face transformers model, its name in the local hub cache, or"
        " minilm; default: the embedded model.",
    ),
]


def _checked(lang: str | None) -> str | None:
    if lang is not None:
        check_language(lang)
    return lang


# `main` reads it before a command begins, so that help and errors are in this language too: see `language()`.
Lang = Annotated[
    str | None,
    typer.Option(
        "--lang",
        callback=_checked,
        is_eager=True,
        autocompletion=lambda: list(LANGUAGES),
        help="Language, en or zh; default: HEADWISE_LANG, then the locale.",
    ),
]


def check_file(option: str, path: Path | None, example: str, *, stream: bool = False) -> None:
    """Raise before any long computation if an output file cannot be written.

    Args:
        option: its name on the command line. path: as given; None for none. example: a name that would do.
        stream: whether it may be `-`, standard output.
    Raises:
        ConfigError: for a folder, and for `-`. CheckpointError: if the place cannot be written.
    """
    if path is None or (stream and is_stream(path)):
        return
    if is_stream(path):
        raise ConfigError(
            f"{option} '-': this output cannot go to standard output; expected a file, such as {example}",
            f"{option} '-'：此输出不能写到标准输出；应为文件名，例如 {example}",
        )
    if os.path.isdir(path):
        raise ConfigError(
            f"{option} {str(path)!r}: is a folder; expected a file name, such as {example}",
            f"{option} {str(path)!r}：是文件夹；应为文件名，例如 {example}",
        )
    check_writable(path, option)


def load(model: Path | None) -> Any:
    """Decoder, tokenizer and info of a checkpoint, or of the embedded model."""
    from headwise.lm.checkpoint import load_checkpoint, load_pretrained

    return load_pretrained() if model is None else load_checkpoint(model)


@contextmanager
def progress_bar() -> Iterator[Any]:
    """A bar, as the `progress=` of a call. It appears with the first report, so that an earlier error is printed alone,
    and disappears at the end. Where there is no terminal, `Estimate` prints a line for what takes long."""
    check_interrupted()
    columns = TextColumn("[progress.description]{task.description}"), BarColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Estimate()
        return
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task("", total=None)

    def progress(what: str, done: int, of: int) -> None:
        check_interrupted()
        bar.start()
        bar.update(task, description=work(what), completed=done, total=of)

    try:
        yield progress
    finally:
        stop(bar)


class Estimate:
    """A `progress=` callback that prints how long each part of the work will take, once that is known to be long.

    Args:
        clock: seconds, as `time.monotonic`.
    """

    AFTER, LONG = 3.0, 10.0  # seconds before a part is estimated, and those left that are worth a line

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._of, self._first, self._printed = clock, -1, (0.0, 0), False

    def __call__(self, what: str, done: int, of: int) -> None:
        """Called with the work done, and how much there is."""
        check_interrupted()
        now = self._clock()
        if of != self._of or done < self._first[1]:  # another part
            self._of, self._first, self._printed = of, (now, done), False
        since, before = self._first
        if self._printed or done <= before or now - since < self.AFTER:
            return
        left = (now - since) / (done - before) * (of - done)
        self._printed = True
        if left >= self.LONG:
            print_left(what, left)


def print_left(what: str, seconds: float) -> None:
    """Print to standard error how much time is left."""
    from headwise.table.show import duration

    say(Console(stderr=True), "left", what=work(what), time=duration(seconds, language()))


def stop(bar: Progress) -> None:
    """Stop a progress bar; one that was never started leaves no empty line."""
    if bar.live.is_started:
        bar.stop()
