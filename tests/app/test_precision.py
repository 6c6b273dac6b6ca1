"""`scripts/precision.py`: what it calls an error is one, and half precision does what docs/precision.md concludes."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from headwise.errors import KernelError

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "precision.py"
PAGE = ROOT / "docs" / "precision.md"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("precision", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["precision"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


precision = load()
HALVES = [mode for mode in precision.MODES if mode.autocast is None and mode.dtype.itemsize == 2]
PLAIN = [mode for mode in precision.MODES if mode.autocast is None]


def errors(kernel, mode, n=67, factor=1, seed=0):
    try:
        return precision.attend_errors(kernel, mode, n, factor, seed)
    except KernelError as refused:
        pytest.skip(str(refused))


def test_an_error_is_an_error():
    truth = torch.tensor([3.0, -4.0], dtype=torch.float64)
    off = (truth + torch.tensor([0.0, 0.5])).float()
    assert precision.frobenius(off, truth) == pytest.approx(0.1)
    assert precision.largest(off, truth) == pytest.approx(0.5)
    assert precision.median([{"a": 3.0}, {"a": 1.0}, {"a": 2.0}]) == {"a": 2.0}


def test_float64_truth_is_the_operator_of_pytorch():
    inputs, truth = precision.case(torch.float64, 13, 1, 0)
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves)
    assert precision.frobenius(out, truth.out) < 1e-14
    for found, expected in zip(torch.autograd.grad(out, leaves, inputs[3]), truth.gradients, strict=True):
        assert precision.frobenius(found, expected) < 1e-13


@pytest.mark.parametrize("factor", precision.FACTORS)
@pytest.mark.parametrize("mode", PLAIN, ids=lambda mode: mode.name)
@pytest.mark.parametrize("kernel", precision.OURS)
def test_no_kernel_is_worse_than_twice_pytorch(kernel, mode, factor):
    ours, peer = errors(kernel, mode, factor=factor), errors(precision.PEER, mode, factor=factor)
    for name in precision.OUTPUTS:
        assert ours[name] <= 2 * peer[name], name


@pytest.mark.parametrize("mode", HALVES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("kernel", precision.OURS)
def test_statistics_are_float32_in_half_precision(kernel, mode):
    """An hundredth of what the same statistics lose in the dtype of the inputs."""
    ours, peer = errors(kernel, mode), errors(precision.PEER, mode)
    for name in precision.STATISTICS:
        assert ours[f"{name} max"] <= 0.01 * peer[f"{name} max"], name
        assert ours[f"{name} max"] <= 1e-4


@pytest.mark.thorough_except(
    "MultiHeadAttention-float32", "MultiHeadAttention-float16", "MultiHeadAttention-autocast float16"
)
@pytest.mark.parametrize("mode", precision.MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("kind", ["MultiHeadAttention", "TransformerBlock"])
def test_layers_are_as_exact_as_those_of_pytorch(kind, mode):
    ours, peer = (precision.layer_errors(kind, maker, mode, 31, 1, 0) for maker in ("headwise", precision.PEER))
    for name in ("out ‖·‖", "dx ‖·‖", "dW ‖·‖"):
        assert 0 < ours[name] <= 1.5 * peer[name], name


def test_peer_is_the_same_layer():
    attention = precision.MultiHeadAttention(24, precision.HEADS, bias=True)
    x = torch.randn(1, 7, 24, dtype=torch.float64)
    for ours in (attention, precision.block_of(attention)):
        assert torch.allclose(precision.Peer(ours).double()(x), ours.double()(x), atol=1e-12)


def _heads(text: str) -> list[str]:
    return [line for line in text.splitlines() if re.match(r"\| (logits|dtype|layer) ", line)]


def _rows(text: str) -> list[list[str]]:
    """The words at the beginning of each row of numbers."""
    cells = [line[2:-2].split(" | ") for line in text.splitlines() if re.match(r"\| .*e-\d", line)]
    return [[cell for cell in row if not re.match(r"\d", cell)] for row in cells]


@pytest.mark.thorough
def test_script_prints_the_tables_of_the_page():
    done = subprocess.run([sys.executable, str(SCRIPT), "--quick"], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert "nan" not in done.stdout
    page = PAGE.read_text(encoding="utf-8")
    quick, whole = _heads(done.stdout), _heads(page)
    assert len(quick) == 4
    assert [head for head in whole if "n = " not in head] == [head for head in quick if "n = " not in head]
    if "Refused:" not in done.stdout:  # where a kernel is not compiled, its rows are missing
        assert _rows(done.stdout) == _rows(page)
