"""Attention as people write it by hand, with attributes for its sizes; d_model=12, 3 heads of 4 channels."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Split(nn.Module):
    """Sizes batch, seq and heads in every view; an optional mask of zeros and ones."""

    def __init__(self, d_model: int = 12, num_heads: int = 3) -> None:
        super().__init__()
        self.num_heads, self.d_head, self.d_model = num_heads, d_model // num_heads, d_model
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (w(x).view(b, n, self.num_heads, self.d_head).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        scores = torch.matmul(q, k.transpose(-2, -1)) / self.d_head**0.5
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        out = torch.matmul(F.softmax(scores, dim=-1), v).transpose(1, 2)
        return self.wo(out.contiguous().view(b, n, self.d_model))


class Merged(nn.Module):
    """The product of heads and head size when heads are merged; a square root as a tensor."""

    def __init__(self, hidden: int = 12, h: int = 3) -> None:
        super().__init__()
        self.h, self.d_k = h, hidden // h
        self.W_Q, self.W_K, self.W_V, self.W_O = (nn.Linear(hidden, hidden) for _ in range(4))

    def forward(self, X: Tensor) -> Tensor:
        Q, K, V = (w(X).view(X.size(0), -1, self.h, self.d_k).transpose(1, 2) for w in (self.W_Q, self.W_K, self.W_V))
        weights = torch.softmax(
            torch.matmul(Q, K.transpose(-2, -1)) / torch.sqrt(torch.tensor(float(self.d_k))), dim=-1
        )
        out = torch.matmul(weights, V).transpose(1, 2).contiguous()
        return self.W_O(out.view(X.size(0), -1, self.h * self.d_k))


class Kept(nn.Module):
    """Dropout of the weights, which are kept; heads are merged to the width of the input."""

    def __init__(self, embed_dim: int = 12, num_heads: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.dropout = num_heads, embed_dim // num_heads, dropout
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(embed_dim, embed_dim) for _ in range(4))
        self.last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        Q, K, V = (
            w(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
            for w in (self.q_proj, self.k_proj, self.v_proj)
        )
        weights = F.softmax(torch.matmul(Q, K.transpose(-2, -1)) / self.head_dim**0.5, dim=-1)
        weights = F.dropout(weights, p=self.dropout, training=self.training)
        self.last = weights.detach()
        return self.out_proj(torch.matmul(weights, V).transpose(1, 2).contiguous().view(B, T, C))


class Packed(nn.Module):
    """One map for queries, keys and values, split by an attribute; a causal buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.n_embd, self.head_size = 3, 12, 4
        self.c_attn, self.c_proj = nn.Linear(12, 36), nn.Linear(12, 12)
        self.register_buffer("bias", torch.tril(torch.ones(7, 7)))

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.size()
        q, k, v = (
            y.view(B, T, self.n_head, self.head_size).transpose(1, 2) for y in self.c_attn(x).split(self.n_embd, dim=2)
        )
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(self.head_size))
        att = F.softmax(att.masked_fill(self.bias[:T, :T] == 0, float("-inf")), dim=-1)
        return self.c_proj((att @ v).transpose(1, 2).reshape(B, T, -1))


