"""One process of a small distributed job: runs the cases of a module, and writes what came of each.

Cases say by assertions what must hold on every rank. After the first that fails the ranks may not be in step, so the
later ones are not run, and say so.
"""

import importlib
import json
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

PATIENCE = timedelta(seconds=90)  # for ranks on a machine that has much else to do


def main(module: str, rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    store.set_timeout(PATIENCE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=PATIENCE)
    cases: dict[str, Callable[[int, int], None]] = importlib.import_module(module).CASES
    outcomes = {}
    failed = ""
    for name, case in cases.items():
        outcomes[name] = f"not run: {failed} failed before it" if failed else _outcome(case, rank, ranks)
        if not failed:
            store.set(f"{name}/{rank}", outcomes[name] or "passed")
            told = [store.get(f"{name}/{other}").decode() for other in range(ranks)]
            failed = "" if all(one == "passed" for one in told) else name
            outcomes[name] = "\n".join(f"rank {at}: {one}" for at, one in enumerate(told)) if failed else ""
    (folder / f"{rank}.json").write_text(json.dumps(outcomes))
    if not failed:  # a thread of gloo that lets a tensor go while Python ends would abort the process
        dist.barrier()
        dist.destroy_process_group()


def _outcome(case: Callable[[int, int], None], rank: int, ranks: int) -> str:
    torch.manual_seed(5)
    try:
        case(rank, ranks)
    except BaseException:
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
