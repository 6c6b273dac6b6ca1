"""Model types of transformers' registry, each unlike the others; and the document of all of them."""

import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from registry_checks import CHECKS, examine
from registry_models import model_types
from registry_overrides import FAST
from registry_table import RESULTS, made_with, markdown, read, short

from parameters import thorough

FIRST, ROWS = made_with(RESULTS), read(RESULTS)
DOC = Path(__file__).parents[2] / "docs" / "model_types.md"
STORED = FIRST["transformers"] == transformers.__version__


# Of each status and each set of checks, the quickest.
QUICK = {"falcon", "bert", "dinov2", "clip", "gemma2", "llama", "bart", "git"}


@pytest.mark.thorough_except("falcon")
@pytest.mark.parametrize("name", thorough(FAST, set(FAST) - QUICK))
def test_model_type_computes_the_same_or_is_refused(name):
    row = short(examine(name))
    assert row["status"] not in ("wrong", "crash"), row.get("why") or row.get("notes")
    if STORED:
        stored = ROWS[name]
        assert (row["status"], row.get("why")) == (stored["status"], stored.get("why"))
        # What rounding makes unstable may not apply on another CPU.
        assert row.get("checks", "").replace("-", "p") == stored.get("checks", "").replace("-", "p")


def test_families_of_the_fast_part_are_seventy_and_of_every_status():
    assert len(set(FAST)) == len(FAST) == 70
    assert {ROWS[name]["status"] for name in FAST} == {"pass", "in part", "refused"}


def test_no_model_type_is_refused_for_an_argument():
    assert not [name for name, row in ROWS.items() if "calls its attention with" in str(row)]


def test_no_stored_row_is_wrong():
    assert {name for name, row in ROWS.items() if row["status"] in ("wrong", "crash")} == set()


@pytest.mark.thorough
@pytest.mark.skipif(not STORED, reason="the rows are those of another version of transformers")
@pytest.mark.parametrize("name", ["kosmos_2_5_vision_model", "xclip"])
def test_attention_that_is_looked_up_in_vain_is_not_taken_for_switched(name):
    """One looks it up with getattr, which finds nothing and stays eager; one in a copy of its configuration."""
    row = short(examine(name))
    assert row["status"] == ROWS[name]["status"] == {"kosmos_2_5_vision_model": "refused", "xclip": "pass"}[name]


@pytest.mark.skipif(not STORED, reason="the rows are those of another version of transformers")
def test_every_model_type_has_a_row():
    assert sorted(ROWS) == model_types()


def test_document_shows_the_stored_rows():
    assert list(FIRST["checks"]) == list(CHECKS)
    said = "docs/model_types.md is old: python scripts/all_families.py --write"
    assert markdown(FIRST, ROWS) in DOC.read_text(encoding="utf-8"), said


@pytest.mark.thorough
def test_the_script_of_the_document_runs_a_type_and_keeps_its_row(tmp_path):
    rows = tmp_path / "rows.jsonl"
    script = DOC.parents[1] / "scripts" / "all_families.py"
    done = subprocess.run(
        [sys.executable, str(script), "--only", "bert", "--results", str(rows)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("1 types: pass 1;")
    assert read(rows)["bert"]["status"] == "pass"
