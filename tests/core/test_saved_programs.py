"""Programs that PyTorch has saved, in processes that have imported no more than PyTorch and headwise.kernels."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from samples import qkv
from torch import Tensor
from torch.utils import _pytree as pytree

import headwise as hw

pytestmark = [
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.torch.jit.trace"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),  # of the compiler's own
]

LOADS = """
import sys
import {first}
import {second}
folder = sys.argv[1]
program, traced = torch.export.load(folder + "/program.pt2").module(), torch.jit.load(folder + "/traced.pt")
assert "headwise.map.attention" not in sys.modules
inputs, expected, gradients = torch.load(folder + "/results.pt")
assert torch.equal(traced(*inputs), expected)
learned = [x.requires_grad_() for x in inputs]
compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
again = torch.export.export(program, tuple(learned)).module()
for call in (program, compiled, again):
    out = call(*learned)
    assert torch.equal(out, expected)
    for found, gradient in zip(torch.autograd.grad(out.square().sum(), learned), gradients, strict=True):
        assert torch.equal(found, gradient)
print("the same")
"""


class Masked(torch.nn.Module):
    """One call without, and one with tensors of a mask and a score."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        plain = hw.attend(q, k, v, mask=hw.Causal())
        return plain + hw.attend(q, k, v, mask=hw.Lengths([20, 53]), score=hw.Bias(bias))


def given() -> tuple[Tensor, ...]:
    return *qkv(), torch.linspace(-1, 1, 53).expand(1, 6, 1, 53).clone()


@pytest.mark.thorough
@pytest.mark.parametrize(("first", "second"), [("headwise.kernels", "torch"), ("torch", "headwise.kernels")])
def test_a_process_that_imports_the_kernels_loads_and_runs_them(first: str, second: str, tmp_path: Path) -> None:
    inputs = given()
    torch.export.save(torch.export.export(Masked(), inputs), tmp_path / "program.pt2")
    with torch.no_grad():
        torch.jit.save(torch.jit.trace(Masked(), inputs, check_trace=False), tmp_path / "traced.pt")
    learned = [x.clone().requires_grad_() for x in inputs]
    out = Masked()(*learned)
    torch.save((inputs, out.detach(), torch.autograd.grad(out.square().sum(), learned)), tmp_path / "results.pt")
    script = LOADS.format(first=first, second=second)
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=False)
    assert done.stdout == "the same\n", done.stderr


@pytest.mark.thorough  # it runs a C++ compiler
@pytest.mark.skipif(not shutil.which("g++"), reason="AOTInductor needs a C++ compiler")
def test_a_package_of_aot_inductor(tmp_path: Path) -> None:
    inputs = given()
    program = torch.export.export(Masked(), inputs, dynamic_shapes=(*[{2: torch.export.Dim.AUTO}] * 3, None))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "package.pt2"))
    package = torch._inductor.aoti_load_package(path)
    assert torch.equal(package(*inputs), Masked()(*inputs))


SAVED = {
    "headwise.masks.base.And": hw.masks.And,
    "headwise.masks.base.Or": hw.masks.Or,
    "headwise.masks.base.WithGap": hw.masks.WithGap,
    "headwise.masks.positional.HeadWindows": hw.masks.HeadWindows,
    "headwise.masks.positional.Causal": hw.masks.Causal,
    "headwise.masks.positional.Everything": hw.masks.Everything,
    "headwise.masks.positional.Sinks": hw.masks.Sinks,
    "headwise.masks.positional.Window": hw.masks.Window,
    "headwise.scores.base.WithGap": hw.scores.WithGap,
    "headwise.scores.kinds.SoftCap": hw.SoftCap,
}


def test_programs_name_classes_as_those_that_were_saved_before():
    assert {name: pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(name) for name in SAVED} == SAVED
