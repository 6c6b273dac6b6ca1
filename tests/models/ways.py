"""Ways of writing attention, after common tutorials and libraries. Each keeps its weights, as `self.weights`, for
comparison; b=2, h=3, n=5 and d=4 unless a class says otherwise."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

B, H, N, D = 2, 3, 5, 4
E = H * D


def lower(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


def real(*lengths: int, n: int = N) -> Tensor:
    """Which keys are no padding, [b, n]."""
    return torch.arange(n) < torch.tensor(lengths)[:, None]


class Way(nn.Module):
    """Four projections."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(E, E) for _ in range(4))
        self.weights: Any = None

    def heads(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """[b, h, n, d] each."""
        y = x if context is None else context
        q, k, v = self.q_proj(x), self.k_proj(y), self.v_proj(y)
        return tuple(z.view(*z.shape[:2], H, D).transpose(1, 2) for z in (q, k, v))  # type: ignore[return-value]

    def merge(self, out: Tensor) -> Tensor:
        return self.out_proj(out.transpose(1, 2).contiguous().view(out.shape[0], -1, E))

    def of(self, x: Tensor, scores: Tensor, v: Tensor) -> Tensor:
        self.weights = torch.softmax(scores, dim=-1)
        return self.merge(self.weights @ v)


class SplitAfterProjection(Way):
    """view to [batch, seq, heads, d], then transpose; mask == 0 is filled with -inf."""

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        Q, K, V = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        Q, K, V = Q.view(batch, seq, H, D), K.view(batch, seq, H, D), V.view(batch, seq, H, D)
        Q, K, V = Q.transpose(1, 2), K.transpose(1, 2), V.transpose(1, 2)
        scores = torch.matmul(Q, K.transpose(-2, -1)) / (D**0.5)
        scores = scores.masked_fill(lower(seq).int() == 0, float("-inf"))
        self.weights = F.softmax(scores, dim=-1)
        out = torch.matmul(self.weights, V).transpose(1, 2)
        return self.out_proj(out.contiguous().view(batch, seq, E))


class DividedByTensor(Way):
    """One line a projection; the square root is a tensor."""

    def forward(self, X: Tensor) -> Tensor:
        Q = self.q_proj(X).view(X.size(0), -1, H, D).transpose(1, 2)
        K = self.k_proj(X).view(X.size(0), -1, H, D).transpose(1, 2)
        V = self.v_proj(X).view(X.size(0), -1, H, D).transpose(1, 2)
        scores = torch.matmul(Q, K.transpose(-2, -1)) / torch.sqrt(torch.tensor(D, dtype=X.dtype))
        self.weights = torch.softmax(scores, dim=-1)
        out = torch.matmul(self.weights, V)
        return self.out_proj(out.transpose(1, 2).contiguous().view(X.size(0), -1, H * D))


class DroppedByFunction(Way):
    """F.dropout of the weights, which are kept for a picture."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        weights = F.softmax(torch.matmul(q, k.transpose(-2, -1)) / (D**0.5), dim=-1)
        self.weights = weights.detach()
        weights = F.dropout(weights, p=0.5, training=self.training)
        return self.merge(torch.matmul(weights, v))


def annotated(query: Tensor, key: Tensor, value: Tensor, mask: Any, dropout: nn.Module) -> tuple[Tensor, Tensor]:
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.size(-1))
    scores = scores.masked_fill(mask == 0, -1e9)
    weights = scores.softmax(dim=-1)
    return torch.matmul(dropout(weights), value), weights


class AnnotatedTransformer(nn.Module):
    """Four linear maps in a list, attention in a function, -1e9."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(E, E) for _ in range(4)])
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = [
            linear(y).view(x.size(0), -1, H, D).transpose(1, 2)
            for linear, y in zip(self.linears, (x, x, x), strict=False)
        ]
        out, self.weights = annotated(q, k, v, lower(x.shape[1])[None, None], self.dropout)
        return self.linears[-1](out.transpose(1, 2).contiguous().view(x.size(0), -1, E))


class SmallGPT(nn.Module):
    """One projection split in three; a causal buffer."""

    def __init__(self, flash: bool = False) -> None:
        super().__init__()
        self.c_attn, self.c_proj, self.flash = nn.Linear(E, 3 * E), nn.Linear(E, E), flash
        self.attn_dropout = nn.Dropout(0.2)
        self.register_buffer("bias", torch.tril(torch.ones(7, 7)).view(1, 1, 7, 7))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(E, dim=2)
        k = k.view(b, t, H, c // H).transpose(1, 2)
        q = q.view(b, t, H, c // H).transpose(1, 2)
        v = v.view(b, t, H, c // H).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
        self.weights = att = F.softmax(att, dim=-1)
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0, is_causal=True)
        else:
            y = self.attn_dropout(att) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class Head(nn.Module):
    """One head as a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(E, D, bias=False) for _ in range(3))
        self.register_buffer("tril", torch.tril(torch.ones(7, 7)))

    def forward(self, x: Tensor) -> Tensor:
        k, q = self.key(x), self.query(x)
        wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        wei = wei.masked_fill(self.tril[: x.shape[1], : x.shape[1]] == 0, float("-inf"))
        self.weights = F.softmax(wei, dim=-1)[:, None]
        return F.softmax(wei, dim=-1) @ self.value(x)


class HeadsInAList(nn.Module):
    """Heads one after the other, concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([Head() for _ in range(H)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([head(x) for head in self.heads], dim=-1)


class SequenceToSequence(nn.Module):
    """A decoder's state attends to an encoder's outputs, by bmm and unsqueeze; no heads, no scale."""

    def __init__(self) -> None:
        super().__init__()
        self.state = nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.state(x[:, -1])
        scores = torch.bmm(x, hidden.unsqueeze(2)).squeeze(2)
        weights = torch.softmax(scores, dim=1)
        self.weights = weights[:, None, None]
        return torch.bmm(weights.unsqueeze(1), x)


class VisionTransformer(nn.Module):
    """qkv reshaped to five dimensions; q is scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(E, 3 * E), nn.Linear(E, E)
        self.attn_drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, H, c // H).permute(2, 0, 3, 1, 4).unbind(0)
        q = q * D**-0.5
        self.weights = (q @ k.transpose(-2, -1)).softmax(dim=-1)
        x = self.attn_drop(self.weights) @ v
        return self.proj(x.transpose(1, 2).reshape(b, n, c))


class AdditiveMask(Way):
    """(1 - mask) * -10000, added."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        mask = (1.0 - real(5, 3)[:, None, None, :].to(x.dtype)) * -10000.0
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(D) + mask
        self.weights = nn.functional.softmax(scores, dim=-1)
        return self.merge(torch.matmul(self.weights, v))


class PositionBias(Way):
    """No scale, a bias of every head added in place, softmax in another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(1, H, N, N))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        scores = torch.matmul(q, k.transpose(3, 2))
        scores += self.bias
        self.weights = F.softmax(scores.double(), dim=-1).type_as(scores)
        return self.merge(torch.matmul(self.weights, v))


class EinsumHeads(Way):
    """einsum with spaces, and a mask of the lowest number."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        sim = torch.einsum("b h i d, b h j d -> b h i j", q, k) * D**-0.5
        sim = sim.masked_fill(~lower(x.shape[1]), -torch.finfo(sim.dtype).max)
        self.weights = sim.softmax(dim=-1)
        return self.merge(torch.einsum("b h i j, b h j d -> b h i d", self.weights, v))


class FoldedHeads(Way):
    """[n, b, e], with heads folded into the batch for bmm, and unfolded for the padding mask."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        n, b, _ = x.shape
        q = self.q_proj(x) * D**-0.5
        q, k, v = (y.contiguous().view(n, b * H, D).transpose(0, 1) for y in (q, self.k_proj(x), self.v_proj(x)))
        weights = torch.bmm(q, k.transpose(1, 2))
        weights = weights.view(b, H, n, n).masked_fill(~real(3, 5)[:, None, None], float("-inf")).view(b * H, n, n)
        weights = F.softmax(weights, dim=-1, dtype=torch.float64).type_as(weights)
        self.weights = weights.view(b, H, n, n)
        out = torch.bmm(F.dropout(weights, 0.1, self.training), v)
        return self.out_proj(out.transpose(0, 1).contiguous().view(n, b, E))


def rotated(x: Tensor) -> Tensor:
    """Rotary positions of [..., n, d]."""
    angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * 0.3 ** torch.arange(D // 2, dtype=x.dtype)
    cos, sin = torch.cat((angle, angle), -1).cos(), torch.cat((angle, angle), -1).sin()
    one, two = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-two, one), dim=-1) * sin


class FoldedRotary(Way):
    """Folded heads without an explicit mask, with rotary positions."""

    def forward(self, x: Tensor) -> Tensor:
        n, b, _ = (x := x.transpose(0, 1)).shape
        q, k, v = (
            y.contiguous().view(n, b * H, D).transpose(0, 1)
            for y in (self.q_proj(x) / D**0.5, self.k_proj(x), self.v_proj(x))
        )
        weights = torch.softmax(torch.bmm(rotated(q), rotated(k).transpose(1, 2)), -1)
        self.weights = weights.view(b, H, n, n)
        return self.out_proj(torch.bmm(weights, v).transpose(0, 1).reshape(n, b, E))


class GroupedKeys(nn.Module):
    """Two KV heads for six query heads, repeated; rotary positions; an additive mask of the lowest number."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(E, 6 * D), nn.Linear(E, 2 * D), nn.Linear(E, 2 * D)
        self.o_proj = nn.Linear(6 * D, E)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (p(x).view(b, n, -1, D).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotated(q), rotated(k)
        k, v = (y[:, :, None].expand(b, 2, 3, n, D).reshape(b, 6, n, D) for y in (k, v))
        mask = torch.triu(torch.full((n, n), torch.finfo(x.dtype).min, dtype=x.dtype), 1)[None, None]
        scores = torch.matmul(q, k.transpose(2, 3)) * D**-0.5 + mask
        self.weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float64).to(q.dtype)
        return self.o_proj(torch.matmul(self.weights, v).transpose(1, 2).reshape(b, n, -1))


class CrossAttention(Way):
    """Seven keys of another sequence, some of them padding."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x, torch.cat((x, x[:, :2]), 1).flip(1))
        scores = (q / math.sqrt(D)) @ k.transpose(-2, -1)
        return self.of(x, scores.masked_fill(~real(4, 7, n=7)[:, None, None], -math.inf), v)


class LinearBiases(Way):
    """A slope of each head times the distance."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        place = torch.arange(x.shape[1])
        slopes = 2.0 ** -torch.arange(1, H + 1, dtype=x.dtype)
        bias = slopes[:, None, None] * (place[None, :] - place[:, None])
        return self.of(x, (q @ k.mT * D**-0.5 + bias).masked_fill(~lower(x.shape[1]), float("-inf")), v)


class SlidingWindow(Way):
    """Three keys, the query's own among them."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        window = torch.tril(torch.triu(torch.ones(x.shape[1], x.shape[1]), -2)).bool()
        return self.of(x, torch.where(window, q @ k.mT * D**-0.5, float("-inf")), v)


class SoftCapped(Way):
    """Scores within ±5."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        scores = 3 * torch.matmul(q, k.transpose(2, 3))
        scores = torch.tanh(scores / 5.0) * 5.0
        return self.of(x, scores + torch.full((N, N), -1e9, dtype=x.dtype).triu(1), v)


class Sinks(Way):
    """A learned logit of each head, concatenated before the softmax and dropped after it."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(H))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        scores = torch.matmul(q, k.transpose(2, 3)) * D**-0.5
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
        both = torch.cat([scores, sinks], dim=-1)
        both = both - both.max(dim=-1, keepdim=True).values
        self.weights = F.softmax(both, dim=-1, dtype=both.dtype)[..., :-1]
        return self.merge(torch.matmul(self.weights, v))


class SinksInFront(Sinks):
    """The same with the sinks before the scores."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
        both = torch.cat([sinks, torch.matmul(q, k.transpose(2, 3)) * D**-0.5], dim=-1)
        self.weights = both.softmax(-1)[..., 1:]
        return self.merge(torch.matmul(self.weights, v))


class ZeroForNaN(Way):
    """Fully masked queries, whose softmax is NaN, get zeros."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        scores = torch.matmul(q, k.transpose(2, 3)) * D**-0.5
        scores = scores.masked_fill(~lower(x.shape[1]).tril(-1), float("-inf"))  # a query sees earlier keys alone
        self.weights = scores.softmax(-1).nan_to_num(0.0)
        return self.merge(torch.matmul(self.weights, v))


class OverImages(nn.Module):
    """[b, c, height, width], 1×1 convolutions, and values on the left of the weights; one head."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Conv2d(E, D, 1), nn.Conv2d(E, D, 1), nn.Conv2d(E, E, 1)

    def forward(self, x: Tensor) -> Tensor:
        image = x.mT.reshape(x.shape[0], E, 5, 1).expand(-1, -1, -1, 2)
        b, c, height, width = image.shape
        query = self.query(image).view(b, -1, height * width).permute(0, 2, 1)
        key = self.key(image).view(b, -1, height * width)
        weights = torch.softmax(torch.bmm(query, key), dim=-1)
        self.weights = weights[:, None]
        out = torch.bmm(self.value(image).view(b, -1, height * width), weights.permute(0, 2, 1))
        return out.view(b, c, height, width)


class HeadsOverImages(nn.Module):
    """Heads are parts of the channels; einsum over the channels of a head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Conv1d(E, 3 * E, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x.mT).chunk(3, dim=1)
        q, k, v = (y.reshape(b * H, D, n) for y in (q, k, v))
        scale = 1 / math.sqrt(math.sqrt(D))
        weights = torch.softmax(torch.einsum("bct,bcs->bts", q * scale, k * scale), dim=-1)
        self.weights = weights.view(b, H, n, n)
        return torch.einsum("bts,bcs->bct", weights, v).reshape(b, c, n)


class AddedProduct(Way):
    """baddbmm into memory that is not read, with the scale as alpha."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.reshape(-1, N, D) for y in self.heads(x))
        start = torch.empty(q.shape[0], N, N, dtype=q.dtype)
        scores = torch.baddbmm(start, q, k.transpose(-1, -2), beta=0, alpha=D**-0.5)
        weights = scores.softmax(dim=-1)
        self.weights = weights.view(B, H, N, N)
        return self.merge(torch.bmm(weights, v).view(B, H, N, D))


class WrittenSoftmax(Way):
    """exp and sum, after the largest score is subtracted."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        scores = q @ k.transpose(-2, -1) / math.sqrt(D)
        e = torch.exp(scores - scores.max(dim=-1, keepdim=True)[0])
        self.weights = e / e.sum(dim=-1, keepdim=True)
        return self.merge(self.weights @ v)


class LogSoftmax(Way):
    """The exponential of log_softmax."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        self.weights = F.log_softmax(q @ k.mT * 0.5, dim=-1).exp()
        return self.merge(self.weights @ v)


class KeysFirst(Way):
    """Scores [b, h, m, n], and softmax along the keys, which come first."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x, torch.cat((x, x[:, :2]), 1))
        weights = torch.softmax(k @ q.transpose(-2, -1) / math.sqrt(D), dim=-2)
        self.weights = weights.transpose(-2, -1)
        return self.merge(weights.transpose(-2, -1) @ v)


class LearnedQuery(Way):
    """One learned query for each sequence: a product with a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(E))

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(torch.matmul(self.k_proj(x), self.query) / math.sqrt(E), dim=1)
        self.weights = weights[:, None, None]
        return torch.matmul(weights.unsqueeze(1), x).squeeze(1)


class Windows(Way):
    """Windows folded into the batch, with a bias of each head and a mask of each window."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(H, N, N))

    def forward(self, x: Tensor) -> Tensor:
        windows = torch.cat((x, x.flip(1)))  # two windows of each image
        q, k, v = self.heads(windows)
        weights = (q * D**-0.5) @ k.transpose(-2, -1) + self.bias.unsqueeze(0)
        mask = torch.zeros(2, N, N, dtype=x.dtype)
        mask[1, :2, 3:] = -100000.0
        weights = weights.view(B, 2, H, N, N) + mask.unsqueeze(1).unsqueeze(0)
        self.weights = nn.Softmax(dim=-1)(weights.view(-1, H, N, N))
        return self.merge(self.weights @ v)


class OneKeyHead(Way):
    """All heads share one key head, by einsum."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        k, v = k[:, 0], v[:, 0]
        self.weights = torch.einsum("bhnd,bmd->bhnm", q, k).mul(D**-0.5).softmax(-1)
        return self.merge(torch.einsum("bhnm,bmd->bhnd", self.weights, v))


class GroupsByEinsum(nn.Module):
    """Query heads [kv, group] as two axes, which keys and values do not repeat; [b, n, h, d]."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(E, 6 * D), nn.Linear(E, 2 * D), nn.Linear(E, 2 * D)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q = self.q_proj(x).view(b, n, 2, 3, D)
        k, v = self.k_proj(x).view(b, n, 2, D), self.v_proj(x).view(b, n, 2, D)
        weights = torch.softmax(torch.einsum("bqkgd,bskd->bkgqs", q, k) / math.sqrt(D), dim=-1)
        self.weights = weights.flatten(1, 2)
        return torch.einsum("bkgqs,bskd->bqkgd", weights, v).flatten(2)


class HeadsInWeights(nn.Module):
    """Projections with an axis of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Parameter(torch.randn(H, E, D) / 3) for _ in range(3))
        self.wo = nn.Parameter(torch.randn(H, D, E))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("bnd,hde->bhne", x, w) for w in (self.wq, self.wk, self.wv))
        scores = torch.einsum("bhid,bhjd->bhij", q * D**-0.5, k)
        self.weights = torch.special.softmax(scores, dim=-1)
        return torch.einsum("bhne,hed->bnd", torch.einsum("bhij,bhjd->bhid", self.weights, v), self.wo)


class InPlace(Way):
    """Everything in place."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        scores = torch.matmul(q, k.mT)
        scores.div_(math.sqrt(D))
        scores.masked_fill_(~lower(x.shape[1]), torch.finfo(x.dtype).min)
        self.weights = scores.softmax(-1)
        return self.merge(self.weights @ v)


class MultipliedMask(Way):
    """w · mask − 10¹⁰ · (1 − mask)."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        w = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(D)
        mask = torch.tril(torch.ones(N, N, dtype=x.dtype)).view(1, 1, N, N)
        self.weights = nn.Softmax(dim=-1)(w * mask + -1e10 * (1 - mask))
        return self.merge(torch.matmul(self.weights, v))


class Cosine(Way):
    """Normalised queries and keys, and a learned temperature of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.randn(H, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        return self.of(x, scores * torch.clamp(self.temperature, max=4.6).exp(), v)


class SumOfProducts(Way):
    """Content and positions: two products, added and scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.u, self.w = nn.Parameter(torch.randn(H, 1, D)), nn.Parameter(torch.randn(H, 1, D))
        self.r_proj = nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        r = self.r_proj(torch.linspace(0, 1, N * E, dtype=x.dtype).view(1, N, E)).view(1, N, H, D).transpose(1, 2)
        scores = (torch.matmul(q + self.u, k.mT) + torch.matmul(q + self.w, r.mT)) / D**0.5
        return self.of(x, scores, v)


class Disentangled(Way):
    """A product, and gathered products of queries with positions."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.reshape(-1, N, D) for y in self.heads(x))
        scale = math.sqrt(D * 2)
        scores = torch.bmm(q, k.transpose(-1, -2) / scale)
        positions = torch.linspace(-1, 1, 9 * D, dtype=x.dtype).view(9, D)
        place = torch.arange(N)
        index = (place[:, None] - place + 4).expand(q.shape[0], N, N)
        scores = scores + torch.gather(torch.matmul(q, positions.mT) / scale, -1, index)
        weights = torch.softmax(scores, -1)
        self.weights = weights.view(B, H, N, N)
        return self.merge(torch.bmm(weights, v).view(B, H, N, D))


class Unbatched(Way):
    """[n, e] without a batch."""

    def forward(self, x: Tensor) -> Tensor:
        x = x[0]
        q, k, v = (p(x).view(N, H, D).transpose(0, 1) for p in (self.q_proj, self.k_proj, self.v_proj))
        weights = torch.softmax(q @ k.transpose(-2, -1) / 2, -1)
        self.weights = weights[None]
        return (weights @ v).transpose(0, 1).reshape(N, E)


class MaskedAfterwards(Way):
    """Masked keys get weight 0 once more after the softmax, which changes nothing."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        hidden = ~lower(x.shape[1])
        weights = (q @ k.mT / 2).masked_fill(hidden, -1e9).softmax(-1)
        self.weights = weights.masked_fill(hidden, 0.0)
        return self.merge(self.weights @ v)


class TwoPackages(Way):
    """scaled_dot_product_attention of three dimensions, with an additive mask and a scale of its own."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.reshape(-1, N, D) for y in self.heads(x))
        mask = torch.zeros(N, N, dtype=x.dtype).masked_fill(~lower(N), float("-inf"))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)
        self.weights = (q @ k.mT * 0.3 + mask).softmax(-1).view(B, H, N, N)
        return self.merge(out.view(B, H, N, D))


class Grouped(Way):
    """scaled_dot_product_attention with enable_gqa and a boolean mask."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        k, v = k[:, :1], v[:, :1]
        mask = real(4, 5)[:, None, None, :]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        self.weights = (q @ k.mT * 0.5).masked_fill(~mask, -math.inf).softmax(-1)
        return self.merge(out)


class TorchLayer(nn.Module):
    """nn.MultiheadAttention in one of its forms."""

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.mha, self.need_weights = nn.MultiheadAttention(E, H, batch_first=True), need_weights

    def forward(self, x: Tensor) -> Tensor:
        padding = ~real(4, 5)
        y, weights = self.mha(x, x, x, key_padding_mask=padding, need_weights=True, average_attn_weights=False)
        self.weights = weights
        if self.need_weights:
            return y
        return self.mha(x, x, x, key_padding_mask=padding, need_weights=False)[0]
