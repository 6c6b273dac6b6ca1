"""Layers in ONNX Runtime, OpenVINO, ExecuTorch and AOTInductor, with the numbers that they have in PyTorch.

`make exporters` installs the first three in a folder of their own.
"""

import importlib
import shutil
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore")]  # of the exporters' own
PACKAGES = {"ONNX Runtime": "onnxruntime", "OpenVINO": "openvino", "ExecuTorch": "executorch"}
ROWS = "MHA, causal", "GQA and rotary positions, padded", "MHA, two of four heads pruned"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    return importlib.import_module("exporters")


@pytest.mark.parametrize("column", PACKAGES)
@pytest.mark.parametrize("row", ROWS)
def test_a_program_has_the_same_numbers_in(column: str, row: str, script: Any, tmp_path: Path) -> None:
    pytest.importorskip(PACKAGES[column], reason="make exporters installs it")
    module, program = script.made(row)
    run = script.COLUMNS[column][1](program, tmp_path)
    assert script.difference(module, run) < 1e-5


@pytest.mark.skipif(not shutil.which("g++"), reason="AOTInductor needs a C++ compiler")
def test_a_package_of_aot_inductor(script: Any, tmp_path: Path) -> None:
    module, program = script.made("GQA and rotary positions, padded")
    assert script.difference(module, script.aot_inductor(program, tmp_path)) < 1e-5


def test_what_cannot_be_exported_is_named(script: Any) -> None:
    (cell,) = script.row("`sparse_mixture`, causal", ["torch.export"])
    assert cell.startswith("refused: ConfigError: SparseHeadMixture cannot be part of a graph")
