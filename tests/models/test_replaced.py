"""Attention of any model, computed by headwise: equal outputs and gradients, and what stays as it is."""

import near_misses
import pytest
import test_recognise
import torch
import touched
import ways
from test_recognise import Model, model_of
from torch import nn
from ways import B, E, N

import headwise as hw
from headwise.errors import ConfigError

KEPT = {"MaskedAfterwards"}  # weights that are changed after the softmax
REPLACED = [*(way for way in test_recognise.WAYS if way not in KEPT), "HeadsInAList"]


def batch(seed=0, n=N):
    torch.manual_seed(seed)
    return torch.randn(B, n, E, dtype=torch.float64, requires_grad=True)


def results(model, x):
    """The output and the gradients of the input and all parameters."""
    y = model(x)
    found = torch.autograd.grad(y.square().sum(), [x, *model.parameters()], allow_unused=True)
    return [y, *(grad for grad in found if grad is not None)]


def same(found, expected):
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize("way", REPLACED)
def test_a_way_of_writing_attention_is_replaced_and_equal(way):
    model = model_of(getattr(ways, way)())
    first, other = batch(0), batch(1)
    expected, later = results(model, first), results(model, other)
    with hw.attach(model) as handle:
        assert all(map(torch.equal, results(model, first), expected))  # the model's own code, compared with attend
        same(results(model, other), later)
        assert handle.skipped == {}
        assert all(name.startswith("blocks.0.attn") for name in handle.attached)
        assert handle.attached
        weights = getattr(model.blocks[0]["attn"], "weights", None)
        assert way in ("TwoPackages", "Grouped") or weights is None or not weights.made
    assert all(map(torch.equal, results(model, first), expected))


@pytest.mark.parametrize("way", ["SmallGPT", "WrittenSoftmax", "Sinks", "FoldedHeads"])
def test_weights_that_are_kept_are_computed_when_they_are_read(way):
    model = model_of(getattr(ways, way)())
    x = batch(1)
    model(x)
    expected = model.blocks[0]["attn"].weights
    with hw.attach(model, batch=batch()):
        model(x)
        weights = model.blocks[0]["attn"].weights
        assert not weights.made
        assert (weights.shape, weights.dtype) == (expected.shape, expected.dtype)
        assert torch.equal(weights, expected)
        assert weights.made


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize("miss", test_recognise.NEAR)
def test_a_near_miss_is_never_replaced(miss):
    model = model_of(getattr(near_misses, miss)())
    before, x = [list(module._forward_hooks) for module in model.modules()], batch()
    with pytest.raises(ConfigError, match=r"attach\(model\): (no attention in Model|headwise computes no attention)"):
        hw.attach(model, batch=x)
    handle = hw.attach(model)
    with pytest.raises(ConfigError, match=r"attach\(model\): (no attention in Model|headwise computes no attention)"):
        model(x)
    assert [list(module._forward_hooks) for module in model.modules()] == before
    handle.detach()


# kind: the reason, when it is compared or later; "" if it is replaced
LEFT = {
    touched.DetachedWeights: "gradients do not flow through all of it",
    touched.ScoresWithoutGradients: "gradients do not flow through all of it",
    touched.HookedWeights: "its scores or weights are read",
    touched.KeptGradient: "its scores or weights are read",
    touched.DroppedHeads: "its scores or weights are read",
    touched.WrittenWeights: "the weights are changed after the softmax",
    touched.WrittenView: "its result differs from that of attention",
    touched.Quantised: "the weights are changed after the softmax",
    touched.Sharpened: "its scores or weights are read",
    touched.SumOfAll: "its scores or weights are read",
    touched.LargestOfQueries: "something that differs between keys is computed from its scores",
    touched.DependsOnWeights: "its scores or weights are read",
    touched.NumPyWeights: "its scores or weights are read",
    touched.MaskLikeScores: "",
    touched.ReadLikeUnread: "its scores or weights are read",
    touched.Penalised: "",
    touched.TwoValues: "",
    touched.ChangedMask: "its scores or weights are read",
    touched.ChangedKeys: "its scores or weights are read",
}


@pytest.mark.thorough_except("WrittenWeights", "Quantised", "Sharpened", "DependsOnWeights")
@pytest.mark.filterwarnings("ignore:attach.model.. not attached")
@pytest.mark.parametrize("kind", LEFT, ids=lambda kind: kind.__name__)
def test_attention_is_watched_whoever_computes_it(kind):
    torch.manual_seed(3)
    model = nn.Sequential(Model(kind()), ways.DividedByTensor()).double()

    def watched():
        with hw.watch(model, measures=["entropy"], maps="lazy") as record:
            model(batch(5))
        return {name: amap.to_dense() for name, amap in record.maps.items()}

    expected = watched()
    with hw.attach(model):
        model(batch(4))
        found = watched()
    assert found.keys() == expected.keys()
    for name, weights in found.items():
        torch.testing.assert_close(weights, expected[name])


@pytest.mark.thorough_beyond(4)
@pytest.mark.filterwarnings("ignore:attach.model.. not attached")
@pytest.mark.parametrize("kind", LEFT, ids=lambda kind: kind.__name__)
def test_what_is_done_to_scores_and_weights_happens_exactly(kind):
    torch.manual_seed(3)
    model = nn.Sequential(Model(kind()), ways.DividedByTensor()).double()  # the second so that something is attached
    changed = model[0].blocks[0]["attn"]
    with hw.attach(model) as handle:
        results(model, batch(4))
        changed.late = True
        found = [results(model, batch(seed)) for seed in range(3)]
        why = handle.skipped.get("0.blocks.0.attn", "")
        assert why.startswith(LEFT[kind])
        assert bool(why) == bool(LEFT[kind])
        assert "1" in handle.attached
    for seed, mine in enumerate(found):
        same(mine, results(model, batch(seed)))
