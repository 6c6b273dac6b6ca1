"""Importance against brute force: differences of losses for gradients, heads edited by hand for ablation."""

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from importance_samples import decoder, planted, square_loss, stack, texts, token_loss, vectors, wanted_of
from torch import Tensor, nn

from headwise.analysis.importance.ablation import ablation_importance, donors, losses_without
from headwise.analysis.importance.curve import pruning_curve
from headwise.analysis.importance.gradients import gradient_importance, learn_gates, taylor_importance
from headwise.analysis.importance.losses import HeadImportance
from headwise.errors import ConfigError, HeadwiseError, ShapeError
from headwise.kernels import use_kernel
from headwise.models.find import find_heads
from headwise.models.site import scale_heads
from headwise.table import show

HEADS = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (1, 3), (1, 4)]  # of `stack`


def differences(model: nn.Module, loss: Callable[[], Tensor], step: float) -> np.ndarray:
    """∂L/∂ξ of all heads by central differences."""
    sites = find_heads(model)
    found = []
    for layer, site in enumerate(sites):
        for head in range(site.num_heads):
            ends = []
            for sign in (1, -1):
                gates = [torch.ones(s.num_heads, dtype=torch.float64) for s in sites]
                gates[layer][head] += sign * step
                with scale_heads(sites, gates), torch.no_grad():
                    ends.append(float(loss()))
            found.append((ends[0] - ends[1]) / (2 * step))
    return np.array(found)


# Rotary positions round to float32: the decoder's differences need a longer step.
@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "step", "near"), [("stack", 1e-5, 1e-6), ("decoder", 2e-3, 1e-4)])
def test_gradients_are_differences_of_losses(kind: str, step: float, near: float) -> None:
    model, batches, loss_fn = (
        (stack(), vectors(), square_loss) if kind == "stack" else (decoder().double(), texts(), token_loss)
    )
    with use_kernel("reference"):  # float64 throughout
        signed = np.stack([differences(model, lambda b=b: loss_fn(model, b), step) for b in batches])  # type: ignore[misc]
        each = gradient_importance(model, batches, loss_fn)
        mean = gradient_importance(model, batches, loss_fn, absolute="mean")
    scale = np.abs(signed).max()
    assert np.allclose(each.flat, np.abs(signed).mean(0), atol=near * scale)
    assert np.allclose(mean.flat, np.abs(signed.mean(0)), atol=near * scale)
    assert not np.allclose(each.flat, mean.flat, rtol=0.05)
    assert np.allclose(each.column.flat_error, np.abs(signed).std(0, ddof=1) / math.sqrt(3), atol=near * scale)
    assert each.loss == pytest.approx(np.mean([loss_fn(model, b).item() for b in batches]))


def test_a_row_counts_as_a_batch_of_its_own() -> None:
    model, batches = stack(), vectors()
    rows = [(x[i : i + 1], y[i : i + 1]) for x, y in batches for i in range(len(x))]
    by_rows = gradient_importance(model, batches, square_loss, per="row")
    assert by_rows.samples is not None
    assert by_rows.samples.shape == (12, 8)
    assert np.allclose(by_rows.samples, gradient_importance(model, rows, square_loss).samples, rtol=1e-9)


def test_taylor_sums_tokens_and_is_at_least_the_gradient() -> None:
    """By hand: a leaf in the place of each layer's concatenated heads, and its gradient."""
    model, batches = stack(), vectors()
    taylor = taylor_importance(model, batches, square_loss)
    expected, signed = [], []
    for x, y in batches:
        held: list[Tensor] = []

        def leaf(_: int, concat: Tensor, held: list[Tensor] = held) -> Tensor:
            concat.retain_grad()
            held.append(concat)
            return concat

        nn.functional.mse_loss(model.by_hand(x, leaf), y).backward()
        products = [
            (c.grad * c).detach().unflatten(-1, (layer.num_heads, -1)).sum(-1)  # type: ignore[operator]
            for c, layer in zip(held, model.layers, strict=True)
        ]
        expected.append(np.concatenate([p.abs().sum((0, 1)).numpy() for p in products]))
        signed.append(np.concatenate([p.sum((0, 1)).abs().numpy() for p in products]))
    assert np.allclose(taylor.samples, expected, rtol=1e-9)
    each = gradient_importance(model, batches, square_loss)
    assert np.allclose(each.samples, signed, rtol=1e-9)
    assert (taylor.flat > 1.05 * each.flat).all()


