"""The record of heads over a training: what it says, and that it comes back from its file."""

import json
from pathlib import Path

import numpy as np
import pytest

from headwise.analysis.history import Alike, HeadHistory, HeadLook
from headwise.errors import CheckpointError, ConfigError


def look(step: int, labels: list[list[list[str]]], seconds: float = 0.5) -> HeadLook:
    shape = (len(labels), len(labels[0]))
    numbers = np.arange(shape[0] * shape[1], dtype=float).reshape(shape) / 7 + step
    alike = {"cka": Alike(0.1 + step, float("nan"), (("L0H1", 0.25), ("L0H0", 0.25)))}
    return HeadLook(step, seconds, {"broad": numbers, "rare": numbers * np.nan}, {"induction": -numbers}, labels, alike)


def history() -> HeadHistory:
    """Head 0 finds its role at step 20 for good, head 1 loses it for a time, head 2 has none at the end."""
    labels = [[], ["previous"], ["local"]], [["induction"], [], []], [["induction", "even"], ["previous"], []]
    return HeadHistory({"settings": {"seed": 1}}, [look(10 * (i + 1), [row]) for i, row in enumerate(labels)])


def test_a_role_holds_since_the_look_after_which_it_was_never_lost() -> None:
    found = history()
    assert [found.role(0, head) for head in range(3)] == ["induction", "previous", "none"]
    assert [found.since(0, head) for head in range(3)] == [20, 30, None]
    assert found.role(0, 2, look=0) == "local"
    assert found.until(20).since(0, 0) == 20
    assert found.until(20).since(0, 1) is None


def test_numbers_stand_by_look_layer_and_head() -> None:
    found = history()
    assert found.steps.tolist() == [10, 20, 30]
    assert found.shape == (1, 3)
    np.testing.assert_allclose(found.passage("broad")[1, 0], [20, 20 + 1 / 7, 20 + 2 / 7])
    np.testing.assert_allclose(found.repeats("induction")[2, 0, 0], -30)
    assert np.isnan(found.repeats("previous")).all()
    assert found.repeats("previous").shape == (3, 1, 3)
    np.testing.assert_allclose(found.alike("cka"), [10.1, 20.1, 30.1])
    assert np.isnan(found.alike("cka", within=True)).all()
    assert np.isnan(found.alike("cosine")).all()


def test_the_table_has_the_earliest_first() -> None:
    text = str(history())
    assert text.splitlines()[0] == "1 × 3 heads, 3 looks from step 10 to 30, 0.5 s each (median)"
    head, body = history().rows()
    assert head[:3] == ["head", "role at the end", "since step"]
    assert [row[:3] for row in body] == [["L0H0", "induction", "20"], ["L0H1", "previous", "30"], ["L0H2", "·", "—"]]
    assert [row[3] for row in body] == ["—"] * 3  # never measured
    assert "<td>L0H0</td>" in history()._repr_html_()
    assert repr(HeadHistory({}, [])) == "no looks yet"


def test_a_look_is_a_table_of_heads() -> None:
    table = history().table(look=1)
    assert list(table) == ["passage broad", "passage rare", "repeats induction"]
    np.testing.assert_allclose(table.dense("passage broad"), history().passage("broad")[1])
    assert table.title == "Heads at step 20"


def test_it_comes_back_from_its_file(tmp_path: Path) -> None:
    history().write(tmp_path / "new" / "heads.jsonl")
    found = HeadHistory.read(tmp_path / "new" / "heads.jsonl")
    assert found.about == history().about
    assert str(found) == str(history())
    np.testing.assert_allclose(found.passage("broad"), history().passage("broad"), atol=1e-5)
    assert np.isnan(found.passage("rare")).all()
    assert found.looks[1].alike["cka"].nearest == (("L0H1", 0.25), ("L0H0", 0.25))
    assert np.isnan(found.looks[1].alike["cka"].within)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["heads.jsonl"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [], "line 1: not JSON"),
        (lambda lines: ["3"], "line 1: the file: expected an object"),
        (lambda lines: [lines[1]], "its first line has another one"),
        (lambda lines: ["{"], "line 1: not JSON"),
        (lambda lines: [*lines[:3], lines[3][:50]], "line 4: not JSON"),
        (lambda lines: [lines[0], "[]"], "line 2: the file: expected an object"),
        (lambda lines: [lines[0], '{"step": 1}'], "line 2: alike is missing"),
        (lambda lines: [lines[0], lines[2], lines[1]], "expected ascending steps"),
    ],
)
def test_what_is_no_record_is_told(tmp_path: Path, change, message: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "heads.jsonl"
    history().write(path)
    path.write_text("\n".join(change(path.read_text(encoding="utf-8").splitlines())), encoding="utf-8")
    with pytest.raises(CheckpointError, match=message) as error:
        HeadHistory.read(path)
    assert "heads.jsonl" in str(error.value)


def test_missing_files_other_encodings_and_steps_that_fall_are_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="--watch-heads"):
        HeadHistory.read(tmp_path / "none.jsonl")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="not UTF-8"):
        HeadHistory.read(tmp_path / "bytes")
    with pytest.raises(ConfigError, match=r"expected ascending steps, got \[30, 10\]"):
        HeadHistory({}, [history().looks[2], history().looks[0]])


def test_lines_are_plain_json_without_nan() -> None:
    line = history().looks[0].to_json()
    found = json.loads(line, parse_constant=lambda name: pytest.fail(name))
    assert found["passage"]["rare"] == [[None, None, None]]
    assert found["passage"]["broad"][0][1] == 10.14286


@pytest.mark.parametrize("sign", ["\u2028", "\u2029", "\x85"])
def test_line_ends_of_other_kinds_in_a_text_are_read_back(tmp_path: Path, sign: str) -> None:
    found = HeadHistory({"file": f"a{sign}b"}, history().looks)
    found.write(tmp_path / "h.jsonl")
    again = HeadHistory.read(tmp_path / "h.jsonl")
    assert (again.about, len(again.looks)) == ({"file": f"a{sign}b"}, 3)
