"""The command measure."""

import atexit
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from headwise.cli.interruption import CODE, check_interrupted, is_first, is_interruption
from headwise.cli.options import AnyModel, Lang, check_file, is_stream, progress_bar, say
from headwise.errors import ConfigError, HeadwiseError


def measure(
    files: Annotated[
        list[str], typer.Option("--file", help="UTF-8 text, .jsonl, .parquet, a folder or a glob pattern; repeatable.")
    ],
    out: Annotated[Path, typer.Option(help="Table to write: .parquet, .csv or .jsonl.")],
    model: AnyModel = None,
    measures: Annotated[str | None, typer.Option(help="Comma-separated names; `headwise measures` lists them.")] = None,
    window: Annotated[
        int | None,
        typer.Option(help="Tokens per window; default: the length that the model was trained on."),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(help="Tokens from one window to the next; default: the window, without overlap."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Windows per batch.")] = 8,
    max_tokens: Annotated[int | None, typer.Option(help="Stop after this many tokens.")] = None,
    per: Annotated[str, typer.Option(help="all, or file for separate numbers per file.")] = "all",
    field: Annotated[
        str, typer.Option(help="Field of JSON lines, or column of Parquet, that contains the text.")
    ] = "text",
    layers: Annotated[str | None, typer.Option(help="Layers to include: 0,4-7.")] = None,
    heads: Annotated[str | None, typer.Option(help="Heads of each layer to include: 0,4-7.")] = None,
    passages: Annotated[
        int, typer.Option(help="Passages to keep of each head: the strongest, and as many sampled ones; 0 for none.")
    ] = 8,
    strongest_by: Annotated[
        str, typer.Option(help="What makes a passage strong: weight, or a measure of queries such as induction_mass.")
    ] = "weight",
    device: Annotated[str | None, typer.Option(help="cpu, cuda …; default: a GPU if there is one.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Dtype of the weights: float32, bfloat16 or float16; default: float32.")
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Discard earlier results and start again.")] = False,
    sort: Annotated[str | None, typer.Option(help="Sort the printed table by this measure, largest first.")] = None,
    png: Annotated[Path | None, typer.Option(help="Also plot every measure as layers × heads.")] = None,
    page: Annotated[
        Path | None, typer.Option(help="Also write an HTML page: heads by any two statistics, and their passages.")
    ] = None,
    lang: Lang = None,
) -> None:
    """Measure every head on a corpus of any size. Resumable; torchrun divides the work."""
    from headwise.corpus.work import Deserted, Ranks

    for option, given in (("--file", files), ("--out", [out])):
        if any(map(is_stream, given)):
            raise ConfigError(
                "{option} '-': a run that can be resumed reads and writes files; expected a file name", option=option
            )
    ranks = Ranks.joined()
    atexit.register(ranks.leave)  # after all messages have been printed
    try:
        with _signals():
            _measure(
                ranks, files, out, sort, png, page, model=model, measures=measures, window=window, stride=stride,
                batch=batch, max_tokens=max_tokens, per=per, field=field, layers=_numbers("layers", layers),
                heads=_numbers("heads", heads), passages=passages,
                strongest_by=strongest_by, device=device, dtype=dtype, restart=restart,
            )  # fmt: skip
    except (KeyboardInterrupt, Exception) as error:
        if is_interruption(error):
            if ranks.first:
                _print_how_to_resume(out, restart)
            else:
                atexit.unregister(ranks.leave)  # all are to end at once
            raise typer.Exit(143 if isinstance(error, _Terminated) else CODE) from None
        named = isinstance(error, HeadwiseError | OSError)
        ranks.fail(str(error) if named else f"{type(error).__name__}: {error}")
        if named and not ranks.first and not isinstance(error, Deserted):
            raise typer.Exit(2) from None
        raise


def _measure(
    ranks: Any, files: list[str], out: Path, sort: str | None, png: Path | None, page: Path | None, *,
    model: Path | None,
    measures: str | None, **options: Any,
) -> None:  # fmt: skip
    from headwise.corpus import measure_corpus
    from headwise.corpus.printing import check_sort, print_measures
    from headwise.reports.corpus_page import check_picture, print_passages, write_corpus_page, write_picture
    from headwise.stats import shown_in
    from headwise.wording import language

    names = (
        shown_in("corpus") if measures is None else tuple(name.strip() for name in measures.split(",") if name.strip())
    )
    check_sort(sort, names)
    if png is not None:
        check_picture(png)
    if ranks.first:
        check_file("--png", png, "measures.png")
        check_file("--page", page, "heads.html")
    since = time.monotonic()
    with progress_bar() if ranks.first else nullcontext() as progress:
        found = measure_corpus(model, files, out, measures=names, ranks=ranks, progress=progress, **options)
    if not ranks.first:
        return
    console = Console()
    print_measures(found, console, sort=sort, seconds=time.monotonic() - since if found.new else None)
    print_passages(found.passages, console)
    if not found.new:
        say(console, "finished_table", path=out)
    if png is not None:
        say(console, "wrote_measures", path=write_picture(found, png))
    if page is not None:
        say(console, "wrote_corpus_page", path=write_corpus_page(found, page, lang=language()))


class _Terminated(KeyboardInterrupt):
    """SIGTERM: a launcher or a scheduler ends the process."""


@contextmanager
def _signals() -> Iterator[None]:
    """In this context SIGTERM ends the run as Ctrl-C does, and repeated signals, which launchers send, are ignored."""

    def end(number: int, frame: Any) -> None:
        if not is_first(number):
            return
        raise _Terminated if number == signal.SIGTERM else KeyboardInterrupt

    check_interrupted()
    before = {each: signal.signal(each, end) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except KeyboardInterrupt:
        before = dict.fromkeys(before, signal.SIG_IGN)
        raise
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _print_how_to_resume(out: Path, restart: bool) -> None:
    from headwise.corpus.units import Units

    so_far = Units(out).so_far()
    console = Console(stderr=True)
    if so_far is None:
        say(console, "stopped_before")
    else:
        say(console, "stopped_restarting" if restart else "stopped_measuring", done=so_far[0], of=so_far[1])


def _numbers(name: str, given: str | None) -> list[int] | None:
    """0,4-7 as numbers."""
    if given is None:
        return None
    found: list[int] = []
    for part in given.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or not (last or first).isdigit() or int(last or first) < int(first):
            raise ConfigError("--{name} {given!r}: expected numbers such as 0,4-7", name=name, given=given)
        found += range(int(first), int(last or first) + 1)
    return found
