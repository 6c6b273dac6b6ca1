"""`certify`: the same function as which call of `attend`, or what is different."""

import math

import near_misses
import pytest
import test_recognise
import torch
import torch.nn.functional as F
import touched
import ways
from torch import nn
from ways import B, D, E, N, Way, lower

import headwise as hw
from headwise.errors import ConfigError


def certified(kind):
    torch.manual_seed(0)
    model = nn.Sequential(kind()).double().eval()
    return hw.models.certify(model, torch.randn(B, N, E, dtype=torch.float64))


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize("way", [way for way in test_recognise.WAYS if way not in {"TwoPackages", "Grouped"}])
def test_a_way_of_writing_attention_is_the_same_function(way):
    (one,) = found = certified(getattr(ways, way))
    if way == "MaskedAfterwards":  # its weights are changed, which changed nothing on this batch
        assert "masked_fill at" in one.reason
        assert "equal here, but not the same function as attend(q, k, v, mask=Causal(), scale=0.5)" in repr(found)
        return
    assert found.same
    assert one.reason == ""
    assert one.function.startswith("attend(q, k, v, ")
    assert one.difference <= one.allowed < 1e-11
    assert one.gradients < 1e-10
    _, _, scale, _, _ = test_recognise.WAYS[way]
    usual = scale is not None and scale != pytest.approx(D**-0.5) and way not in {"LearnedQuery"}
    assert any("not 1/√" in remark for remark in one.remarks) == (
        usual or way in {"FoldedRotary", "SequenceToSequence"}
    )


class Inverted(Way):
    def forward(self, x):
        q, k, v = self.heads(x)
        return self.merge((q @ k.mT / 2).masked_fill(lower(N), -math.inf).softmax(-1) @ v)


class WithoutItself(Way):
    def forward(self, x):
        q, k, v = self.heads(x)
        return self.merge((q @ k.mT / 2).masked_fill(~lower(N).tril(-1), -1e9).softmax(-1) @ v)


class Unscaled(Way):
    def forward(self, x):
        q, k, v = self.heads(x)
        return self.merge((q @ k.mT).softmax(-1) @ v)


class DroppedScores(Way):
    def forward(self, x):
        q, k, v = self.heads(x)
        return self.merge(F.dropout(q @ k.mT / 2, 0.5).softmax(-1) @ v)


class DroppedWeights(Way):
    def forward(self, x):
        q, k, v = self.heads(x)
        return self.merge(F.dropout((q @ k.mT / 2).softmax(-1), 0.5) @ v)


# kind: what it says, whether it is the same function
SAYS = {
    Inverted: (("queries attend to exactly the keys that Causal() masks: its mask may be inverted",
                "2 fully masked queries: their result is NaN, and so are gradients, where attend returns 0"), True),
    WithoutItself: (("no query attends to its own key",
                     "2 fully masked queries: their result is the mean of all values, as they are masked with a finite "
                     "number, where attend returns 0"), True),
    Unscaled: (("its scale is 1, not 1/√4 = 0.5: there is none",), True),
    DroppedWeights: (("a share of 0.5 of its weights is dropped",), True),
    DroppedScores: (("dropout of scores at",), False),
    touched.DetachedWeights: (("its gradients are not those of attention",), False),
    near_misses.OverQueries: (("softmax over the queries, not over the keys",), False),
    near_misses.OverHeads: (("softmax along an axis that is not that of the keys, such as the heads",), False),
    near_misses.WeakMask: (("masked scores are set to -3, which does not mask them",), False),
    near_misses.ClampedScores: (("clamp of scores at", "its scale is 1, not 1/√4 = 0.5: there is none"), False),
    near_misses.MaskedWeights: (("the weights are changed after the softmax, by mul at",), False),
}  # fmt: skip


@pytest.mark.parametrize("kind", SAYS, ids=lambda kind: kind.__name__)
def test_what_is_unusual_or_different_is_named(kind):
    said, same = SAYS[kind]
    (one,) = found = certified(kind)
    assert one.same == found.same == same
    reasons = [one.reason, *one.remarks] if not same else list(one.remarks)
    assert len(reasons) == len(said)
    assert all(mine.startswith(expected) for mine, expected in zip(reasons, said, strict=True))
    assert (one.difference > one.allowed) == (not same and kind is not touched.DetachedWeights)
    for text in said:
        assert text in repr(found)


@pytest.mark.parametrize("kind", [near_misses.LinearAttention, near_misses.SigmoidAttention, near_misses.Classifier])
def test_what_is_no_softmax_attention_has_nothing_to_be_compared_with(kind):
    (one,) = found = certified(kind)
    assert (one.same, one.function, one.difference) == (False, "", None)
    assert "no softmax attention, or not followed" in repr(found)
    assert found.same  # there is no attention that differs


def test_every_module_is_a_row_and_the_model_is_unchanged():
    torch.manual_seed(0)
    model = nn.Sequential(ways.SmallGPT(), near_misses.OverQueries(), ways.DividedByTensor()).eval()
    x = torch.randn(B, N, E)
    expected, before = model(x), {name: p.clone() for name, p in model.state_dict().items()}
    found = hw.models.certify(model, {"input": x})
    assert torch.equal(found.output, expected)
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert [(one.name, one.same) for one in found] == [("0", True), ("1", False), ("2", True)]
    assert not found.same
    assert found["2"].function == "attend(q, k, v, scale=0.5)"
    lines = repr(found).splitlines()
    assert lines[0].split()[:2] == ["module", "verdict"]
    assert lines[4].startswith("1 (near_misses.py:")
    assert found._repr_html_().count("<tr>") == 4


def test_a_model_without_anything_close_is_an_error():
    with pytest.raises(ConfigError, match=r"certify\(model\): no attention in Linear; looked for"):
        hw.models.certify(nn.Linear(3, 5), torch.randn(2, 3))
    with pytest.raises(ConfigError, match=r"certify\(model\): expected an nn.Module, got int"):
        hw.models.certify(3, torch.randn(2, 3))
