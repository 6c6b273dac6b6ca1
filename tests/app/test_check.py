"""`headwise check`: right and wrong answers, and code that does what it should not."""

import os
import time
from pathlib import Path

import pytest
from commands import Command

from headwise.textbook.guide.grading.grade import Grade, grade
from headwise.textbook.guide.registry import find_exercise

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


def test_a_wrong_answer_gets_the_smallest_input_on_which_it_is_wrong(headwise: Command, tmp_path: Path):
    (tmp_path / "answer.py").write_text(WRONG)
    done = headwise("check", "split-heads", tmp_path / "answer.py", "--lang", "zh")
    assert done.code == 1
    assert "找到的最小输入" in done.out
    assert "x = [1×2×2]" in done.out  # one sequence of two tokens with two heads: a smaller one would be right
    assert "num_heads = 2" in done.out


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("while True: pass", "took longer than 1 seconds"),
        pytest.param("time.sleep(1000)", "took longer than 1 seconds", marks=pytest.mark.thorough),
        pytest.param(
            "return torch.ones(25_000_000_000)", "line 3: RuntimeError: .*allocate", marks=pytest.mark.thorough
        ),
        pytest.param("return [0] * 10 ** 11", "line 3: MemoryError", marks=pytest.mark.thorough),
        pytest.param("while True: print('x' * 1000)", "printed more than 1 MiB", marks=pytest.mark.thorough),
        pytest.param("os._exit(3)", "ended the process with code 3", marks=pytest.mark.thorough),
        pytest.param("raise SystemExit", "line 3: SystemExit", marks=pytest.mark.thorough),
        pytest.param("os.fork()", "line 3: Refused: os.fork", marks=pytest.mark.thorough),
        pytest.param("import socket; socket.socket()", "line 3: Refused: socket", marks=pytest.mark.thorough),
        pytest.param("return object()", "a value of type object", marks=pytest.mark.thorough),
        pytest.param("return )", "line 3: SyntaxError", marks=pytest.mark.thorough),
        pytest.param("return torch.zeros(400_000_000)", "too large|allocate", marks=pytest.mark.thorough),
    ],
)
def test_code_that_misbehaves_is_ended_with_one_line(body: str, reason: str):
    from re import search

    limits = {"seconds": 1.0} if "longer" in reason else {}  # any other end must not depend on the processor's speed
    said = why(graded(body, **limits))
    assert search(reason, said), said
    assert "\n" not in said


@pytest.mark.parametrize(
    "body",
    [
        "os.remove({!r})",
        pytest.param("import shutil; shutil.rmtree(os.path.dirname({!r}))", marks=pytest.mark.thorough),
        pytest.param("open({!r}, 'w')", marks=pytest.mark.thorough),
        pytest.param("os.rename({!r}, 'here')", marks=pytest.mark.thorough),
    ],
)
def test_files_outside_of_its_folder_stay(body: str, tmp_path: Path):
    kept = tmp_path / "kept.txt"
    kept.write_text("mine")
    assert "Refused" in why(graded(body.format(str(kept))))
    assert kept.read_text() == "mine"


@pytest.mark.thorough
def test_the_kernel_refuses_what_gets_past_the_audit_hook(tmp_path: Path):
    """As machine code could: a function of the C library, found before the hook was installed."""
    from headwise.textbook.guide.grading.process import Raised, Sandbox

    kept = tmp_path / "kept.txt"
    kept.write_text("mine")
    code = (
        "import sys\n_os = sys.modules['posix']\n"
        f"def f():\n    import torch\n    torch.save(torch.ones(3), {str(kept)!r})\n"
    )
    with Sandbox(code, "a.py", "f", seconds=2.0) as sandbox:
        if "Landlock" not in sandbox.guards:
            pytest.skip("the kernel has no Landlock")
        with pytest.raises(Raised):
            sandbox()
    assert kept.read_text() == "mine"


@pytest.mark.thorough
def test_nothing_is_left_running_and_no_folder_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = graded(
        "import threading; threading.Thread(target=time.sleep, args=(1000,)).start(); return x.sum().item()"
    )
    assert not result.passed
    assert list(tmp_path.iterdir()) == []
    time.sleep(0.05)
    found = (
        [pid for pid in os.listdir("/proc") if pid.isdigit() and _parent(pid) == os.getpid()]
        if os.path.isdir("/proc")
        else []
    )
    assert not [pid for pid in found if "grading.child" in _command(pid)]


def _parent(pid: str) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return -1


def _command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


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
