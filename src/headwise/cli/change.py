"""Commands that make a new checkpoint of one: heads that go, keys that are shared, caches that become short.

Each prints its plan, asks, writes, reads what it wrote, and judges it beside the model that it came from.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from headwise.cli.given import Model, check_file, progress
from headwise.errors import ConfigError

if TYPE_CHECKING:
    from headwise.refit import Source, Texts

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
    png: Annotated[Path | None, typer.Option("--png", help="Also draw the curve here.")] = None,
    context: Context = None,
    windows: Windows = 16,
    force: Force = False,
    yes: Yes = False,
    dry_run: DryRun = False,
    json: Json = None,
) -> None:
    """Take heads out of a model: named ones, or the least important, with the curve of what it costs."""
    from headwise.refit.pruning import Choice, plan_pruning
    from headwise.views.figure import figure_class
    from headwise.views.pruning import write_pruning

    choice = Choice(heads, remove, _share("--share", share), _share("--max-loss", max_loss))
    if heads is not None and (by is not None or png is not None):
        raise ConfigError("--heads names the heads: there is no --by and no curve for --png then")
    check_file("--json", json, "pruned.json")
    check_file("--png", png, "curve.png")
    if png is not None:
        figure_class()  # says what is missing before anything takes long
    source, texts = _opened(model, file, out, context, windows, force=force, dry_run=dry_run, heal=heal)
    with progress() as step:
        plan = plan_pruning(
            source, texts, choice, step, by=by or "ablation", orders=orders, penalty=penalty, gate_steps=gate_steps
        )
    console = _print(plan)
    if png is not None:
        write_pruning(plan.curve, png, chosen=len(plan.heads), limit=choice.max_loss or 0.01)
        console.print(f"\n[bold]{png}[/bold] shows the curve.", highlight=False)
    if not plan.heads:
        _save(json, plan.to_dict())
        raise ConfigError(
            f"--max-loss {max_loss}: no head can go for that: the first of the order is already above it; give a "
            f"larger one, or --remove N"
        )
    change = {"prune": [list(head) for head in plan.heads], "by": plan.by}
    _carry_out(plan, plan.apply, change, "pruned", out, heal=heal, lr=lr, yes=yes, dry_run=dry_run, json=json)


def convert(
    file: File,
    num_kv_heads: Annotated[int, typer.Option("--num-kv-heads", help="Key and value heads that stay in each layer.")],
    model: Model = None,
    out: Out = None,
    method: Annotated[str, typer.Option("--method", help="svd loses least; or mean, first, cluster.")] = "svd",
    heal: Heal = 0,
    lr: Rate = 1e-4,
    context: Context = None,
    windows: Windows = 16,
    force: Force = False,
    yes: Yes = False,
    dry_run: DryRun = False,
    json: Json = None,
) -> None:
    """Let heads share keys and values (GQA, MQA): a smaller cache, with healing by some training."""
    from headwise.refit import plan_conversion

    check_file("--json", json, "converted.json")
    source, texts = _opened(model, file, out, context, windows, force=force, dry_run=dry_run, heal=heal)
    with progress() as step:
        plan = plan_conversion(source, texts, num_kv_heads, step, method=method)
    _print(plan)
    change = {"convert": num_kv_heads, "method": method}
    _carry_out(plan, lambda: plan.model, change, "merged", out, heal=heal, lr=lr, yes=yes, dry_run=dry_run, json=json)


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
    from headwise.refit import Candidate, judge, open_source, plan_budget, read_budget, save_budget, split_text

    source = open_source(model)
    beside = Path() if model is None else source.file.parent
    target = beside / "budget.json" if out is None else out
    check_file("--json", json, "budget_plan.json")
    if not dry_run:
        check_file("--out", target, "budget.json")
    if not dry_run and target.exists() and (not force or target.resolve() == source.file.resolve()):
        raise ConfigError(f"--out {str(target)!r}: is there already; give another name, or --force to replace a budget")
    texts = split_text(file, source.tokenizer, context=_context(source, context), windows=windows)
    with progress() as step:
        plan = plan_budget(
            source, texts, step, window=window, sinks=sinks, threshold=threshold, lengths=_lengths(lengths)
        )
    console = _print(plan)
    if not _wanted(target, yes=yes, dry_run=dry_run, console=console):
        _save(json, {"plan": plan.to_dict(), "written": None})
        return
    save_budget(plan.found, target)
    both = [Candidate("all tokens", source.decoder), Candidate("budget", source.decoder, read_budget(target))]
    with progress() as step:
        verdict = judge(both, texts, step)
    console.print()
    _print(verdict)
    _save(json, {"plan": plan.to_dict(), "written": str(target), "judged": verdict.to_dict()})
    asked = "" if model is None else f" --model {model}"
    console.print(f"\n[bold]{target}[/bold] holds it: headwise write{asked} --budget {target}", highlight=False)


def _opened(
    model: Path | None, file: Path, out: Path | None, context: int | None, windows: int, *, force: bool,
    dry_run: bool, heal: int,
) -> "tuple[Source, Texts]":  # fmt: skip
    """The model and the text, after all that can be refused before anything takes long."""
    from headwise.refit import check_target, open_source, split_text

    if out is None and not dry_run:
        raise ConfigError("--out is missing: a folder for the new checkpoint; or give --dry-run to see the plan")
    if heal < 0:
        raise ConfigError(f"--heal {heal}: expected a number of steps, or 0 for none")
    source = open_source(model)
    if out is not None:
        check_target(source, out, force=force)
    return source, split_text(file, source.tokenizer, context=_context(source, context), windows=windows)


def _carry_out(
    plan: Any, apply: Callable[[], Any], change: dict[str, Any], done: str, out: Path | None, *, heal: int, lr: float,
    yes: bool, dry_run: bool, json: Path | None,
) -> None:  # fmt: skip
    """Ask, write, read again, judge."""
    from headwise.refit import Candidate, judge
    from headwise.refit.healing import healed
    from headwise.refit.source import write_changed

    console, source, texts = Console(), plan.source, plan.texts
    if out is None or not _wanted(out, yes=yes, dry_run=dry_run, console=console):
        _save(json, {"plan": plan.to_dict(), "written": None})
        return
    models: list[Candidate] = [Candidate("before", source.decoder)]
    with progress() as step:
        changed = apply()
        if heal:
            models.append(Candidate(done, changed))
            changed = healed(changed, texts, heal, lr, step)
            change, done = {**change, "heal": heal, "lr": lr}, "healed"
        models.append(Candidate(done, write_changed(source, changed, out, change)))
        verdict = judge(models, texts, step)
    console.print()
    _print(verdict)
    _save(json, {"plan": plan.to_dict(), "written": str(out), "judged": verdict.to_dict()})
    console.print(f"\n[bold]{out}[/bold] holds the new model: headwise write --model {out}", highlight=False)


def _wanted(out: Path, *, yes: bool, dry_run: bool, console: Console) -> bool:
    """Whether it is to be written; asked for, if that was not said. No answer is a no, and an error."""
    if dry_run or yes:
        return yes and not dry_run
    console.print(f"\nwrite to {out}? [y/N] ", end="", markup=False, highlight=False)
    sys.stdout.flush()
    answer = "" if sys.stdin is None or sys.stdin.closed else sys.stdin.readline()
    if not answer:
        console.print()
        raise ConfigError("there was no answer, so nothing was written; --yes answers beforehand")
    if answer.strip().lower() in ("y", "yes"):
        return True
    console.print("Nothing was written.", highlight=False)
    return False


def _print(result: Any) -> Console:
    """A plan or a verdict as tables."""
    from headwise.plan import print_plan

    console = Console()
    print_plan(result.shown(), console)
    return console


def _save(path: Path | None, content: dict[str, Any]) -> None:
    if path is None:
        return
    from json import dumps

    from headwise.files import atomic_path

    with atomic_path(path) as temporary:
        temporary.write_text(dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _context(source: "Source", given: int | None) -> int:
    context: int = source.decoder.config.context if given is None else given
    return context


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
