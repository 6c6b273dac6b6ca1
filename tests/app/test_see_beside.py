"""`headwise see --beside`: a second text on the page of the first."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import headwise as hw
from commands import Command


def data(page: Path) -> dict[str, Any]:
    """What a page shows."""
    code = re.search(r'id="report">(.*?)</script>', page.read_text(encoding="utf-8"), re.S)
    assert code is not None
    return json.loads(code[1])


def test_a_text_a_file_and_standard_input_are_read_alike(headwise: Command, model_folder: Path, tmp_path: Path) -> None:
    page, file = tmp_path / "report.html", tmp_path / "second.txt"
    file.write_text("武松打狼。", encoding="utf-8")
    see = ("see", "武松打虎。", "--model", model_folder, "--out", page, "--no-open", "--beside")
    pages = []
    for given, answer in (("武松打狼。", None), (file, None), ("-", "武松打狼。")):
        done = headwise(*see, given, answer=answer)
        assert done.code == 0, done.err
        pages.append(data(page))
        assert [passage["title"] for passage in pages[-1]["passages"]] == ["武松打虎。", "武松打狼。"]
    assert pages[0] == pages[1] == pages[2]


@pytest.mark.parametrize(("given", "why"), [
    ("second.txt", "--beside 'second.txt': there is no such file"), (".", "--beside '.': is a folder"),
    ("", "beside: the second text is empty"), ("-", "--beside '-': standard input is the first text already"),
    ("latin.txt", "'latin.txt' is not UTF-8"),
])  # fmt: skip
def test_a_wrong_second_text_is_refused_before_the_first_is_read(
    headwise: Command, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("latin.txt").write_bytes("Müller".encode("latin-1"))
    text = "-" if given == "-" else "武松打虎。"
    done = headwise("see", text, "--model", model_folder, "--beside", given, answer="武松" if text == "-" else None)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {why}")
    assert not Path("report.html").exists()


def test_a_long_second_text_is_read_in_windows_and_one_that_is_too_long_is_refused_first() -> None:
    subject = hw.load_model()
    assert subject.context is not None
    long = "水浒传。" * (subject.context // 4 + 7)
    shown = hw.see("武松", subject, beside=long, cells=32).passages[1]
    assert len(shown.tokens) == len(long)
    assert shown.maps.shape[-1] <= 32
    read = []
    with pytest.raises(hw.TextError, match="see reads at most"):
        hw.see("武松", subject, beside="水" * 3_000_000, progress=lambda *step: read.append(step))
    assert read == []
