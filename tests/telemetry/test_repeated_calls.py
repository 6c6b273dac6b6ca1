"""A module that is called several times in one forward pass: a map of each call, and statistics over all of them."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from watched_models import ids, x

import headwise as hw

MEASURES = ("max_logit", "entropy")


class Shared(nn.Module):
    """One layer for every step, as ALBERT has it, and for inputs of other sizes."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *several):
        for one in several:
            self.layer(one)
            self.layer(-one)


def shared(kind):
    torch.manual_seed(3)
    if kind == "headwise":
        return Shared(hw.MultiHeadAttention(24, 4)).eval()
    return Shared(nn.TransformerEncoderLayer(24, 4, 19, batch_first=True, dropout=0.0)).eval()


def latest(record, layer, name):
    """A measure of a layer's heads in the last step, [heads] float32."""
    return record.latest.table.layer(layer).column(name).float()


@pytest.mark.thorough_except("torch")
@pytest.mark.parametrize("kind", ["headwise", "torch"])
def test_every_call_has_its_map(kind):
    model, images = shared(kind), [x(n=n, seed=n) for n in (5, 7)]
    with torch.no_grad(), hw.watch(model, maps="lazy", measures=MEASURES) as record:
        model(*images)
    (name,) = record.layers
    assert list(record.maps) == [name, f"{name}#2", f"{name}#3", f"{name}#4"]
    assert [amap.shape[2] for amap in record.maps.values()] == [5, 5, 7, 7]
    one, other = (record.maps[f"{name}{call}"] for call in ("", "#2"))
    assert not torch.equal(one.q, other.q)
    assert record.latest.layers == (name,)
    measured = [amap.measure(*MEASURES) for amap in record.maps.values()]
    assert_close(
        latest(record, name, "max_logit"),
        torch.cat([one["max_logit"] for one in measured]).amax(0),
    )
    rows = torch.tensor([5, 5, 7, 7])[:, None] / 24
    entropy = torch.stack([one["entropy"].mean(0) for one in measured])
    assert_close(latest(record, name, "entropy"), (rows * entropy).sum(0), rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
def test_the_calls_of_one_forward_are_kept_and_no_others():
    model = shared("torch")
    with torch.no_grad(), hw.watch(model, maps="pooled") as record:
        model(x(), x())
        assert len(record.maps) == 4
        model(x())
    assert list(record.maps) == ["layer.self_attn", "layer.self_attn#2"]


def albert(**options):
    from transformers import AlbertConfig, AlbertModel

    torch.manual_seed(4)
    return AlbertModel(AlbertConfig(
        vocab_size=53, embedding_size=8, hidden_size=24, num_hidden_layers=3, num_attention_heads=4, pad_token_id=0,
        intermediate_size=29, max_position_embeddings=40, initializer_range=0.3, attn_implementation="eager",
    )).eval()  # fmt: skip


@pytest.fixture
def watched_albert():
    model = albert()
    with torch.no_grad():
        attentions = model(ids(), output_attentions=True).attentions
        with hw.watch(model, maps="lazy", measures=[*MEASURES, "received_mass"]) as record:
            model(ids())
    return record, attentions


def test_a_shared_layer_of_a_transformers_model_has_the_map_of_each_call(watched_albert):
    record, attentions = watched_albert
    assert len(record.layers) == 1
    assert len(record.maps) == len(attentions) == 3
    for amap, weights in zip(record.maps.values(), attentions, strict=True):
        assert_close(amap.to_dense(), weights, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("maps", ["lazy", "pooled"])
def test_a_report_shows_every_call(maps):
    model = albert()
    with torch.no_grad(), hw.watch(model, maps=maps, measures=["entropy", "normalized_entropy"]) as record:
        model(ids())
    (name,) = record.layers
    report = hw.report(record, tokens=ids())
    assert report.layers == [name, f"{name}#2", f"{name}#3"]
    assert any("called several times" in note or "calls several times" in note for note in report.notes)
    entropy = torch.stack([torch.as_tensor(values) for values in report.statistics["entropy"]])
    if maps == "lazy":
        own = torch.stack([amap.measure("entropy")["entropy"].mean(0) for amap in record.maps.values()])
        assert_close(entropy, own.to(entropy.dtype), rtol=1e-5, atol=1e-6)
    else:  # of all calls
        assert_close(entropy, record.latest["entropy"].expand(3, 4).to(entropy.dtype), rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
def test_a_report_knows_the_second_call_of_cross_attention_as_such():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.TransformerDecoderLayer(24, 4, 19, batch_first=True, dropout=0.0)

        def forward(self, target, memory):
            return self.layer(self.layer(target, memory), memory)

    torch.manual_seed(3)
    model = Twice().eval()
    with torch.no_grad(), hw.watch(model, maps="lazy") as record:
        model(x(n=7), x(n=7, seed=2))
    kinds = "layer.self_attn", "layer.multihead_attn"
    assert list(record.maps) == [f"{kind}{call}" for call in ("", "#2") for kind in kinds]
    names = [passage.title for passage in hw.report(record, entries=0).passages]
    assert [name.partition(",")[0] for name in names] == ["encoder", "cross attention"]


def test_observers_hear_of_every_call_under_one_name():
    model = albert()
    hw.attach(model)
    seen = []
    with torch.no_grad(), hw.models.observe(seen.append, model=model):
        model(ids())
    assert len(seen) == 3
    assert len({call.name for call in seen}) == 1
    assert len({call.map.q.data_ptr() for call in seen}) == 3
