"""Many processes: the bits of one, whoever of them is killed; and one error, said once."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from sweep_samples import WINDOW, said, write_jsonl

import headwise.corpus.ranks as ranks
from headwise.cli import main
from headwise.corpus.journal import Journal

HERE = Path(__file__).parent
PROGRAM = str(HERE / "sweep_samples.py")
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")
LIMIT = 600  # seconds; far more than it takes


def environment(**more):
    return {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "COLUMNS": "100", "PYTHONIOENCODING": "utf-8",
        **more,
    }  # fmt: skip


def torchrun(processes):
    """The launcher, for processes of this machine alone; one that needs no launcher for one."""
    if processes == 1:
        return [sys.executable]
    return [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--rdzv-backend", "c10d",
        "--rdzv-endpoint", "localhost:0", "--local-addr", "localhost",
    ]  # fmt: skip


def run(processes, *args, **more):
    command = [*torchrun(processes), PROGRAM, "measure", *map(str, args)]
    return subprocess.run(
        command, env=environment(**more), capture_output=True, text=True, encoding="utf-8", timeout=LIMIT
    )


@pytest.fixture
def alone(monkeypatch, small_pieces):
    """alone(*args): by one process, this one, to the end."""

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["headwise", "measure", *map(str, args)])
        main()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the programs have it
    yield run
    torch.set_num_threads(threads)


@pytest.fixture
def options(model_folder, tmp_path):
    """A corpus of uneven units: lines, many of them in one, and texts."""
    (tmp_path / "a.txt").write_text(said(9000, 1), encoding="utf-8")
    write_jsonl(tmp_path / "b.jsonl", [said(1 + 97 * n % 300, n) for n in range(20)])
    (tmp_path / "c.txt").write_text(said(3100, 2), encoding="utf-8")
    (tmp_path / "d.txt").touch()
    fixed = ["--measures", "entropy,max_logit,received_mass", "--window", WINDOW, "--batch", 3, "--device", "cpu"]
    files = [tmp_path / name for name in ("a.txt", "b.jsonl", "c.txt", "d.txt")]
    named = [part for file in files for part in ("--file", file)]
    return ["--model", model_folder, *named, *fixed]


@pytest.mark.thorough
def test_three_processes_give_the_bits_of_one(options, alone, tmp_path):
    one, many = tmp_path / "one.csv", tmp_path / "many.csv"
    alone(*options, "--out", one, "--per", "file")
    done = run(3, *options, "--out", many, "--per", "file")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("mean of heads") == 1  # the first process alone speaks
    assert not Journal(many).folder.exists()
    assert one.read_bytes() == many.read_bytes()
    assert len(one.read_bytes().splitlines()) == 1 + 3 * 6 * 3


@pytest.mark.thorough
def test_killed_in_the_middle_and_started_again(options, alone, tmp_path):
    """By two processes, then by three, then by one: each takes up what the last one left, whichever was killed."""
    whole, parts = tmp_path / "whole.csv", tmp_path / "parts.csv"
    alone(*options, "--out", whole)
    before = 0
    for processes, accident in ((2, "kill:0:2"), (3, "kill:1:1")):
        done = run(processes, *options, "--out", parts, HEADWISE_ACCIDENT=accident)
        assert done.returncode != 0
        assert not parts.exists()
        now, of = Journal(parts).so_far()
        assert before < now < of, done.stderr
        before = now
    alone(*options, "--out", parts)
    assert parts.read_bytes() == whole.read_bytes()


@pytest.mark.thorough
def test_an_error_of_any_process_is_said_once(options, tmp_path):
    out = tmp_path / "out.csv"
    done = run(2, *options, "--out", out, HEADWISE_ACCIDENT="error:1:1")
    assert done.returncode != 0
    assert done.stderr.count("an accident") == 1
    assert "error: process 1 of 2: an accident" in done.stderr
    assert "Traceback" not in done.stderr.split("error: process 1")[0]
    assert Journal(out).so_far()[0] >= 1


@pytest.mark.thorough
def test_what_the_user_can_mend_is_said_once(options, tmp_path):
    (tmp_path / "c.txt").write_bytes(b"abc\xff")
    out = tmp_path / "out.csv"
    done = run(2, *options, "--out", out)
    assert done.returncode != 0
    assert done.stderr.count("c.txt' is not UTF-8: byte 0xff at offset 3") == 1
    assert not Journal(out).folder.exists()


@pytest.mark.thorough
def test_who_is_left_without_a_launcher_ends_too(options, alone, tmp_path):
    """Two processes that nobody looks after: one is killed, the other sees that it gives no sign of life."""
    out, port = tmp_path / "out.csv", str(20000 + os.getpid() % 20000)
    address = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port, "HEADWISE_SILENCE": "8"}
    command = [sys.executable, PROGRAM, "measure", *map(str, options), "--out", str(out)]
    jobs = [
        subprocess.Popen(
            command, env=environment(RANK=str(rank), HEADWISE_ACCIDENT="kill:1:1", **address), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8",
        )
        for rank in (0, 1)
    ]  # fmt: skip
    (_, said_by_first), _ = (job.communicate(timeout=LIMIT) for job in jobs)
    assert [job.returncode for job in jobs] == [2, -signal.SIGKILL]
    assert "process 1 of 2 no longer responds; run the same command to resume" in said_by_first
    alone(*options, "--out", out)
    assert out.exists()


@pytest.mark.thorough
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_by_hand_it_says_how_to_go_on(options, tmp_path, sent, code):
    out = tmp_path / "out.csv"
    (tmp_path / "a.txt").write_text(said(200_000, 1), encoding="utf-8")
    command = [sys.executable, PROGRAM, "measure", *map(str, options), "--out", str(out)]
    job = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True, encoding="utf-8")
    until = time.monotonic() + LIMIT
    while not list(Journal(out).folder.glob("unit-*.safetensors")):
        assert time.monotonic() < until
        assert job.poll() is None, job.stderr.read()
        time.sleep(0.05)
    job.send_signal(sent)
    said_then = job.communicate(timeout=LIMIT)[1]
    assert job.returncode == code
    done, of = Journal(out).so_far()
    assert f"Stopped; {done} of {of} units are done. Run the same command to resume." in said_then
    assert "Traceback" not in said_then
    assert not list(Journal(out).folder.glob(".*.tmp"))


@pytest.mark.thorough
def test_a_full_disk_is_told_and_nothing_is_lost(options, alone, tmp_path):
    """A file may not grow beyond some bytes: the manifest fits, and so does no unit."""
    resource = pytest.importorskip("resource", reason="no limits of files here")
    out = tmp_path / "out.csv"
    assert run(1, *options, "--out", out, HEADWISE_ACCIDENT="error:0:3").returncode == 2
    before = Journal(out).so_far()
    assert before[0] == 3
    command = [sys.executable, PROGRAM, "measure", *map(str, options), "--out", str(out)]
    full = subprocess.run(
        command, env=environment(), capture_output=True, text=True, encoding="utf-8", timeout=LIMIT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500)),
    )  # fmt: skip
    assert full.returncode == 2
    assert "cannot be written" in full.stderr
    assert "3 finished units are kept there; run the same command to resume" in full.stderr
    assert "Traceback" not in full.stderr
    assert Journal(out).so_far() == before
    alone(*options, "--out", out)
    assert out.exists()


def test_the_store_is_asked_now_and_then_however_small_the_batches_are(monkeypatch):
    asked = []

    class Store:
        def check(self, keys):
            asked.append("check")
            return False

        def add(self, key, more):
            asked.append("add")
            return 1

    monkeypatch.setattr(ranks, "BEAT", 1e6)
    one = ranks.Ranks(1, 3, Store())
    begun = time.monotonic()
    for _ in range(1000):
        one.check()
    looks = 1 + (time.monotonic() - begun) // ranks.LOOK
    assert asked.count("check") <= looks
    assert asked.count("add") <= 1 + 2 * looks  # its own sign of life, and those of the other two
    one._end.set()
