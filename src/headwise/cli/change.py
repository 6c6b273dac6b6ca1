"""Commands that make a new checkpoint of one: heads that go, keys that are shared, caches that become short.

Each prints its plan, asks, writes, reads what it wrote, and judges it beside the model that it came from.
"""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.given import Model, check_file, progress
from headwise.cli.job import carry_out, is_done, is_wanted, job_of, opened, print_tables, save_json
from headwise.errors import ConfigError
from headwise.outputs import taken

File = Annotated[Path, typer.Option("--file", help="A UTF-8 text: a part to decide on, another to judge on.")]
Context = Annotated[int | None, typer.Option("--context", help="Tokens in a window; the model's own if left out.")]
Windows = Annotated[int, typer.Option("--windows", help="Windows to decide on; to judge on, four times as many.")]
Out = Annotated[Path | None, typer.Option("--out", help="Folder of the new checkpoint.")]
Force = Annotated[bool, typer.Option("--force", help="Replace what --out holds; never the source.")]
Yes = Annotated[bool, typer.Option("--yes", help="Write without asking.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="The plan alone; nothing is written.")]
Json = Annotated[Path | None, typer.Option("--json", help="Also write all numbers here.")]
Heal = Annotated[int, typer.Option("--heal", help="Steps of training on the text afterwards.")]
Rate = Annotated[float, typer.Option("--lr", help="Peak learning rate of healing.")]
Seed = Annotated[int, typer.Option("--seed", help="Of all that is drawn at random: the same seed, the same result.")]


def prune(
    file: File,
    model: Model = None,
    out: Out = None,
    heads: Annotated[str | None, typer.Option("--heads", help="These, as LAYER.HEAD from 0: 0.1,0.2,3.5.")] = None,
    remove: Annotated[int | None, typer.Option("--remove", help="So many, the least important.")] = None,
    share: Annotated[str | None, typer.Option("--share", help="This share of all: 0.25 or 25%.")] = None,
    max_loss: Annotated[
        str | None, typer.Option("--max-loss", help="As many as the curve allows at this rise of the loss: 1%.")
    ] = None,
    by: Annotated[
        str | None, typer.Option("--by", help="Importance: ablation (if left out), gradient, taylor or gates.")
    ] = None,
    penalty: Annotated[float, typer.Option("--penalty", help="Of gates: the price of a head, nats a token.")] = 0.01,
    gate_steps: Annotated[int, typer.Option("--gate-steps", help="Of gates: steps of learning.")] = 200,
    orders: Annotated[int, typer.Option("--orders", help="Random orders beside the curve.")] = 4,
    heal: Heal = 0,
    lr: Rate = 1e-4,
    seed: Seed = 0,
    png: Annotated[Path | None, typer.Option("--png", help="Also draw the curve here.")] = None,
    context: Context = None,
    windows: Windows = 16,
    force: Force = False,
    yes: Yes = False,
    dry_run: DryRun = False,
    json: Json = None,
) -> None:
    """Take heads out of a model: named ones, or the least important, with the curve of what it costs."""
    from headwise.compress.pruning import Choice, plan_pruning
    from headwise.reports.figure import figure_class
    from headwise.reports.pruning import write_pruning

    choice = Choice(heads, remove, _share("--share", share), _share("--max-loss", max_loss))
    if heads is not None and (by is not None or png is not None):
        raise ConfigError("--heads names the heads: there is no --by and no curve for --png then")
    check_file("--json", json, "pruned.json")
    check_file("--png", png, "curve.png")
    if png is not None:
        figure_class()  # says what is missing before anything takes long
    options = {
        "heads": heads, "remove": remove, "share": choice.share, "max_loss": choice.max_loss, "by": by or "ablation",
        "penalty": penalty, "gate_steps": gate_steps, "orders": orders, "heal": heal, "lr": lr, "seed": seed,
    }  # fmt: skip
    with opened("prune", options, model, file, out, context, windows, force=force, dry_run=dry_run) as job:
        if png is None and is_done(job, json):
            return
        with progress() as step:
            plan = plan_pruning(
                job.source, job.texts, choice, step, by=by or "ablation", orders=orders, penalty=penalty,
                gate_steps=gate_steps, seed=seed,
            )  # fmt: skip
        console = print_tables(plan)
        if png is not None:
            write_pruning(plan.curve, png, chosen=len(plan.heads), limit=choice.max_loss or 0.01)
            console.print(f"\n[bold]{png}[/bold] shows the curve.", highlight=False)
        if not plan.heads:
            save_json(json, plan.to_dict())
            raise ConfigError(
                f"--max-loss {max_loss}: no head can go for that: the first of the order is already above it; give a "
                f"larger one, or --remove N"
            )
        change = {"prune": [list(head) for head in plan.heads], "by": plan.by}
        carry_out(job, plan, plan.apply, change, "pruned", yes=yes, dry_run=dry_run, json=json)


def convert(
    file: File,
    num_kv_heads: Annotated[int, typer.Option("--num-kv-heads", help="Key and value heads that stay in each layer.")],
    model: Model = None,
    out: Out = None,
    method: Annotated[str, typer.Option("--method", help="svd loses least; or mean, first, cluster.")] = "svd",
    heal: Heal = 0,
    lr: Rate = 1e-4,
    seed: Seed = 0,
    context: Context = None,
    windows: Windows = 16,
    force: Force = False,
    yes: Yes = False,
    dry_run: DryRun = False,
    json: Json = None,
) -> None:
    """Let heads share keys and values (GQA, MQA): a smaller cache, with healing by some training."""
    from headwise.compress import plan_conversion

    check_file("--json", json, "converted.json")
    options = {"num_kv_heads": num_kv_heads, "method": method, "heal": heal, "lr": lr, "seed": seed}
    with opened("convert", options, model, file, out, context, windows, force=force, dry_run=dry_run) as job:
        if is_done(job, json):
            return
        with progress() as step:
            plan = plan_conversion(job.source, job.texts, num_kv_heads, step, method=method)
        print_tables(plan)
        change = {"convert": num_kv_heads, "method": method}
        carry_out(job, plan, lambda: plan.model, change, "merged", yes=yes, dry_run=dry_run, json=json)


def budget(
    file: File,
    model: Model = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="The JSON file; budget.json beside the model, or here, if left out.")
    ] = None,
    window: Annotated[int, typer.Option("--window", help="Last tokens that a short cache keeps.")] = 64,
    sinks: Annotated[int, typer.Option("--sinks", help="First tokens that every cache keeps.")] = 4,
    threshold: Annotated[
        float, typer.Option("--threshold", help="Share of a head's attention that must be on those.")
    ] = 0.95,
    lengths: Annotated[str | None, typer.Option("--lengths", help="Tokens to tell the bytes at: 1024,4096.")] = None,
    context: Context = None,
    windows: Windows = 16,
    force: Force = False,
    yes: Yes = False,
    dry_run: DryRun = False,
    json: Json = None,
) -> None:
    """Which heads may keep a short cache, as a file for `headwise write --budget`; what it saves and costs."""
    from headwise.compress import Candidate, judge, open_source, plan_budget, read_budget, save_budget
    from headwise.compress.made import KEY

    check_file("--json", json, "budget_plan.json")
    if not dry_run:
        check_file("--out", out, "budget.json")
    source = open_source(model)
    beside = Path() if model is None else source.file.parent
    target = beside / "budget.json" if out is None else out
    wanted = _lengths(lengths)
    options = {"window": window, "sinks": sinks, "threshold": threshold, "lengths": wanted}
    with nullcontext() if dry_run else taken(target, "--out"):
        job = job_of("budget", options, source, file, target, context, windows)
        finished = job.finished and not (force or dry_run)
        job = replace(job, finished=finished)
        if not (dry_run or finished) and target.exists() and (not force or target.resolve() == source.file.resolve()):
            raise ConfigError(
                f"--out {str(target)!r}: is there already; give another name, or --force to replace a budget"
            )
        if is_done(job, json):
            return
        with progress() as step:
            plan = plan_budget(source, job.texts, step, window=window, sinks=sinks, threshold=threshold, lengths=wanted)
        console = print_tables(plan)
        if not is_wanted(job, yes=yes, dry_run=dry_run, console=console):
            save_json(json, {"plan": plan.to_dict(), "written": None})
            return
        if not finished:
            save_budget(plan.found, target, {KEY: job.made})
        both = [Candidate("all tokens", source.decoder), Candidate("budget", source.decoder, read_budget(target))]
        with progress() as step:
            verdict = judge(both, job.texts, step)
        console.print()
        print_tables(verdict)
        save_json(json, {"plan": plan.to_dict(), "written": str(target), "judged": verdict.to_dict(), KEY: job.made})
        asked = "" if model is None else f" --model {model}"
        console.print(f"\n[bold]{target}[/bold] holds it: headwise write{asked} --budget {target}", highlight=False)


def _share(option: str, text: str | None) -> float | None:
    """0.25 or 25% as a number."""
    if text is None:
        return None
    try:
        return float(text.strip().removesuffix("%")) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        raise ConfigError(f"{option} {text!r}: expected a share such as 0.25 or 25%") from None


def _lengths(text: str | None) -> list[int]:
    try:
        return [int(word) for word in (text or "").split(",") if word.strip()]
    except ValueError:
        raise ConfigError(f"--lengths {text!r}: expected numbers of tokens, such as 1024,4096") from None
