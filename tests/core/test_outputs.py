"""A result's place is known to be good before the work, is held by one run, and holds no rubbish of killed ones."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headwise.base.files import (
    LONGEST,
    atomic_folder,
    atomic_path,
    check_writable,
    contents,
    is_temporary,
    sweep,
    taken,
    write_text,
)
from headwise.errors import CheckpointError, ConfigError

posix = pytest.mark.skipif(os.name != "posix", reason="no such locks, signals and permissions here")
HOLDS = """
import sys, time
from headwise.base.files import atomic_folder, atomic_path
from headwise.base.files import taken
with taken(sys.argv[1], "--out", folder=sys.argv[2] == "folder"):
    with atomic_path(sys.argv[3] + "/begun.txt") as one, atomic_folder(sys.argv[3] + "/begun") as other:
        (other / "half.txt").write_text("half")
        print("ready", flush=True)
        time.sleep(300)
"""


@contextmanager
def another_run(out: Path, kind: str, home: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds `out` and writes a file and a folder into `home`."""
    args = [sys.executable, "-c", HOLDS, str(out), kind, str(home)]
    with subprocess.Popen(args, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


@posix
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_one_run_holds_a_place_until_it_is_killed_and_the_next_sweeps(tmp_path: Path, kind: str) -> None:
    out, folder = tmp_path / "a" / "out", kind == "folder"
    home = out if folder else out.parent
    with another_run(out, kind, home) as process:
        before = sorted(home.iterdir())
        assert sum(map(is_temporary, before)) == 2
        with pytest.raises(ConfigError, match=rf"--out '.*out': another run \(process {process.pid}\) is writing it"):
            taken(out, "--out", folder=folder).__enter__()
        with taken(home / "other.txt", "--out"):  # another place in the same folder
            assert set(before) < set(home.iterdir())
        assert sorted(home.iterdir()) == before  # what a living process writes is left alone
        process.send_signal(signal.SIGKILL)
        process.wait()
        (home / ".mine.tmp").write_text("a user's")
        (home / ".mine.abcdefgh.tmp").write_text("a user's")
        with taken(out, "--out", folder=folder):
            assert not any(map(is_temporary, home.iterdir()))
    assert sorted(path.name for path in home.iterdir()) == [".mine.abcdefgh.tmp", ".mine.tmp"]


def test_a_writer_may_rename_a_file_of_its_own(tmp_path: Path) -> None:
    """As safetensors does: it makes another file, and puts it in the place of the one that it was given."""
    with atomic_path(tmp_path / "out.bin") as temporary:
        own = temporary.with_name(".tmpABCDEF")
        own.write_text("whole")
        assert [is_temporary(path) for path in tmp_path.iterdir()] == [True]  # where a sweep finds it after a kill
        own.chmod(0o600)
        own.rename(temporary)
        sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["out.bin"]
    (tmp_path / "plain").write_text("")
    assert (tmp_path / "out.bin").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_folders_are_made_and_go_if_nothing_was_written(tmp_path: Path) -> None:
    with taken(tmp_path / "a" / "b" / "out.csv", "--out"):
        assert (tmp_path / "a" / "b").is_dir()
    with pytest.raises(KeyError), taken(tmp_path / "a" / "out", "--out", folder=True):
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    with taken(tmp_path / "a" / "out", "--out", folder=True):
        assert contents(tmp_path / "a" / "out") == []
        (tmp_path / "a" / "out" / "model").write_text("whole")
    assert [path.name for path in (tmp_path / "a" / "out").iterdir()] == ["model"]


@posix
def test_a_place_is_held_within_one_process_too(tmp_path: Path) -> None:
    with taken(tmp_path / "out", "out"):
        with pytest.raises(ConfigError, match=rf"out='.*out': another run \(process {os.getpid()}\)"):
            taken(tmp_path / "out", "out").__enter__()
        with pytest.raises(ConfigError):  # an error does not release it
            taken(tmp_path / "out", "out").__enter__()
    with taken(tmp_path / "out", "out"):
        pass


def test_without_locks_the_work_is_done_and_nothing_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = tmp_path / ".out.txt.abcdefgh.headwise.tmp"
    left.write_text("of a run that may be living")
    monkeypatch.setattr("headwise.base.files.lock", lambda handle: None)
    monkeypatch.setattr("headwise.base.files.lock", lambda handle: None)
    out = tmp_path / "out.txt"
    with taken(out, "--out"), taken(out, "--out"), atomic_path(out) as temporary:
        temporary.write_text("whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == [left.name, "out.txt"]


@pytest.mark.parametrize("name", ["a", "é" * 120, "x" * LONGEST, "x" * 255])
def test_a_name_may_be_as_long_as_the_file_system_takes(tmp_path: Path, name: str) -> None:
    with taken(tmp_path / name, "--out"), atomic_path(tmp_path / name) as temporary:
        sweep(tmp_path)  # by another run, at the same time
        temporary.write_text("whole")
    with atomic_folder(tmp_path / "folder") as temporary:
        sweep(tmp_path)
        (temporary / "file").write_text("whole")
    assert {path.name for path in tmp_path.iterdir()} == {name, "folder"}
    assert (tmp_path / name).read_text() == (tmp_path / "folder" / "file").read_text() == "whole"


@posix
@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("file/out", "'.*file' is not a folder"),
        ("file/new/out", "'.*file' is not a folder"),
        ("x" * 256, "File name too long"),
        ("new/" + "x" * 256, "File name too long"),
        ("gone/out", "'.*gone' is a link to nothing"),
        ("/proc/headwise/out", "No such file or directory"),
        ("a\0b", ".*null"),
    ],
)
def test_what_cannot_be_written_is_known_before(tmp_path: Path, path: str, why: str, folder: bool) -> None:
    (tmp_path / "file").write_text("a file")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    for look in (check_writable, lambda *args, **options: taken(*args, **options).__enter__()):
        with pytest.raises(CheckpointError, match=rf"--out '.*': cannot be written: {why}"):
            look(tmp_path / path, "--out", folder=folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "gone"]


@posix
def test_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(CheckpointError, match=r"'.*pipe' could not be written \(it is a pipe or a device; expected a"):
        write_text(pipe, "text")
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


@posix
def test_a_file_is_no_folder_and_a_device_no_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    with pytest.raises(CheckpointError, match="it is a file; expected a folder"):
        check_writable(tmp_path / "file", "--out", folder=True)
    for path in (tmp_path, "/dev/null"):
        with pytest.raises(CheckpointError, match="it is a folder, a pipe or a device; expected a file name"):
            check_writable(path, "--out")
    assert os.path.exists("/dev/null")


AS_SOMEBODY = """
import os, sys
from headwise.base.files import check_writable
if os.geteuid() == 0:  # to whom nothing is forbidden
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
for path in sys.argv[1:]:
    try:
        check_writable(path, "--out")
    except ValueError as error:
        print(error)
"""


@pytest.mark.thorough
@posix
def test_a_folder_without_permission_is_known_before() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to other users
        Path(name).chmod(0o755)
        closed = Path(name, "closed")
        closed.mkdir()
        closed.chmod(0o555)
        paths = [str(closed / "out"), str(closed / "new" / "out")]
        done = subprocess.run([sys.executable, "-c", AS_SOMEBODY, *paths], capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"--out {path!r}: cannot be written: Permission denied" for path in paths]
