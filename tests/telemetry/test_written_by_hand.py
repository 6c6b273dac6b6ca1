"""Statistics and gradients of attention that is written by hand, in many spellings, beside a plain computation."""

import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw

B, N, H, D = 3, 7, 4, 4
REAL = torch.arange(N) < torch.tensor([N, 4, 5])[:, None]
PLACE = torch.arange(N)
LOWER = PLACE[:, None] >= PLACE
ANGLE = PLACE[:, None] * torch.tensor([1.0, 0.3])
COS, SIN = ANGLE.cos(), ANGLE.sin()


def turned(x: Tensor, join) -> Tensor:
    """Rotary positions of pairs of numbers."""
    one, two = (x[..., ::2], x[..., 1::2]) if join is torch.stack else x.chunk(2, -1)
    return join((one * COS - two * SIN, two * COS + one * SIN), -1)


def swapped(x: Tensor) -> Tensor:
    one, two = x.chunk(2, -1)
    return torch.cat((-two, one), -1) * SIN.repeat(1, 2) + x * COS.repeat(1, 2)


def of_complex_numbers(x: Tensor) -> Tensor:
    numbers = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(numbers * torch.complex(COS, SIN)).flatten(-2)


def partly(x: Tensor) -> Tensor:
    return torch.cat((x[..., :1] * COS[:, :1], x[..., 1:]), -1)


