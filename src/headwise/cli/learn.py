"""The commands train, write, measure and merge."""

import atexit
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from headwise.base.files import check_apart
from headwise.cli.interruption import CODE, check_interrupted, is_first, is_interruption
from headwise.cli.options import (
    STREAM,
    AnyModel,
    Estimate,
    Lang,
    Model,
    check_file,
    is_read,
    is_stream,
    progress_bar,
    read_from,
    said,
    say,
    stdin_text,
    stop,
    typed,
)
from headwise.errors import ConfigError, HeadwiseError
from headwise.wording import language, tr


def train(
    files: Annotated[list[Path], typer.Argument(help="UTF-8 text files; - is standard input.")],
    out: Annotated[Path, typer.Option(help="Folder for the checkpoint and the log.")],
    experiment: Annotated[str | None, typer.Option(hidden=True)] = None,
    lang: Lang = None,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 2000,
    d_model: Annotated[int, typer.Option(help="Model width.")] = 256,
    num_layers: Annotated[int, typer.Option(help="Layers.")] = 4,
    num_heads: Annotated[int, typer.Option(help="Query heads per layer.")] = 8,
    num_kv_heads: Annotated[int | None, typer.Option(help="KV heads: fewer than heads is GQA, 1 is MQA.")] = None,
    d_ff: Annotated[int, typer.Option(help="Width of the feed-forward network.")] = 640,
    design: Annotated[str, typer.Option(help="An attention design that supports causal masks, for example gqa.")] = (
        "multi_head"
    ),
    options: Annotated[
        list[str] | None, typer.Option("--set", help="An option of the design: --set latent_dim=64; repeatable.")
    ] = None,
    order: Annotated[str, typer.Option(help="Norm placement: pre or post.")] = "pre",
    context: Annotated[int, typer.Option(help="Tokens per window.")] = 256,
    dropout: Annotated[float, typer.Option(help="Dropout probability.")] = 0.1,
    batch_size: Annotated[int, typer.Option(help="Windows per step.")] = 16,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 2e-3,
    warmup: Annotated[int, typer.Option(help="Warmup steps of the learning rate.")] = 200,
    weight_decay: Annotated[float, typer.Option(help="Weight decay of AdamW.")] = 0.1,
    repeat_share: Annotated[
        str,
        typer.Option(help="Share of windows with repeated text; 0.1,0.4@500 changes it at step 500."),
    ] = "0",
    eval_every: Annotated[int, typer.Option(help="Steps between evaluations and checkpoints.")] = 200,
    save_seconds: Annotated[
        float,
        typer.Option(help="Also save whenever this many seconds have passed."),
    ] = 30.0,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    precision: Annotated[str, typer.Option(help="Precision of matrix products: bfloat16 or float32.")] = "bfloat16",
    init: Annotated[Path | None, typer.Option(help="Start from the weights and sizes of this model.")] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start from the beginning, even if --out contains a run.")
    ] = False,
    watch_heads: Annotated[
        bool, typer.Option("--watch-heads", help="Record and plot the roles of all heads at each evaluation.")
    ] = False,
) -> None:
    """Train a small character model. The same command resumes an interrupted run."""
    console = Console()
    if experiment is not None:
        raise ConfigError(
            "--experiment {experiment}: is a command of its own: headwise reconstruct FILE --out DIR",
            experiment=experiment,
        )
    from headwise.lm.train import Resumed, train as run
    from headwise.nn.registry import read_options
    from headwise.table.show import duration

    def resumed(since: Resumed) -> None:
        text = tr("Resumed after step {step} of {steps}, saved {ago} ago in {path}.")
        if since.step >= since.steps:
            text = tr("{path} contains this finished run, saved {ago} ago; use --fresh to train again.")
        ago = duration(since.seconds)
        say(console, text.filled(step=since.step, steps=since.steps, ago=ago, path=out))

    try:
        with _bar(steps) as watch, ExitStack() as ending:
            texts = [ending.enter_context(read_from(file, "FILES")) for file in files]
            outcome = run(
                texts, out, d_model=d_model, num_layers=num_layers, num_heads=num_heads, num_kv_heads=num_kv_heads,
                d_ff=d_ff, design=design, options=read_options(options or []), order=order, context=context,
                dropout=dropout, steps=steps, batch_size=batch_size, lr=lr, warmup=warmup, weight_decay=weight_decay,
                repeat_share=repeat_share, seed=seed, eval_every=eval_every, precision=precision, init=init,
                save_seconds=save_seconds, resume=not fresh, resumed=resumed, watch=watch, watch_heads=watch_heads,
            )  # fmt: skip
    except KeyboardInterrupt:
        say(Console(stderr=True), tr("Interrupted; the same command without --fresh resumes after the last save."))
        raise typer.Exit(CODE) from None
    for name, loss in outcome.heldout.items():
        say(console, tr("held-out loss, {name}: {loss:.4f} nats per token", name=name, loss=loss))
    if watch_heads:
        _heads(out, console)
    if not outcome.finished:
        say(console, tr("Stopped at step {step}; run the same command to resume.", step=outcome.step))
        raise typer.Exit(CODE)
    say(console, tr("Wrote the model to [bold]{path}[/bold]. Look at its heads: headwise see --model {path}", path=out))


