"""Hand-written code that holds numbers of each head: heads are removed with theirs, or the tensor is named."""

import math

import pytest
import torch
from torch import nn

import headwise as hw
from headwise.errors import ConfigError

H, KV, D, N = 6, 6, 4, 5


class Slopes(nn.Module):
    def __init__(self, values):
        super().__init__()
        self.slopes = nn.Parameter(values)

    def forward(self, distance):
        return -self.slopes[:, None, None] * distance


class Numbered(nn.Module):
    """Attention with numbers of each head, held and used in one way."""

    def __init__(self, way, h=H, kv=KV, child=None):
        super().__init__()
        self.way, self.h, self.kv = way, h, kv
        self.q, self.o = nn.Linear(h * D, h * D), nn.Linear(h * D, h * D)
        self.k, self.v = nn.Linear(h * D, kv * D), nn.Linear(h * D, kv * D)
        values = torch.rand(h) + 0.2
        if way in ("buffer", "equal"):
            self.register_buffer("slopes", values if way == "buffer" else torch.ones(h))
        elif way == "attribute":
            self.slopes = values
        elif way == "table":
            self.table = nn.Embedding(2 * N, h)
        elif way == "keys":
            self.sizes = nn.Parameter(torch.rand(kv, 1, 1) + 0.5)
        elif way in ("child", "shared"):
            self.child = child or Slopes(values)
        elif way == "norm":  # of the size of a head, which is the number of heads
            self.norm = nn.Parameter(torch.rand(D))
        elif way != "none":
            self.numbers = nn.Parameter(values.view(1, h, 1, 1))

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (-1, D)).transpose(1, 2) for w in (self.q, self.k, self.v))
        if self.way == "keys":
            k = k * self.sizes
        if self.way == "norm":
            q = q * self.norm
        k, v = (y.repeat_interleave(self.h // self.kv, 1) for y in (k, v))
        scores = q @ k.mT / math.sqrt(D)
        i = torch.arange(x.shape[1])
        distance = (i[:, None] - i).abs()
        if hasattr(self, "slopes"):
            scores = scores - self.slopes[:, None, None] * distance
        if self.way == "table":
            scores = scores + self.table(distance).movedim(-1, 0)
        if hasattr(self, "child"):
            scores = scores + self.child(distance)
        if self.way == "temperature":
            scores = scores * self.numbers
        if self.way == "sink":
            sink = self.numbers.expand(len(x), -1, x.shape[1], -1)
            weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        out = weights @ v
        if self.way == "gate":
            out = out * self.numbers
        return self.o(out.transpose(1, 2).flatten(2))


def masked_and_pruned(model, x, gone):
    sites = hw.find_heads(model, x)
    gates = torch.ones(sites[0].num_heads).index_fill(0, torch.tensor(gone), 0.0)
    with hw.models.scale_heads(sites[:1], [gates]), torch.no_grad():
        masked = model(x)
    return masked, hw.edit.prune(model, {0: gone}, copy=True).model


@pytest.mark.thorough_except("none-q.bias-shape0", "buffer-slopes-shape1")
@pytest.mark.parametrize(
    ("way", "name", "shape"),
    [
        ("none", "q.bias", (4 * D,)), ("buffer", "slopes", (4,)),
        ("temperature", "numbers", (1, 4, 1, 1)), ("sink", "numbers", (1, 4, 1, 1)), ("equal", "slopes", (4,)),
        ("table", "table.weight", (2 * N, 4)), ("child", "child.slopes", (4,)),
    ],
)  # fmt: skip
def test_numbers_of_heads_are_removed_with_their_heads(way, name, shape):
    torch.manual_seed(0)
    model, x = nn.Sequential(Numbered(way)).double().eval(), torch.randn(2, N, H * D).double()
    masked, pruned = masked_and_pruned(model, x, [1, 4])
    torch.testing.assert_close(pruned(x), masked)
    state = pruned.state_dict()
    assert state[f"0.{name}"].shape == shape
    pruned.load_state_dict(state)
    if way == "table":
        assert pruned[0].table.embedding_dim == 4
    again = hw.edit.prune(pruned, {0: [0]}, copy=True).model
    assert torch.isfinite(again(x)).all()


def test_numbers_of_kv_heads_are_removed_with_the_kv_head():
    torch.manual_seed(0)
    model, x = nn.Sequential(Numbered("keys", kv=3)).double().eval(), torch.randn(2, N, H * D).double()
    masked, pruned = masked_and_pruned(model, x, [2, 3])
    torch.testing.assert_close(pruned(x), masked)
    assert pruned[0].sizes.shape == (2, 1, 1)


def test_numbers_of_channels_stay_where_a_head_has_as_many_as_there_are_heads():
    torch.manual_seed(0)
    model, x = nn.Sequential(Numbered("norm", h=D, kv=D)).double().eval(), torch.randn(2, N, D * D).double()
    masked, pruned = masked_and_pruned(model, x, [1])
    torch.testing.assert_close(pruned(x), masked)
    assert pruned[0].norm.shape == (D,)


@pytest.mark.parametrize(("way", "name"), [("attribute", r"slopes \(6,\)"), ("gate", r"numbers \(1, 6, 1, 1\)")])
def test_a_tensor_that_cannot_be_cut_is_named(way, name):
    torch.manual_seed(0)
    model, x = Numbered(way).double().eval(), torch.randn(2, N, H * D).double()
    hw.find_heads(model, x)
    with pytest.raises(ConfigError, match=f"{name} may belong to heads"):
        hw.edit.prune(model, [1])


@pytest.mark.thorough
def test_numbers_that_two_layers_share_are_named():
    torch.manual_seed(0)
    child = Slopes(torch.rand(H))
    model = nn.Sequential(Numbered("shared", child=child), Numbered("shared", child=child)).double().eval()
    hw.find_heads(model, torch.randn(2, N, H * D).double())
    with pytest.raises(ConfigError, match=r"0\.child\.slopes' and '1\.child\.slopes' are one tensor"):
        hw.edit.prune(model, {0: [1]})
