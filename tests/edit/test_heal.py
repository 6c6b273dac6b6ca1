"""A short training after surgery brings back some of what was lost, and leaves nothing behind."""

from typing import Any

import pytest
import torch
from design_samples import design, given
from torch import Tensor, nn

import headwise as hw
from headwise.edit import heal, merge_kv
from headwise.errors import ConfigError


def distance(to: nn.Module) -> Any:
    """The loss of a model that should do what another does."""

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch) - to(batch).detach()).square().mean()

    return loss_fn


BATCHES = [given(n=9, seed=seed) for seed in range(7)]


@pytest.mark.thorough
def test_a_merged_module_learns_what_it_lost() -> None:
    teacher = design("multi_head", {})
    student = merge_kv(teacher, 2, "svd", copy=True).model
    loss_fn = distance(teacher)
    before = sum(loss_fn(student, x).item() for x in BATCHES)
    seen = []
    result = heal(student, BATCHES, loss_fn, 60, lr=1e-2, watch=seen.append)
    after = sum(loss_fn(student, x).item() for x in BATCHES)
    assert after < 0.7 * before
    assert [step.step for step in seen] == list(range(1, 61))
    assert [step.loss for step in seen] == list(result.losses)
    assert max(step.lr for step in seen) == pytest.approx(1e-2)
    assert seen[0].lr < 2e-3 > seen[-1].lr
    assert result.trained == sum(p.numel() for p in student.parameters())
    assert str(result).startswith(f"60 steps on {result.trained:,} weights; loss ")
    assert not student.training
    assert all(p.grad is None for p in student.parameters())
    assert student.num_kv_heads == 2


def test_only_the_weights_asked_for_are_trained() -> None:
    teacher = design("multi_head", {})
    student = merge_kv(teacher, 3, copy=True).model
    before = {name: p.clone() for name, p in student.named_parameters()}
    heal(student, iter(BATCHES), distance(teacher), 7, lr=1e-2, parameters=student.o_proj.parameters())
    changed = {name for name, p in student.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"o_proj.weight"}


def state(model: nn.Module) -> bytes:
    return b"".join(x.numpy().tobytes() for x in model.state_dict().values())


@pytest.mark.thorough
def test_the_same_seed_heals_to_the_same_bits_and_disturbs_nobody() -> None:
    teacher = design("multi_head", {})
    healed = []
    for seed in (5, 5, 6):
        student = nn.Sequential(merge_kv(teacher, 2, "svd", copy=True).model, nn.Dropout(0.3))
        torch.manual_seed(len(healed))  # what is drawn elsewhere does not matter
        before = torch.get_rng_state()
        heal(student, BATCHES, distance(teacher), 11, lr=1e-2, seed=seed)
        assert torch.equal(torch.get_rng_state(), before)
        healed.append(state(student))
    assert healed[0] == healed[1] != healed[2]


def test_batches_are_drawn_by_the_caller() -> None:
    """What the caller draws between steps comes from the caller's own generator, which goes on as without healing."""
    teacher = design("multi_head", {})
    drawn: list[float] = []

    def batches() -> Any:
        for x in BATCHES:
            drawn.append(float(torch.rand(())))
            yield x

    student = nn.Sequential(design("multi_head", {}), nn.Dropout(0.3))
    torch.manual_seed(3)
    heal(student, batches(), distance(teacher), 7)
    torch.manual_seed(3)
    assert drawn == [float(torch.rand(())) for _ in BATCHES]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps=0"),
        ({"warmup": -1}, "warmup=-1"),
        ({"lr": 0.0}, r"lr=0\.0"),
        ({"clip": 0.0}, r"clip=0\.0"),
        ({"weight_decay": float("nan")}, "weight_decay=nan"),
        ({"batches": iter(BATCHES), "steps": 9}, "they ended after 7 of 9 steps"),
        ({"batches": []}, "they ended after 0 of 3 steps"),
        ({"parameters": []}, "nothing to train"),
        ({"loss_fn": lambda m, x: m(x).sum() * torch.inf}, "the loss became (inf|-inf|nan) at step 0"),
        ({"loss_fn": lambda m, x: (m(x) * 0).abs().sqrt().sum()}, "the gradient became nan at step 0, at a loss of 0"),
    ],
)
def test_what_cannot_be_is_named(changes: dict[str, Any], message: str) -> None:
    module = design("multi_head", {})
    options = {"batches": BATCHES, "loss_fn": distance(module), "steps": 3} | changes
    with pytest.raises(ConfigError, match=message):
        heal(module, **options)
    assert not module.training
    assert all(bool(p.isfinite().all()) for p in module.parameters())


def test_steps_without_effect_are_no_healing() -> None:
    torch.manual_seed(0)
    layer, x = hw.MultiHeadAttention(12, 3).bfloat16(), torch.randn(2, 5, 12).bfloat16()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).float().square().mean()

    with pytest.raises(ConfigError, match=r"lr=1e-07: 2 steps changed no weight, .*bfloat16"):
        heal(layer, [x], loss, 2, lr=1e-7)
    with pytest.raises(ConfigError, match="the loss depends on none of those"):
        heal(layer, [x], loss, 2, parameters=nn.Linear(3, 3).parameters())
    with pytest.raises(ConfigError, match="the loss depends on none of those"):
        heal(layer, [x], lambda model, x: loss(model, x).detach(), 2)
    layer.unused = nn.Parameter(torch.zeros(7))
    assert heal(layer, [x], loss, 2, lr=0.1).trained == 4 * 12 * 12
