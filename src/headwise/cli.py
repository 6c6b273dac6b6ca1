"""The command line: every command is one call into the library."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from headwise.errors import ConfigError, HeadwiseError, TextError

app = typer.Typer(
    help="Multi-head attention you can see.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
SAMPLE = (
    "话说鲁智深回到丛林选佛场中禅床上扑倒头便睡。上下肩两个禅和子推他起来，说道：“使不得，既要出家，如何不学坐禅？”"
    "智深道：“洒家自睡，干你甚事？”禅和子道：“善哉！”智深裸袖道：“团鱼洒家也吃，甚么‘鳝哉’？”"
    "禅和子道：“却是苦也！”智深便道：“团鱼大腹，又肥甜了，好吃，那得‘苦也’？”"
)
Model = Annotated[
    Path | None, typer.Option("--model", help="Checkpoint folder or file; the embedded model if left out.")
]


@app.command()
def see(
    text: Annotated[str | None, typer.Argument(help="The text; a passage of Water Margin if left out.")] = None,
    file: Annotated[Path | None, typer.Option("--file", help="Read the text from a UTF-8 file.")] = None,
    model: Model = None,
    out: Annotated[Path, typer.Option("--out", help="Where the report goes.")] = Path("report.html"),
    png: Annotated[Path | None, typer.Option("--png", help="Also write heat maps into this folder.")] = None,
    sort: Annotated[str | None, typer.Option("--sort", help="Sort the table by this statistic.")] = None,
    cells: Annotated[
        int, typer.Option("--cells", min=8, max=1024, help="Longer texts are pooled to so many cells.")
    ] = 384,
    lang: Annotated[str, typer.Option("--lang", help="Language of the page: en or zh.")] = "en",
) -> None:
    """Show what every head attends to in a text: a table here, and an HTML report."""
    from headwise.lm.corpus import read_text
    from headwise.see import see as look
    from headwise.views.html import write_report
    from headwise.views.terminal import print_report

    if text is not None and file is not None:
        raise ConfigError("give the text or --file, not both")
    if file is not None:
        text = read_text(file)
    text = SAMPLE if text is None else text
    decoder, tokenizer, _ = _load(model)
    with _steps() as step:
        report = look(text, decoder, tokenizer, title=_title(text, file), cells=cells, step=step)
    console = Console()
    print_report(report, console, sort=sort)
    write_report(report, out, lang=lang)
    console.print(f"\n[bold]{out}[/bold] shows every head; open it in a browser.", highlight=False)
    if png is not None:
        from headwise.views.png import write_pngs

        with _steps() as step:
            pictures = write_pngs(report, png, step=step)
        console.print(f"[bold]{png}[/bold] holds {len(pictures)} heat maps.", highlight=False)


@app.command()
def train(
    files: Annotated[list[Path], typer.Argument(help="UTF-8 texts.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the checkpoint and the log.")],
    experiment: Annotated[
        str | None, typer.Option("--experiment", help="'reconstruct': the classic small demonstration instead.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 2000,
    d_model: Annotated[int, typer.Option("--d-model")] = 256,
    num_layers: Annotated[int, typer.Option("--num-layers")] = 4,
    num_heads: Annotated[int, typer.Option("--num-heads")] = 8,
    num_kv_heads: Annotated[int | None, typer.Option("--num-kv-heads", help="Fewer than heads: GQA; 1: MQA.")] = None,
    d_ff: Annotated[int, typer.Option("--d-ff")] = 640,
    design: Annotated[str, typer.Option("--design", help="A head design that can be causal, gqa for example.")] = (
        "multi_head"
    ),
    options: Annotated[
        list[str] | None, typer.Option("--set", help="An option of the design: --set latent_dim=64.")
    ] = None,
    order: Annotated[str, typer.Option("--order", help="Of the blocks: pre or post norm.")] = "pre",
    context: Annotated[int, typer.Option(help="Tokens in a window.")] = 256,
    dropout: Annotated[float, typer.Option()] = 0.1,
    batch_size: Annotated[int, typer.Option("--batch-size")] = 16,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 2e-3,
    warmup: Annotated[int, typer.Option(help="Steps until the peak.")] = 200,
    weight_decay: Annotated[float, typer.Option("--weight-decay")] = 0.1,
    repeat_share: Annotated[
        str, typer.Option("--repeat-share", help="Share of windows whose text repeats itself; 0.1,0.4@500 changes it.")
    ] = "0",
    eval_every: Annotated[int, typer.Option("--eval-every", help="Steps between evaluations and checkpoints.")] = 200,
    seed: Annotated[int, typer.Option()] = 0,
    precision: Annotated[str, typer.Option(help="bfloat16 or float32 products.")] = "bfloat16",
    init: Annotated[Path | None, typer.Option("--init", help="Start from this model's weights and sizes.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start again even if --out holds a run.")] = False,
) -> None:
    """Train a small character model; Ctrl-C or a crash loses nothing, the same command goes on."""
    console = Console()
    if experiment is not None:
        _experiment(experiment, files, out, seed, console)
        return
    from headwise.heads.named import read_options
    from headwise.lm.train import Progress as Done, train as run

    columns = "[progress.description]{task.description}", BarColumn(), "{task.completed}/{task.total}"
    bar = Progress(*columns, TextColumn("{task.fields[note]}"), TimeRemainingColumn(), console=Console(stderr=True))
    task = bar.add_task("training", total=steps, note="")

    def watch(done: Done) -> None:
        bar.start()  # with the first step, so that an error before it stands alone
        held = "" if done.heldout is None else f" held-out {done.heldout:.3f}"
        note = f"loss {done.loss:.3f}{held}  {done.tokens_per_second:,.0f} tokens/s"
        bar.update(task, completed=done.step, note=note)

    try:
        outcome = run(
            files, out, d_model=d_model, num_layers=num_layers, num_heads=num_heads, num_kv_heads=num_kv_heads,
            d_ff=d_ff, design=design, options=read_options(options or []), order=order, context=context,
            dropout=dropout, steps=steps, batch_size=batch_size, lr=lr, warmup=warmup, weight_decay=weight_decay,
            repeat_share=repeat_share, seed=seed, eval_every=eval_every, precision=precision, init=init,
            resume=not fresh, watch=watch,
        )  # fmt: skip
    finally:
        bar.stop()
    for name, loss in outcome.heldout.items():
        console.print(f"held-out loss, {name}: {loss:.4f} nats a token", highlight=False)
    if not outcome.finished:
        console.print(f"Stopped at step {outcome.step}; the same command goes on from there.", highlight=False)
        raise typer.Exit(130)
    console.print(f"[bold]{out}[/bold] holds the model: headwise see --model {out}", highlight=False)


@app.command()
def write(
    prompt: Annotated[str, typer.Option("--prompt", help="How it begins.")] = "话说",
    length: Annotated[int, typer.Option("--length", help="Characters to write.")] = 200,
    temperature: Annotated[float, typer.Option("--temperature", help="0 takes the likeliest each time.")] = 0.8,
    top_k: Annotated[int | None, typer.Option("--top-k", help="Sample among the k likeliest.")] = None,
    top_p: Annotated[
        float | None, typer.Option("--top-p", help="Sample among the likeliest that hold this share.")
    ] = 0.95,
    seed: Annotated[int | None, typer.Option("--seed", help="The same seed writes the same text.")] = None,
    model: Model = None,
) -> None:
    """Let the model write, character by character."""
    from headwise.lm.generate import write as compose

    decoder, tokenizer, _ = _load(model)
    pieces = compose(decoder, tokenizer, prompt, length, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    sys.stdout.write(prompt)
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


@app.command()
def trace(
    seq: Annotated[int, typer.Option("--seq", help="Tokens n.")] = 4,
    d_model: Annotated[int, typer.Option("--d-model")] = 8,
    num_heads: Annotated[int, typer.Option("--num-heads")] = 2,
    num_kv_heads: Annotated[int | None, typer.Option("--num-kv-heads")] = None,
    design: Annotated[str, typer.Option("--design", help="A head design, latent for example.")] = "multi_head",
    options: Annotated[
        list[str] | None, typer.Option("--set", help="An option of the design: --set latent_dim=4.")
    ] = None,
    batch: Annotated[int, typer.Option("--batch")] = 1,
    causal: Annotated[bool, typer.Option("--causal/--full")] = False,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    lang: Annotated[str, typer.Option("--lang", help="en or zh.")] = "en",
) -> None:
    """Every step of a head design with its shapes and numbers, computed as you read."""
    from headwise.heads.named import read_options
    from headwise.trace import print_trace, trace as follow

    steps = follow(
        seq, d_model, num_heads, design=design, num_kv_heads=num_kv_heads, options=read_options(options or []),
        batch=batch, causal=causal, seed=seed, lang=lang,
    )  # fmt: skip
    print_trace(steps, Console())


@app.command()
def measures() -> None:
    """List the statistics that can be asked for by name."""
    from rich.table import Table

    from headwise.measures import GIVEN, MEASURES

    table = Table(box=None, header_style="bold", padding=(0, 1))
    for column in ("name", "unit", "range", "what it is", "source"):
        table.add_column(column, overflow="fold", no_wrap=column == "name")
    kinds: dict[str, Any] = {**MEASURES, **{name: kind for name, (kind, _) in GIVEN.items()}}
    for name, kind in kinds.items():
        what = " ".join((kind.__doc__ or "").split("\n\n")[0].split())
        table.add_row(name, kind.unit, kind.range, what, kind.source)
    Console().print(table)


@app.command()
def plan(
    config: Annotated[str | None, typer.Option("--config", help="A published model; --list shows all.")] = None,
    design: Annotated[str | None, typer.Option("--design", help="A head design; multi_head if left out.")] = None,
    d_model: Annotated[int | None, typer.Option("--d-model")] = None,
    num_heads: Annotated[int | None, typer.Option("--num-heads")] = None,
    num_kv_heads: Annotated[int | None, typer.Option("--num-kv-heads")] = None,
    head_dim: Annotated[int | None, typer.Option("--head-dim")] = None,
    sizes: Annotated[
        list[str] | None, typer.Option("--set", help="Another size of the design: --set latent_dim=512.")
    ] = None,
    seq: Annotated[int, typer.Option("--seq", help="Tokens n.")] = 2048,
    batch: Annotated[int, typer.Option("--batch")] = 1,
    causal: Annotated[bool, typer.Option("--causal/--full", help="Of a design; models know theirs.")] = True,
    window: Annotated[int | None, typer.Option("--window", help="Keys that a query sees, of a design.")] = None,
    sinks: Annotated[int, typer.Option("--sinks", help="First keys that it sees beside the window.")] = 0,
    materialised: Annotated[bool, typer.Option("--materialised", help="The n×n scores are stored.")] = False,
    dtype: Annotated[str, typer.Option("--dtype", help="Of weights and activations.")] = "bfloat16",
    cache: Annotated[str | None, typer.Option("--cache", help="Of keys and values kept; int8, for example.")] = None,
    peak: Annotated[float | None, typer.Option("--peak", help="FLOP/s of a machine, for times.")] = None,
    bandwidth: Annotated[float | None, typer.Option("--bandwidth", help="Its bytes/s.")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure both on this machine.")] = False,
    trade_off: Annotated[bool, typer.Option("--trade-off", help="h against d_k at one d_model.")] = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="The trade-off as a PNG.")] = None,
    designs: Annotated[bool, typer.Option("--designs", help="All designs beside one another.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="All models and designs.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Numbers, not rounded.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown")] = False,
) -> None:
    """What a model or a layer takes: parameters, memory, FLOPs, and the least time on a machine."""
    from headwise.plan import answer, plot_trade_off, print_plan, to_json, to_markdown

    if json and markdown:
        raise ConfigError("give --json or --markdown, not both")
    if plot is not None and not trade_off:
        raise ConfigError("--plot draws the trade-off: give --trade-off too")
    named = {"d_model": d_model, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    found = answer(
        config=config, design=design, sizes=named, more=sizes or [], seq=seq, batch=batch, causal=causal, window=window,
        sinks=sinks, materialised=materialised, dtype=dtype, cache=cache, peak=peak, bandwidth=bandwidth,
        measure=measure, trade_off=trade_off, designs=designs, listing=listing,
    )  # fmt: skip
    if plot is not None:
        plot_trade_off(found, plot)
    if json or markdown:
        sys.stdout.write(to_json(found) if json else to_markdown(found))
        return
    console = Console()
    print_plan(found, console)
    if plot is not None:
        console.print(f"\n[bold]{plot}[/bold] shows the same as lines.", highlight=False)


@app.command()
def claims(
    only: Annotated[
        list[str] | None, typer.Option("--only", help="These claims: --only ID, again for more, or ID,ID.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Those that take longer too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Numbers, not rounded.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="As docs/claims.md has it.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", help="Also write a page with plots here, of all claims or of --only.")
    ] = None,
) -> None:
    """Measure what the texts claim; 1 is the exit code if a verdict is not the expected one."""
    if as_json and markdown:
        raise ConfigError("give --json or --markdown, not both")
    if only and every:
        raise ConfigError("give --only or --all, not both")
    if html is not None and html.is_dir():
        raise ConfigError(f"--html {str(html)!r}: is a folder; give the name of a file, such as claims.html")
    from headwise.claims import choose, print_findings, run, to_json, to_markdown, write_page

    wanted = choose([name for part in only or [] for name in part.split(",") if name], slow=every or html is not None)
    with _steps() as step:
        found = run(wanted, step)
    if as_json or markdown:
        sys.stdout.write(to_json(found) if as_json else to_markdown(found))
    else:
        print_findings(found, Console(), skipped=0 if only else len(choose(slow=True)) - len(found))
    if html is not None:
        write_page(found, html)
        if not (as_json or markdown):
            Console().print(f"\n[bold]{html}[/bold] shows the same with plots; open it in a browser.", highlight=False)
    if not all(finding.agrees for finding in found):
        raise typer.Exit(1)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for a bug report.")] = False,
) -> None:
    """What runs on this machine: kernels and which is picked when, the compiled library, versions."""
    import json
    from dataclasses import asdict

    from headwise.doctor import examine, print_examination

    if as_json:
        sys.stdout.write(json.dumps(asdict(examine()), indent=2) + "\n")
    else:
        print_examination(examine(), Console())


def main() -> None:
    """Run; what the user can mend comes as one line, with exit code 2."""
    try:
        # Some versions of typer give the code of an Exit back instead of raising it.
        if code := app(standalone_mode=False):
            sys.exit(code)
    except HeadwiseError as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{error.strerror or error}" + (f": {error.filename!r}" if error.filename else ""))
    except KeyboardInterrupt:
        sys.exit(130)
    except typer.Exit as leaving:
        sys.exit(leaving.exit_code)
    except Exception as error:
        show = getattr(error, "show", None)  # typer's own usage errors know how to print themselves
        if show is None:
            raise
        show()
        sys.exit(getattr(error, "exit_code", 2))


def _fail(message: str) -> None:
    Console(stderr=True).print("[bold red]error:[/bold red] ", end="")
    Console(stderr=True, markup=False, highlight=False, soft_wrap=True).print(message)
    sys.exit(2)


def _load(model: Path | None) -> Any:
    from headwise.lm.checkpoint import load_model, load_pretrained

    return load_pretrained() if model is None else load_model(model)


def _experiment(name: str, files: list[Path], out: Path, seed: int, console: Console) -> None:
    from headwise.lm.reconstruct import reconstruct
    from headwise.views.html import write_report

    if name != "reconstruct":
        raise ConfigError(f"--experiment {name!r}: expected 'reconstruct'")
    if len(files) != 1:
        raise TextError(f"--experiment reconstruct takes one file of sentences, got {len(files)}")
    with _steps() as step:
        report = reconstruct(files[0], seed=seed, step=step)
    write_report(report, out / "report.html")
    for fact, value in report.facts:
        console.print(f"{fact}: {value}", highlight=False)
    for note in report.notes:
        console.print(note, highlight=False)
    console.print(f"[bold]{out / 'report.html'}[/bold] shows every sentence and head, both ways.", highlight=False)


def _title(text: str, file: Path | None) -> str:
    if file is not None:
        return file.name
    start = " ".join(text.split())
    return start if len(start) <= 24 else start[:24] + "…"


@contextmanager
def _steps() -> Iterator[Any]:
    """A progress bar for a call that says what it is doing; gone when it is done."""
    columns = TextColumn("[progress.description]{task.description}"), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, of: bar.update(task, description=what, completed=done, total=of)
