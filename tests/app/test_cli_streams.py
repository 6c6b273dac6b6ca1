"""Standard input and output: UTF-8 in every locale, `-` as a file, and a pipe whose reader leaves early."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import headwise as hw
from commands import Command
from headwise.cli import main
from headwise.cli.options import typed
from headwise.errors import TextError

PROGRAM = sys.executable, "-m", "headwise"


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_the_version_is_printed_without_a_command(headwise: Command, option: str) -> None:
    assert headwise(option) == (0, f"headwise {hw.__version__}\n", "")


@pytest.mark.thorough
def test_a_text_on_standard_input(headwise: Command, model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("武松打虎", encoding="utf-8")
    see = ("see", "--model", model_folder, "--out", tmp_path / "report.html")
    given = headwise(*see, "武松打虎")
    assert given.code == 0, given.err
    assert headwise(*see, "-", answer="武松打虎") == given
    assert headwise(*see, "--file", "-", answer="武松打虎") == given


@pytest.mark.parametrize(("given", "why"), [("", "standard input is empty"), (None, "standard input is closed")])
@pytest.mark.parametrize("option", ["TEXT", "--file"])
def test_standard_input_without_a_text(headwise: Command, given: str | None, why: str, option: str) -> None:
    done = headwise("see", *(["-"] if option == "TEXT" else ["--file", "-"]), "--model", "absent", answer=given)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {option} '-': {why}")


def test_bytes_on_standard_input_that_are_not_utf8(headwise: Command) -> None:
    done = headwise("see", "-", answer="武松".encode("gb18030"))
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: 'standard input' is not UTF-8: byte 0xce at offset 0")


@pytest.mark.skipif(os.name != "posix", reason="arguments of another kind")
@pytest.mark.parametrize("option", ["TEXT", "--beside"])
def test_bytes_of_an_argument_that_are_not_utf8(option: str) -> None:
    assert typed(os.fsdecode("武松".encode()), option) == "武松"
    with pytest.raises(TextError, match=f"'{option}' is not UTF-8: byte 0xff at offset 2;"):
        typed("ab\udcff", option)


@pytest.mark.thorough
def test_a_report_on_standard_output_is_alone_there(model_folder: Path, tmp_path: Path) -> None:
    command = [*PROGRAM, "see", "武松打虎", "--model", model_folder, "--out", "-"]
    done = subprocess.run(command, capture_output=True, cwd=tmp_path, env={**os.environ, "COLUMNS": "120"})
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.startswith(b"<!doctype html>")
    assert done.stdout.rstrip().endswith(b"</html>")
    assert "entropy" in done.stderr.decode()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "args",
    [
        ["measure", "--file", "-", "--out", "new.csv"],
        ["measure", "--file", "text.txt", "--out", "-"],
        ["prune", "--file", "text.txt", "--remove", "1", "--out", "new", "--json", "-"],
        ["plan", "trade-off", "8", "--plot", "-"],
        ["claims", "--json", "--html", "-"],
        ["prune", "--file", "-", "--remove", "1", "--out", "new"],
    ],
    ids=" ".join,
)
def test_a_dash_is_refused_where_it_cannot_be(
    headwise: Command, args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = headwise(*args)
    assert (done.code, done.out) == (2, "")
    assert f"error: {args[args.index('-') - 1]} '-': " in done.err
    assert not list(tmp_path.iterdir())


@pytest.mark.thorough
def test_a_text_to_prune_by_comes_from_standard_input(headwise: Command, model_folder: Path, tmp_path: Path) -> None:
    text = "武松又来打虎，再来？" * 300
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    prune = ["prune", "--model", model_folder, "--heads", "0.1", "--windows", "2", "--orders", "1", "--dry-run"]
    from_file = headwise(*prune, "--file", tmp_path / "text.txt", "--json", tmp_path / "file.json")
    assert from_file.code == 0, from_file.err
    from_pipe = headwise(*prune, "--file", "-", "--json", tmp_path / "pipe.json", answer=text)
    assert from_pipe.code == 0, from_pipe.err
    losses = [json.loads((tmp_path / name).read_text())["plan"]["curve"]["loss"] for name in ("file.json", "pipe.json")]
    assert losses[0] == losses[1]


@pytest.mark.thorough
@pytest.mark.skipif(os.name != "posix", reason="locales of another kind")
@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_any_locale_prints_and_reads_utf8(model_folder: Path, tmp_path: Path, encoding: str) -> None:
    """Python's own UTF-8 mode is off, so that the C locale is ASCII; PYTHONIOENCODING is honoured, by escapes."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHONIO"))}
    env |= {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "COLUMNS": "120"}
    env |= {"PYTHONIOENCODING": "ascii"} if encoding == "ascii" else {}
    command = [*PROGRAM, "see", "武松打虎", "--model", model_folder, "--lang", "zh", "--out", tmp_path / "report.html"]
    done = subprocess.run(command, capture_output=True, env=env)
    assert done.returncode == 0, done.stderr.decode()
    out = done.stdout.decode(encoding)
    assert "4 个字符".encode("ascii", "backslashreplace").decode() in out if encoding == "ascii" else "4 个字符" in out
    assert "<title>武松打虎" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.thorough
