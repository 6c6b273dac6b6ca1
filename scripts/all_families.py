"""Every model type of the installed transformers, tiny and random, with headwise's attention against its own.

    python scripts/all_families.py --jobs 2            # all, in the background of other work: half an hour of CPU
    python scripts/all_families.py --only llama --only bert
    python scripts/all_families.py --fast              # the families that the tests run, about a minute
    python scripts/all_families.py --write             # put what is stored into docs/models.md

Each type runs in a process of its own, so that what crashes or hangs is one row. Rows are stored as they come, and a
run that was stopped goes on where it was.
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
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "tests" / "adapters" / "registry_results.jsonl"
sys.path[:0] = [str(ROOT / "tests" / "adapters"), str(ROOT / "scripts")]

LIMIT = 60.0  # seconds of CPU for a type


def main() -> int:
    """Run, and say what was found; 1 if a type is wrong or crashes."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--only", action="append", metavar="TYPE", help="these types, again")
    options.add_argument("--fast", action="store_true", help="the families that the tests run, again")
    options.add_argument("--again", action="append", metavar="STATUS", help="those of this status, again: wrong, crash …")
    options.add_argument("--jobs", type=int, default=1, help="processes at once")
    options.add_argument("--part", default="1/1", metavar="I/N", help="the I-th of N parts, for runs side by side")
    options.add_argument("--limit", type=float, default=LIMIT, help="seconds of CPU for one type")
    options.add_argument("--results", type=Path, default=RESULTS, help="where rows are stored")
    options.add_argument("--write", action="store_true", help="put the stored results into docs/models.md")
    given = options.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    warnings.simplefilter("ignore")
    stored = read(given.results)
    part, parts = map(int, given.part.split("/"))
    types = wanted(given, stored)[part - 1 :: parts]
    begun = time.monotonic()
    rows = run(types, given.jobs, given.limit, given.results) if types else []
    print(f"{len(rows)} types in {time.monotonic() - begun:.0f} s")
    return int(any(row["status"] in ("wrong", "crash") for row in rows))


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The stored rows; the last one of each type counts."""
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row["type"]: row for row in rows if "type" in row}


def wanted(given: argparse.Namespace, stored: dict[str, dict[str, Any]]) -> list[str]:
    """Which types to run."""
    if given.only:
        return given.only
    from registry_models import model_types

    if given.again:
        return [name for name, row in stored.items() if row["status"] in given.again]
    return [name for name in model_types() if name not in stored]


def _one(model_type: str, limit: float, answer: Connection) -> None:
    import torch
    from registry_checks import examine

    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit) + 1))
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    answer.send(examine(model_type))
    answer.close()


def run(types: list[str], jobs: int, limit: float, results: Path) -> list[dict[str, Any]]:
    """Each type in a process forked from this one, which has imported what all of them need."""
    import registry_checks  # noqa: F401
    from transformers.models.bert import modeling_bert  # noqa: F401
    from transformers.models.clip import modeling_clip  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401
    from transformers.utils import logging

    import headwise as hw

    assert hw.switch and hw.watch

    logging.set_verbosity_error()
    fork = multiprocessing.get_context("fork")
    waiting, running, rows = list(types), {}, []
    with results.open("a", encoding="utf-8") as file:
        while waiting or running:
            while waiting and len(running) < jobs:
                name = waiting.pop(0)
                ours, theirs = fork.Pipe(duplex=False)
                process = fork.Process(target=_one, args=(name, limit, theirs))
                process.start()
                theirs.close()
                running[ours] = (name, process, time.monotonic())
            for ours in wait(list(running), timeout=0.5):
                name, process, began = running.pop(ours)
                try:
                    row = ours.recv()
                except EOFError:
                    process.join()
                    ended = -(process.exitcode or 0)
                    why = f"no answer after {limit:.0f} s" if ended == signal.SIGXCPU else f"the process ended with {-ended}"
                    row = {"type": name, "status": "crash", "why": why}
                process.join()
                _store(row, time.monotonic() - began, file, rows, len(types))
            for ours, (name, process, began) in list(running.items()):
                if time.monotonic() - began > 10 * limit:  # it sleeps, or the machine does other things
                    process.kill()
                    process.join()
                    del running[ours]
                    row = {"type": name, "status": "crash", "why": f"no answer after {limit:.0f} s"}
                    _store(row, limit, file, rows, len(types))
    return rows


def _store(row: dict[str, Any], wall: float, file: Any, rows: list[dict[str, Any]], of: int) -> None:
    rows.append(row)
    file.write(json.dumps(row, ensure_ascii=False) + "\n")
    file.flush()
    said = row.get("why", "")
    bad = [f"{k}: {v}" for k, v in row.get("checks", {}).items() if v.split(":")[0] in ("wrong", "crash", "refused")]
    print(f"[{len(rows)}/{of}] {row['type']}: {row['status']} {wall:.1f} s {said[:300]}", *bad, sep="\n    ", flush=True)


if __name__ == "__main__":
    sys.exit(main())
