"""Many processes: the bits of one, whoever of them is killed; and one error, said once."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from sweep_samples import WINDOW, said, write_jsonl

import headwise.corpus.work as ranks
from forked import Program
from headwise.cli import main
from headwise.corpus.passages import passages_path
from headwise.corpus.units import Units

HERE = Path(__file__).parent
PROGRAM = str(HERE / "sweep_samples.py")
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")
LIMIT = 600  # seconds; far more than it takes


def launched(processes, *args, **more):
    """By torchrun, for processes of this machine alone."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--rdzv-backend", "c10d",
        "--rdzv-endpoint", "localhost:0", "--local-addr", "localhost", PROGRAM, "measure", *map(str, args),
    ]  # fmt: skip
    environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "COLUMNS": "100", "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(
        command, env={**os.environ, **environment, **more}, capture_output=True, text=True, encoding="utf-8",
        timeout=LIMIT,
    )  # fmt: skip


@pytest.fixture
def start(tmp_path):
    """start(processes, *args): programs that nobody looks after, in the environment that torchrun gives to its own."""

    def start(processes, *args, **more):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
        folder = tmp_path / f"said{len(list(tmp_path.glob('said*')))}"
        folder.mkdir()
        given = {"COLUMNS": "100", "WORLD_SIZE": str(processes), **address, **more}
        call = (PROGRAM, "measure", *args)
        return [Program(call, folder / str(at), environment={**given, "RANK": str(at)}) for at in range(processes)]

    return start


@pytest.fixture
def run(start):
    """run(processes, *args): the exit codes of all, and what they said together."""

    def run(*args, **more):
        ended = [job.wait(LIMIT) for job in start(*args, **more)]
        codes, out, err = zip(*ended, strict=True)
        return [*codes], "".join(out), "".join(err)

    return run


@pytest.fixture
def alone(monkeypatch, small_pieces):
    """alone(*args): by one process, this one, to the end."""

    def alone(*args):
        monkeypatch.setattr(sys, "argv", ["headwise", "measure", *map(str, args)])
        main()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the programs have it
    yield alone
    torch.set_num_threads(threads)


@pytest.fixture
def options(model_folder, tmp_path):
    """A corpus of uneven units: lines, many of them in one, and texts."""
    (tmp_path / "a.txt").write_text(said(5000, 1), encoding="utf-8")
    write_jsonl(tmp_path / "b.jsonl", [said(1 + 97 * n % 300, n) for n in range(20)])
    (tmp_path / "c.txt").write_text(said(1600, 2), encoding="utf-8")
    (tmp_path / "d.txt").touch()
    fixed = ["--measures", "entropy,max_logit,received_mass", "--window", WINDOW, "--batch", 8, "--device", "cpu"]
    files = [tmp_path / name for name in ("a.txt", "b.jsonl", "c.txt", "d.txt")]
    named = [part for file in files for part in ("--file", file)]
    return ["--model", model_folder, *named, *fixed]


@pytest.mark.thorough
def test_three_processes_give_the_bits_of_one(options, alone, run, tmp_path):
    one, many = tmp_path / "one.csv", tmp_path / "many.csv"
    alone(*options, "--out", one, "--per", "file")
    codes, out, err = run(3, *options, "--out", many, "--per", "file")
    assert codes == [0, 0, 0], err
    assert out.count("mean of heads") == 1  # the first process alone speaks
    assert not Units(many).folder.exists()
    assert one.read_bytes() == many.read_bytes()
    assert passages_path(one).read_bytes() == passages_path(many).read_bytes()
    assert len(one.read_bytes().splitlines()) == 1 + 3 * 6 * 3


@pytest.mark.thorough
def test_killed_in_the_middle_and_started_again(options, alone, tmp_path):
    """By two processes of torchrun, whichever is killed, then by one: each takes up what the last one left."""
    whole, parts = tmp_path / "whole.csv", tmp_path / "parts.csv"
    alone(*options, "--out", whole)
    done = launched(2, *options, "--out", parts, HEADWISE_ACCIDENT="kill:0:2")
    assert done.returncode != 0
    assert not parts.exists()
    before, of = Units(parts).so_far()
    assert 0 < before < of, done.stderr
    assert launched(2, *options, "--out", parts, HEADWISE_ACCIDENT="kill:1:1").returncode != 0
    assert not parts.exists()
    assert before < Units(parts).so_far()[0] < of
    alone(*options, "--out", parts)
    assert parts.read_bytes() == whole.read_bytes()
    assert passages_path(parts).read_bytes() == passages_path(whole).read_bytes()


@pytest.mark.thorough
def test_an_error_of_any_process_is_said_once(options, run, tmp_path):
    out = tmp_path / "out.csv"
    codes, _, err = run(2, *options, "--out", out, HEADWISE_ACCIDENT="error:1:1")
    assert 0 not in codes
    assert err.count("an accident") == 1
    assert "error: process 1 of 2: an accident" in err
    assert "Traceback" not in err
    assert Units(out).so_far()[0] >= 1


@pytest.mark.thorough
def test_what_the_user_can_mend_is_said_once(options, run, tmp_path):
    (tmp_path / "c.txt").write_bytes(b"abc\xff")
    out = tmp_path / "out.csv"
    codes, _, err = run(2, *options, "--out", out)
    assert 0 not in codes
    assert err.count("c.txt' is not UTF-8: byte 0xff at offset 3") == 1
    assert not out.exists()


@pytest.mark.thorough
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_by_hand_it_says_how_to_go_on(options, start, tmp_path, sent, code):
    out = tmp_path / "out.csv"
    (tmp_path / "a.txt").write_text(said(200_000, 1), encoding="utf-8")
    (job,) = start(1, *options, "--out", out)
    until = time.monotonic() + LIMIT
    while not list(Units(out).folder.glob("unit-*.json")):
        assert time.monotonic() < until
        assert job.process.is_alive(), job.err.read_text("utf-8")
        time.sleep(0.05)
    os.kill(job.process.pid, sent)
    ended, _, said_then = job.wait(LIMIT)
    assert ended == code
    done, of = Units(out).so_far()
    assert f"Stopped; {done} of {of} units are done. Run the same command to resume." in said_then
    assert "Traceback" not in said_then
    assert not list(Units(out).folder.glob(".*.tmp"))


@pytest.mark.thorough
def test_a_full_disk_is_told_and_nothing_is_lost(options, alone, run, tmp_path):
    """A file may not grow beyond some bytes: the manifest fits, and so does no unit."""
    pytest.importorskip("resource", reason="no limits of files here")
    out = tmp_path / "out.csv"
    assert run(1, *options, "--out", out, HEADWISE_ACCIDENT="error:0:3")[0] == [2]
    before = Units(out).so_far()
    assert before[0] == 3
    codes, _, err = run(1, *options, "--out", out, HEADWISE_FILES="500")
    assert codes == [2]
    assert "cannot be written" in err
    assert "3 finished units are kept there; run the same command to resume" in err
    assert "Traceback" not in err
    assert Units(out).so_far() == before
    alone(*options, "--out", out)
    assert out.exists()


def test_the_store_is_asked_now_and_then_however_small_the_batches_are():
    asked = []

    class Store:
        def check(self, keys):
            asked.append("check")
            return False

    one = ranks.Ranks(1, 3, Store())
    begun = time.monotonic()
    for _ in range(1000):
        one.check()
    assert 0 < len(asked) <= 1 + (time.monotonic() - begun) // ranks.LOOK
