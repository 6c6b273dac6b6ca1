"""The memory of a process that measures does not grow with the corpus."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sweep_samples import said

ROOM = 8  # MB
SCRIPT = """
import sys
from pathlib import Path
from sweep_samples import make_small_pieces
from headwise.corpus import measure_corpus

def note(what, done, of):
    if not what.startswith("measuring"):
        return
    status = Path("/proc/self/status").read_text("utf-8").splitlines()
    print(done / of, next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS")))

make_small_pieces()
measure_corpus(sys.argv[1], "corpus.jsonl", "out.csv", measures=["entropy"], passages=2, batch=32, device="cpu",
               progress=note)
"""


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not say how much memory is used")
def test_memory_does_not_grow_with_the_corpus(model_folder, tmp_path):
    """After the first quarter; kept maps of the batches would take twice what is allowed."""
    long = said(9000, 1)
    lines = [json.dumps({"text": long[n * 7 % 8000 :][: 5 + n * 31 % 400]}) + "\n" for n in range(450)]
    (tmp_path / "corpus.jsonl").write_text("".join(lines), encoding="utf-8")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model_folder)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [tuple(map(float, line.split())) for line in done.stdout.splitlines()]
    early, late = (max(size for share, size in found if (share < 0.25) == first) for first in (True, False))
    assert len(found) > 60
    assert late < early + ROOM, found
