"""Every model type of the installed transformers, tiny and random: headwise's attention against the model's own.

    python scripts/all_families.py                     # all of them, about 11 minutes of CPU; a stopped run resumes
    python scripts/all_families.py --only llama --only bert
    python scripts/all_families.py --fast              # the 70 types that the tests run, about a minute
    python scripts/all_families.py --write             # what has been run goes into docs/model_types.md

Each type runs in a process of its own: one that crashes or hangs is one row. The checks are those of
tests/models/registry_checks.py. Rows are kept in build/all_families.jsonl as they come; `--write` adds them to
those stored in tests/models/registry_results.jsonl.
"""

import argparse
import json
import multiprocessing
import os
import resource
import signal
import sys
import time
import warnings
from collections import Counter
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).parent.parent
DOCS, RUN = ROOT / "docs", ROOT / "build" / "all_families.jsonl"
sys.path.insert(0, str(ROOT / "tests" / "models"))
import blocks  # noqa: E402
import registry_table  # noqa: E402
from registry_overrides import FAST  # noqa: E402

LIMIT = 60.0  # seconds of CPU for a type
CLOSE = "<!-- checked closely -->", "<!-- end of checked closely -->"
ALL = "<!-- every model type -->", "<!-- end of every model type -->"

Row = dict[str, Any]


def main() -> int:
    """Run, store, write; 1 if a type that ran is wrong or crashes."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--only", action="append", default=[], metavar="TYPE", help="these types, again")
    options.add_argument("--again", action="append", default=[], metavar="STATUS", help="those of this status, again")
    options.add_argument("--fast", action="store_true", help="the types that the tests run, again")
    options.add_argument("--jobs", type=int, default=1, help="processes at once")
    options.add_argument("--part", default="1/1", metavar="I/N", help="the I-th of N parts, for runs side by side")
    options.add_argument("--limit", type=float, default=LIMIT, help="seconds of CPU for one type")
    options.add_argument("--results", type=Path, default=RUN, help="where rows are kept as they come")
    options.add_argument("--write", action="store_true", help="store what has been run, and write docs/model_types.md")
    given = options.parse_args()
    warnings.simplefilter("ignore")
    given.results.parent.mkdir(parents=True, exist_ok=True)
    began, rows = time.monotonic(), []
    if not given.write or given.only or given.again or given.fast:
        part, parts = map(int, given.part.split("/"))
        rows = run(wanted(given)[part - 1 :: parts], given.jobs, given.limit, given.results)
        counts = ", ".join(f"{status} {count}" for status, count in Counter(row["status"] for row in rows).items())
        cpu = sum(row.get("seconds", 0.0) for row in rows)
        print(f"{len(rows)} types: {counts}; {cpu:.0f} s of CPU, {time.monotonic() - began:.0f} s")
    if given.write:
        write(given.results)
    return int(any(row["status"] in ("wrong", "crash") for row in rows))


def wanted(given: argparse.Namespace) -> list[str]:
    """Which types to run."""
    from registry_models import model_types

    done = registry_table.read(given.results)
    if given.only or given.fast:
        return [*given.only, *(FAST if given.fast else ())]
    if given.again:
        return [name for name, row in done.items() if row["status"] in given.again]
    return [name for name in model_types() if name not in done]


def write(results: Path) -> None:
    """Add the rows of a run to those that are stored, and show them in the document."""
    import family_checks
    import torch
    import transformers
    from registry_checks import CHECKS
    from registry_models import model_types

    first = {
        "transformers": transformers.__version__,
        "torch": torch.__version__.partition("+")[0],
        "checks": {name: " ".join((check.__doc__ or "").split()).rstrip(".") for name, check in CHECKS.items()},
    }
    types = set(model_types())
    stored = registry_table.read(registry_table.RESULTS)
    stored |= {name: registry_table.short(row) for name, row in registry_table.read(results).items()}
    registry_table.store(registry_table.RESULTS, {name: row for name, row in stored.items() if name in types}, first)
    blocks.write(DOCS / "models.md", *CLOSE, family_checks.table())
    blocks.write(
        DOCS / "model_types.md", *ALL, registry_table.markdown(first, registry_table.read(registry_table.RESULTS))
    )


def run(types: list[str], jobs: int, limit: float, results: Path) -> list[Row]:
    """Each type in a process that is forked from this one, which has imported what all of them need."""
    import registry_checks  # noqa: F401
    from transformers.models.bert import modeling_bert  # noqa: F401
    from transformers.models.clip import modeling_clip  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401
    from transformers.utils import logging

    logging.set_verbosity_error()
    fork = multiprocessing.get_context("fork")
    waiting, running, rows = list(types), {}, list[Row]()
    with results.open("a", encoding="utf-8") as file:

        def keep(row: Row, began: float) -> None:
            rows.append(row)
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            bad = {said[:200]: f"{name}: {said[:200]}" for name, said in row.get("checks", {}).items()
                   if said.startswith(("wrong", "crash"))}  # fmt: skip
            why = "" if row["status"] in ("wrong", "crash") and bad else row.get("why", "")[:200]
            said = f"[{len(rows)}/{len(types)}] {row['type']}: {row['status']} {time.monotonic() - began:.1f} s {why}"
            print(said, *bad.values(), sep="\n    ", flush=True)

        while waiting or running:
            while waiting and len(running) < jobs:
                name = waiting.pop(0)
                ours, theirs = fork.Pipe(duplex=False)
                process = fork.Process(target=_examine, args=(name, limit, theirs))
                process.start()
                theirs.close()
                running[ours] = (name, process, time.monotonic())
            for ours in wait(list(running), timeout=0.5):
                name, process, began = running.pop(ours)
                try:
                    row = ours.recv()
                except EOFError:
                    row = {}
                process.join()
                keep(row or {"type": name, "status": "crash", "why": _end(process.exitcode or 0, limit)}, began)
            for ours, (name, process, began) in list(running.items()):
                if time.monotonic() - began > 10 * limit:  # it sleeps, or the machine is busy otherwise
                    process.kill()
                    process.join()
                    del running[ours]
                    keep({"type": name, "status": "crash", "why": f"no answer in {10 * limit:.0f} s"}, began)
    return rows


def _examine(model_type: str, limit: float, answer: Connection) -> None:
    import torch
    from registry_checks import examine

    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit) + 1))
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    answer.send(examine(model_type))
    answer.close()


def _end(code: int, limit: float) -> str:
    if -code in (signal.SIGXCPU, signal.SIGKILL):
        return f"no answer in {limit:.0f} s of CPU"
    return f"the process ended with {code}"


if __name__ == "__main__":
    sys.exit(main())
