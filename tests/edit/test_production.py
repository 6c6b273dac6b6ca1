"""`scripts/production.py`: fewer heads in the folder, which plain transformers reads with equal logits."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

SCRIPT = Path(__file__).parents[2] / "scripts" / "production.py"


@pytest.mark.thorough
@pytest.mark.parametrize(("options", "heads"), [((), ("6", "3")), (("--merge",), ("8", "2"))])
def test_what_is_served_has_fewer_heads(tmp_path: Path, options: tuple[str, ...], heads: tuple[str, str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The tiger sleeps, and the wolf watches the tiger. " * 200, encoding="utf-8")
    command = [sys.executable, str(SCRIPT), str(text), "--steps", "2", "--heal", "1", "--out", str(tmp_path / "served")]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    table = [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]
    assert (table[0]["heads"], table[0]["KV heads"]) == ("8", "4")
    assert all((row["heads"], row["KV heads"]) == heads for row in table[1:])
    assert f"{heads[0]} heads, {heads[1]} KV heads in config.json" in done.stdout
    assert "plain transformers: largest difference of logits" in done.stdout
