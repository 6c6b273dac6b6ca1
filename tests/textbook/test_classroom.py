"""`headwise check --class`: a folder of answers in one table."""

import re
from pathlib import Path

import pytest

from commands import Command

RIGHT = "def split_heads(x, h):\n    return x.view(*x.shape[:2], h, -1).transpose(1, 2)\n"
WRONG = "def split_heads(x, h):\n    return x.view(x.shape[0], h, x.shape[1], -1)\n"


def written(folder: Path, **answers: str) -> Path:
    for name, source in answers.items():
        path = folder / name.replace("__", "/").replace("_copy", " (1)")
        path = path.with_name(f"{path.name}.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return folder


@pytest.mark.thorough
def test_a_class_is_one_table_with_the_commonest_counterexample(headwise: Command, tmp_path: Path):
    folder = written(tmp_path, anna__split_heads=RIGHT, ben__split_heads=WRONG, chen__split_heads=WRONG, chen__notes="")
    done = headwise("check", "--class", folder, "--seconds", "60", "--seed", "1")
    assert done.code == 0
    rows = [line.split() for line in done.out.splitlines()[:4]]
    assert rows == [
        ["pupil", "split-heads", "right"], ["anna", "✓", "1/1"], ["ben", "✗", "0/1"], ["chen", "✗", "0/1"],
    ]  # fmt: skip
    assert re.search(r"✗ 2 × split-heads: x = \[1×2×2\].*num_heads = 2.*\(ben, chen\)", done.out)
    assert "files of no exercise: 1 (chen/notes.py)" in done.out
    seed = re.search(r"--seed (\d+) repeats them", done.out)[1]
    assert seed != "0"
    assert headwise("check", "--class", folder, "--seconds", "60", "--seed", seed).out == done.out


def test_two_answers_of_one_pupil_are_named_and_not_graded(headwise: Command, tmp_path: Path):
    folder = written(tmp_path, anna__split_heads=RIGHT, anna__split_heads_copy=WRONG)
    done = headwise("check", "--class", folder)
    assert "anna         2×           0/1" in done.out or re.search(r"anna\s+2×\s+0/1", done.out)
    named = "anna/split_heads (1).py, anna/split_heads.py"
    assert f"anna has 2 answers to split-heads, none of which is graded: {named}" in done.out


@pytest.mark.thorough
def test_one_exercise_needs_no_folders_and_code_that_does_not_end_stops_nobody(headwise: Command, tmp_path: Path):
    folder = written(tmp_path, anna="while True: pass\n", ben=RIGHT, ben__answer=RIGHT, chen=RIGHT)
    (folder / "dora.py").write_bytes(b"\xff\xfe")
    done = headwise("check", "split-heads", "--class", folder, "--seconds", "5")
    rows = [line.split() for line in done.out.splitlines()[1:5]]
    assert rows == [["anna", "✗", "0/1"], ["ben", "2×", "0/1"], ["chen", "✓", "1/1"], ["dora", "✗", "0/1"]]
    assert "the code took longer than 5 seconds (anna)" in done.out
    assert "dora.py' is not UTF-8" in done.out


def test_a_folder_without_answers_is_refused(headwise: Command, tmp_path: Path):
    done = headwise("check", "--class", tmp_path)
    assert done.code == 2
    assert "no answers; expected a folder for each pupil" in done.err
    assert "expected a folder" in headwise("check", "--class", tmp_path / "none").err
