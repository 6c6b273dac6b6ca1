"""`headwise see --beside` and `--swap`: a second text on the page of the first."""

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


@pytest.mark.thorough
def test_a_word_is_swapped_and_both_texts_are_on_the_page(headwise: Command, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    for lang, said in (("en", "query → word"), ("zh", "查询 → 词")):
        done = headwise("see", "武松打虎。", "--swap", "打=看", "--out", page, "--no-open", "--lang", lang)
        assert done.code == 0, done.err
        assert [passage["title"] for passage in data(page)["passages"]] == ["武松打虎。", "武松看虎。"]
        assert said in done.out
        assert "“打” → “看”" in done.out
        assert len(done.out.splitlines()) <= 22
    assert "“打” → “[b]”" in headwise("see", "武松打虎。", "--swap", "打=[b]", "--out", page, "--no-open").out


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize(("swap", "why", "more"), [
    ("打", "--swap '打': expected WORD=OTHER, for example tired=soft", ()),
    ("狼=看", "swap: the text does not have the word '狼'", ()), ("=看", "swap: got '' and '看'; expected two", ()),
    ("武=看", "swap: the text has '武' 2 times; expected once", ()),
    ("打=看", "give --swap or --beside, not both", ("--beside", "武松")),
])  # fmt: skip
def test_a_wrong_swap_is_one_line(
    headwise: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swap: str, why: str, more: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    done = headwise("see", "武松打虎武。", "--swap", swap, *more)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {why}")
    assert len(done.err.splitlines()) == 1
    assert not Path("report.html").exists()


@pytest.mark.thorough
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
