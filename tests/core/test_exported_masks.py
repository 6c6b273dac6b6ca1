"""Masks and designs in graphs of torch.export and make_fx: in them whole, or refused by name."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from design_samples import given
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import headwise as hw
from headwise.masks import Dense, Grid, Mask, State
from headwise.masks.given import shortest


class EvenKeys(Mask):
    """A mask of an unregistered class."""

    holds = {}

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        return (cols % 2 == 0).expand(len(rows), -1)[None, None]

    def state(self, rows: Any, cols: Any, grid: Grid) -> State:
        return State.MIXED


class Masked(nn.Module):
    """A layer with a mask of its own."""

    def __init__(self, layer: nn.Module, mask: Mask) -> None:
        super().__init__()
        self.layer, self.mask = layer, mask

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, mask=self.mask)


def exported(module: nn.Module, x: Tensor) -> Any:
    return torch.export.export(module, (x,), strict=False).module()


def made_fx(module: nn.Module, x: Tensor) -> Any:
    with torch.no_grad():
        return make_fx(module, tracing_mode="fake", _allow_non_fake_inputs=True)(x)


@pytest.mark.thorough_except("made_fx")
@pytest.mark.parametrize("recorded", [exported, made_fx])
def test_an_unregistered_mask_is_named_and_not_left_out(recorded: Any) -> None:
    module, x = Masked(hw.MultiHeadAttention(12, 2), EvenKeys() & hw.Causal()), given(dtype=torch.float32)
    with pytest.raises(
        hw.ConfigError, match=r"torch\.export or make_fx cannot contain the mask EvenKeys, as it is not"
    ):
        recorded(module, x)


@pytest.mark.parametrize("recorded", [exported, made_fx])
@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_k": 2, "keys": "chosen"}, {"top_k": 2, "per": "sequence"}])
def test_a_mixture_is_named(recorded: Any, options: dict[str, Any]) -> None:
    module, x = Masked(hw.nn.SparseHeadMixture(12, 6, **options), hw.Causal()), given(dtype=torch.float32)
    with pytest.raises(hw.ConfigError, match=r"SparseHeadMixture cannot be part of a graph of torch\.export"):
        recorded(module, x)


ARGUMENTS: dict[str, tuple[dict[str, Any], Any]] = {  # and what `dynamic_shapes` says of them
    "causal": ({"mask": hw.Causal()}, {"mask": []}),
    "window": ({"mask": hw.Causal() & (hw.Window(3, 1) | hw.masks.Sinks(1))}, {"mask": [[], [[], []]]}),
    "by head": ({"mask": hw.masks.HeadWindows((2, None))}, {"mask": []}),
    "score": ({"mask": hw.Causal(), "score": (hw.SoftCap(3.0),)}, {"mask": [], "score": ([],)}),
}


@pytest.mark.thorough_except("score-False")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_masks_without_tensors_are_arguments(name: str, strict: bool) -> None:
    options, shapes = ARGUMENTS[name]
    layer, x = hw.MultiHeadAttention(12, 2).eval(), given(dtype=torch.float32)
    shapes = {"x": {1: torch.export.Dim("n", min=2, max=64)}, **shapes}
    program = torch.export.export(layer, (x,), options, dynamic_shapes=shapes, strict=strict).module()
    y = given(29, dtype=torch.float32)
    torch.testing.assert_close(program(y, **options), layer(y, **options))
    with pytest.raises((ValueError, AssertionError, RuntimeError), match=r"input tree spec|spec"):
        program(y, **{**options, "mask": hw.Window(5)})


LOADED = """
import sys, torch
import headwise.kernels
from headwise import Causal, Window
program = torch.export.load(sys.argv[1]).module()
x, y = torch.load(sys.argv[2], weights_only=True)
assert torch.equal(program(x, mask=Causal() & Window(3)), y)
"""


@pytest.mark.thorough
def test_a_saved_program_runs_in_another_process_without_unpickling(tmp_path: Path) -> None:
    layer, x, mask = hw.MultiHeadAttention(12, 2).eval(), given(dtype=torch.float32), hw.Causal() & hw.Window(3)
    torch.export.save(torch.export.export(layer, (x,), {"mask": mask}), tmp_path / "program.pt2")
    torch.save((x, layer(x, mask=mask).detach()), tmp_path / "numbers.pt")
    command = [sys.executable, "-c", LOADED, tmp_path / "program.pt2", tmp_path / "numbers.pt"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "weights_only" not in done.stderr


def test_a_mask_in_a_tree_stays_the_same_object() -> None:
    documents = hw.Documents(torch.arange(7) // 3)
    for mask in (hw.Causal(), hw.Causal() & hw.Window(3), documents, documents & hw.Causal()):
        leaves, spec = pytree.tree_flatten({"mask": mask})
        assert leaves == ([documents] if mask is documents or documents in vars(mask).values() else [])
        assert pytree.tree_unflatten(leaves, spec)["mask"] is mask
    _, one = pytree.tree_flatten(hw.Window(3))
    assert one == pytree.tree_flatten(hw.Window(3))[1] != pytree.tree_flatten(hw.Window(4))[1]
    again = pytree.treespec_loads(pytree.treespec_dumps(pytree.tree_flatten(hw.Causal() & hw.Window(3, 1))[1]))
    assert pytree.tree_unflatten([], again) == hw.Causal() & hw.Window(3, 1)


def test_a_padding_mask_for_no_queries_is_as_it_is() -> None:
    mask = Dense(torch.tensor([True, False, True])[None, None, None].expand(2, 1, 0, -1))
    assert shortest(mask) == mask
