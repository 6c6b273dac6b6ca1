"""docs/heads.md and the script that makes it; `headwise train --watch-heads`, whose record it shows."""

import importlib
import json
import random
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from commands import forked
from forked import Program

ROOT = Path(__file__).parents[2]
SCRIPT, PAGE = ROOT / "scripts" / "heads_tour.py", ROOT / "docs" / "heads.md"
pytestmark = pytest.mark.thorough  # a training and the whole tour, for all of them
SECTIONS = ("roles", "alike", "information", "importance", "pruning", "rollout", "knockout", "encoder", "training")

pytest.importorskip("matplotlib", reason="pictures need the view extra")
pytest.importorskip("scipy", reason="groups need the scipy extra")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, files = tmp_path_factory.mktemp("texts"), []
    chinese = ["武松打虎，", "林冲夜奔。", "宋江道：“我便去。”", "众头领都到山上，", "吃了三碗酒。\n"]
    english = [
        "the king is here, ",
        "my lord; ",
        "what say you to the queen? ",
        "He went away.\n",
        "O night, good night! ",
    ]
    for name, words, count in (("one", chinese, 1600), ("two", english, 1800)):
        files.append(folder / f"{name}.txt")
        files[-1].write_text("".join(random.Random(name).choices(words, k=count)), encoding="utf-8")
    return files


@pytest.fixture(scope="module")
def watched(texts: list[Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Folder of a run with --watch-heads, and what was printed."""
    out = tmp_path_factory.mktemp("run")
    sizes = ("--d-model", "16", "--num-layers", "2", "--num-heads", "4", "--d-ff", "20", "--context", "12")
    steps = ("--steps", "4", "--eval-every", "2", "--batch-size", "3", "--precision", "float32")
    said = tmp_path_factory.mktemp("said")
    done = forked(said, "train", texts[1], "--out", out, *sizes, *steps, "--watch-heads", COLUMNS="200")
    assert done.code == 0, done.err
    return out, done.out


def blocks(page: str) -> dict[str, str]:
    """What stands between the markers of each section."""
    return {
        name: found[1]
        for name in SECTIONS
        if (found := re.search(f"<!-- {name}: [^>]*-->\n(.*?)<!-- end of {name} -->", page, re.DOTALL))
    }


def headers(markdown: str) -> list[str]:
    """First lines of the tables."""
    lines = markdown.splitlines()
    return [a for a, b in pairwise(lines) if b.startswith("| ---")]


def test_a_watched_training_tells_where_its_record_and_picture_lie(watched: tuple[Path, str]) -> None:
    out, printed = watched
    assert f"Wrote the roles of all heads at each evaluation to {out / 'heads.jsonl'}." in printed
    assert f"Wrote a plot of the roles over training to {out / 'heads.png'}." in printed
    lines = [json.loads(line) for line in (out / "heads.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines[1:]] == [0, 2, 4]
    assert (out / "heads.png").read_bytes().startswith(b"\x89PNG")


def test_the_script_makes_what_the_page_shows(texts: list[Path], watched: tuple[Path, str], tmp_path: Path) -> None:
    pictures = tmp_path / "pictures"
    call = (SCRIPT, *texts, "--quick", "--pictures", pictures, "--training", watched[0])
    code, out, err = Program(call, tmp_path / "said").wait(300)
    assert code == 0, err
    made = dict(re.findall(r"^## (\w+)\n\n(.*?)(?=^## |\Z)", out, re.DOTALL | re.MULTILINE))
    shown = blocks(PAGE.read_text(encoding="utf-8"))
    assert tuple(made) == tuple(shown) == SECTIONS
    absent = {name for name, text in made.items() if text.startswith("Not run:")}
    assert absent <= {"encoder"}
    for name in set(SECTIONS) - absent:
        assert headers(made[name]), name
        assert headers(made[name]) == headers(shown[name]), name
    names = {path.name for path in pictures.iterdir()}
    missing = {"heads_encoder.png"} if "encoder" in absent else set()
    assert names == {f"heads_{x}.png" for x in ("alike", "encoder", "pruning", "training")} - missing
    assert all((pictures / name).read_bytes().startswith(b"\x89PNG") for name in names)


def test_pictures_and_sections_of_the_page_are_there() -> None:
    page = PAGE.read_text(encoding="utf-8")
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page)
    assert len(pictures) >= 4
    for picture in pictures:
        assert (PAGE.parent / picture).read_bytes().startswith(b"\x89PNG"), picture
    assert all(text.strip() and "Not run" not in text for text in blocks(page).values())


def test_a_block_of_the_page_is_replaced_and_a_missing_one_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    marked: Any = importlib.import_module("blocks")
    tour: Any = importlib.import_module("heads_tour")
    assert tuple(tour.SECTIONS) == SECTIONS
    marks = tour.BEGIN.format("roles", "roles"), tour.END.format("roles")
    page, file = f"a\n{marks[0]}\nold \\1\n{marks[1]}\nb {marks[1]}\n", tmp_path / "page.md"
    file.write_text(page, encoding="utf-8")
    marked.write(file, *marks, r"| new \1 |")
    assert file.read_text(encoding="utf-8") == page.replace("old \\1", r"| new \1 |")
    for begin, end in (("<!-- alike -->", marks[1]), (marks[0], "<!-- end of alike -->"), (marks[1], marks[0])):
        with pytest.raises(SystemExit, match=r"page\.md lacks"):
            marked.write(file, begin, end, "x")
    for name in ("heads_tour", "blocks"):
        sys.modules.pop(name)
