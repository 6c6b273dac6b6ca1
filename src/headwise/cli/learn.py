"""The commands train and write."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from headwise.cli.interruption import CODE
from headwise.cli.options import (
    STREAM,
    Estimate,
    Lang,
    Model,
    is_read,
    load,
    read_from,
    said,
    say,
    stdin_text,
    stop,
    typed,
)
from headwise.errors import ConfigError


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
        ago = duration(since.seconds)
        if since.step >= since.steps:
            say(console, "finished_run", path=out, ago=ago)
        else:
            say(console, "resumed", step=since.step, steps=since.steps, ago=ago, path=out)

    with _resumable(), _bar(steps) as watch, ExitStack() as ending:
        texts = [ending.enter_context(read_from(file, "FILES")) for file in files]
        outcome = run(
            texts, out, d_model=d_model, num_layers=num_layers, num_heads=num_heads, num_kv_heads=num_kv_heads,
            d_ff=d_ff, design=design, options=read_options(options or []), order=order, context=context,
            dropout=dropout, steps=steps, batch_size=batch_size, lr=lr, warmup=warmup, weight_decay=weight_decay,
            repeat_share=repeat_share, seed=seed, eval_every=eval_every, precision=precision, init=init,
            save_seconds=save_seconds, resume=not fresh, resumed=resumed, watch=watch, watch_heads=watch_heads,
        )  # fmt: skip
    for name, loss in outcome.heldout.items():
        say(console, "heldout", name=name, loss=loss)
    if watch_heads:
        _heads(out, console)
    if not outcome.finished:
        say(console, "stopped_training", step=outcome.step)
        raise typer.Exit(CODE)
    say(console, "trained", path=out)


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
    from headwise.lm.model import check_sampling, write as compose

    prompt = stdin_text("--prompt").removesuffix("\n") if prompt == STREAM else typed(prompt, "--prompt")
    check_sampling(prompt, length, temperature, top_k, top_p)
    kept = None
    if budget is not None:
        from headwise.compress import read_budget

        kept = read_budget(budget)
    decoder, tokenizer, _ = load(model)
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
    task, estimate = bar.add_task(said("training"), total=steps, note=""), Estimate()

    def watch(done: Any) -> None:
        estimate("training", done.step, done.steps)
        bar.start()  # with the first step, so that an earlier error is printed alone
        held = "" if done.heldout is None else said("training_heldout", loss=done.heldout)
        note = said("training_note", loss=done.loss, held=held, rate=done.tokens_per_second)
        bar.update(task, completed=done.step, note=note)

    try:
        yield watch
    finally:
        stop(bar)


@contextmanager
def _resumable() -> Iterator[None]:
    """Ctrl-C before the first step, or a second time, ends the command at once."""
    try:
        yield
    except KeyboardInterrupt:
        say(Console(stderr=True), "interrupted_training")
        raise typer.Exit(CODE) from None


def _heads(out: Path, console: Console) -> None:
    from headwise.lm.watch_heads import HEADS_FILE
    from headwise.reports.plots import write_dynamics

    record = out / HEADS_FILE
    say(console, "wrote_roles", path=record)
    try:
        picture = write_dynamics(record, out / "heads.png")
    except ConfigError as error:  # matplotlib is optional; the record is the result
        say(console, "no_plot", why=error)
        return
    say(console, "wrote_roles_plot", path=picture)
