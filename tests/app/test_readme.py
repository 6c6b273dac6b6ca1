"""The Python of both READMEs, and the example for many devices in docs/scale.md, run as printed."""

import io
import re
import socket
import tokenize
from pathlib import Path

import pytest

from forked import Program

ROOT = Path(__file__).parents[2]
DISTRIBUTED = "torchrun --nproc-per-node 2 this.py"


def blocks(name: str) -> list[str]:
    """The blocks of Python in a file of the repository's root."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def code(block: str) -> list[str]:
    """The tokens of a block without its comments."""
    found = tokenize.generate_tokens(io.StringIO(block).readline)
    return [token.string for token in found if token.type not in (tokenize.COMMENT, tokenize.NL)]


def run(folder: Path, source: str, processes: int = 1) -> None:
    """A program in a folder; of several processes in the environment that torchrun gives them."""
    script = folder / "this.py"
    script.write_text(f"import os\nos.chdir({str(folder)!r})\n{source}", encoding="utf-8")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        world = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(processes)}
    ranks = [
        Program([script], folder / str(at), environment={**world, "RANK": str(at), "LOCAL_RANK": str(at)})
        for at in range(processes)
    ]
    ended = [rank.wait(300) for rank in ranks]
    assert [code for code, _, _ in ended] == [0] * processes, ended


def test_both_languages_have_the_same_code():
    assert [code(block) for block in blocks("README.zh.md")] == [code(block) for block in blocks("README.md")]


def test_a_readme_is_short():
    assert all(
        len((ROOT / name).read_text(encoding="utf-8").splitlines()) < 150 for name in ("README.md", "README.zh.md")
    )


@pytest.mark.parametrize("name", ["README.md", "README.zh.md"])
def test_files_that_a_readme_names_exist(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    found = re.findall(r"\]\(([^)#]+)\)", text) + re.findall(r"python (scripts/\w+\.py)", text)
    assert len(found) > 15
    assert [path for path in found if not (ROOT / path).exists()] == []


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
    run(tmp_path, block, 2)
