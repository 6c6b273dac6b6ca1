"""Where a file cannot be written, one line names it, what was there before stays, and nothing half is left."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from commands import Command
from headwise.analysis.history import HeadHistory, HeadLook
from headwise.base.files import atomic_path
from headwise.corpus.result import Output
from headwise.edit.budgets import Budget
from headwise.errors import CheckpointError
from processes import files_no_larger_than

TEXT = "话说武松打虎。" * 9


def amap() -> hw.AttentionMap:
    q, k, v = torch.randn(3, 1, 4, 99, 8)
    return hw.attend(q, k, v, mask=hw.Causal(), return_map=True)[1]


def history() -> HeadHistory:
    numbers = {"broad": np.zeros((2, 99))}
    return HeadHistory({}, [HeadLook(3, 0.5, numbers, numbers, [[[]] * 99] * 2)])


def budget() -> Budget:
    return Budget(((5,) * 99,), (torch.ones(99),), 5, 0, 0.9, ((6, 6),), 31)


def table(path: Path) -> None:
    Output.of(path).write([{"layer": list(range(999)), "value": [0.5] * 999}], {"model": "x" * 999})


WRITERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "a map": ("map.safetensors", lambda path: amap().save(path)),
    "a record of heads": ("heads.jsonl", lambda path: history().write(path)),
    "a budget": ("budget.json", lambda path: hw.edit.save_budget(budget(), path)),
    "roles": ("roles.json", lambda path: hw.analysis.roles([amap()]).save(path)),
    "a CSV table": ("table.csv", table),
    "a JSON table": ("table.jsonl", table),
    "a Parquet table": ("table.parquet", table),
}


@pytest.mark.parametrize("room", [0, 100])
@pytest.mark.parametrize("what", WRITERS)
def test_a_full_disk_is_told_with_the_file_and_leaves_nothing(what: str, room: int, tmp_path: Path) -> None:
    name, write = WRITERS[what]
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow", reason="pyarrow is not installed (the parquet extra)")
    path = tmp_path / name
    path.write_text("an old one")
    with files_no_larger_than(room), pytest.raises(CheckpointError, match=rf"{name}' could not be written") as caught:
        write(path)
    assert "untouched" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert path.read_text() == "an old one"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file" / "map", tmp_path):
        with pytest.raises(CheckpointError, match="could not be written"), atomic_path(path) as temporary:
            temporary.write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_errors_of_other_kinds_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), atomic_path(tmp_path / "file"):
        _ = 1 / 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    "args",
    [
        ["see", TEXT, "--out", "report.html"],
        ["measure", "--file", "text.txt", "--out", "table.csv", "--measures", "entropy"],
    ],
    ids=lambda args: args[0],
)  # fmt: skip
def test_a_command_on_a_full_disk_is_one_line(
    args: list[str], headwise: Command, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text(TEXT * 20, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with files_no_larger_than(300):
        done = headwise(*args, "--model", model_folder)
    assert done.code == 2, done.err
    said = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(said) == 1, done.err
    assert "Traceback" not in done.err
    assert "written" in said[0]
    assert any(name in said[0] for name in ("report.html", "table.csv"))
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path.name not in ("text.txt", "lock")]
    assert [path for path in left if path.suffix == ".tmp" or path.stat().st_size >= 300] == []
