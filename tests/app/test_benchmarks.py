"""The benchmarks run; how fast things are is for their full sizes on a quiet machine to say."""

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_speed_compares_equal_numbers() -> None:
    command = [sys.executable, str(FOLDER / "speed.py"), "--quick", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 6


def test_memory_stays_far_below_the_weights() -> None:
    done = subprocess.run([sys.executable, str(FOLDER / "memory.py"), "--quick"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    taken = [float(line.split(" MB")[0].split()[-1]) for line in done.stdout.splitlines()[1:]]
    assert len(taken) == 3
    assert max(taken) < 100  # the weights of these sizes take 805 MB
