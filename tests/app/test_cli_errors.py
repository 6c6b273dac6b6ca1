"""What is wrong with the arguments comes as one line and exit code 2, whoever finds it; a bare command shows help."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

from commands import Command
from headwise.base.files import taken
from headwise.cli import program
from headwise.cli.program import app
from headwise.cli.see import WIDE, measures
from headwise.stats import GIVEN, MEASURES

NAMES = list(get_command(app).commands)


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize("name", NAMES)
def test_an_option_that_no_command_has(headwise: Command, name: str) -> None:
    done = headwise(name, "--wings")
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(rf"error: No such option:? '?--wings.*; headwise {name} -h lists the options\n", done.err)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["sea"], ["No such command 'sea'", "; headwise -h"]),
        (["--wings"], ["No such option", "--wings", "; headwise -h"]),
        (["train", "--out", "o"], ["Missing argument", "; headwise train -h"]),
        (["train", "a.txt"], ["Missing option", "--out", "; headwise train -h"]),
        (["see", "--cells", "5"], ["--cells", "8", "; headwise see -h"]),
        (["trace", "--seq", "1.5"], ["--seq", "integer"]),
        (["plan", "layer", "--seq"], ["--seq", "requires an argument"]),
        (["plan", "gpt-3"], ["No such command", "gpt-3", "; headwise plan -h"]),
        (["plan", "model", "gpt-3", "4"], ["extra argument", "4"]),
        (["claims", "--htm", "x"], ["--htm", "--html"]),
    ],
)
def test_what_typer_finds_is_one_line_too(headwise: Command, args: list[str], words: list[str]) -> None:
    done = headwise(*args)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ")
    assert len(done.err.splitlines()) == 1
    for word in words:
        assert word in done.err, done.err


@pytest.mark.thorough
def test_a_bare_command_shows_its_help(headwise: Command) -> None:
    bare, asked = headwise(), headwise("--help")
    assert bare == asked
    assert bare.code == 0
    assert all(name in bare.out for name in NAMES)


def test_an_interruption_that_typer_turns_into_its_own_is_one(
    headwise: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object, **options: object) -> None:
        raise typer.Abort

    monkeypatch.setattr("headwise.cli.program.command_line", lambda: interrupted)
    assert headwise("measures") == (130, "", "Interrupted.\n")
    assert headwise("measures", "--lang", "zh") == (130, "", "已中断。\n")


@pytest.mark.parametrize(
    "args",
    [
        ["see", "武", "--out", "folder"],
        ["plan", "trade-off", "64", "--plot", "folder"],
        ["claims", "--html", "folder"],
        ["prune", "--file", "x", "--remove", "1", "--dry-run", "--png", "folder"],
        ["prune", "--file", "x", "--remove", "1", "--dry-run", "--json", "folder"],
        ["convert", "--file", "x", "--num-kv-heads", "1", "--dry-run", "--json", "folder"],
        ["budget", "--file", "x", "--out", "folder"],
        ["budget", "--file", "x", "--dry-run", "--json", "folder"],
    ],
)
def test_a_folder_where_a_file_is_to_be_written_is_told_before_anything_else(
    headwise: Command, args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    done = headwise(*args)
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(r"error: --\w+ 'folder': is a folder; expected a file name, such as \w+\.\w+\n", done.err)
    assert [path.name for path in tmp_path.rglob("*")] == ["folder"]


OUTPUTS = [
    ["see", "武", "--model", "absent", "--out"],
    ["see", "武", "--model", "absent", "--png"],
    ["train", "absent.txt", "--out"],
    ["reconstruct", "absent.txt", "--out"],
    ["measure", "--file", "text.txt", "--model", "absent", "--out"],
    ["measure", "--file", "text.txt", "--model", "absent", "--out", "new.csv", "--png"],
    ["plan", "trade-off", "absent", "--plot"],
    ["claims", "--only", "absent", "--html"],
    *(
        [*command, "--file", "absent.txt", "--model", "absent", *more]
        for command in (["prune", "--remove", "1"], ["convert", "--num-kv-heads", "1"], ["budget"])
        for more in (["--out"], ["--out", "new", "--json"])
    ),
    ["prune", "--remove", "1", "--file", "absent.txt", "--model", "absent", "--out", "new", "--png"],
]


@pytest.mark.thorough_beyond(6)
@pytest.mark.skipif(os.name != "posix", reason="names of another kind")
@pytest.mark.parametrize("args", OUTPUTS, ids=" ".join)
@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("text.txt/new/out.csv", "'text.txt' is not a folder"),
        ("y" * 252 + ".csv", "File name too long"),
        ("/proc/headwise/out.csv", "No such file or directory"),
    ],
    ids=["below a file", "too long", "proc"],
)
def test_what_cannot_be_written_is_told_before_anything_is_read(
    headwise: Command, args: list[str], path: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("武松打虎" * 99, encoding="utf-8")
    path = path.replace(".csv", ".png") if args[-1] == "--png" else path
    done = headwise(*args, path)
    assert (done.code, done.out) == (2, "")
    assert "cannot be written" in done.err
    assert why in done.err
    assert args[-1].removeprefix("--") in done.err
    assert len(done.err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


@pytest.mark.skipif(os.name != "posix", reason="no such locks")
@pytest.mark.parametrize(
    "args",
    # Without budget, which opens the model first, and reconstruct, whose result is a file in the folder.
    [args for args in OUTPUTS if args[-1] == "--out" and args[0] not in ("budget", "reconstruct")],
    ids=" ".join,
)
def test_a_place_that_another_run_holds_is_refused(
    headwise: Command, args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("武松打虎" * 99, encoding="utf-8")
    folder = args[0] in ("train", "prune", "convert")
    out = tmp_path / ("out" if folder else "out.csv")
    with taken(out, "--out", folder=folder):
        done = headwise(*args, out)
    assert (done.code, done.out) == (2, "")
    assert f"another run (process {os.getpid()}) is writing it" in done.err
    assert len(done.err.splitlines()) == 1


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize(("word", "more"), [("true", 4 * 64), ("True", 256), ("1", 256), ("qo", 128), ("FALSE", 0)])
def test_what_is_true_or_false_may_be_written_so(headwise: Command, word: str, more: int) -> None:
    layer = ("plan", "layer", "--d-model", "64", "--num-heads", "4")
    done = headwise(*layer, "--set", f"bias={word}", "--set", "qk-norm = true", "--markdown")
    assert done.code == 0, done.err
    assert f"{4 * 64 * 64 + more + 2 * 16:,} parameters" in done.out
    for wrong in ("qk_norm=2", "qk_norm=yes", "bias=perhaps"):
        done = headwise(*layer, "--set", wrong)
        assert (done.code, done.out) == (2, "")
        assert len(done.err.splitlines()) == 1
        assert "true" in done.err.lower()
        assert wrong.partition("=")[2] in done.err


@pytest.mark.parametrize("columns", [60, 80, 109, 110, 200])
def test_measures_are_whole_at_any_width(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    measures()
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    kinds: dict[str, Any] = {**MEASURES, **GIVEN}
    assert [line.split()[0] for line in lines[1:] if line[1] != " "] == list(kinds)  # a name is never cut
    cells = [re.split(r" {2,}", line.strip()) for line in lines]
    words = " ".join(cell for row in cells for cell in row[1 if row[0] in kinds else 0 :])
    assert "…" not in words
    if columns < WIDE:  # one column beside the names, so that its lines join to what was said
        for kind in kinds.values():
            assert f"{kind.unit}, {kind.range}; {kind.source}" in words
    else:
        for kind in kinds.values():
            assert any(kind.unit in row and kind.range in row for row in cells)


def test_the_way_out_is_an_option_that_the_command_has(headwise: Command) -> None:
    why = "error: d_model=8 is not divisible by num_heads=3; or give"
    assert headwise("trace", "--num-heads", 3).err == f"{why} --set head_dim=…\n"
    assert headwise("plan", "layer", "--d-model", 8, "--num-heads", 3).err == f"{why} --head-dim\n"
    assert "或给出 --set head_dim=…" in headwise("trace", "--num-heads", 3, "--lang", "zh").err


@pytest.mark.thorough
def test_config_json_stands_for_its_folder(headwise: Command, tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_embd": 12, "n_layer": 2, "n_head": 3, "vocab_size": 37, "n_positions": 11}
    (tmp_path / "config.json").write_text(json.dumps(config))
    by_file, by_folder = (headwise("plan", "model", path) for path in (tmp_path / "config.json", tmp_path))
    assert by_file == by_folder
    assert by_file.code == 0
    for command in (["see", "hi"], ["write"], ["convert", "--num-kv-heads", 1, "--file", __file__, "--dry-run"]):
        by_file, by_folder = (headwise(*command, "--model", path) for path in (tmp_path / "config.json", tmp_path))
        assert by_file == by_folder
        assert by_file.code == 2
        assert "truncated" not in by_file.err


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["trace", "claims", "tour", "check", "reconstruct", "train demonstration"])
def test_a_command_of_the_textbook_says_what_to_install(
    headwise: Command, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwise.cli.program.commands", dict)
    program._commands.cache_clear()  # it keeps what was imported
    assert f"│ {name} " in headwise("--help").out
    wanted = f"error: headwise {name} requires headwise-textbook: pip install headwise-textbook\n"
    assert headwise(*name.split()) == (2, "", wanted)
    assert headwise(*name.split(), "--help") == (2, "", wanted)
    assert headwise(*name.split(), "--lang", "zh").err.endswith(
        "需要 headwise-textbook：pip install headwise-textbook\n"
    )
    program._commands.cache_clear()