def write(
    prompt: Annotated[str, typer.Option(help="Start of the text; - reads it from standard input.")] = "话说",
    length: Annotated[int, typer.Option(help="Characters to generate.")] = 200,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature; 0 always takes the most likely character.")
    ] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k most likely characters.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the smallest set with this total probability.")
    ] = 0.95,
    seed: Annotated[int | None, typer.Option(help="Random seed; the same seed gives the same text.")] = None,
    budget: Annotated[Path | None, typer.Option(help="Cache budget, as written by `headwise budget`.")] = None,
    model: Model = None,
    lang: Lang = None,
) -> None:
    """Generate text with a model, one character at a time."""
    from headwise.lm.checkpoint import load_checkpoint, load_pretrained
    from headwise.lm.model import check_sampling, write as compose

    prompt = stdin_text("--prompt").removesuffix("\n") if prompt == STREAM else typed(prompt, "--prompt")
    check_sampling(prompt, length, temperature, top_k, top_p)
    kept = None
    if budget is not None:
        from headwise.edit import read_budget

        kept = read_budget(budget)
    decoder, tokenizer, _ = load_pretrained() if model is None else load_checkpoint(model)
    pieces = compose(
        decoder, tokenizer, prompt, length, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, budget=kept
    )
    sys.stdout.write(prompt)
    for piece in pieces:
        if not is_read():
            break
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


@contextmanager
def _bar(steps: int) -> Iterator[Any]:
    """The bar of a training, as what is called with each `TrainingStep`."""
    columns = "[progress.description]{task.description}", BarColumn(), "{task.completed}/{task.total}"
    bar = Progress(*columns, TextColumn("{task.fields[note]}"), TimeRemainingColumn(), console=Console(stderr=True))
    task, estimate = bar.add_task(said(tr("training")), total=steps, note=""), Estimate()

    def watch(done: Any) -> None:
        estimate("training", done.step, done.steps)
        bar.start()  # with the first step, so that an earlier error is printed alone
        held = "" if done.heldout is None else said(tr(" held-out {loss:.3f}", loss=done.heldout))
        note = tr("loss {loss:.3f}{held}  {rate:,.0f} tokens/s", loss=done.loss, held=held, rate=done.tokens_per_second)
        bar.update(task, completed=done.step, note=said(note))

    try:
        yield watch
    finally:
        stop(bar)


def _heads(out: Path, console: Console) -> None:
    from headwise.lm.watch_heads import HEADS_FILE
    from headwise.reports.plots import write_dynamics

    record = out / HEADS_FILE
    say(console, tr("Wrote the roles of all heads at each evaluation to [bold]{path}[/bold].", path=record))
    try:
        picture = write_dynamics(record, out / "heads.png")
    except ConfigError as error:  # matplotlib is optional; the record is the result
        say(console, tr("No plot was drawn: {why}", why=str(error)))
        return
    say(console, tr("Wrote a plot of the roles over training to [bold]{path}[/bold].", path=picture))


