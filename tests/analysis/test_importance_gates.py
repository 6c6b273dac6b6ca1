"""Hard concrete gates: the distribution against draws of it, and what they learn against planted heads."""

import copy
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from importance_samples import Stack, planted, square_loss, stack, vectors, wanted_of
from torch import Tensor

import headwise as hw
from headwise.analysis.importance.ablation import losses_without
from headwise.analysis.importance.gradients import HardConcrete, gradient_importance, learn_gates
from headwise.errors import ConfigError


@pytest.mark.parametrize("log_alpha", [-3.0, -1.0, 0.0, 0.7, 2.5])
@pytest.mark.parametrize("gate", [HardConcrete(), HardConcrete(0.33, -0.2, 1.3)])
def test_draws_are_zero_as_often_as_the_formula_says(gate: HardConcrete, log_alpha: float) -> None:
    uniform = torch.rand(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parameter = torch.tensor(log_alpha, dtype=torch.float64)
    drawn = gate.draw(parameter, uniform)
    assert drawn.min() >= 0
    assert drawn.max() <= 1
    assert (drawn > 0).double().mean().item() == pytest.approx(gate.open(parameter).item(), abs=0.005)
    # P(z < 1) = P(s < (1 − γ)/(ζ − γ)), by the distribution of s: σ(β logit(s) − log α).
    inside = (1 - gate.low) / (gate.high - gate.low)
    below = 1 / (1 + math.exp(-(gate.temperature * math.log(inside / (1 - inside)) - log_alpha)))
    assert (drawn < 1).double().mean().item() == pytest.approx(below, abs=0.005)


def test_values_are_those_of_the_paper() -> None:
    gate = HardConcrete()
    assert (gate.temperature, gate.low, gate.high) == (2 / 3, -0.1, 1.1)
    x = torch.linspace(-4, 4, 9, dtype=torch.float64)
    assert torch.allclose(gate.settled(x), (x.sigmoid() * 1.2 - 0.1).clamp(0, 1))
    assert torch.allclose(gate.open(x), (x - 2 / 3 * math.log(0.1 / 1.1)).sigmoid())
    for p in (0.1, 0.5, 0.95):
        assert gate.open(torch.tensor(gate.log_alpha(p))).item() == pytest.approx(p, abs=1e-6)


def test_draws_have_a_gradient_and_no_ends() -> None:
    gate, x = HardConcrete(), torch.zeros(3, dtype=torch.float64, requires_grad=True)
    ends = torch.tensor([0.0, 1.0, 0.4], dtype=torch.float64)
    drawn = gate.draw(x, ends)
    assert drawn.isfinite().all()
    drawn.sum().backward()
    step = 1e-6
    slope = (gate.draw(x.detach() + step, ends) - gate.draw(x.detach() - step, ends)) / (2 * step)
    assert torch.allclose(x.grad, slope, atol=1e-8)
    assert slope[2] > 0.1


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.5}, {"low": 0.0}, {"high": 1.0}])
def test_a_distribution_that_cannot_be_is_named(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))}="):
        HardConcrete(**options)


@pytest.mark.thorough
def test_importance_and_gates_name_heads_as_prune_takes_them() -> None:
    model = planted([(1, 4), (0, 0)])
    batches = vectors(dtype=torch.float32)
    batches = wanted_of(model, batches)
    by_gradient, gates = (
        gradient_importance(model, batches, square_loss),
        learn_gates(model, batches, square_loss, 0.01, steps=300),
    )
    least = by_gradient.order()[:2]
    assert {(i, head) for i, cut in _cuts(model, least) for head in cut.removed} == set(least)
    assert sorted(gates.removed() + gates.kept()) == list(by_gradient.table.places)
    assert gates.kept() == [(0, 0), (1, 4)]
    assert [(i, cut.kept) for i, cut in _cuts(model, gates.removed())] == [(0, (0,)), (1, (4,))]
    assert set(gates.removed(0.0)) == set()


def _cuts(model: Stack, heads: Any) -> list[tuple[int, Any]]:
    """What pruning took out, by layer."""
    return [(int(name.rpartition(".")[2]), cut) for name, cut in hw.edit.prune(model, heads, copy=True).cuts.items()]


@pytest.mark.thorough
@pytest.mark.parametrize("needed", [[(0, 1)], [(1, 4), (0, 0)], [(1, 0), (1, 2), (0, 2)]])
def test_the_planted_heads_are_kept_and_no_others(needed: list[tuple[int, int]]) -> None:
    model = planted(needed)
    batches = wanted_of(model, vectors(dtype=torch.float32))
    found = learn_gates(model, batches, square_loss, 0.01, steps=300)
    assert found.kept() == sorted(needed)
    assert found.without.mean() < found.whole.mean() + 1e-3
    assert set(found.importance.order()[-len(needed) :]) == set(needed)
    assert found.history[-20:, 1].mean() == pytest.approx(len(needed), abs=1.0)


