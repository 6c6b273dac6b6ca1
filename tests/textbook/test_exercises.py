"""The exercises: each can be solved from its task, and a wrong answer is shown with what belongs to it."""

from pathlib import Path

import answers
import pytest
import torch

from commands import Command
from headwise_textbook.exercises import Draw
from headwise_textbook.exercises.child import decoded, encoded
from headwise_textbook.exercises.grade import difference, grade, lines
from headwise_textbook.topics import exercises, find_exercise, topics


@pytest.mark.thorough_beyond(16)
@pytest.mark.parametrize("name", exercises())
def test_an_answer_written_from_the_task_is_right(name: str):
    one = exercises()[name]
    theirs = getattr(answers, one.function)
    for seed in range(15):
        args = one.inputs(Draw(seed))
        ours = one.ours(*args)
        value = decoded(encoded(theirs(*decoded(encoded(list(args))))))  # as in the process that runs it
        assert difference(value, ours, one.tolerance) is None, seed


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ([torch.ones(2), torch.ones(2)], torch.ones(2, 2)),
        ([[torch.tensor(1.0), 2]], torch.tensor([[1.0, 2.0]])),
        ((True, False), torch.tensor([True, False])),
        (torch.Size((2, 3)), [2, 3]),
        (range(3), [0, 1, 2]),
        (torch.ones(2).double(), torch.ones(2)),
        (3.0, 3),
        (torch.tensor(True), True),
    ],
)
def test_values_in_another_form_are_right(theirs: object, ours: object):
    assert difference(decoded(encoded(theirs)), ours, 1e-4) is None


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [(20_001, 20_000), (10**30, 20_000), (-(10**30), 20_000), ([torch.ones(2), 1], torch.ones(2, 2))],
)
def test_whole_numbers_are_exact_and_other_lists_are_wrong(theirs: object, ours: object):
    assert difference(theirs, ours, 1e-4) is not None


@pytest.mark.thorough
def test_what_is_printed_belongs_to_the_input_that_is_shown():
    code = (
        "print('while it was read')\n"
        "def split_heads(x, num_heads):\n"
        "    print('x has', x.numel())\n"
        "    return x.view(*x.shape[:2], num_heads, -1).transpose(1, 2) if x.numel() < 12 else x\n"
    )
    one = find_exercise("split-heads")
    result = grade(one, code, seconds=60.0)
    assert result.counterexample is not None
    size = torch.Size(map(int, dict(result.counterexample.arguments)["x"].split("]")[0][1:].split("×"))).numel()
    assert result.printed == f"x has {size}\n"
    assert lines(result, one)[-1] == f"  it printed: x has {size}"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("def crossover(d):\n    print('before', d > 0)\n    while True: pass\n", "before True\n"),
        ("import os\ndef crossover(d):\n    os.close(2)\n    return 0\n", ""),
    ],
)
def test_what_was_printed_before_the_end_is_shown(code: str, printed: str):
    result = grade(find_exercise("crossover"), code, seconds=2.0)
    assert not result.passed
    assert result.printed == printed


@pytest.mark.thorough
def test_an_error_of_syntax_names_its_line_once():
    result = grade(find_exercise("crossover"), "def crossover(d):\n    return 2 * * d\n", seconds=60.0)
    assert str(result.stopped) == "line 2: SyntaxError: invalid syntax"


@pytest.mark.parametrize(
    ("lang", "said"),
    [("en", "error: FILE {!r}: No such file or directory\n"), ("zh", "错误： FILE {!r}：没有这个文件或文件夹\n")],
)
def test_a_missing_file_is_named_with_its_argument(headwise: Command, tmp_path: Path, lang: str, said: str):
    path = str(tmp_path / "absent.py")
    done = headwise("check", "crossover", path, "--lang", lang)
    assert (done.code, done.out, done.err) == (2, "", said.format(path))


def test_check_lists_all_exercises_and_those_of_a_topic(headwise: Command):
    every = headwise("check", "--lang", "zh").out
    assert all(name in every for name in exercises())
    assert "切分成头" in every
    some = headwise("check", "head_kinds", "--lang", "en").out
    assert [name for name in exercises() if f"headwise check {name} " in some] == [
        one.name for one in topics()["head_kinds"].exercises
    ]


def test_an_exercise_that_does_not_exist_is_answered_with_the_nearest(headwise: Command):
    assert "did you mean 'split-heads'" in headwise("check", "splitheads", "a.py").err
    assert "是否要用 'split-heads'" in headwise("check", "splitheads", "a.py", "--lang", "zh").err