def test_layers_are_divided_by_their_norms() -> None:
    found = gradient_importance(stack(), vectors(), square_loss)
    normalised = found.normalised()
    rows = zip(normalised.column, found.column, normalised.column.error, found.column.error, strict=True)
    for row, before, error, raw in rows:
        assert np.linalg.norm(row) == pytest.approx(1)
        assert np.allclose(row * np.linalg.norm(before), before)
        assert np.allclose(error * np.linalg.norm(before), raw)


def edited(model: Any, batch: tuple[Tensor, Tensor], gone: list[tuple[int, int]], value: Callable) -> float:
    """The loss with the heads set by hand to value(layer, columns of the head)."""

    def edit(layer: int, concat: Tensor) -> Tensor:
        concat, size = concat.clone(), model.layers[layer].value_dim
        for at, head in gone:
            if at == layer:
                columns = slice(head * size, (head + 1) * size)
                concat[..., columns] = value(layer, columns)
        return concat

    with torch.no_grad():
        return float(nn.functional.mse_loss(model.by_hand(batch[0], edit), batch[1]))


def outputs(model: Any, x: Tensor) -> list[Tensor]:
    held: list[Tensor] = []
    with torch.no_grad():
        model.by_hand(x, lambda _, concat: held.append(concat) or concat)
    return held


@pytest.mark.thorough
def test_ablation_by_zero_is_a_model_without_the_slice_of_the_output_matrix() -> None:
    model, batches = stack(), vectors()
    found = ablation_importance(model, batches, square_loss)
    for i, (layer, head) in enumerate(HEADS):
        cut = copy.deepcopy(model)
        with torch.no_grad():
            cut.layers[layer].per_head_weights()["o"][head].zero_()
        rises = [square_loss(cut, b).item() - square_loss(model, b).item() for b in batches]
        assert np.allclose(found.samples[:, i], rises, atol=1e-12)  # type: ignore[index]
        assert found.column[layer][head].item() == pytest.approx(np.mean(rises), abs=1e-12)
        assert found.column.error[layer][head].item() == pytest.approx(np.std(rises, ddof=1) / math.sqrt(3))
    assert list(found.table.places) == HEADS
    assert np.abs(found.flat).min() > 1e-6


@pytest.mark.thorough
@pytest.mark.parametrize("other", [False, True])
def test_ablation_by_mean_sets_the_head_to_its_mean_over_all_tokens(other: bool) -> None:
    model, batches = stack(), vectors(5)
    reference, batches = batches[3:] if other else batches[:3], batches[:3]
    found = ablation_importance(model, batches, square_loss, by="mean", reference=reference if other else None)
    held = [outputs(model, x) for x, _ in reference]
    means = [torch.cat([h[layer].flatten(0, 1) for h in held]).mean(0) for layer in range(2)]
    for i, at in enumerate(HEADS):
        rises = [
            edited(model, b, [at], lambda layer, columns: means[layer][columns]) - square_loss(model, b).item()
            for b in batches
        ]
        assert np.allclose(found.samples[:, i], rises, atol=1e-12)  # type: ignore[index]


@pytest.mark.thorough
def test_ablation_by_resampling_takes_the_same_position_of_another_row() -> None:
    model, batches = stack(), vectors()
    found = ablation_importance(model, batches, square_loss, by="resample", draws=2, seed=5)
    for i, at in enumerate(HEADS):
        rises = np.zeros(3)
        for number, batch in enumerate(batches):
            clean = outputs(model, batch[0])
            for draw in range(2):
                other = donors(4, 5 + 1_000_003 * draw + number)
                loss = edited(model, batch, [at], lambda a, c, o=other, clean=clean: clean[a][o][..., c])  # type: ignore[misc]
                rises[number] += (loss - square_loss(model, batch).item()) / 2
        assert np.allclose(found.samples[:, i], rises, atol=1e-12)  # type: ignore[index]


