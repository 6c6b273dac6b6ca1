"""Modules of torch and other forms of layers are converted as they compute, or refused; files can be loaded."""

import functools
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_models import X, apart, passing
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune as masks

import headwise as hw


def refused_or_equal(convert: Callable[[], Callable[[], Tensor]], expected: Callable[[], Tensor]) -> bool:
    """Whether a conversion was refused; otherwise it must compute the same."""
    try:
        made = convert()
    except hw.ConfigError:
        return True
    torch.testing.assert_close(made(), expected(), rtol=1e-5, atol=1e-7)
    return False


ONE_MODULE: dict[str, tuple[Callable[[Any, str], Any], bool]] = {
    "plain": (lambda module, name: None, False),
    "weight norm": (lambda module, name: parametrizations.weight_norm(module, name), False),
    "old weight norm, stale": (lambda module, name: grown(nn.utils.weight_norm(module, name), name), False),
    "pruning mask": (lambda module, name: masks.l1_unstructured(module, name, 0.3), False),
    "forward of a copy": (lambda module, name: setattr(module, "forward", apart(grown_copy(module))), True),
    "forward that passes on": (lambda module, name: setattr(module, "forward", passing(module)), False),
}


def grown(module: nn.Module, name: str) -> None:
    with torch.no_grad():
        getattr(module, f"{name}_g").mul_(2.0)


def grown_copy(module: nn.Module) -> nn.Module:
    copy = deepcopy(module)
    with torch.no_grad():
        for p in copy.parameters():
            p.mul_(2.0)
    return copy


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("how", ONE_MODULE)
def test_modules_of_torch_are_converted_as_they_compute_or_refused(how: str) -> None:
    change, refused = ONE_MODULE[how]
    torch.manual_seed(1)
    attention = nn.MultiheadAttention(12, 3, batch_first=True).double().eval()
    change(attention, "in_proj_weight")
    found = refused_or_equal(
        lambda: functools.partial(hw.MultiHeadAttention.from_torch(attention), X), lambda: attention(X, X, X)[0]
    )
    assert found == refused
    for kind, convert, axes in ((nn.Conv1d, hw.nn.from_conv1d, 1), (nn.Conv2d, hw.nn.from_conv2d, 2)):
        conv = kind(3, 5, 3, padding=1).double()
        change(conv, "weight")
        x = torch.randn(2, *[7] * axes, 3).double()
        found = refused_or_equal(
            lambda conv=conv, convert=convert, x=x: functools.partial(convert(conv, sharpness=200.0), x),
            lambda conv=conv, x=x: conv(x.movedim(-1, 1)).movedim(1, -1),
        )
        assert found == refused


@pytest.mark.parametrize("how", ["plain", "forward of a copy", "forward that passes on"])
def test_block_diagonal_layers_are_converted_as_they_compute_or_refused(how: str) -> None:
    change, refused = ONE_MODULE[how]
    layer = hw.nn.BlockDiagonalAttention(12, 3).double().eval()
    change(layer, "")
    assert refused_or_equal(lambda: functools.partial(layer.to_multi_head(), X), lambda: layer(X)) == refused


@pytest.mark.parametrize("how", [masks.identity, parametrizations.weight_norm], ids=["mask", "weight norm"])
def test_files_that_could_not_be_loaded_are_not_written(how: Callable[..., Any], tmp_path: Path) -> None:
    tokenizer = hw.lm.CharTokenizer.from_text("abab")
    decoder = hw.lm.Decoder(hw.lm.DecoderConfig(vocab_size=tokenizer.vocab_size, d_model=12, num_heads=3, num_layers=1))
    how(decoder.blocks[0].attention.q_proj, "weight")
    with pytest.raises(hw.ConfigError, match="could not be loaded"):
        hw.lm.save_model(tmp_path / "model.safetensors", decoder, tokenizer, {})
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (the hf extra)")
    config = transformers.GPT2Config(vocab_size=7, n_positions=5, n_embd=12, n_layer=1, n_head=3)
    model = transformers.GPT2LMHeadModel(config)
    how(model.transformer.h[0].mlp.c_fc, "weight")
    with pytest.raises(hw.ConfigError, match="could not be loaded"):
        hw.edit.save_pruned(model, tmp_path / "folder")
    assert not list(tmp_path.iterdir())