@pytest.mark.skipif(os.name != "posix", reason="pipes of another kind")
def test_a_pipe_that_closes_early_loses_nothing(model_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    shell = (
        f"'{sys.executable}' -m headwise see 武松 --model '{model_folder}' --out '{out}' 2>'{tmp_path}/err' | head -1"
    )
    done = subprocess.run(["bash", "-o", "pipefail", "-c", shell], capture_output=True, text=True)
    assert (done.returncode, (tmp_path / "err").read_text()) == (0, "")
    assert "2 layers" in done.stdout
    assert out.read_bytes().endswith(b"</html>\n")


@pytest.mark.thorough
@pytest.mark.skipif(os.name != "posix", reason="pipes of another kind")
def test_a_pipe_that_is_closed_from_the_start(model_folder: Path, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    for args in (["see", "武松", "--out", str(tmp_path / "report.html")], ["write", "--length", "3"]):
        command = [*PROGRAM, *args, "--model", str(model_folder)]
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
        assert (done.returncode, done.stderr) == (0, "")
    os.close(writing)
    assert (tmp_path / "report.html").read_bytes().endswith(b"</html>\n")


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
@pytest.mark.parametrize("arguments", [("plan", "model", "gpt-2-small", "--json"), ("plan", "list", "--markdown")])
def test_output_that_cannot_be_written_is_an_error(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        found = subprocess.run([*PROGRAM, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (found.returncode, found.stderr) == (2, "error: No space left on device\n")


def test_streams_that_are_closed_lose_nothing_else(headwise: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert headwise("measures") == (0, "", "")
    monkeypatch.setattr(sys, "stderr", None)
    assert headwise("measures", "--absent") == (2, "", "")


@pytest.mark.parametrize("columns", ["0", "1", "20"])
def test_tables_keep_their_columns_however_narrow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys, "argv", ["headwise", "measures"])
    main()
    assert "Olsson" in capsys.readouterr().out


def test_a_text_in_utf_16_is_named(headwise: Command, tmp_path: Path) -> None:
    for encoding, byte in (("utf-16-le", "ff"), ("utf-16-be", "fe")):
        (tmp_path / "text.txt").write_bytes(f"\ufeff武松打虎{encoding}".encode(encoding))
        found = headwise("see", "--file", tmp_path / "text.txt", "--no-open")
        assert found.code == 2
        assert f"byte 0x{byte} at offset 0; convert it, for example with iconv -f UTF-16 -t UTF-8" in found.err


def test_a_model_of_transformers_cannot_write(headwise: Command, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    found = headwise("write", "--model", tmp_path)
    assert found.code == 2
    assert "is a model of transformers; expected a checkpoint of headwise" in found.err
