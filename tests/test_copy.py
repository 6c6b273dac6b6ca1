"""What changes a model changes it in place and returns it, or with `copy=True` changes a deepcopy and returns that."""

import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import headwise as hw
from headwise.models.attaching import Attachment


class Change(NamedTuple):
    """A public function that changes a model.

    run: calls it with keyword arguments of its own beside `copy`. result: the model in what it returns.
    """

    run: Callable[..., Any]
    result: Callable[[Any], nn.Module] = lambda found: found.model  # type: ignore[no-any-return]


def clipped(model: nn.Module, **options: bool) -> Any:
    """Inside a watched step, with a limit that all heads exceed."""
    with hw.watch(model, measures=["max_logit"], steps="manual") as record:
        model[0](torch.ones(2, 5, 12))
        record.step()
    return hw.telemetry.qk_clip(model, record, tau=1e-6, **options)


CHANGES = {
    "edit.heal": Change(
        lambda model, **options: hw.edit.heal(
            model, [torch.ones(2, 5, 12)], lambda m, x: m[0](x).square().sum(), 3, **options
        )
    ),
    "edit.merge_kv": Change(lambda model, **options: hw.edit.merge_kv(model, {0: 2}, **options)),
    "edit.prune": Change(lambda model, **options: hw.edit.prune(model, {0: [1, 3]}, **options)),
    "models.attach": Change(hw.attach),
    "parallel.parallelize_heads": Change(
        lambda model, **options: hw.parallel.parallelize_heads(model, init_device_mesh("cpu", (1,)), **options),
        lambda found: found,
    ),
    "parallel.sequence_parallel": Change(hw.parallel.sequence_parallel),
    "telemetry.qk_clip": Change(clipped),
}  # fmt: skip

# Functions of a model that leave it as it is; `watch`, `intervene` and `gate_gradients` until their end, and gradients
# are no state.
READS = {
    "analysis.ablation_importance", "analysis.attention_knockout", "analysis.direct_effects",
    "analysis.gradient_importance", "analysis.learn_gates", "analysis.losses_without", "analysis.pruning_curve",
    "analysis.relevance", "analysis.taylor_importance", "analysis.value_norms", "edit.budget_effect",
    "edit.save_pruned",
    "models.certify", "models.find_heads", "models.input_embedding", "models.intervene", "models.recognise",
    "parallel.clip_gradients", "parallel.held_heads", "parallel.sum_gradients", "parallel.whole_state",
    "telemetry.gate_gradients", "telemetry.watch", "testing.check_kind",
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_process(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone, for `parallel`."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(hw.MultiHeadAttention(12, 6), nn.MultiheadAttention(12, 3)).eval()


def state(model: nn.Module) -> list[object]:
    """All that a change may concern: tensors and their kinds, modules and what is set on them."""
    tensors = [
        (name, type(x), (x.full_tensor() if hasattr(x, "full_tensor") else x).tolist())
        for name, x in model.state_dict().items()
    ]
    modules = [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()]
    return [*tensors, *modules]


def public_functions() -> dict[str, Callable[..., Any]]:
    found = {}
    for space in hw._NAMESPACES:
        module = importlib.import_module(f"headwise.{space}")
        for name in module.__all__:
            if inspect.isfunction(function := getattr(module, name)):
                found[f"{space}.{name}"] = function
    return found


def test_every_public_function_of_a_model_changes_it_or_leaves_it() -> None:
    functions = public_functions()
    takes_model = {
        name
        for name, function in functions.items()
        if next(iter(inspect.get_annotations(function).values()), None) in (nn.Module, nn.Module | Attachment)
    }
    takes_copy = {name for name, function in functions.items() if "copy" in inspect.signature(function).parameters}
    assert takes_copy == CHANGES.keys()
    assert takes_model - takes_copy == READS
    for name in takes_copy:
        copy = inspect.signature(functions[name]).parameters["copy"]
        assert (copy.kind, copy.default) == (copy.KEYWORD_ONLY, False), name


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_in_place(name: str) -> None:
    model, change = made(), CHANGES[name]
    before = state(model)
    assert change.result(change.run(model)) is model
    assert state(model) != before


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize("name", CHANGES)
def test_with_copy_the_change_is_in_a_deepcopy(name: str) -> None:
    model, twin, change = made(), made(), CHANGES[name]
    before = state(model)
    changed = change.result(change.run(model, copy=True))
    assert changed is not model
    assert not {id(part) for part in changed.modules()} & {id(part) for part in model.modules()}
    assert state(model) == before
    change.run(twin)
    assert state(changed) == state(twin) != before


def test_healing_a_copy_trains_the_copies_of_the_parameters_given() -> None:
    model = made()
    before = state(model)
    options: dict[str, Any] = {"steps": 3, "parameters": model[0].o_proj.parameters(), "copy": True}
    healed = hw.edit.heal(model, [torch.ones(2, 5, 12)], lambda m, x: m[0](x).square().sum(), **options)
    changed = {name for name, x in healed.model.state_dict().items() if not torch.equal(x, model.state_dict()[name])}
    assert changed == {"0.o_proj.weight"}
    assert state(model) == before


def test_clipping_a_copy_leaves_the_step_for_the_model_itself() -> None:
    model = made()
    with hw.watch(model, measures=["max_logit"], steps="manual") as record:
        model[0](torch.ones(2, 5, 12))
        record.step()
    copied = hw.telemetry.qk_clip(model, record, tau=1e-6, copy=True)
    again = hw.telemetry.qk_clip(model, record, tau=1e-6)
    assert copied == again
    assert again.heads
    assert state(copied.model) == state(model)
