"""A command on a damaged file ends with one line that names it, and exit code 2."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from commands import Command
from headwise.corpus.units import Units
from headwise.edit.budgets import Budget, save_budget

sys.path.insert(0, str(Path(__file__).parent.parent))  # corruption
from corruption import damaged

TEXT = "话说武松打虎。The tiger sleeps!\n武松又来打虎，再来？" * 30
TIMES = 6
OPTIONS = [
    "--d-model", 6, "--num-layers", 1, "--num-heads", 3, "--d-ff", 5, "--context", 7, "--batch-size", 2,
    "--eval-every", 1, "--steps", 2, "--warmup", 0, "--dropout", 0, "--watch-heads",
]  # fmt: skip


def refused(headwise: Command, args: list[object], path: Path, data: bytes, seed: int) -> None:
    """However the file is damaged, the command says so in a line, or does what it would have done."""
    told = 0
    for other in damaged(data, TIMES, seed):
        path.write_bytes(other)
        done = headwise(*args)
        lines = [line for line in done.err.splitlines() if line.startswith("error: ")]
        assert done.code in (0, 2), done.err
        assert "Traceback" not in done.err
        assert len(lines) == (done.code == 2)
        assert done.code == 0 or path.name in lines[0]
        told += done.code == 2
    assert told > 0


def see(folder: Path, model: Path) -> tuple[Path, list[object]]:
    (folder / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    return folder / "model.safetensors", ["see", "武松", "--model", folder, "--out", folder / "report.html"]


def budget(folder: Path, model: Path) -> tuple[Path, list[object]]:
    save_budget(Budget(((5,) * 5,) * 2, (torch.ones(5),) * 2, 5, 0, 0.9, ((4, 4),) * 2, 31), folder / "budget.json")
    args = ["write", "--prompt", "武", "--length", 2, "--model", model, "--budget", folder / "budget.json"]
    return folder / "budget.json", args


def parquet(folder: Path, model: Path) -> tuple[Path, list[object]]:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed (the parquet extra)")
    writer = pytest.importorskip("pyarrow.parquet")
    writer.write_table(arrow.table({"text": [TEXT] * 3}), folder / "corpus.parquet")
    out, corpus = folder / "out.csv", folder / "corpus.parquet"
    args = ["measure", "--file", corpus, "--out", out, "--measures", "entropy", "--model", model, "--restart"]
    return corpus, [*args, "--max-tokens", 40]


KINDS: dict[str, Callable[[Path, Path], tuple[Path, list[object]]]] = {
    "see": see, "write": budget, "measure": parquet
}  # fmt: skip


@pytest.mark.thorough_except("see", "write")
@pytest.mark.parametrize("kind", KINDS)
def test_a_command_on_a_damaged_file(headwise: Command, kind: str, model_folder: Path, tmp_path: Path) -> None:
    path, args = KINDS[kind](tmp_path, model_folder)
    assert headwise(*args).code == 0
    refused(headwise, args, path, path.read_bytes(), seed=1)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["training.safetensors", "heads.jsonl"])
def test_a_training_that_continues_from_a_damaged_file(headwise: Command, name: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    args: list[object] = ["train", tmp_path / "text.txt", "--out", tmp_path / "run", *OPTIONS]
    done = headwise(*args)
    assert done.code == 0, done.err
    path = tmp_path / "run" / name
    refused(headwise, args, path, path.read_bytes(), seed=2)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["manifest.json", "unit-000000.json"])
def test_a_measurement_that_continues_from_a_damaged_file(
    headwise: Command, name: str, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, out = tmp_path / "text.txt", tmp_path / "out.csv"
    corpus.write_text(TEXT, encoding="utf-8")
    args: list[object] = [
        "measure", "--file", corpus, "--out", out, "--measures", "entropy", "--max-tokens", 40, "--model", model_folder,
    ]  # fmt: skip
    with monkeypatch.context() as stopped:  # before the table is written
        stopped.setattr(Units, "remove", lambda self: None)
        stopped.setattr("headwise.corpus.result.Output.write", lambda self, parts, about: None)
        assert headwise(*args).code == 0
    folder, kept = Units(out).folder, tmp_path / "kept"
    shutil.copytree(folder, kept)
    assert headwise(*args).code == 0
    table = out.read_bytes()
    told = 0
    for data in damaged((kept / name).read_bytes(), TIMES, seed=3):
        out.unlink(missing_ok=True)
        shutil.copytree(kept, folder, dirs_exist_ok=True)
        (folder / name).write_bytes(data)
        done = headwise(*args)
        assert "Traceback" not in done.err
        if done.code == 0:  # nothing that counts was damaged
            assert out.read_bytes() == table
            continue
        lines = done.err.splitlines()
        assert done.code == 2
        assert [name in line for line in lines if line.startswith("error: ")] == [True]
        assert not out.exists()
        told += 1
    assert (told > 0) == (name == "manifest.json")  # a damaged unit is measured again