Sort = Annotated[str | None, typer.Option(help="Sort the printed table by this measure, largest first.")]
Png = Annotated[Path | None, typer.Option(help="Also plot every measure as layers × heads.")]
Page = Annotated[
    Path | None, typer.Option(help="Also write an HTML page: heads by any two statistics, and their passages.")
]


def measure(
    files: Annotated[
        list[str],
        typer.Option("--file", help="UTF-8 text, .jsonl, .parquet, folder, pattern or address; repeatable."),
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
    shard: Annotated[
        str | None, typer.Option(help="Measure part i of N, such as 0/8 to 7/8; `headwise merge` joins the tables.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda …; default: a GPU if there is one.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Dtype of the weights: float32, bfloat16 or float16; default: float32.")
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Discard earlier results and start again.")] = False,
    sort: Sort = None,
    png: Png = None,
    page: Page = None,
    lang: Lang = None,
) -> None:
    """Measure every head on a corpus of any size. Resumable; torchrun or --shard divides the work."""
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
                batch=batch, max_tokens=max_tokens, per=per, field=field, layers=numbers_of("layers", layers),
                heads=numbers_of("heads", heads), passages=passages,
                strongest_by=strongest_by, shard=shard_of(shard), device=device, dtype=dtype, restart=restart,
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
    from headwise.corpus.printing import check_sort
    from headwise.reports.corpus_page import check_picture
    from headwise.stats import shown_in

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
    _show(found, sort, png, page, time.monotonic() - since if found.new else None)


def merge(
    parts: Annotated[list[Path], typer.Argument(help="Tables of all shards, written by `headwise measure --shard`.")],
    out: Annotated[Path, typer.Option(help="Table to write: .parquet, .csv or .jsonl.")],
    restart: Annotated[bool, typer.Option("--restart", help="Overwrite --out.")] = False,
    sort: Sort = None,
    png: Png = None,
    page: Page = None,
    lang: Lang = None,
) -> None:
    """Join the tables of the shards of a corpus to the table of the whole corpus."""
    from headwise.corpus import merge as merge_parts
    from headwise.reports.corpus_page import check_picture

    if png is not None:
        check_picture(png)
    check_file("--png", png, "measures.png")
    check_file("--page", page, "heads.html")
    check_apart([("--out", out), ("--png", png), ("--page", page)], {str(part): part for part in parts})
    _show(merge_parts(parts, out, restart=restart), sort, png, page, None)


def _show(found: Any, sort: str | None, png: Path | None, page: Path | None, seconds: float | None) -> None:
    from headwise.corpus.printing import print_measures
    from headwise.reports.corpus_page import print_passages, write_corpus_page, write_picture

    console = Console()
    print_measures(found, console, sort=sort, seconds=seconds)
    print_passages(found.passages, console)
    if not found.new:
        done = tr("{path} already contains the finished table of this command; use --restart to measure again.")
        say(console, done.filled(path=found.path))
    if png is not None:
        say(console, tr("Wrote a plot of every measure to [bold]{path}[/bold].", path=write_picture(found, png)))
    if page is not None:
        wrote = tr("Wrote the heads and their passages to [bold]{path}[/bold]; open it in a browser.")
        say(console, wrote.filled(path=write_corpus_page(found, page, lang=language())))


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
        say(console, tr("Stopped before anything was measured."))
    else:
        again = tr("Stopped; {done} of {of} units are done. Run the same command to resume.")
        if restart:
            again = tr("Stopped; {done} of {of} units are done. Run the same command without --restart to resume.")
        say(console, again.filled(done=so_far[0], of=so_far[1] or "?"))


def shard_of(given: str | None) -> tuple[int, int] | None:
    """0/8 as two numbers."""
    if given is None:
        return None
    number, _, of = given.partition("/")
    if not (number.isdecimal() and of.isdecimal()):
        raise ConfigError("--shard {given!r}: expected i/N, such as 0/8 to 7/8", given=given)
    return int(number), int(of)


def numbers_of(name: str, given: str | None) -> list[int] | None:
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
