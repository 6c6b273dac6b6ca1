"""`NonFiniteAlarm` names what is NaN or infinite itself, not a layer further on that received it."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from watched_models import VOCAB, ids, transformers_model, x

import headwise as hw
from headwise.errors import ConfigError
from headwise.stats.base import side_by_side


class Attention(nn.Module):
    """Written out."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, y):
        q, k, v = self.qkv(y).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
        causal = torch.ones(11, 11).triu(1).bool()
        weights = (q @ k.mT / 8**0.5).masked_fill(causal, -torch.inf).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class ByHand(nn.Module):
    """Two layers of it, with what a model has around them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 24)
        self.register_buffer("positions", torch.randn(11, 24))
        self.norms = nn.ModuleList(nn.LayerNorm(24) for _ in range(2))
        self.attentions = nn.ModuleList(Attention() for _ in range(2))
        self.wide = nn.ModuleList(nn.Sequential(nn.Linear(24, 29), nn.GELU(), nn.Linear(29, 24)) for _ in range(2))
        self.head = nn.Linear(24, VOCAB)

    def forward(self, tokens):
        y = self.embedding(tokens) + self.positions
        for norm, attention, wide in zip(self.norms, self.attentions, self.wide, strict=True):
            y = y + attention(norm(y))
            y = y + wide(y)
        return self.head(y)


def decoder():
    return hw.lm.Decoder(hw.lm.DecoderConfig(VOCAB, d_model=24, num_layers=2, num_heads=3, num_kv_heads=1, d_ff=29))


def encoder():
    layer = nn.TransformerEncoderLayer(24, 3, 29, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


MODELS = {
    "headwise": (decoder, ids),
    "torch": (encoder, x),
    "llama": (lambda: transformers_model("llama"), ids),
    "gpt2": (lambda: transformers_model("gpt2"), ids),
    "by_hand": (ByHand, ids),
}
UNUSED = {"original_inv_freq"}  # a copy that no forward reads


def watched(model, given):
    found = []
    with hw.watch(model, alarms=[hw.telemetry.NonFiniteAlarm(then=found.append)]) as record, torch.no_grad():
        model(given)
    return record, found


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_the_parameter_or_buffer_that_is_not_finite_is_named_first(name, number):
    make, inputs = MODELS[name]
    torch.manual_seed(3)
    model, given = make().eval(), inputs()
    assert watched(model, given)[1] == []
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    planted = {
        where: held for where, held in held.items()
        if held.is_floating_point() and held.ndim and where.rpartition(".")[2] not in UNUSED
    }  # fmt: skip
    assert len(planted) > 12
    for where, numbers in planted.items():
        before = numbers.detach().clone()
        with torch.no_grad():
            numbers[..., :1].fill_(number)
        record, found = watched(model, given)
        with torch.no_grad():
            numbers.copy_(before)
        assert [one.origin for one in found] == [(where,)]
        assert found[0].message.startswith(f"step 0: NaN or infinity in {where}; ")
        assert record.latest.nonfinite_result


WHERE = {
    "embedding": "before the first attention",
    "norms.0": "before the first attention",
    "attentions.0.out": "after the finite attention of attentions.0",
    "wide.0.1": "after the finite attention of attentions.0",
    "norms.1": "after the finite attention of attentions.0",
    "wide.1": "after the finite attention of attentions.1",
    "head": "after the finite attention of attentions.1",
}


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize("where", WHERE)
def test_where_no_number_of_the_model_is_nan_the_last_finite_attention_is_named(where):
    model = ByHand().eval()
    model.get_submodule(where).register_forward_hook(lambda module, given, result: result * torch.nan)
    record, (finding,) = watched(model, ids())
    assert finding.origin == ()
    said = f"step 0: NaN or infinity began {WHERE[where]}; no parameter or buffer was found that has any; "
    assert finding.message.startswith(said)
    assert {*record.layers, *record.unwatched} == {"attentions.0", "attentions.1"}  # none is lost


def test_a_buffer_that_may_have_received_nan_is_named_with_where_they_began():
    class Normed(ByHand):
        def __init__(self):
            super().__init__()
            self.batch_norm = nn.BatchNorm1d(VOCAB)

        def forward(self, tokens):
            return self.batch_norm(super().forward(tokens).mT).mT

    model = Normed()
    model.wide[0].register_forward_hook(lambda module, given, result: result * torch.nan)
    _, (finding,) = watched(model, ids())
    assert finding.origin == ("batch_norm.running_mean", "batch_norm.running_var")
    begun = (
        "NaN or infinity in batch_norm.running_mean, batch_norm.running_var; they began after the finite attention of "
    )
    assert finding.message.startswith(f"step 0: {begun}attentions.0; ")


def test_scores_that_overflow_are_their_own_beginning():
    model = ByHand().eval()
    with torch.no_grad():
        model.attentions[0].qkv.weight[:48] *= 1e30
    _, (finding,) = watched(model, ids())
    assert finding.message.startswith("step 0: attentions.0 head 0: NaN or infinity in the scores of ")


def test_a_mask_of_minus_infinity_in_a_buffer_or_a_result_is_no_alarm():
    class Masked(ByHand):
        def __init__(self):
            super().__init__()
            self.register_buffer("hidden", torch.full((VOCAB,), -torch.inf))

        def forward(self, tokens):
            return torch.cat((super().forward(tokens), self.hidden.expand(*tokens.shape, VOCAB)), -1)

    model = Masked().eval()
    assert watched(model, ids())[1] == []
    with torch.no_grad():
        model.wide[1][0].bias[3] = torch.nan
    (finding,) = watched(model, ids())[1]
    assert finding.origin == ("wide.1.0.bias",)
    assert finding.heads == ()


def test_a_result_that_is_still_nan_is_reported_once_and_again_after_it_was_finite():
    model, found = ByHand().eval(), []
    with hw.watch(model, alarms=[hw.telemetry.NonFiniteAlarm(then=found.append)]):
        for number in (torch.nan, torch.nan, 0.0, torch.nan):
            with torch.no_grad():
                model.head.bias[2] = number
            model(ids())
    assert [one.summary.step for one in found] == [0, 3]


class OfAllHeads:
    """A measure whose heads cannot be joined: the share of each in the sum over the heads that it was given."""

    name = "of_all_heads"

    def finish(self, state):
        return state / state.sum(1, keepdim=True)


def test_a_state_that_is_nan_on_one_side_only_is_not_joined():
    none, some = torch.tensor([[0.0]]), torch.tensor([[3.0]])
    with pytest.raises(ConfigError, match="'of_all_heads' keeps its heads otherwise"):  # 0 / 3 together, 0 / 0 apart
        side_by_side(OfAllHeads(), [none, some], [1, 1])
    assert side_by_side(OfAllHeads(), [none, none], [1, 1]).tolist() == [[0.0, 0.0]]


@dataclass
class Result:
    y: torch.Tensor


class Rotated(nn.Module):
    """Attention whose input is multiplied by complex numbers, with a result that is no collection of tensors."""

    def __init__(self):
        super().__init__()
        self.attention = hw.MultiHeadAttention(24, 3)
        self.register_buffer("turns", torch.polar(torch.ones(24), torch.zeros(24)))
        self.scale = 1.0

    def forward(self, x):
        return Result(self.attention(x * self.turns.real) * self.scale)


def test_a_complex_buffer_that_is_nan_is_named():
    model = Rotated()
    model.turns[7] = complex(torch.nan, 0.0)
    (finding,) = watched(model, torch.randn(2, 5, 24))[1]
    assert finding.origin == ("turns",)


def test_nan_in_a_dataclass_is_one_in_the_result():
    model = Rotated()
    model.scale = torch.nan
    (finding,) = watched(model, torch.randn(2, 5, 24))[1]
    assert finding.heads == ()
    assert "in the result of the model" in finding.message