class CausalSelfAttention(nn.Module):
    """As in nanoGPT: one map, split by an attribute; the width of its input is that of the heads."""

    def __init__(self, n_embd: int = 12, n_head: int = 3, flash: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.n_embd, self.n_head, self.dropout, self.flash = n_embd, n_head, dropout, flash
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.attn_dropout, self.resid_dropout = nn.Dropout(dropout), nn.Dropout(dropout)
        if not flash:
            self.register_buffer("bias", torch.tril(torch.ones(7, 7)).view(1, 1, 7, 7))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        if self.flash:
            p = self.dropout if self.training else 0
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=p, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = F.softmax(att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf")), dim=-1)
            y = self.attn_dropout(att) @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class ByInput(CausalSelfAttention):
    """Split by the width of the input, too."""

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = (y.view(B, T, self.n_head, -1).transpose(1, 2) for y in self.c_attn(x).split(C, dim=2))
        att = (q @ k.transpose(-2, -1)) / 2
        y = F.softmax(att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf")), dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class Constant(CausalSelfAttention):
    """The number of heads is written in the code."""

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = (y.view(B, T, 3, 4).transpose(1, 2) for y in self.c_attn(x).chunk(3, -1))
        return self.c_proj(((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).reshape(B, T, C))


class Residual(CausalSelfAttention):
    """Its input is used for more than its size."""

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = (y.view(B, T, self.n_head, -1).transpose(1, 2) for y in self.c_attn(x).chunk(3, -1))
        return x + self.c_proj(((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).reshape(B, T, C))


class Interleaved(nn.Module):
    """Queries, keys and values of a head side by side in one map; norms of queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 3
        self.qkv, self.dense = nn.Linear(12, 36), nn.Linear(12, 12)
        self.q_norm, self.k_norm = nn.LayerNorm(4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], self.heads, 12).transpose(1, 2).chunk(3, -1)
        weights = (self.q_norm(q) @ self.k_norm(k).mT / 2).softmax(-1)
        return self.dense((weights @ v).transpose(1, 2).flatten(2))


class Conv1D(nn.Module):
    """A linear map whose weight is [in, out]."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) / 3), nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class Transposed(nn.Module):
    """Weights [in, out], and [n, b, e] inside."""

    def __init__(self) -> None:
        super().__init__()
        self.h = 3
        self.qkv, self.proj = Conv1D(36, 12), Conv1D(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        n, b, _ = (x := x.transpose(0, 1).contiguous()).shape
        q, k, v = (y.reshape(n, b * self.h, 4).transpose(0, 1) for y in self.qkv(x).chunk(3, -1))
        out = torch.bmm(torch.softmax(torch.bmm(q, k.mT) / 2, -1), v)
        return self.proj(out.transpose(0, 1).reshape(n, b, -1)).transpose(0, 1)


class Grouped(nn.Module):
    """Six query heads on two KV heads, repeated, with rotary positions if `rotary`."""

    def __init__(self, rotary: bool = False, kv: int = 2) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.rotary = 6, kv, rotary
        self.wq, self.wo = nn.Linear(12, 24), nn.Linear(24, 12)
        self.wk, self.wv = nn.Linear(12, 4 * kv), nn.Linear(12, 4 * kv, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, 4)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        if self.rotary:
            angle = torch.arange(x.shape[1])[:, None] * torch.tensor([1.0, 0.3]).to(x)
            q, k = (
                torch.cat((y[..., :2] * angle.cos() - y[..., 2:] * angle.sin(),
                           y[..., 2:] * angle.cos() + y[..., :2] * angle.sin()), -1) for y in (q, k)
            )  # fmt: skip
        k, v = (y.repeat_interleave(self.n_heads // self.n_kv_heads, dim=1) for y in (k, v))
        weights = (q @ k.mT / 2).softmax(-1)
        return self.wo((weights @ v).transpose(1, 2).reshape(*x.shape[:2], self.n_heads * 4))


class WithTemperatures(Split):
    """A number of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (w(x).view(b, n, self.num_heads, self.d_head).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        scores = q @ k.mT * self.temperature[: self.num_heads, None, None]
        return self.wo((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Gated(Split):
    """Heads are gated before the output projection."""

    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = ((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.wo(out * x.sigmoid())


class Model(nn.Module):
    """Two blocks with residuals and norms around one kind of attention."""

    def __init__(self, kind: Any, **sizes: Any) -> None:
        super().__init__()
        self.attention = nn.ModuleList([kind(**sizes) for _ in range(2)])
        self.norms = nn.ModuleList([nn.LayerNorm(12) for _ in range(2)])
        self.head = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        for norm, attention in zip(self.norms, self.attention, strict=True):
            x = x + attention(norm(x))
        return self.head(x)
