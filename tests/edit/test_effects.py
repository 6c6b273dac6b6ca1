"""Every public function that changes or replaces something of a model does what it reports, or says that it did not.

The functions are found by their signatures; each one that changes something has an action here. An action returns what
it can be told by, and must return on a module that was changed by somebody the same as on the plain module that
computes the same function; or raise, or warn by name.
"""

import functools
import inspect
import typing
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from changed_models import DONE, Subject, X, layers_in, out, passing, plain, twin_of
from torch import Tensor, nn

import headwise as hw
from headwise.interventions import Scale
from parameters import thorough

FOUND = 33  # functions that change something; a walk that finds fewer is broken

# Functions that take a model and change nothing of it, or describe what others change.
READS = {
    "edit.budgets.budget_effect", "edit.merging.group_heads", "analysis.flow.value_norms",
    "analysis.relevance.relevance", "models.hooks.input_embedding", "models.find.find_heads",
    "models.recognise.publisher.recognise",
    "models.replace.certifying.certify", "parallel.heads.whole_state", "parallel.heads_held.gather_map",
    "parallel.heads_held.held_heads", "publishing.observe", "corpus.run.measure_corpus", "reports.see.show",
    "nn.layout.Layout.into", "analysis.direct_effects.direct_effects", "telemetry.alarms.Alarm.cause",
    "telemetry.alarms.NonFiniteAlarm.cause", "testing.layers.check_kind",
    *(f"models.site.Kind.{name}" for name in ("layout", "resize", "resizing", "share", "site", "tapped", "weights")),
}  # fmt: skip
# Functions with tests of their own, in test_converted.py.
ALONE = {
    "edit.folder.save_pruned", "lm.checkpoint.save_model", "nn.block_diagonal.BlockDiagonalAttention.to_multi_head",
    "nn.convolution.from_conv1d", "nn.convolution.from_conv2d", "nn.multi_head.MultiHeadAttention.from_torch",
}  # fmt: skip
ACTIONS: dict[str, Callable[[Any], Any]] = {}


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public functions and methods of public classes that take a module, or make one of their own module."""
    for space in hw._NAMESPACES:
        home = import_module(f"headwise.{space}")
        for one in (getattr(home, name) for name in home.__all__):
            if inspect.isclass(one):
                for name, member in inspect.getmembers(one, lambda x: inspect.isfunction(x) or inspect.ismethod(x)):
                    function = getattr(member, "__func__", member)
                    public = not name.startswith("_") and function.__module__.startswith("headwise.")
                    if public and (takes_module(function) or (issubclass(one, nn.Module) and makes_module(member))):
                        yield called(function), function
            elif callable(one) and takes_module(one):
                yield called(inspect.unwrap(one)), one


def called(function: Any) -> str:
    return f"{function.__module__}.{function.__qualname__}".removeprefix("headwise.")


def classes_in(annotation: Any) -> Iterator[type]:
    if isinstance(annotation, type) and not typing.get_args(annotation):
        yield annotation
    for each in typing.get_args(annotation):
        yield from classes_in(each)


MODULES = (nn.Module, hw.models.HeadSite, hw.models.Attachment, hw.lm.LoadedModel)


def takes_module(function: Any) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(issubclass(kind, MODULES) for one in parameters for kind in classes_in(one.annotation))


def makes_module(member: Any) -> bool:
    """Whether an instance method returns another module."""
    returned = inspect.signature(member).return_annotation
    known = isinstance(returned, str) or any(issubclass(kind, nn.Module) for kind in classes_in(returned))
    return inspect.isfunction(member) and member.__name__.startswith("to_") and known and returned != "dict"


@pytest.mark.thorough
def test_every_public_function_that_takes_a_module_is_known_to_change_it_or_not() -> None:
    names = {name for name, _ in functions()}
    assert names == READS | ALONE | ACTIONS.keys()
    assert not READS & (ALONE | ACTIONS.keys())
    assert len(ALONE | ACTIONS.keys()) >= FOUND


QUICK = {
    "plain", "shared layer", "one module at two places", "weight norm", "old weight norm, stale", "pruning mask",
    "adapter in a linear map", "distributed", "forward of a copy", "forwards of copies of maps",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """One process that is a group."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


# --- what is done, and what it is told by


def action(name: str) -> Callable[[Callable[[Subject], Any]], Callable[[Subject], Any]]:
    def register(function: Callable[[Subject], Any]) -> Callable[[Subject], Any]:
        ACTIONS[name] = function
        return function

    return register


