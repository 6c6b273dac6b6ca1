"""The benchmark of tiles runs, and asks for every kind of tile."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")


@pytest.mark.thorough
def test_tiles_are_timed_small():
    command = [sys.executable, "-m", "benchmarks.zoom", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")][2:]
    assert [row[:2] for row in rows] == [["1", "q, k, lse"], ["4", "q, k, lse"], ["8", "the pyramid"]]
    for row in rows:
        asked = [float(number) for number in row[4:]]
        assert 0 < asked[0] <= asked[1]
    assert "these times say nothing" in done.stdout