TURNED = {
    "cat": lambda x: turned(x, torch.cat),
    "stack": lambda x: turned(x, torch.stack).flatten(-2),
    "swapped": swapped,
    "complex": of_complex_numbers,
    "partly": partly,
    "index": lambda x: x[:, torch.arange(H)],
    "index_select": lambda x: x.index_select(1, torch.arange(H)),
    "stacked heads": lambda x: torch.stack([x[:, h] for h in range(H)], 1),
}
INPUTS = {
    "normed twice": lambda m, x: (m.norm(x), m.norm(x)),
    "cast twice": lambda m, x: (x.double().float(), x.double().float()),
    "turned twice": lambda m, x: (x.transpose(0, 1), x.transpose(0, 1)),
}
PREFIX = LOWER | (PLACE < 2)
NEAR = torch.stack([LOWER & (PLACE[:, None] - PLACE <= h) for h in range(H)])
NOT_REAL = (~REAL)[:, None, None]
MASKS = {
    "of a prefix": lambda s: s.masked_fill(~PREFIX | NOT_REAL, -math.inf),
    "of each head": lambda s: s.masked_fill(~NEAR, -math.inf).masked_fill(NOT_REAL, -1e9),
    "of blocks": lambda s: torch.where((PLACE[:, None] // 3 == PLACE // 3) & ~NOT_REAL, s, -math.inf),
    "-1000": lambda s: s + NOT_REAL * -1000.0,
    "-1000 filled": lambda s: s.masked_fill(NOT_REAL, -1000.0),
    "-1e4 twice": lambda s: s + (~LOWER * -1e4 + NOT_REAL * -1e4),
    "-1e4 beside a bias": lambda s: s + ((PLACE - PLACE[:, None]) * 0.1 + NOT_REAL * -1e4),
}


class Written(nn.Module):
    """Self attention with padding; it keeps its scores."""

    def __init__(self, given=None, turn=None, mask=None) -> None:
        super().__init__()
        self.q, self.k, self.v, self.norm = *(nn.Linear(H * D, H * D) for _ in range(3)), nn.LayerNorm(H * D)
        self.given, self.turn, self.mask = given, turn, mask

    def made(self, x: Tensor) -> list[Tensor]:
        """Queries, keys and values of a tensor that is freed before they are used."""
        x = self.norm(x)
        return [self.q(x), self.k(x), self.v(x)]

    def forward(self, x: Tensor) -> Tensor:
        if self.given is None:
            made = self.made(x)
        else:
            one, two = self.given(self, x)
            made = [self.q(one), self.k(two), self.v(two)]
            made = [y if len(y) == B else y.transpose(0, 1) for y in made]
        q, k, v = (y.unflatten(-1, (H, D)).transpose(1, 2) for y in made)
        if self.turn is not None:
            q, k = self.turn(q), self.turn(k)
        scores = q @ k.mT / 2
        scores = scores.masked_fill(NOT_REAL, -1e9) if self.mask is None else self.mask(scores)
        self.scores = scores.detach()
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


WRITTEN = {
    **{name: {"turn": turn} for name, turn in TURNED.items()},
    **{name: {"given": given} for name, given in INPUTS.items()},
    **{name: {"mask": mask} for name, mask in MASKS.items()},
}


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize("how", WRITTEN)
@torch.no_grad()
def test_padded_queries_are_not_counted(how):
    torch.manual_seed(0)
    model, x = Written(**WRITTEN[how]), torch.randn(B, N, H * D)
    with hw.watch(model, measures=["entropy", "max_logit", "mean_distance"]) as record:
        model(x)
    weights = model.scores.double().softmax(-1).nan_to_num(0.0)
    rows = torch.stack(
        [-torch.special.xlogy(weights, weights).sum(-1), (weights * (PLACE[:, None] - PLACE).abs()).sum(-1)]
    )
    entropy, distance = torch.einsum("sbhn,bn->sh", rows, REAL.double()).float() / REAL.sum()
    torch.testing.assert_close(record.latest["entropy"][0], entropy)
    torch.testing.assert_close(record.latest["mean_distance"][0], distance)
    largest = model.scores.masked_fill(~REAL[:, None, :, None], -math.inf).amax((0, 2, 3))
    torch.testing.assert_close(record.latest["max_logit"][0], largest)


def split(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x).unflatten(-1, (H, D)).transpose(1, 2)


def buffered(x: Tensor) -> Tensor:
    cache = x.new_zeros(B, H, N + 2, D)
    cache[:, :, :N] = x
    return cache[:, :, :N]


def of_two(m: Written, x: Tensor) -> list[Tensor]:
    parts = x[:, :4], x[:, 4:]  # such as text and an image
    return [torch.cat([split(layer, part) for part in parts], 2) for layer in (m.q, m.k)]


# Queries and keys of a tensor x or of two, and which of the queries are tokens.
COUNTED = {
    "one tensor": (lambda m, x, y: (x[:, None], x[:, None]), REAL),
    "a layer and its input": (lambda m, x, y: (m.q(x)[:, None], x[:, None]), REAL),
    "two tensors": (lambda m, x, y: (x[:, None], y[:, None]), None),
    "layers of two": (lambda m, x, y: (split(m.q, x), split(m.k, y)), None),
    "a layer and another tensor": (lambda m, x, y: (m.q(x)[:, None], y[:, None]), None),
    "joined": (lambda m, x, y: of_two(m, x), REAL),
    "a cache": (lambda m, x, y: (split(m.q, x), buffered(split(m.k, x))), REAL),
    "the first query": (lambda m, x, y: (split(m.q, x)[:, :, :1], split(m.k, x)), None),
    "the last query": (lambda m, x, y: (split(m.q, x)[:, :, -1:], split(m.k, x)), REAL[:, -1:]),
    "a mean of queries": (lambda m, x, y: (split(m.q, x).mean(2, keepdim=True), split(m.k, x)), None),
    "other keys": (lambda m, x, y: (split(m.q, x), split(m.k, x).flip(2)), None),
}


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize("how", COUNTED)
@torch.no_grad()
def test_queries_are_padding_where_they_are_tokens_of_the_keys(how):
    made, real = COUNTED[how]

    class Attention(Written):
        def forward(self, x, y):
            q, k = made(self, x, y)
            return (q @ k.mT).masked_fill(NOT_REAL, -math.inf).softmax(-1) @ k

    with hw.watch(Attention(), maps="lazy") as record:
        record.model(*torch.randn(2, B, N, H * D))
    counted = record.maps[""].lse[:, 0].isfinite()
    assert torch.equal(counted, torch.ones_like(counted) if real is None else real)


def test_heads_are_numbered_as_in_the_layer_of_the_queries():
    """KV heads that query heads share in turn, 0 1 0 1, as axes [kv, group] of the product."""

    class InTurn(Written):
        def forward(self, x):
            q = self.q(x).unflatten(-1, (H // 2, 2, D))
            k, v = (layer(x)[..., : 2 * D].unflatten(-1, (2, D)) for layer in (self.k, self.v))
            self.scores = torch.einsum("bigkd,bjkd->bkgij", q, k)
            return torch.einsum("bkgij,bjkd->bigkd", self.scores.softmax(-1), v).flatten(2)

    model = InTurn()
    with hw.watch(model, measures=["max_logit"]) as record:
        model(torch.randn(B, N, H * D))
    largest = model.scores.transpose(1, 2).flatten(1, 2).amax((0, 2, 3))
    torch.testing.assert_close(record.latest["max_logit"][0], largest.detach())


GATED = {
    "grouped": lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True),
    "dropout": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5),
    "grouped with dropout": lambda q, k, v: F.scaled_dot_product_attention(
        q, k[:, :2], v[:, :2], dropout_p=0.5, enable_gqa=True
    ),
    "fully masked": lambda q, k, v: (
        (q @ k.mT).masked_fill(~LOWER | (PLACE < 2), torch.finfo(q.dtype).min).softmax(-1) @ v
    ),
}


@pytest.mark.parametrize("how", GATED)
def test_gradients_of_gates_are_those_of_what_the_code_computes(how):
    class Gated(Written):
        def forward(self, x):
            q, k, v = (layer(x).unflatten(-1, (H, D)).transpose(1, 2) for layer in (self.q, self.k, self.v))
            self.heads = GATED[how](q, k, v)
            return self.heads.transpose(1, 2).flatten(2)

    torch.manual_seed(0)
    model, slope = Gated(), torch.randn(B, N, H * D)
    with hw.telemetry.gate_gradients(model) as gates:
        y = model(torch.randn(B, N, H * D))
        model.heads.retain_grad()
        (y * slope).sum().backward()
    expected = (model.heads * model.heads.grad).sum((0, 2, 3)).abs().detach()
    table = gates.importance().table
    torch.testing.assert_close(table.column(next(iter(table))).float(), expected)
    held = weakref.ref(model.heads)
    del model.heads, y
    assert held() is None  # without the garbage collector