def loss(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


def first_heads(subject: Subject) -> dict[int, list[int]]:
    return {i: [0] for i in range(len(subject.sites))}


@action("edit.pruning.prune")
def _(subject: Subject) -> Any:
    return out(hw.edit.prune(subject.model, first_heads(subject)).model)


@action("edit.merging.merge_kv")
def _(subject: Subject) -> Any:
    return out(hw.edit.merge_kv(subject.model, 1, "first").model)


@action("edit.healing.heal")
def _(subject: Subject) -> Any:
    before = [p.detach().clone() for p in subject.model.parameters()]
    found = hw.edit.heal(subject.model, [X], loss, 2, lr=0.1)
    pairs = zip(before, subject.model.parameters(), strict=True)
    return float(sum(p.numel() for old, p in pairs if not torch.equal(old, p)) - found.trained)


@action("telemetry.clip.qk_clip")
def _(subject: Subject) -> Any:
    with hw.watch(subject.model, measures=["max_logit"]) as record:
        out(subject.model)
        before = record.latest["max_logit"]
        clipped = hw.telemetry.qk_clip(subject.model, record, tau=0.3 * float(before.max()))
        out(subject.model)
        after = record.latest["max_logit"]
    gammas = torch.ones_like(before)
    for layer, head, _, gamma in clipped.heads:
        gammas[record.layers.index(layer), head] = gamma
    assert clipped
    return (after / before - gammas).abs().max() > 1e-4, after.max() > 1.0001 * clipped.tau


@action("models.site.scale_heads")
def _(subject: Subject) -> Any:
    sites = subject.sites
    with hw.models.scale_heads(sites, [torch.tensor([0.0, 1.0, 2.0])] * len(sites)):
        return out(subject.model)


@action("models.site.record_heads")
def _(subject: Subject) -> Any:
    with hw.models.record_heads(subject.sites) as heads:
        out(subject.model)
    return torch.cat(heads)


@action("models.attaching.intervene")
def _(subject: Subject) -> Any:
    with hw.intervene(subject.model, Scale(0.0, heads=[0])):
        return out(subject.model)


@action("models.attaching.attach")
def _(subject: Subject) -> Any:
    with hw.attach(subject.model):
        return out(subject.model)


@action("telemetry.watching.watch")
def _(subject: Subject) -> Any:
    with hw.watch(subject.model, measures=["max_logit"]) as record:
        out(subject.model)
    return record.latest["max_logit"]


@action("telemetry.gates.gate_gradients")
def _(subject: Subject) -> Any:
    with hw.telemetry.gate_gradients(subject.model) as gates:
        loss(subject.model, X).backward()
    return torch.cat([torch.as_tensor(x) for x in gates.importance().column])


@action("analysis.importance.ablation.ablation_importance")
def _(subject: Subject) -> Any:
    return hw.analysis.ablation_importance(subject.model, [X], loss).samples


@action("analysis.importance.ablation.losses_without")
def _(subject: Subject) -> Any:
    sites = subject.sites
    return hw.analysis.losses_without(subject.model, [X], loss, [(i, 0) for i in range(len(sites))])


@action("analysis.importance.curve.pruning_curve")
def _(subject: Subject) -> Any:
    order = [(i, head) for i in range(len(subject.sites)) for head in range(3)]
    return hw.analysis.pruning_curve(subject.model, [X], loss, order, random_orders=1).losses


@action("analysis.importance.gradients.gradient_importance")
def _(subject: Subject) -> Any:
    return hw.analysis.gradient_importance(subject.model, [X], loss).samples


@action("analysis.importance.gradients.taylor_importance")
def _(subject: Subject) -> Any:
    return hw.analysis.taylor_importance(subject.model, [X], loss).samples


@action("analysis.importance.gradients.learn_gates")
def _(subject: Subject) -> Any:
    return hw.analysis.learn_gates(subject.model, [X], loss, 1e-3, steps=2).table.column("log_alpha")


@action("analysis.importance.ablation.attention_knockout")
def _(subject: Subject) -> Any:
    return hw.analysis.attention_knockout(subject.model, [X], loss, queries=-1, keys=[0]).samples


@action("nn.forms.MultiHeadForm.from_multi_head")
def _(subject: Subject) -> Any:
    return out(hw.nn.PerHeadAttention.from_multi_head(subject.layer))


@action("nn.forms.MultiHeadForm.to_multi_head")
def _(subject: Subject) -> Any:
    return out(hw.nn.ContractionAttention.from_multi_head(subject.layer).to_multi_head())


@action("nn.gated_output.GatedAttention.from_multi_head")
def _(subject: Subject) -> Any:
    return out(hw.nn.GatedAttention.from_multi_head(subject.layer))


@action("nn.mixture.MixtureOfHeads.from_multi_head")
def _(subject: Subject) -> Any:
    return out(hw.nn.MixtureOfHeads.from_multi_head(subject.layer, shared_heads=1, top_k=2, router_std=0.0))


@action("nn.multi_head.MultiHeadAttention.to_torch")
def _(subject: Subject) -> Any:
    return subject.layer.to_torch()(X, X, X)[0]


@action("parallel.heads.parallelize_heads")
def _(subject: Subject) -> Any:
    return out(hw.parallel.parallelize_heads(subject.model, mesh()))


@action("parallel.heads.head_parallel_plan")
def _(subject: Subject) -> Any:
    plan = hw.parallel.head_parallel_plan(subject.layer)
    return out(torch.distributed.tensor.parallel.parallelize_module(subject.layer, mesh(), plan))


@action("parallel.sequence.sequence_parallel")
def _(subject: Subject) -> Any:
    with hw.parallel.sequence_parallel(subject.model, how="ring", layout="contiguous") as handle:
        y = out(subject.model)
        reached = [layer for layer in layers_in(subject.model) if "attention" in vars(layer)]
        return y, float(len(reached) - 2), float(len(handle.layers) == 0)


@action("parallel.heads.clip_gradients")
def _(subject: Subject) -> Any:
    loss(subject.model, X).backward()
    hw.parallel.clip_gradients(subject.model, 1e-3)
    return nn.utils.get_total_norm([p.grad for p in subject.model.parameters() if p.grad is not None])


@action("parallel.sequence.sum_gradients")
def _(subject: Subject) -> Any:
    loss(subject.model, X).backward()
    whole = [p.grad.clone() for p in subject.model.parameters() if p.grad is not None]
    hw.parallel.sum_gradients(subject.model)
    found = [p.grad for p in subject.model.parameters() if p.grad is not None]
    return all(any(torch.equal(x, y) for y in found) for x in whole)


def mesh() -> Any:
    return torch.distributed.device_mesh.init_device_mesh("cpu", (1,))


def numbers(found: Any) -> list[Tensor]:
    several = found if isinstance(found, tuple) else (found,)
    return [torch.as_tensor(one).detach().double() for one in several]


@pytest.mark.thorough_beyond(6)
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("how", thorough(DONE, DONE.keys() - QUICK))
@pytest.mark.parametrize("name", ACTIONS)
def test_what_is_reported_is_done(name: str, how: str) -> None:
    model = DONE[how](plain())
    twin = twin_of(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            found = numbers(ACTIONS[name](Subject(model)))
        except hw.HeadwiseError:
            assert how != "plain"
            return
    if any("1" in str(one.message) for one in said if one.category is UserWarning):
        assert how != "plain"
        return
    for mine, expected in zip(found, numbers(ACTIONS[name](Subject(twin))), strict=True):
        known = torch.where(
            mine.isnan() & (name == "telemetry.gates.gate_gradients"), expected, mine
        )  # NaN is reported
        torch.testing.assert_close(known, expected, rtol=1e-5, atol=1e-7)
        assert not mine.isnan().all()


@pytest.mark.parametrize(
    "change",
    [
        lambda model, x, mesh: hw.attach(model, copy=True),
        lambda model, x, mesh: hw.edit.prune(model, {1: [0]}, copy=True),
        lambda model, x, mesh: hw.edit.merge_kv(model, 1, copy=True),
        lambda model, x, mesh: hw.edit.heal(model, [x], loss, 1, copy=True),
        lambda model, x, mesh: hw.parallel.parallelize_heads(model, mesh(), copy=True),
        lambda model, x, mesh: hw.parallel.sequence_parallel(model, copy=True),
    ],
)
def test_a_copy_that_would_call_the_original_is_refused(change: Callable[..., Any]) -> None:
    model = plain()
    model[1].forward = passing(model[1])
    with pytest.raises(hw.ConfigError, match=r"forward of 1 \(MultiHeadAttention\).*would call the original"):
        change(model, X, mesh)
    model[1].forward = functools.partial(type(model[1]).forward, model[1])  # a copy of it calls the copy
    before, done = out(model), hw.edit.prune(model, {1: [0]}, copy=True).model
    assert torch.equal(out(model), before)
    torch.testing.assert_close(out(done), out(hw.edit.prune(plain(), {1: [0]}).model))


def test_a_forward_with_arguments_bound_to_it_is_not_that_of_its_class() -> None:
    other = nn.MultiheadAttention(24, 4, batch_first=True)
    other.forward = functools.partial(type(other).forward, other, attn_mask=torch.ones(5, 5).triu(1).bool())
    with pytest.raises(hw.ConfigError, match="forward of MultiheadAttention was replaced on the instance"):
        hw.MultiHeadAttention.from_torch(other)
