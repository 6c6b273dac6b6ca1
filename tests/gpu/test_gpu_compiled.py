"""The GPU kernels compile for GPUs that need not be here, and fit into their shared memory."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the GPU kernel is written in Triton")

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.gpu_compiled import CASES, SHARED, Compiled, main

ROOT = Path(__file__).parents[2]


def run(*arguments: str, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: here kernels may be those of Triton's interpreter."""
    given = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    given |= {"TRITON_CACHE_DIR": str(cache), **environment}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu_compiled", *arguments]
    return subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("case", "arch"), [("bf16 64 everything", 89), ("bf16 128 causal", 90), ("fp32 128 decode statistics", 80)]
)
def test_kernels_compile_and_fit(case: str, arch: int, tmp_path: Path) -> None:
    done = run("--case", case, "--arch", str(arch), "--json", str(tmp_path / "rows.json"), cache=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    kernels = [row["kernel"] for row in rows]
    assert kernels[0] == "attend_kernel"
    trained = CASES[case][1]
    assert trained == ({"delta_kernel", "query_gradient_kernel", "key_gradient_kernel"} <= set(kernels))
    assert ("merge_kernel" in kernels) == ("decode" in case)
    assert ("bias_gradient_kernel" in kernels) == ("everything" in case)
    for row in rows:
        assert 16 <= row["registers"] <= 255
        assert row["shared"] <= SHARED[arch]
    # bfloat16 runs on tensor cores, float32 exactly and therefore without them.
    assert (rows[0]["products"] > 0) == case.startswith("bf16")
    if case == "bf16 128 causal":
        assert rows[0]["copies"] > 0


def test_what_does_not_fit_is_named() -> None:
    row = Compiled("a call", 89, "attend_kernel", 255, 0, 114_688, 8, 44, 28)
    assert row.wrong == "114688 bytes of shared memory, and a block has 101376"
    assert replace(row, arch=90).wrong == ""


def test_a_kernel_that_does_not_compile_is_an_error(tmp_path: Path) -> None:
    site = tmp_path / "sitecustomize.py"  # breaks the compiler
    site.write_text("import triton.compiler.compiler as c\nc.ASTSource.make_ir = None\n", encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = run("--case", "bf16 128 decode", "--arch", "90", cache=tmp_path, PYTHONPATH=path)
    assert done.returncode == 1
    assert "bf16 128 decode                90  does not compile: TypeError" in done.stdout


def test_wrong_options_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SystemExit, match="TRITON_INTERPRET=1: the interpreter compiles nothing"):
        main([])
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(SystemExit, match="no such case; expected some of bf16 64 causal, "):
        main(["--case", "fp64*"])
