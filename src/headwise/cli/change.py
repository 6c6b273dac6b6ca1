"""Commands that write a changed checkpoint: heads removed, KV heads shared, caches shortened.

Each prints a plan, asks for confirmation, writes the result, reads it back, and compares it with the original model.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from headwise.base.files import check_apart, taken, write_text
from headwise.cli.options import Lang, Model, check_file, is_stream, progress_bar, read_from, said, say
from headwise.errors import ConfigError
from headwise.wording import tr

if TYPE_CHECKING:
    from headwise.compress import Source, Texts


@dataclass(frozen=True)
class Job:
    """The inputs of a command; made: all that its result depends on; finished: `out` has it already."""

    source: "Source"
    texts: "Texts"
    out: Path | None
    made: dict[str, Any]
    finished: bool


@contextmanager
def opened(
    command: str, options: dict[str, Any], model: Path | None, file: Path, out: Path | None, context: int | None,
    windows: int, *, force: bool, dry_run: bool,
) -> "Iterator[Job]":  # fmt: skip
    """The model and the text, after all checks that need no long computation; `out` is locked meanwhile."""
    from headwise.compress import check_target, open_source
    from headwise.compress.converting import check_healing
    from headwise.compress.source import check_windows

    if out is None and not dry_run:
        raise ConfigError(
            tr("--out is missing: give a folder for the new checkpoint, or --dry-run to see the plan only")
        )
    check_healing(options["heal"], options["lr"])
    check_windows(context, windows)
    lock = nullcontext() if out is None or dry_run else taken(out, "--out", folder=True)
    with read_from(file, "--file") as text, lock:
        source = open_source(model)
        job = job_of(command, options, source, text, out, context, windows)
        if out is not None and not job.finished:
            check_target(source, out, force=force)
        yield replace(job, finished=job.finished and not (force or dry_run))


def job_of(
    command: str, options: dict[str, Any], source: "Source", file: Path, out: Path | None, context: int | None,
    windows: int,
) -> Job:  # fmt: skip
    """The text for a model, and whether `out` already contains the result for both."""
    from headwise.compress import split_text
    from headwise.compress.source import is_made, made_by

    length = source.context if context is None else context
    texts = split_text(file, source.tokenizer, context=length, windows=windows)
    made = made_by(command, source, file, {**options, "context": length, "windows": windows})
    return Job(source, texts, out, made, out is not None and is_made(out, made))


def is_done(job: Job, json: Path | None) -> bool:
    """Whether an earlier run already wrote every result; prints a message if so."""
    from headwise.compress.source import made_json

    if not job.finished or not (json is None or made_json(json, job.made)):
        return False
    done = tr("{path} already contains the finished result of this command; use --force to run it again.")
    say(Console(), done.filled(path=job.out))
    return True


def carry_out(
    job: Job, plan: Any, apply: "Callable[[], Any]", change: dict[str, Any], done: str, *, yes: bool, dry_run: bool,
    json: Path | None,
) -> None:  # fmt: skip
    """Ask for confirmation, write, read back and evaluate. A result of an earlier run is only evaluated."""
    from headwise.compress import Candidate, judge
    from headwise.compress.converting import healed
    from headwise.compress.source import KEY, write_changed
    from headwise.lm.checkpoint import load_checkpoint

    console, source, out, options = Console(), job.source, job.out, job.made["options"]
    if out is None or not is_wanted(job, yes=yes, dry_run=dry_run, console=console):
        save_json(json, {"plan": plan.to_dict(), "written": None})
        return
    models: list[Candidate] = [Candidate("before", source.decoder)]
    with progress_bar() as progress:
        changed = apply()
        if options["heal"]:
            models.append(Candidate(done, changed))
            change, done = {**change, "heal": options["heal"], "lr": options["lr"]}, "healed"
        if job.finished:
            changed = load_checkpoint(out)[0]
        else:
            if options["heal"]:
                changed = healed(changed, job.texts, options["heal"], options["lr"], progress, seed=options["seed"])
            changed = write_changed(source, changed, out, change, {KEY: job.made})
        models.append(Candidate(done, changed))
        verdict = judge(models, job.texts, progress)
    console.print()
    print_tables(verdict)
    save_json(json, {"plan": plan.to_dict(), "written": str(out), "judged": verdict.to_dict(), KEY: job.made})
    say(console, tr("\nWrote the new model to [bold]{path}[/bold]. Use it: headwise write --model {path}", path=out))


def is_wanted(job: Job, *, yes: bool, dry_run: bool, console: Console) -> bool:
    """Whether to write the result; asks for confirmation unless the options answer. End of input raises an error."""
    if dry_run or yes or job.finished:
        return not dry_run
    console.print(said(tr("\nWrite to {path}? \\[y/N] ", path=str(job.out))), end="", highlight=False, soft_wrap=True)
    sys.stdout.flush()
    answer = "" if sys.stdin is None or sys.stdin.closed else sys.stdin.readline()
    if not answer:
        console.print()
        raise ConfigError(tr("no answer on standard input, so nothing was written; use --yes to skip the question"))
    if answer.strip().lower() in ("y", "yes"):
        return True
    say(console, tr("Nothing was written."))
    return False


def print_tables(result: Any) -> Console:
    """Print a plan or an evaluation as tables."""
    from headwise.plan import print_plan

    console = Console()
    print_plan(result.shown(), console)
    return console


def save_json(path: Path | None, content: dict[str, Any]) -> None:
    """Write `content` to `path`, if one is given."""
    if path is None:
        return
    from json import dumps

    write_text(path, dumps(content, ensure_ascii=False, indent=1) + "\n")


File = Annotated[Path, typer.Option(help="UTF-8 text file, or -: one part is used to decide, another to evaluate.")]
Context = Annotated[int | None, typer.Option(help="Tokens per window; default: the context length of the model.")]
Windows = Annotated[int, typer.Option(help="Windows used to decide; four times as many are used to evaluate.")]
Out = Annotated[Path | None, typer.Option(help="Folder for the new checkpoint.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite --out. The source model is never overwritten.")]
Yes = Annotated[bool, typer.Option("--yes", help="Write without asking for confirmation.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan only; write nothing.")]
Json = Annotated[Path | None, typer.Option(help="Also write all numbers to this file.")]
Heal = Annotated[int, typer.Option(help="Training steps on the text after the change.")]
Rate = Annotated[float, typer.Option(help="Peak learning rate for --heal.")]
Seed = Annotated[int, typer.Option(help="Random seed; the same seed gives the same result.")]


def prune(
    file: File,
    model: Model = None,
    out: Out = None,
    heads: Annotated[str | None, typer.Option(help="Heads to remove, as LAYER.HEAD from 0: 0.1,0.2,3.5.")] = None,
    remove: Annotated[int | None, typer.Option(help="Number of heads to remove, least important first.")] = None,
    share: Annotated[str | None, typer.Option(help="Share of all heads to remove: 0.25 or 25%.")] = None,
    max_loss: Annotated[
        str | None,
        typer.Option(help="Remove as many heads as possible for at most this increase of the loss: 1%."),
    ] = None,
    uniform: Annotated[
        bool, typer.Option("--uniform", help="Remove equally many from every layer, the least important of each.")
    ] = False,
    by: Annotated[
        str | None, typer.Option(help="Importance measure: ablation, gradient, taylor or gates; default: ablation.")
    ] = None,
    penalty: Annotated[float, typer.Option(help="With --by gates: penalty per head, in nats per token.")] = 0.01,
    gate_steps: Annotated[int, typer.Option(help="With --by gates: training steps.")] = 200,
    orders: Annotated[int, typer.Option(help="Random orders to compare the curve with.")] = 4,
    heal: Heal = 0,
    lr: Rate = 1e-4,
    seed: Seed = 0,
    png: Annotated[Path | None, typer.Option(help="Also write a plot of the curve to this file.")] = None,
    context: Context = None,
    windows: Windows = 16,
    force: Force = False,
    yes: Yes = False,
    dry_run: DryRun = False,
    json: Json = None,
    lang: Lang = None,
) -> None:
    """Remove attention heads: named ones or the least important. Shows the loss curve."""
    from headwise.compress.pruning import Choice, check_options, plan_pruning
    from headwise.reports.figure import figure_class
    from headwise.reports.plots import write_pruning

    choice = Choice(heads, remove, _share("--share", share), _share("--max-loss", max_loss), uniform)
    check_options(by or "ablation", orders, penalty, gate_steps)
    if heads is not None and (by is not None or png is not None or uniform):
        raise ConfigError(
            tr("--heads cannot be combined with --by, --png or --uniform: the heads are given, so no curve is computed")
        )
    check_file("--json", json, "pruned.json")
    _check_answer(file, yes=yes or dry_run)
    check_file("--png", png, "curve.png")
    _check_apart({"--json": json, "--png": png}, file, model, out)
    if png is not None:
        figure_class()  # raises if matplotlib is missing, before any long computation
    options = {
        "heads": heads, "remove": remove, "share": choice.share, "max_loss": choice.max_loss, "by": by or "ablation",
        "uniform": uniform, "penalty": penalty, "gate_steps": gate_steps, "orders": orders, "heal": heal, "lr": lr,
        "seed": seed,
    }  # fmt: skip
    with opened("prune", options, model, file, out, context, windows, force=force, dry_run=dry_run) as job:
        if png is None and is_done(job, json):
            return
        with progress_bar() as progress:
            plan = plan_pruning(
                job.source, job.texts, choice, progress, by=by or "ablation", orders=orders, penalty=penalty,
                gate_steps=gate_steps, seed=seed,
            )  # fmt: skip
        console = print_tables(plan)
        if png is not None:
            write_pruning(plan.curve, png, chosen=len(plan.heads), limit=choice.max_loss or 0.01)
            say(console, tr("\nWrote the curve to [bold]{path}[/bold].", path=png))
        if not plan.heads:
            save_json(json, plan.to_dict())
            raise ConfigError(
                "--max-loss {max_loss}: no head can be removed within this limit: removing the least important head "
                "already exceeds it; give a larger limit, or --remove N",
                max_loss=max_loss,
            )
        change = {"prune": [list(head) for head in plan.heads], "by": plan.by}
        carry_out(job, plan, plan.apply, change, "pruned", yes=yes, dry_run=dry_run, json=json)


def convert(
    file: File,
    num_kv_heads: Annotated[int, typer.Option(help="Number of KV heads per layer after the conversion.")],
    model: Model = None,
    out: Out = None,
    method: Annotated[
        str, typer.Option(help="How KV heads are merged: svd (smallest loss), mean, first or cluster.")
    ] = "svd",
    heal: Heal = 0,
    lr: Rate = 1e-4,
    seed: Seed = 0,
    context: Context = None,
    windows: Windows = 16,
    force: Force = False,
    yes: Yes = False,
    dry_run: DryRun = False,
    json: Json = None,
    lang: Lang = None,
) -> None:
    """Convert MHA to GQA or MQA by merging KV heads, for a smaller cache."""
    from headwise.compress import plan_conversion
    from headwise.compress.converting import check_conversion

    check_conversion(num_kv_heads, method)
    check_file("--json", json, "converted.json")
    _check_answer(file, yes=yes or dry_run)
    _check_apart({"--json": json}, file, model, out)
    options = {"num_kv_heads": num_kv_heads, "method": method, "heal": heal, "lr": lr, "seed": seed}
    with opened("convert", options, model, file, out, context, windows, force=force, dry_run=dry_run) as job:
        if is_done(job, json):
            return
        with progress_bar() as progress:
            plan = plan_conversion(job.source, job.texts, num_kv_heads, progress, method=method)
        print_tables(plan)
        change = {"convert": num_kv_heads, "method": method}
        carry_out(job, plan, lambda: plan.model, change, "merged", yes=yes, dry_run=dry_run, json=json)


def budget(
    file: File,
    model: Model = None,
    out: Annotated[
        Path | None,
        typer.Option(help="JSON file to write; default: budget.json next to the model, or in this folder."),
    ] = None,
    window: Annotated[int, typer.Option(help="Most recent tokens that a short cache keeps.")] = 64,
    sinks: Annotated[int, typer.Option(help="First tokens that every cache keeps.")] = 4,
    threshold: Annotated[
        float,
        typer.Option(help="Minimum share of a head's attention on these tokens for a short cache."),
    ] = 0.95,
    lengths: Annotated[
        str | None, typer.Option(help="Sequence lengths at which to report the cache size: 1024,4096.")
    ] = None,
    context: Context = None,
    windows: Windows = 16,
    force: Force = False,
    yes: Yes = False,
    dry_run: DryRun = False,
    json: Json = None,
    lang: Lang = None,
) -> None:
    """Find the heads that can use a short KV cache; the result is a file for `headwise write --budget`."""
    from headwise.compress import Candidate, judge, open_source, plan_budget
    from headwise.compress.converting import check_budget
    from headwise.compress.judging import Served
    from headwise.compress.source import KEY, check_windows
    from headwise.edit import read_budget, save_budget

    wanted = _lengths(lengths)
    check_budget(window, sinks, threshold, wanted)
    check_windows(context, windows)
    check_file("--json", json, "budget_plan.json")
    _check_answer(file, yes=yes or dry_run)
    if not dry_run:
        check_file("--out", out, "budget.json")
    source = open_source(model, transformers=True)
    beside = Path() if model is None else source.file.parent
    target = beside / "budget.json" if out is None else out
    _check_apart({"--out": None if dry_run else target, "--json": json}, file, model)
    options = {"window": window, "sinks": sinks, "threshold": threshold, "lengths": wanted}
    lock = nullcontext() if dry_run else taken(target, "--out")
    with read_from(file, "--file") as text, lock:
        job = job_of("budget", options, source, text, target, context, windows)
        finished = job.finished and not (force or dry_run)
        job = replace(job, finished=finished)
        if not (dry_run or finished) and target.exists() and (not force or target.resolve() == source.file.resolve()):
            raise ConfigError(
                "--out {target!r}: already exists; give another name, or --force to overwrite a budget",
                target=str(target),
            )
        if is_done(job, json):
            return
        with progress_bar() as progress:
            plan = plan_budget(
                source, job.texts, progress, window=window, sinks=sinks, threshold=threshold, lengths=wanted
            )
        console = print_tables(plan)
        if not is_wanted(job, yes=yes, dry_run=dry_run, console=console):
            save_json(json, {"plan": plan.to_dict(), "written": None})
            return
        if not finished:
            save_budget(plan.found, target, {KEY: job.made})
        kind = Candidate if source.loaded is None else Served
        both = [kind("all tokens", source.decoder), kind("budget", source.decoder, read_budget(target))]
        with progress_bar() as progress:
            verdict = judge(both, job.texts, progress)
        console.print()
        print_tables(verdict)
        save_json(json, {"plan": plan.to_dict(), "written": str(target), "judged": verdict.to_dict(), KEY: job.made})
        wrote = tr("\nWrote the budget to [bold]{path}[/bold]. Use it: headwise write{model} --budget {path}")
        if source.loaded is not None:
            wrote = tr(
                "\nWrote the budget to [bold]{path}[/bold]. Use it: hw.cache.for_transformers(model, "
                "hw.edit.read_budget({path!r}))"
            )
        say(console, wrote.filled(path=str(target), model="" if model is None else f" --model {model}"))


def _check_answer(file: Path, *, yes: bool) -> None:
    """Raise if the text comes from standard input, which then cannot also answer the question whether to write."""
    if is_stream(file) and not yes:
        raise ConfigError(tr("--file '-': standard input holds the text and cannot confirm; add --yes, or --dry-run"))


def _check_apart(outputs: dict[str, Path | None], file: Path, model: Path | None, out: Path | None = None) -> None:
    """Raise if an output file is another one, the text, the model, or the new model in the folder `out`."""
    from headwise.lm.checkpoint import MODEL_FILE

    written = None if out is None else out / MODEL_FILE
    check_apart(outputs.items(), {"--file": None if is_stream(file) else file, "--model": model, "--out": written})


def _share(option: str, text: str | None) -> float | None:
    """0.25 or 25% as a number."""
    if text is None:
        return None
    try:
        return float(text.strip().removesuffix("%")) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        raise ConfigError("{option} {text!r}: expected a share such as 0.25 or 25%", option=option, text=text) from None


def _lengths(text: str | None) -> list[int]:
    try:
        return [int(word) for word in (text or "").split(",") if word.strip()]
    except ValueError:
        raise ConfigError("--lengths {text!r}: expected numbers of tokens, such as 1024,4096", text=text) from None
