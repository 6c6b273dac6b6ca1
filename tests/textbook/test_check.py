"""`headwise check`: right and wrong answers, and code that does what it should not."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from commands import Command
from headwise_textbook.exercises import grade as grading
from headwise_textbook.exercises.grade import Grade, grade, lines
from headwise_textbook.topics import find_exercise

EXERCISE = find_exercise("split-heads")
RIGHT = "def split_heads(x, h):\n    return x.view(*x.shape[:2], h, -1).transpose(1, 2)\n"
WRONG = "def split_heads(x, h):\n    return x.view(x.shape[0], h, x.shape[1], -1)\n"


def graded(body: str, **limits: float) -> Grade:
    return grade(
        EXERCISE, f"import os, time, torch\ndef split_heads(x, h):\n    {body}\n", **{"seconds": 60.0, **limits}
    )


def why(result: Grade) -> str:
    assert not result.passed
    return str(result.stopped or result.counterexample.why)


def test_a_right_answer_passes(headwise: Command, tmp_path: Path):
    (tmp_path / "answer.py").write_text(RIGHT)
    done = headwise("check", "split_heads", tmp_path / "answer.py")
    assert (done.code, done.err) == (0, "")
    assert done.out == "✓ split-heads: agrees with ours on 40 random inputs\n"


@pytest.mark.thorough
def test_a_wrong_answer_gets_the_smallest_input_on_which_it_is_wrong(headwise: Command, tmp_path: Path):
    (tmp_path / "answer.py").write_text(WRONG)
    done = headwise("check", "split-heads", tmp_path / "answer.py", "--lang", "zh")
    assert done.code == 1
    assert "找到的最小输入" in done.out
    assert "x = [1×2×2]" in done.out  # one sequence of two tokens with two heads: a smaller one would be right
    assert "num_heads = 2" in done.out


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("while True: pass", "took longer than 1 seconds"),
        ("time.sleep(1000)", "took longer than 1 seconds"),
        ("return torch.ones(25_000_000_000)", "line 3: RuntimeError: .*allocate"),
        ("return [0] * 10 ** 11", "line 3: MemoryError"),
        ("while True: print('x' * 1000)", "printed more than 1 MiB"),
        ("os._exit(3)", "ended the process with code 3"),
        ("raise SystemExit", "line 3: SystemExit"),
        ("while True: x = [x]", "MemoryError"),
        ("return object()", "a value of type object"),
        ("return )", "line 3: SyntaxError"),
        ("return torch.zeros(400_000_000)", "too large|allocate"),
    ],
)
def test_code_that_misbehaves_is_ended_with_one_line(body: str, reason: str):
    from re import search

    limits = {"seconds": 1.0} if "longer" in reason else {}  # any other end must not depend on the processor's speed
    said = why(graded(body, **limits))
    assert search(reason, said), said
    assert "\n" not in said


HOSTILE = """
import os, shutil, socket, subprocess, threading
def tried(action):
    try:
        return f"did it: {action()}"
    except BaseException as error:
        return type(error).__name__
def fill():
    for i in range(9):
        with open(str(i), "wb") as file:
            file.write(bytes(15 << 20))
def detached():
    import _posixsubprocess
    return subprocess.Popen(["sleep", "77777"], start_new_session=True).pid
def f(kept, answers):
    import headwise
    return [tried(action) for action in (
        lambda: os.remove(kept), lambda: shutil.rmtree(os.path.dirname(kept)), lambda: open(kept, "w"),
        lambda: os.rename(kept, "here"), lambda: open(kept).read(), lambda: open(answers).read(),
        lambda: __import__("headwise_textbook.exercises.one"), lambda: open("/usr/mine", "w"),
        lambda: open(os.path.join(os.path.dirname(headwise.__file__), "mine"), "w"), fill,
        lambda: socket.create_connection(("127.0.0.1", 22), 1), os.fork, detached,
        threading.Thread(target=print).start, lambda: open("/etc/passwd"), lambda: os.setuid(0),
    )]
"""


@pytest.mark.thorough
def test_code_is_kept_from_files_network_and_other_processes(tmp_path: Path):
    kept = tmp_path / "kept.txt"
    kept.write_text("mine")
    answers = Path(grading.__file__).parent / "one.py"
    assert answers.is_file()
    with grading.Sandbox(HOSTILE, "a.py", "f", seconds=20.0) as sandbox:
        if sandbox.together:
            pytest.skip(sandbox.together)
        said = sandbox(str(kept), str(answers))
        alone = sandbox(str(kept), str(answers))  # and it goes on
    assert [one for one in said if one.startswith("did it")] == [], said
    assert alone == said
    assert kept.read_text() == "mine"


@pytest.mark.thorough
def test_without_namespaces_the_program_runs_with_the_reason_and_the_same_end(tmp_path: Path):
    folder = tmp_path / "folder"
    folder.mkdir()
    program = [sys.executable, "-S", "-c", "import os; print(os.environ['HEADWISE_APART'], os.getcwd()); os._exit(7)"]
    task = {"folder": str(folder), "shown": [], "hidden": ["/no/such/folder"], "program": program}
    command = [sys.executable, "-I", "-S", str(Path(grading.__file__).parent / "apart.py"), json.dumps(task)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr
    assert done.stdout.endswith(f" {folder}\n")
    assert not folder.exists()
    assert "not kept from your files" in lines(Grade(3, together=done.stdout.split("]")[-1]), EXERCISE)[-1]


@pytest.mark.thorough
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_command_is_ended(tmp_path: Path, end: int):
    (tmp_path / "answer.py").write_text("import time\ntime.sleep(77)\n")
    command = [sys.executable, "-m", "headwise", "check", "split-heads", str(tmp_path / "answer.py"), "--seconds", "60"]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "LANGUAGE": str(tmp_path)}  # which exercises inherit
    running = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    _until(lambda: any("a reader's function" in one for one in _inside(tmp_path)), 60.0)
    running.send_signal(end)
    running.wait()
    _until(lambda: not list(tmp_path.glob("headwise-check-*")) and not _inside(tmp_path), 10.0)


@pytest.mark.thorough
def test_nothing_is_left_running_and_no_folder_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("LANGUAGE", str(tmp_path))
    result = graded("return [1, 2]")
    assert not result.passed
    assert list(tmp_path.iterdir()) == []
    assert _inside(tmp_path) == []


@pytest.mark.thorough
def test_a_result_that_is_nested_too_deeply_is_named():
    body = "for _ in range(100_000): x = [x]\n    return x"
    assert why(graded(body)) == "returned a value that is nested too deeply"


def _until(done: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until
        time.sleep(0.05)


def _inside(folder: Path) -> list[str]:
    """The processes of exercises that have this temporary folder in their arguments or environment."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            command, given = (Path(f"/proc/{pid}/{of}").read_bytes().decode() for of in ("cmdline", "environ"))
            if str(folder) in command + given and ("apart.py" in command or "a reader's function" in command):
                found.append(command)
    return found


@pytest.mark.parametrize("data", [b"", b"\x00\x01", b"\xff\xfe\x00"])
def test_a_file_that_is_not_text_is_one_error(headwise: Command, tmp_path: Path, data: bytes):
    (tmp_path / "answer.py").write_bytes(data)
    done = headwise("check", "split-heads", tmp_path / "answer.py")
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert "answer.py" in done.err


@pytest.mark.thorough
def test_a_missing_function_is_named_with_what_there_is():
    result = grade(EXERCISE, "def split(x):\n    return x\n")
    assert str(result.stopped) == "answer.py defines no function split_heads; it defines: split"
