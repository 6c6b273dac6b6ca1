"""Heads that play one role exactly, and a two-layer model that copies: made of one-hot positions and tokens."""

from collections.abc import Callable

import torch
from torch import Tensor

from headwise.map import AttentionMap
from headwise.masks import Causal
from headwise.nn.multi_head import MultiHeadAttention

SHARP = 40.0  # the least difference between the score of a key that is meant and of one that is not


def _near(n: int, m: int, offsets: range) -> Tensor:
    """[n, m], 1 at the offsets of each query, which stands at the end of the keys; the first key for those outside."""
    position = torch.arange(n)[:, None] + m - n
    key = torch.arange(m)
    inside = torch.zeros(n, m)
    for offset in offsets:
        inside += (key == position + offset).float()
    inside[inside.sum(1) == 0, 0] = 1.0
    return inside


def _matching(ids: Tensor, n: int, shift: int) -> Tensor:
    """[b, n, m], 1 at the keys whose token `shift` before them, earlier than the query, is the query's; else at key
    0."""
    b, m = ids.shape
    position, key = torch.arange(n)[:, None] + m - n, torch.arange(m)
    source = torch.cat((torch.full((b, shift), -1), ids[:, : m - shift]), 1)
    meant = (ids[:, m - n :, None] == source[:, None]) & (key - shift < position)
    meant = meant.float()
    meant[meant.sum(-1) == 0, :] = torch.eye(m)[0]
    return meant


MEANINGS = 11


def embeddings(vocabulary: int, d: int = 19, seed: int = 0) -> Tensor:
    """[vocabulary, d]: tokens with the same remainder modulo MEANINGS have nearly the same meaning, and a component
    that all tokens have is larger than any meaning."""
    generator = torch.Generator().manual_seed(seed)
    meanings = torch.randn(MEANINGS, d, generator=generator)
    return 5.0 + meanings[torch.arange(vocabulary) % MEANINGS] + 0.1 * torch.randn(vocabulary, d, generator=generator)


def _alike(ids: Tensor, n: int) -> Tensor:
    """[b, n, m], 1 at the nearest key before the query that is another token of the same meaning; else at key 0."""
    m = ids.shape[1]
    position, key = torch.arange(n)[:, None] + m - n, torch.arange(m)
    query = ids[:, m - n :, None]
    alike = (query % MEANINGS == ids[:, None] % MEANINGS) & (query != ids[:, None]) & (key < position)
    return torch.eye(m)[(alike * key).argmax(-1)]


# Which keys are meant, [n, m] or [b, n, m], from tokens [b, m] and the number of queries.
PATTERNS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "previous": lambda ids, n: _near(n, ids.shape[1], range(-1, 0)),
    "self": lambda ids, n: _near(n, ids.shape[1], range(1)),
    "next": lambda ids, n: _near(n, ids.shape[1], range(1, 2)),
    "offset": lambda ids, n: _near(n, ids.shape[1], range(-3, -2)),
    "local": lambda ids, n: _near(n, ids.shape[1], range(-4, 5)),
    "first": lambda ids, n: _near(n, ids.shape[1], range(0)),
    "duplicate": lambda ids, n: _matching(ids, n, 0),
    "induction": lambda ids, n: _matching(ids, n, 1),
    "semantic": _alike,
}


def planted(roles: list[str], ids: Tensor, n: int, *, kv_heads: int | None = None) -> tuple[Tensor, Tensor]:
    """Queries [b, h, n, m] and keys [b, h or kv_heads, m, m] of a head for each role, for scale=1: keys are one-hot
    positions, and a query has SHARP at the positions that it means."""
    b, m = ids.shape
    q = torch.stack([(SHARP * PATTERNS[role](ids, n)).expand(b, n, m) for role in roles], 1)
    return q, torch.eye(m).expand(b, kv_heads or len(roles), m, m).clone()


class Copier:
    """Two layers of attention that repeat what they have seen: a previous-token head writes each token's predecessor
    into the stream, and an induction head finds what followed the same token before, and raises its logit.

    Token ids [s, n], a start token first, to (logits [s, n, V], maps, values): what `probe_induction` calls. A token
    looks at all of its matches alike, and at the start token if it has none.
    """

    def __init__(self, vocabulary: int, context: int) -> None:
        self.vocabulary, self.context = v, c = vocabulary, context
        self.width = 3 * v + c + 1  # token | the token before | what comes next | position | 1
        token, before, after = (torch.eye(self.width)[:, i * v : (i + 1) * v] for i in range(3))
        position, one = torch.eye(self.width)[:, 3 * v : 3 * v + c], torch.eye(self.width)[:, -1:]
        back = position.roll(-1, 1)  # position i asks for i − 1
        back[3 * v] = position[3 * v]  # and the first for itself
        self.unembedding = after.T.contiguous()
        asks = torch.cat((token, 0.5 * one), 1)  # half of what a match scores goes to the start
        self.layers = [
            MultiHeadAttention.from_heads(*(x[None] for x in (SHARP * c**0.5 * back, position, token, before.T))),
            MultiHeadAttention.from_heads(
                *(x[None] for x in (
                    2 * SHARP * (v + 1) ** 0.5 * asks, torch.cat((before, position[:, :1]), 1), token, after.T
                ))
            ),
        ]  # fmt: skip

    def outputs(self) -> list[Tensor]:
        """W_O of each layer, [h, d_v, d_model]."""
        return [layer.per_head_weights()["o"] for layer in self.layers]

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> tuple[Tensor, list[AttentionMap], list[Tensor]]:
        s, n = ids.shape
        x = torch.zeros(s, n, self.width)
        x[..., : self.vocabulary] = torch.nn.functional.one_hot(ids, self.vocabulary).float()
        x[..., 3 * self.vocabulary : 3 * self.vocabulary + n] = torch.eye(n)
        x[..., -1] = 1.0
        maps, values = [], []
        for layer in self.layers:
            y, amap = layer(x, mask=Causal(), return_map=True)
            maps.append(amap)
            values.append((x @ layer.per_head_weights()["v"][0])[:, None])
            x = x + y
        return 20.0 * x @ self.unembedding.T, maps, values
