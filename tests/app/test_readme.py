"""The Python of both READMEs, and the example for many devices in docs/scale.md, run as printed."""

import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DISTRIBUTED = "torchrun --nproc-per-node 2 this.py"


def blocks(name: str) -> list[str]:
    """The blocks of Python in a file of the repository's root."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def code(block: str) -> list[str]:
    """The tokens of a block without its comments."""
    found = tokenize.generate_tokens(io.StringIO(block).readline)
    return [token.string for token in found if token.type not in (tokenize.COMMENT, tokenize.NL)]


def run(folder: Path, source: str, *launcher: str) -> None:
    script = folder / "this.py"
    script.write_text(source, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, *launcher, str(script)], cwd=folder, capture_output=True, text=True, encoding="utf-8",
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_both_languages_have_the_same_code():
    assert [code(block) for block in blocks("README.zh.md")] == [code(block) for block in blocks("README.md")]


@pytest.mark.thorough
def test_the_blocks_run_one_after_the_other(tmp_path):
    pytest.importorskip("scipy")
    pytest.importorskip("transformers")
    run(tmp_path, "\n".join(blocks("README.md")))
    assert (tmp_path / "map.safetensors").exists()
    assert "transformer.h.1.attn" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.thorough
def test_the_block_for_many_devices_runs_on_two_processes(tmp_path):
    (block,) = (block for block in blocks("docs/scale.md") if DISTRIBUTED in block)
    run(tmp_path, block, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
