"""Shared by the commands that write a changed checkpoint: output folder, confirmation and evaluation."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from headwise.cli.options import progress_bar
from headwise.cli.streams import read_from
from headwise.cli.words import said, say
from headwise.errors import ConfigError
from headwise.files import write_text
from headwise.outputs import taken

if TYPE_CHECKING:
    from headwise.compress import Source, Texts


@dataclass(frozen=True)
class Job:
    """The inputs of a command. made: everything that its result depends on. finished: whether `out` already contains
    this result and it is not to be recomputed."""

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
    from headwise.compress.healing import check_healing
    from headwise.compress.texts import check_windows

    if out is None and not dry_run:
        raise ConfigError(
            "--out is missing: give a folder for the new checkpoint, or --dry-run to see the plan only",
            "缺少 --out：请给出存放新检查点的文件夹，或用 --dry-run 只看计划",
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
    from headwise.compress.made import is_made, made_by

    length = source.decoder.config.context if context is None else context
    texts = split_text(file, source.tokenizer, context=length, windows=windows)
    made = made_by(command, source, file, {**options, "context": length, "windows": windows})
    return Job(source, texts, out, made, out is not None and is_made(out, made))


def is_done(job: Job, json: Path | None) -> bool:
    """Whether an earlier run already wrote every result; prints a message if so."""
    from headwise.compress.made import made_json

    if not job.finished or not (json is None or made_json(json, job.made)):
        return False
    say(Console(), "finished", path=job.out)
    return True


def carry_out(
    job: Job, plan: Any, apply: "Callable[[], Any]", change: dict[str, Any], done: str, *, yes: bool, dry_run: bool,
    json: Path | None,
) -> None:  # fmt: skip
    """Ask for confirmation, write, read back and evaluate. A result of an earlier run is only evaluated."""
    from headwise.compress import Candidate, judge
    from headwise.compress.healing import healed
    from headwise.compress.made import KEY
    from headwise.compress.source import write_changed
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
    say(console, "changed", path=out)


def is_wanted(job: Job, *, yes: bool, dry_run: bool, console: Console) -> bool:
    """Whether to write the result; asks for confirmation unless the options answer. End of input raises an error."""
    if dry_run or yes or job.finished:
        return not dry_run
    console.print(said("ask", path=str(job.out)), end="", highlight=False, soft_wrap=True)
    sys.stdout.flush()
    answer = "" if sys.stdin is None or sys.stdin.closed else sys.stdin.readline()
    if not answer:
        console.print()
        raise ConfigError(
            "no answer on standard input, so nothing was written; use --yes to skip the question",
            "标准输入没有回答，因此没有写入任何文件；加 --yes 可跳过提问",
        )
    if answer.strip().lower() in ("y", "yes"):
        return True
    say(console, "nothing_written")
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
