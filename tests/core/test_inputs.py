"""Inputs are regular files: a pipe, a device or a socket at any path argument is one error, at once."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headwise as hw
from headwise.analysis.history import HeadHistory
from headwise.base.files import sha256_of
from headwise.corpus import measure_corpus
from headwise.corpus.passages import Passages
from headwise.errors import HeadwiseError
from headwise.lm import load_checkpoint, load_model

READS: dict[str, Callable[[Path], Any]] = {
    "text": lambda path: hw.see(file=path), "checkpoint": load_checkpoint, "model": load_model,
    "map": hw.AttentionMap.load, "CoNLL-U": hw.analysis.read_conllu,
    "csv": lambda path: hw.HeadTable.load(path.with_suffix(".csv")),
    "json": lambda path: hw.HeadTable.load(path.with_suffix(".json")),
    "parquet": lambda path: hw.HeadTable.load(path.with_suffix(".parquet")), "record of heads": HeadHistory.read,
    "sweep": lambda path: Passages.load(path), "checksum": sha256_of,
    "corpus": lambda path: measure_corpus(None, path, path.parent / "o.csv", device="cpu"),
}  # fmt: skip


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def plug(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(os.fspath(path))


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
@pytest.mark.parametrize("make", [pipe, device, plug])
@pytest.mark.parametrize("what", READS)
def test_what_is_no_file_is_refused_at_once(
    what: str, make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    for suffix in ("", ".csv", ".json", ".parquet", ".passages.json"):
        make(Path(f"x{suffix}"))
    with pytest.raises(HeadwiseError, match="pipe or a device"):
        READS[what](Path("x"))


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_a_command_names_the_way_to_pipe_a_text_into_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x")
    command = [sys.executable, "-m", "headwise", "see", "--file", str(tmp_path / "x"), "--lang", "en"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode != 0, "Traceback" in done.stderr) == (True, False)
    assert "is a pipe or a device; expected a file" in " ".join(done.stderr.split())
