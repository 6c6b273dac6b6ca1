"""Two layers learn to copy, by heads that can be found and taken away; one layer does not."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "induction_study.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("induction_study", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["induction_study"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sequences_repeat_at_their_period_and_hold_no_token_twice_before(script: ModuleType) -> None:
    ids, period = script.sequences(50, 8, 32, torch.Generator().manual_seed(0))
    assert ids.shape == (50, 64)
    assert period.min() < 12
    assert period.max() > 28
    for row, t in zip(ids, period.flatten().tolist(), strict=True):
        assert len(set(row[:t].tolist())) == t
        assert torch.equal(row[t:], row[:-t])


def test_losses_are_those_of_each_copy(script: ModuleType) -> None:
    """A model that knows the next token of the second copy alone."""
    ids, _ = script.sequences(3, 32, 32, torch.Generator().manual_seed(0))

    def knowing(x: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*x.shape, script.VOCAB)
        for i in range(32, x.shape[1]):
            logits[:, i].scatter_(1, ids[:, i + 1 : i + 2], 50.0)
        return logits

    assert script.second_loss(knowing, ids).item() == pytest.approx(0, abs=1e-4)
    assert script.first_loss(knowing, ids).item() == pytest.approx(4.1589, abs=1e-3)


def judge(script: ModuleType, seed: int, steps: int) -> None:
    two, one = (script.study(layers, seed, steps) for layers in (2, 1))
    assert two.second < 0.5 < 3.5 < two.first
    assert two.previous
    assert two.induction
    assert {layer for layer, _ in two.previous} == {0}
    assert {layer for layer, _ in two.induction} == {1}
    assert two.without_induction > 2.5
    assert two.without_previous > 1.0  # heads that are below FOUND are left, and may look back too
    assert two.without_others < 0.5
    assert one.second > 2.5 > 5 * two.second
    assert not one.previous
    assert not one.induction


@pytest.mark.slow  # some minutes on one core, two models a seed
@pytest.mark.parametrize("seed", range(5))
def test_copying_takes_two_layers(script: ModuleType, seed: int) -> None:
    judge(script, seed, 800)
