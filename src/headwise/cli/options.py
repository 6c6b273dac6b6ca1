"""Shared by all commands: options, sentences in both languages, the progress bar, and standard streams.

    say(console, tr("Wrote the model to [bold]{path}[/bold].", path=out))

Values are plain text; the sentences may have markup of rich. Help texts are in `chinese.py`. Standard input and output
are UTF-8 in every locale, `-` is a file name, and pipes may close early:

    with standard_streams():
        text = stdin_text("--file")                        # headwise see -
        with written(out) as path:                         # headwise see --out -
            write_report(report, path)
"""

import io
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from headwise.base.files import check_writable
from headwise.cli.interruption import check_interrupted
from headwise.errors import ConfigError, TextError
from headwise.wording import LANGUAGES, Message, check_language, in_language, language, tr

# What a `progress=` callback is called with.
WORK = (
    tr("checking the files"), tr("comparing"), tr("done"), tr("computing the curve"), tr("drawing"),
    tr("estimating the loss: the model as it is"), tr("estimating the loss: the merged model"),
    tr("estimating the loss"), tr("importance"), tr("measuring heads"), tr("measuring speed"), tr("measuring"),
    tr("merging"), tr("pooling (mean)"), tr("pooling (max)"), tr("reading"), tr("roles"), tr("training"),
    tr("healing"), tr("judging"),
)  # fmt: skip


def said(sentence: Message) -> str:
    """A sentence in the user's language, as markup of rich; its values are plain text."""
    lang = language()
    shown = {name: escape(in_language(x, lang)) if isinstance(x, str) else x for name, x in sentence.values.items()}
    return in_language(sentence.filled(**shown), lang)


def say(console: Console, sentence: Message) -> None:
    """Print a sentence."""
    console.print(said(sentence), highlight=False, soft_wrap=True)


def work(what: str) -> str:
    """A part of the work, as the progress bar shows it."""
    begins = next((words for words in WORK if what.startswith(words)), "")
    return in_language(begins, language()) + what.removeprefix(begins)


STREAM = "-"  # the name of standard input and standard output


@contextmanager
def standard_streams() -> Iterator[None]:
    """Within the block, standard output and error are UTF-8 in every locale, or as PYTHONIOENCODING says, with escapes.
    Output without a reader is discarded, so that the command completes and its files are written."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_utf8, before)
    try:
        yield
    finally:
        for stream, given in zip((sys.stdout, sys.stderr), before, strict=True):
            with suppress(OSError, ValueError):
                stream.flush() if given is not None else stream.close()
        sys.stdout, sys.stderr = before


def is_read() -> bool:
    """Whether standard output still has a reader, as far as earlier writes have shown."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return not (isinstance(raw, _Pipe) and raw.closed_by_reader)


def is_stream(path: str | os.PathLike[str] | None) -> bool:
    """Whether a path is `-`, standard input or output."""
    return path is not None and os.fspath(path) == STREAM


def stdin_bytes(option: str) -> bytes:
    """All of standard input. TextError naming the option if it is closed or empty."""
    if sys.stdin is None or sys.stdin.closed:
        raise TextError(
            "{option} '-': standard input is closed; give a file name, or pipe a text into the command", option=option
        )
    buffer = getattr(sys.stdin, "buffer", None)
    data: bytes = sys.stdin.read().encode() if buffer is None else buffer.read()
    if not data:
        raise TextError("{option} '-': standard input is empty", option=option)
    return data


def stdin_text(option: str) -> str:
    """The text on standard input, in UTF-8. TextError as `stdin_bytes`, and for other encodings."""
    from headwise.lm.texts import decoded

    return decoded(stdin_bytes(option), "standard input")


@contextmanager
def read_from(path: Path, option: str) -> Iterator[Path]:
    """The path; for `-`, a temporary file with what standard input contains."""
    if not is_stream(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="headwise-") as folder:
        copy = Path(folder) / "stdin"
        copy.write_bytes(stdin_bytes(option))
        yield copy


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """The path to write to; for `-`, a temporary file whose content is then written to standard output."""
    if not is_stream(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="headwise-") as folder:
        copy = Path(folder) / "stdout"
        yield copy
        sys.stdout.flush()
        with open(copy, "rb") as source:
            shutil.copyfileobj(source, sys.stdout.buffer)
        sys.stdout.buffer.flush()


def typed(argument: str, option: str) -> str:
    """A text from the command line, which Python decodes by the locale, decoded as UTF-8 if it is UTF-8."""
    from headwise.lm.texts import not_utf8

    if os.name != "posix":
        return argument
    try:
        data = os.fsencode(argument)
        return data.decode()
    except UnicodeDecodeError as error:
        if any("\udc80" <= character <= "\udcff" for character in argument):  # Python's form of such a byte
            raise not_utf8(option, data[error.start], error.start) from None
        return argument
    except UnicodeEncodeError:
        return argument


class _Pipe(io.FileIO):
    """A file descriptor that discards output after the reader has closed the pipe."""

    closed_by_reader = False

    def write(self, data: Any) -> int:
        """Write, or discard."""
        if not self.closed_by_reader:
            try:
                return super().write(data)
            except BrokenPipeError:
                self.closed_by_reader = True
        return memoryview(data).nbytes


def _utf8(stream: Any) -> Any:
    """The stream as described in `standard_streams`; the stream itself if it is not a file of the system."""
    if stream is None:  # closed, as by `>&-`, or a program without a console
        return open(os.devnull, "w", encoding="utf-8")
    try:
        handle = stream.fileno()
    except (AttributeError, OSError, ValueError):  # a stream in memory
        return stream
    stream.flush()
    encoding = stream.encoding if os.environ.get("PYTHONIOENCODING") else "utf-8"
    buffer = io.BufferedWriter(_Pipe(handle, "w", closefd=False))
    return io.TextIOWrapper(buffer, encoding, errors="backslashreplace", line_buffering=stream.line_buffering)


def on_desktop() -> bool:
    """Whether a person at a desktop gave the command: from a terminal, not over SSH, not in CI, with a display."""
    if os.environ.get("CI") or os.environ.get("SSH_CONNECTION") or not sys.stderr.isatty():
        return False
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def open_in_browser(path: Path) -> bool:
    """Open a file, without waiting for the browser; whether that was possible. Its messages are discarded."""
    import webbrowser

    address = path.resolve().as_uri()
    text_only = {"www-browser", "links", "elinks", "lynx", "w3m"}  # these would take over the terminal
    try:
        browser = webbrowser.get()
        return getattr(browser, "name", "") not in text_only and browser.open(address)
    except webbrowser.Error:
        return False


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
            "{option} '-': this output cannot go to standard output; expected a file, such as {example}",
            option=option,
            example=example,
        )
    if os.path.isdir(path):
        raise ConfigError(
            "{option} {path!r}: is a folder; expected a file name, such as {example}",
            option=option,
            path=str(path),
            example=example,
        )
    check_writable(path, option)


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
            from headwise.table.show import duration

            say(Console(stderr=True), tr("{what}: about {time} left", what=work(what), time=duration(left)))


def stop(bar: Progress) -> None:
    """Stop a progress bar; one that was never started leaves no empty line."""
    if bar.live.is_started:
        bar.stop()