@pytest.mark.thorough
@pytest.mark.parametrize("by", ["zero", "mean", "resample"])
def test_several_heads_go_together(by: str) -> None:
    """Donors of a later layer come from the whole model, not from one that misses heads already."""
    model, batches, gone = stack(), vectors(), [(0, 2), (1, 0), (1, 3)]
    found = losses_without(model, batches, square_loss, gone, by=by, seed=9)
    held = [outputs(model, x) for x, _ in batches]
    means = [torch.cat([h[layer].flatten(0, 1) for h in held]).mean(0) for layer in range(2)]
    for number, batch in enumerate(batches):
        value = {
            "zero": lambda layer, columns: 0.0,
            "mean": lambda layer, columns: means[layer][columns],
            "resample": lambda layer, c, n=number: held[n][layer][donors(4, 9 + n)][..., c],  # type: ignore[misc]
        }[by]
        assert found[number] == pytest.approx(edited(model, batch, gone, value), abs=1e-12)
    none = losses_without(model, batches, square_loss, [], by=by)
    assert np.allclose(none, [square_loss(model, b).item() for b in batches], atol=1e-14)


@pytest.mark.parametrize("count", [2, 3, 7, 50])
def test_every_row_is_a_donor_once_and_never_its_own(count: int) -> None:
    for seed in range(20):
        found = donors(count, seed).tolist()
        assert sorted(found) == list(range(count))
        assert all(donor != i for i, donor in enumerate(found))


METHODS: dict[str, Callable[..., HeadImportance]] = {
    "gradient": gradient_importance,
    "absolute mean": lambda *a, **o: gradient_importance(*a, absolute="mean", **o),
    "rows": lambda *a, **o: gradient_importance(*a, per="row", **o),
    "taylor": taylor_importance,
    "zero": ablation_importance,
    "mean": lambda *a, **o: ablation_importance(*a, by="mean", **o),
    "resample": lambda *a, **o: ablation_importance(*a, by="resample", **o),
    "gates": lambda *a, **o: learn_gates(*a, 0.01, steps=5, **o).importance,
}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize("needed", HEADS)
@pytest.mark.parametrize("name", [name for name in METHODS if name != "gates"])
def test_the_one_head_that_matters_is_found(name: str, needed: tuple[int, int]) -> None:
    model = planted([needed])
    batches = wanted_of(model, vectors(dtype=torch.float32))
    found = METHODS[name](model, batches, square_loss)
    assert found.order()[-1] == needed
    assert found.flat.max() > 20 * np.sort(np.abs(found.flat))[-2]


@pytest.mark.thorough_except("gradient", "absolute mean", "rows", "taylor", "resample")
@every_method
def test_the_model_is_left_as_it_was(method: Callable[..., HeadImportance]) -> None:
    model = stack()
    model.train()
    model.layers[0].eval()
    model.layers[1].q_proj.weight.requires_grad_(False)
    model.layers[0].o_proj.weight.grad = torch.ones_like(model.layers[0].o_proj.weight)
    random = torch.get_rng_state()

    def state() -> tuple:
        return (
            [(n, m.training, len(m._forward_pre_hooks), len(m._forward_hooks)) for n, m in model.named_modules()],
            [(n, p.requires_grad, p.grad is None) for n, p in model.named_parameters()],
        )

    before, weights = state(), copy.deepcopy(model.state_dict())
    assert any(sites != 0 for sites in method(model, vectors(), square_loss).flat)
    assert state() == before
    for name, x in model.state_dict().items():
        assert torch.equal(x, weights[name])
    assert torch.equal(torch.get_rng_state(), random)
    with pytest.raises(ConfigError, match="finite"):
        method(model, vectors(), lambda m, b: square_loss(m, b) * math.nan)
    assert state() == before


