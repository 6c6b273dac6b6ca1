"""Keys that may not be in the order of their tokens, and padding that no mask shows as padding."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw

SIZE, STEPS, H, D = 5, 9, 4, 3


class Steps(nn.Module):
    """Steps with a cache of the last tokens, written by hand. `kind`: how it is kept."""

    def __init__(self, kind: str, kv_heads: int = H) -> None:
        super().__init__()
        self.kind, self.kv_heads, self.seen = kind, kv_heads, 0
        self.q, self.k, self.v = nn.Linear(12, H * D), nn.Linear(12, kv_heads * D), nn.Linear(12, kv_heads * D)
        self.kept = [torch.zeros(1, kv_heads, SIZE if kind == "ring" else 2 * STEPS, D) for _ in range(2)]
        self.listed: list[list[Tensor]] = [[], []]
        self.weights = torch.empty(0)

    def held(self, which: int, new: Tensor) -> Tensor:
        n, size = new.shape[2], self.kept[which].shape[2]
        if self.kind in ("ring", "buffer"):
            for i in range(n):
                self.kept[which][:, :, (self.seen + i) % size] = new[:, :, i]
            return self.kept[which][:, :, : self.seen + n]
        if self.kind == "list":
            for i in range(n):
                place = (self.seen + i) % SIZE
                self.listed[which][place : place + 1] = [new[:, :, i]]
            return torch.stack(self.listed[which], 2)
        joined = torch.cat([*self.listed[which], new], 2)
        self.listed[which] = [joined[:, :, -SIZE:] if self.kind == "sliding" else joined]
        return self.listed[which][0]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, D)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k, v = self.held(0, k), self.held(1, v)
        if self.kv_heads < H:
            k, v = (one.repeat_interleave(H // self.kv_heads, 1) for one in (k, v))
        self.seen += x.shape[1]
        n, m = q.shape[2], k.shape[2]
        scores = (q @ k.mT / math.sqrt(D)).masked_fill(torch.ones(n, m).triu(m - n + 1).bool(), -math.inf)
        self.weights = scores.softmax(-1)
        return (self.weights @ v).transpose(1, 2).flatten(2)


def distance(weights: Tensor, newest: int) -> Tensor:
    """The mean distance of the heads in a step, of which key `newest` is that of the query."""
    age = (newest - torch.arange(weights.shape[-1])) % weights.shape[-1]
    return (weights[0, :, -1].double() * age).sum(-1).float()


CONTEXTS: list[Callable[[], Any]] = [torch.no_grad, torch.inference_mode]


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("kv_heads", [H, 2])
@pytest.mark.parametrize(
    ("kind", "rolls"), [("ring", True), ("list", True), ("buffer", False), ("joined", False), ("sliding", False)]
)
def test_a_buffer_that_rolls_has_no_positions_and_any_other_has_those_of_its_tokens(kind, rolls, kv_heads, context):
    torch.manual_seed(0)
    model = Steps(kind, kv_heads)
    with context(), hw.watch(model, measures=["mean_distance", "entropy"]) as record:
        for step in range(STEPS):
            record.remarks.clear()
            model(torch.randn(1, 3 if step == 0 else 1, 12))
            found, rolled = record.latest["mean_distance"][0], rolls and model.seen > SIZE
            if step:
                assert (
                    bool(found.isnan().all())
                    if rolled
                    else not bool((found - distance(model.weights, -1)).abs().gt(1e-4).any())
                )
            assert ("replaces an old one in place" in record.remarks.get("", "")) == rolled
            assert bool(record.remarks) == rolled
            assert bool(record.latest["entropy"].isfinite().all())


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize(("kind", "kv_heads"), [("ring", H), ("ring", 2), ("buffer", H), ("list", 2)])
def test_a_step_alone_does_not_show_the_order_of_a_buffer(kind, kv_heads, context):
    torch.manual_seed(0)
    model = Steps(kind, kv_heads)
    for step in range(STEPS):
        with context(), hw.watch(model, measures=["mean_distance"]) as record:
            model(torch.randn(1, 1, 12))
        assert ("are taken to be the last of its" in record.remarks.get("", "")) == (step > 0)


def test_keys_that_are_joined_anew_are_in_order_without_a_remark():
    model = Steps("joined")
    for _ in range(3):
        with torch.no_grad(), hw.watch(model, measures=["mean_distance"]) as record:
            model(torch.randn(1, 1, 12))
        assert record.remarks == {}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(12, 36)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        return ((q @ k.mT / math.sqrt(D)).masked_fill(~mask, -math.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = hw.MultiHeadAttention(12, H)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y: Tensor = self.layer(x, mask=mask)
        return y


REAL = torch.arange(11) < torch.tensor([11, 7, 4])[:, None]
TRIL, EYE = torch.ones(11, 11).tril().bool(), torch.eye(11).bool()
BOTH = (REAL[:, :, None] & REAL[:, None])[:, None]
LEFT = REAL.flip(1)


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize("make", [Net, Layer])
@pytest.mark.parametrize(("mask", "remark"), [
    (BOTH | EYE, "7 tokens at one end of a row of the batch attend to themselves alone"),
    ((TRIL & LEFT[:, None])[:, None] | EYE, "7 tokens at one end"),
    ((TRIL & REAL[:, None])[:, None] & BOTH | EYE, "7 tokens at one end"),
    ((REAL[:, :, None] == REAL[:, None])[:, None], "its mask keeps 2 sequences of a row of the batch apart"),
    ((TRIL & (REAL[:, :, None] == REAL[:, None]))[:, None], "keeps 2 sequences"),
    (REAL[:, None, None].expand(-1, -1, 11, -1), ""), ((TRIL & REAL[:, None])[:, None], ""), (TRIL[None, None], ""),
    ((TRIL & ~TRIL.tril(-3))[None, None], ""),
])  # fmt: skip
def test_padding_that_attends_to_itself_is_remarked(make, mask, remark):
    torch.manual_seed(0)
    model = make()
    with torch.no_grad(), hw.watch(model, measures=["entropy"]) as record:
        model(torch.randn(3, 11, 12), mask)
    assert remark in " ".join(record.remarks.values())
    assert bool(record.remarks) == bool(remark)


def test_documents_are_remarked_where_they_may_be_padding():
    layer, x = hw.MultiHeadAttention(12, H), torch.randn(1, 7, 12)
    for ids, remark in (
        ([0, 0, 0, 1, 1, 2, 2], False),
        ([0, 0, 0, 0, 1, 2, 3], True),
        ([0, 0, 0, 0, -1, -1, -1], False),
    ):
        with torch.no_grad(), hw.watch(layer, measures=["entropy"]) as record:
            layer(x, mask=hw.Documents(ids))
        assert bool(record.remarks) == remark
