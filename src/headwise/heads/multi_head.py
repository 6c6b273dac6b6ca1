"""Multi-head attention with everything people turn on and off: grouped keys, cross attention, cache, map."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attention import attend
from headwise.cache import Cache
from headwise.errors import ConfigError, ShapeError
from headwise.masks import Mask
from headwise.measures import Measure
from headwise.positions import Rotary


class MultiHeadAttention(nn.Module):
    """MultiHead(X, C) = Concat(head_1 … head_h) W_O,  head_i = softmax(Q_i K_iᵀ / √d_k) V_i.

    Q_i = X W_i^Q, K_i = C W_i^K, V_i = C W_i^V, with C = X unless a context is given (Vaswani et al. 2017, §3.2.2).
    The matrices of all heads lie side by side in one projection each; `from_heads` and `per_head_weights`
    convert to and from one matrix a head, which is the same function.

    Args:
        d_model: width of x.
        num_heads: query heads h. num_kv_heads: key and value heads, a divisor of h; h by default (MHA), 1 is MQA
            (Shazeer 2019), between them GQA (Ainslie et al. 2023).
        head_dim: size d_k of queries and keys, d_model / num_heads by default.
        value_dim: size d_v of values, head_dim by default.
        context_dim: width of the context in cross attention, d_model by default.
        bias: on all four projections.
        dropout: share of the attention weights dropped in training.
        rotary: rotary positions on queries and keys (self attention only).
        qk_norm: RMS norm of each query and key head before the product (Dehghani et al. 2023, 2302.05442).

    Parameters: h·d_k·(d_model + 1) + h_kv·(d_k + d_v)·(context_dim + 1) + (h·d_v + 1)·d_model, the ones with bias.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        context_dim: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        rotary: bool = False,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        if num_heads < 1:
            raise ConfigError(f"num_heads={num_heads}: expected at least 1")
        if head_dim is None:
            if d_model % num_heads:
                raise ShapeError(f"d_model={d_model} is not divisible by num_heads={num_heads}; or give head_dim")
            head_dim = d_model // num_heads
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ShapeError(f"num_heads={num_heads} is not divisible by num_kv_heads={num_kv_heads}")
        if rotary and context_dim not in (None, d_model):
            raise ConfigError("rotary=True needs self attention: a context has positions of its own")
        if not 0.0 <= dropout < 1.0:
            raise ConfigError(f"dropout={dropout}: expected 0 <= dropout < 1")
        self.d_model, self.num_heads, self.num_kv_heads = d_model, num_heads, num_kv_heads
        self.head_dim, self.value_dim = head_dim, head_dim if value_dim is None else value_dim
        self.context_dim = d_model if context_dim is None else context_dim
        self.dropout = dropout
        self.q_proj = nn.Linear(d_model, num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(self.context_dim, num_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(self.context_dim, num_kv_heads * self.value_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * self.value_dim, d_model, bias=bias)
        self.rotary = Rotary(head_dim) if rotary else None
        self.q_norm = nn.RMSNorm(head_dim) if qk_norm else None
        self.k_norm = nn.RMSNorm(head_dim) if qk_norm else None

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask | None = None,
        cache: Cache | None = None,
        return_map: bool = False,
        measures: Sequence[str | Measure] = (),
        return_concat: bool = False,
    ) -> Any:
        """Attend from x [b, n, d_model] to itself or to context [b, m, context_dim].

        Args:
            mask: what each query may see; with a cache the keys are all the cached ones and the new ones, and
                queries stand at their end, so `Causal()` is right at every step.
            cache: a KV cache, self attention only; x is then the next n tokens.
            return_map, measures: as in `attend`.
            return_concat: also return Concat(head_1 … head_h) [b, n, h·d_v], before W_O.
        Returns:
            y [b, n, d_model]; with return_map (y, map); with return_concat (y, concat); with both (y, map, concat).
        """
        self._check(x, context, cache)
        source = x if context is None else context
        q = self._split(self.q_proj(x), self.num_heads)  # [b, n, h·d] -> [b, h, n, d]
        k = self._split(self.k_proj(source), self.num_kv_heads)
        v = self._split(self.v_proj(source), self.num_kv_heads)
        if self.q_norm is not None and self.k_norm is not None:
            # In the norm's own dtype: autocast narrows what the projections give, not the norm's weights.
            q, k = self.q_norm(q.to(self.q_norm.weight.dtype)), self.k_norm(k.to(self.k_norm.weight.dtype))
        if self.rotary is not None:
            start = 0 if cache is None else cache.seen
            q, k = self.rotary(q, start), self.rotary(k, start)
        if cache is not None:
            k, v = cache.append(k, v)
        dropout = self.dropout if self.training else 0.0
        q, k = q.to(v.dtype), k.to(v.dtype)  # under autocast, norms may widen what projections narrowed
        if return_map:
            heads, amap = attend(q, k, v, mask=mask, dropout_p=dropout, return_map=True, measures=measures)
        else:
            heads, amap = attend(q, k, v, mask=mask, dropout_p=dropout, measures=measures), None
        concat = heads.transpose(1, 2).flatten(2)  # [b, h, n, d_v] -> [b, n, h·d_v]
        extras = [extra for extra, asked in ((amap, return_map), (concat, return_concat)) if asked]
        y = self.o_proj(concat)
        return (y, *extras) if extras else y

    def per_head_weights(self) -> dict[str, Tensor]:
        """The matrices of each head: "q" [h, d_model, d_k], "k" [h_kv, context_dim, d_k], "v" [h_kv, context_dim,
        d_v] and "o" [h, d_v, d_model], so that head_i's query is x @ q[i] and y = Σ_i head_i @ o[i]. Views."""
        return {
            "q": self.q_proj.weight.view(self.num_heads, self.head_dim, self.d_model).mT,
            "k": self.k_proj.weight.view(self.num_kv_heads, self.head_dim, self.context_dim).mT,
            "v": self.v_proj.weight.view(self.num_kv_heads, self.value_dim, self.context_dim).mT,
            "o": self.o_proj.weight.mT.view(self.num_heads, self.value_dim, self.d_model),
        }

    @classmethod
    def from_heads(cls, q: Tensor, k: Tensor, v: Tensor, o: Tensor, **options: Any) -> "MultiHeadAttention":
        """A module from one matrix a head, in the shapes of `per_head_weights`; options as in the constructor."""
        for name, x in (("q", q), ("k", k), ("v", v), ("o", o)):
            if x.ndim != 3:
                raise ShapeError(f"{name}: expected [heads, in, out], got shape {tuple(x.shape)}")
        h, d_model, d_k = q.shape
        h_kv, context_dim, d_v = v.shape
        if k.shape != (h_kv, context_dim, d_k) or o.shape != (h, d_v, d_model):
            raise ShapeError(
                f"k {tuple(k.shape)} and o {tuple(o.shape)} do not fit q {tuple(q.shape)} and v {tuple(v.shape)}; "
                f"expected ({h_kv}, {context_dim}, {d_k}) and ({h}, {d_v}, {d_model})"
            )
        module = cls(
            d_model, h, num_kv_heads=h_kv, head_dim=d_k, value_dim=d_v, context_dim=context_dim, **options
        ).to(q)  # fmt: skip
        with torch.no_grad():
            for name, x in module.per_head_weights().items():
                x.copy_({"q": q, "k": k, "v": v, "o": o}[name])
        return module

    @classmethod
    def from_torch(cls, other: nn.MultiheadAttention) -> "MultiHeadAttention":
        """The same function as an `nn.MultiheadAttention`, weights copied.

        Ours is batch-first whatever `other.batch_first` says, and masks have True = may attend, the opposite of
        its `attn_mask` and `key_padding_mask`.
        """
        unlike = (other.bias_k is not None, "add_bias_kv"), (other.add_zero_attn, "add_zero_attn"), (
            other.kdim != other.vdim, "kdim different from vdim"
        )  # fmt: skip
        for present, name in unlike:
            if present:
                raise ConfigError(f"nn.MultiheadAttention with {name} has no equal here")
        bias = other.in_proj_bias is not None
        module = cls(
            other.embed_dim, other.num_heads, context_dim=other.kdim, bias=bias, dropout=other.dropout
        ).to(other.out_proj.weight)  # fmt: skip
        packed = other._qkv_same_embed_dim
        weights = (
            other.in_proj_weight.chunk(3) if packed else (other.q_proj_weight, other.k_proj_weight, other.v_proj_weight)
        )
        with torch.no_grad():
            for linear, weight in zip((module.q_proj, module.k_proj, module.v_proj), weights, strict=True):
                linear.weight.copy_(weight)
            module.o_proj.weight.copy_(other.out_proj.weight)
            if bias:
                for linear, part in zip(
                    (module.q_proj, module.k_proj, module.v_proj), other.in_proj_bias.chunk(3), strict=True
                ):
                    linear.bias.copy_(part)
                module.o_proj.bias.copy_(other.out_proj.bias)
        return module.train(other.training)

    def to_torch(self) -> nn.MultiheadAttention:
        """An `nn.MultiheadAttention(batch_first=True)` with the same weights and outputs; ConfigError if it cannot
        express this module (grouped keys, other head sizes, rotary positions, QK-norm)."""
        square = self.num_heads * self.head_dim == self.d_model and self.value_dim == self.head_dim
        if self.num_kv_heads != self.num_heads or not square or self.rotary or self.q_norm:
            raise ConfigError(
                "nn.MultiheadAttention knows no grouped keys, no head_dim or value_dim of its own, no rotary "
                "positions and no QK-norm; this module has one of them"
            )
        bias = self.q_proj.bias is not None
        other = nn.MultiheadAttention(
            self.d_model, self.num_heads, dropout=self.dropout, bias=bias, kdim=self.context_dim,
            vdim=self.context_dim, batch_first=True,
        ).to(self.q_proj.weight)  # fmt: skip
        linears = (self.q_proj, self.k_proj, self.v_proj)
        with torch.no_grad():
            if other._qkv_same_embed_dim:
                other.in_proj_weight.copy_(torch.cat([linear.weight for linear in linears]))
            else:
                for name, linear in zip("qkv", linears, strict=True):
                    getattr(other, f"{name}_proj_weight").copy_(linear.weight)
            other.out_proj.weight.copy_(self.o_proj.weight)
            if bias:
                other.in_proj_bias.copy_(torch.cat([linear.bias for linear in linears]))
                other.out_proj.bias.copy_(self.o_proj.bias)
        return other.train(self.training)

    def extra_repr(self) -> str:
        """The sizes, for print(module)."""
        return (
            f"d_model={self.d_model}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"head_dim={self.head_dim}, value_dim={self.value_dim}"
        )

    def _split(self, x: Tensor, heads: int) -> Tensor:
        b, n, width = x.shape
        return x.view(b, n, heads, width // heads).transpose(1, 2)

    def _check(self, x: Tensor, context: Tensor | None, cache: Cache | None) -> None:
        if x.ndim != 3 or x.shape[-1] != self.d_model:
            raise ShapeError(f"x: expected [batch, seq, d_model={self.d_model}], got shape {tuple(x.shape)}")
        if context is None:
            if self.context_dim != self.d_model:
                raise ShapeError(
                    f"context: needed, as context_dim={self.context_dim} differs from d_model={self.d_model}"
                )
            return
        if context.ndim != 3 or context.shape[-1] != self.context_dim or context.shape[0] != x.shape[0]:
            raise ShapeError(
                f"context: expected [{x.shape[0]}, seq, {self.context_dim}], got shape {tuple(context.shape)}"
            )
        if cache is not None or self.rotary is not None:
            raise ConfigError("context=… excludes cache=… and rotary=True: both are for self attention")