@pytest.mark.thorough_except("gradient", "absolute mean", "rows", "taylor")
@every_method
def test_dropout_is_off_and_numbers_repeat(method: Callable[..., HeadImportance]) -> None:
    model, batches = decoder(dropout=0.5).train(), texts()
    one, two = (method(model, iter(batches), token_loss) for _ in range(2))
    assert np.array_equal(one.flat, two.flat)
    assert one.loss == pytest.approx(np.mean([token_loss(model.eval(), b).item() for b in batches]))


@pytest.mark.thorough_except("gradient", "absolute mean", "rows", "taylor", "gates")
@every_method
def test_results_print_themselves_and_become_json(method: Callable[..., HeadImportance]) -> None:
    told: list[tuple[int, int]] = []
    found = method(stack(), vectors(), square_loss, progress=lambda _, *done: told.append(done))
    assert told == [(i + 1, len(told)) for i in range(len(told))]
    lines = repr(found).splitlines()
    assert str(found).splitlines() == lines
    assert len(lines) == 4
    assert lines[0].startswith(found.method)
    assert len(lines[1]) == len(lines[3]) > len(lines[2])  # the first layer has two heads less
    assert lines[2].split()[-3:] == [show.number(float(x)) for x in found.column[0]]
    assert lines[3].split()[-5:] == [show.number(float(x)) for x in found.column[1]]
    assert "layers.1" in found._repr_html_()
    back = json.loads(json.dumps(found.to_dict()))
    assert back["values"][back["method"]] == found.flat.tolist()
    assert back["layer"] == [0] * 3 + [1] * 5


def test_one_batch_has_no_standard_error() -> None:
    found = ablation_importance(stack(), vectors(1), square_loss)
    assert found.column.flat_error.isnan().all()
    assert found.to_dict()["values"][f"{found.method} error"] == [None] * 8
    assert "±" not in str(found)


def test_order_is_least_important_first() -> None:
    values = (np.array([0.3, -0.1]), np.array([0.2, 0.3, 0.0]))
    found = HeadImportance.of("made up", "loss", ("a", "b"), values, loss=1.0)
    assert found.order() == [(0, 1), (1, 2), (1, 0), (0, 0), (1, 1)]


@pytest.mark.thorough
def test_chosen_sites_only() -> None:
    model, batches = stack(), vectors()
    whole = ablation_importance(model, batches, square_loss)
    last = ablation_importance(model, batches, square_loss, sites=find_heads(model)[1:])
    assert last.table.layers == ("layers.1",)
    assert np.array_equal(last.column[0], whole.column[1])


def broken(layer: int, head: int) -> Any:
    """A stack with a head that gives infinities, by its own value matrix."""
    model = stack()
    with torch.no_grad():
        model.layers[layer].per_head_weights()["v"][head].fill_(math.inf)
    return model


@pytest.mark.parametrize(("layer", "head"), [(0, 2), (1, 3)])
@pytest.mark.parametrize("method", [gradient_importance, taylor_importance, ablation_importance])
def test_the_head_that_is_not_finite_is_named(method: Callable, layer: int, head: int) -> None:
    with pytest.raises(ConfigError, match=rf"batch 0; the first .* is that of L{layer}H{head} \('layers"):
        method(broken(layer, head), vectors(), square_loss)