@pytest.mark.thorough
def test_the_price_decides_how_many_are_kept() -> None:
    model = planted([(0, 1), (1, 3)])
    batches = wanted_of(model, vectors(dtype=torch.float32))
    assert learn_gates(model, batches, square_loss, 100.0, steps=200).kept() == []
    kept = learn_gates(model, batches, square_loss, 0.0, steps=200).kept()
    assert {(0, 1), (1, 3)} <= set(kept)


@pytest.mark.thorough
def test_losses_are_those_with_and_without_the_closed_heads() -> None:
    model = planted([(1, 1)])
    batches = wanted_of(model, vectors(dtype=torch.float32))
    found = learn_gates(model, batches, square_loss, 0.01, steps=200)
    closed = [
        (i, h) for i, row in enumerate(found.table["open"]) for h in range(len(row)) if (i, h) not in found.kept()
    ]
    assert 0 < len(closed) < 8
    assert np.allclose(found.without, losses_without(model, batches, square_loss, closed))
    assert np.allclose(found.whole, losses_without(model, batches, square_loss, []))
    assert found.history.shape == (200, 2)


@pytest.mark.thorough
def test_the_seed_decides() -> None:
    model, batches = stack(), vectors()
    one, same, other = (learn_gates(model, batches, square_loss, 0.02, steps=20, seed=s) for s in (1, 1, 2))
    assert np.array_equal(one.history, same.history)
    assert np.array_equal(one.importance.flat, same.importance.flat)
    assert not np.array_equal(one.importance.flat, other.importance.flat)


def test_the_first_step_is_the_loss_with_drawn_gates_plus_the_price() -> None:
    """One step of Adam moves every parameter by the learning rate against the sign of its gradient."""
    model, batches = stack(), vectors(1)
    found = learn_gates(model, batches, square_loss, 1e6, steps=1, lr=0.05, start=0.9)
    begun = HardConcrete().log_alpha(0.9)
    assert np.allclose(found.importance.flat, begun - 0.05, atol=1e-6)
    assert found.history[0, 1] == pytest.approx(8 * 0.9, rel=1e-6)


@pytest.mark.thorough
def test_weights_are_trained_only_where_an_optimizer_is_given() -> None:
    model, batches = stack(dtype=torch.float32), vectors(dtype=torch.float32)
    before = copy.deepcopy(model.state_dict())
    learn_gates(model, batches, square_loss, 0.01, steps=30)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    model.train()
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    found = learn_gates(model, batches, square_loss, 0.0, steps=60, optimizer=adam)
    assert not any(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert found.whole.mean() < 0.8 * np.mean([losses_without(stack(dtype=torch.float32), batches, square_loss, [])])
    assert model.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


@pytest.mark.thorough
def test_dropout_while_gates_are_learned_is_drawn_by_the_seed() -> None:
    def loss_fn(model: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        kept = torch.nn.functional.dropout(batch[0], 0.3, model.training)
        return square_loss(model, (kept, batch[1]))

    found = []
    for seed in (5, 5, 6):
        model, batches = stack(dtype=torch.float32).train(), vectors(dtype=torch.float32)
        adam = torch.optim.Adam(model.parameters(), lr=1e-2)
        torch.manual_seed(len(found))
        before = torch.get_rng_state()
        learned = learn_gates(model, batches, loss_fn, 0.01, steps=11, seed=seed, optimizer=adam)
        assert torch.equal(torch.get_rng_state(), before)
        found.append((learned.history.tolist(), [x.tolist() for x in learned.table["log_alpha"]]))
    assert found[0] == found[1] != found[2]


def test_a_loss_that_ends_is_told_with_its_step() -> None:
    calls = iter(range(100))

    def loss_fn(model: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return square_loss(model, batch) * (math.inf if next(calls) == 5 else 1.0)

    with pytest.raises(ConfigError, match=r"returned inf for batch \d, at step 4 of the gates"):
        learn_gates(stack(), vectors(), loss_fn, 0.01, steps=9)


def test_gates_print_themselves_and_become_json() -> None:
    found = learn_gates(stack(), vectors(), square_loss, 0.02, steps=5)
    lines = str(found).splitlines()
    assert len(lines) == 4
    assert "at a price of 0.02 a head" in lines[0]
    assert str(found).count("●") == len(found.kept()) + 1
    assert str(found).count("·") == 8 - len(found.kept())
    assert "<table>" in found._repr_html_()
    back = json.loads(json.dumps(found.to_dict()))
    assert back["values"]["open"] == found.table.column("open").tolist()
    assert [tuple(head) for head in back["kept"]] == found.kept()