def test_a_head_without_which_the_loss_is_not_finite_is_named() -> None:
    """A loss of logarithms that only head 1 of layer 1 keeps from −∞."""
    model = stack()

    def loss_fn(m: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        held = outputs_of(m, batch[0])
        return held.abs().mean().log()

    def outputs_of(m: Any, x: Tensor) -> Tensor:
        size = m.layers[1].value_dim
        found: list[Tensor] = []
        hook = m.layers[1].o_proj.register_forward_pre_hook(lambda _, given: found.append(given[0]))
        m(x)
        hook.remove()
        return found[0][..., size : 2 * size]

    with pytest.raises(ConfigError, match=r"returned -inf for batch 0 without L1H1 \('layers.1'\)"):
        ablation_importance(model, vectors(), loss_fn)


def test_a_gradient_that_is_not_finite_is_named() -> None:
    """√0 has no finite slope; the loss itself is 0."""
    model = stack()
    with torch.no_grad():
        model.layers[1].o_proj.weight.zero_()

    def loss_fn(m: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        found: list[Tensor] = []
        hook = m.layers[1].register_forward_hook(lambda *given: found.append(given[2]))
        m(batch[0])
        hook.remove()
        return found[0].square().sum().sqrt()

    with pytest.raises(ConfigError, match=r"gradient of L0H0 \('layers.0'\) is not finite for batch 0"):
        gradient_importance(model, vectors(), loss_fn)


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, b: gradient_importance(m, [], square_loss), "batches: got none"),
        (lambda m, b: gradient_importance(m, b, square_loss, sites=[]), "sites: got none"),
        (lambda m, b: gradient_importance(m, b, square_loss, absolute="both"), "absolute='both'"),
        (lambda m, b: gradient_importance(m, b, square_loss, per="token"), "per='token'"),
        (lambda m, b: gradient_importance(m, b, lambda m, b: m(b[0])), r"loss_fn: returned shape \(4, 11, 14\)"),
        (lambda m, b: gradient_importance(m, b, lambda m, b: 1.0), "loss_fn: returned float"),
        (lambda m, b: gradient_importance(m, b, lambda m, b: square_loss(m, b).detach()), "no gradient"),
        (lambda m, b: gradient_importance(nn.Linear(3, 3), b, square_loss), "no attention heads"),
        (lambda m, b: gradient_importance(m, b, lambda m, b: b[0].mean()), "'layers.0' is never called"),
        (lambda m, b: ablation_importance(m, b, lambda m, b: b[0].mean()), "'layers.0' is never called"),
        (lambda m, b: ablation_importance(m, b, lambda m, b: b[0].mean(), by="mean"), "'layers.0' is never called"),
        (lambda m, b: learn_gates(m, b, lambda m, b: b[0].mean(), 0.1), "'layers.0' is never called"),
        (lambda m, b: ablation_importance(m, b, square_loss, by="noise"), "by='noise'"),
        (lambda m, b: ablation_importance(m, b, square_loss, reference=b), "got by='zero'"),
        (lambda m, b: ablation_importance(m, b, square_loss, by="mean", reference=[]), "reference: got no"),
        (lambda m, b: ablation_importance(m, b, square_loss, draws=2), "draws=2"),
        (lambda m, b: ablation_importance(m, b, square_loss, by="resample", draws=0), "draws=0"),
        (lambda m, b: ablation_importance(m, [(x[:1], y[:1]) for x, y in b], square_loss, by="resample"), "at least 2"),
        (lambda m, b: losses_without(m, b, square_loss, [(2, 0)]), "L2H0 does not exist; there are 2 layers"),
        (lambda m, b: losses_without(m, b, square_loss, [(0, 3)]), "L0H3 does not exist; layer 0 has 3 heads"),
        (lambda m, b: losses_without(m, b, square_loss, [(1, 3), (1, 3)]), "L1H3 is given twice"),
        (lambda m, b: learn_gates(m, b, square_loss, -1.0), "penalty=-1.0"),
        (lambda m, b: learn_gates(m, b, square_loss, 0.1, steps=0), "steps=0"),
        (lambda m, b: learn_gates(m, b, square_loss, 0.1, start=1.0), r"start=1\.0"),
        (lambda m, b: pruning_curve(m, b, square_loss, [(0, 0)]), "order: 1 heads of 8"),
        (lambda m, b: pruning_curve(m, b, square_loss, HEADS, points=[9]), "points: expected numbers from 0 to 8"),
        (lambda m, b: pruning_curve(m, b, square_loss, HEADS, random_orders=0), "random_orders=0"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_named(call: Callable, message: str) -> None:
    with pytest.raises(HeadwiseError, match=message):
        call(stack(), vectors())


def test_a_loss_that_changes_its_rows_cannot_be_resampled() -> None:
    calls = iter(range(100))

    def loss_fn(m: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        rows = 4 if next(calls) == 0 else 3
        return square_loss(m, (batch[0][:rows], batch[1][:rows]))

    with pytest.raises(ShapeError, match="called differently the second time"):
        ablation_importance(stack(), vectors(), loss_fn, by="resample")
