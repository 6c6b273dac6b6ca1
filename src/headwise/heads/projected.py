"""Queries, keys and values of all heads by one linear map each: what most designs begin with."""

from typing import Any

from torch import Tensor, nn

from headwise.errors import ShapeError
from headwise.heads.base import AttentionLayer, default_head_dim


class ProjectedLayer(AttentionLayer):
    """Q_i = X W_i^Q, K_i = C W_i^K, V_i = C W_i^V, the matrices of all heads side by side in one map each.

    Args:
        d_model: width of x.
        num_heads: query heads h. num_kv_heads: key and value heads, a divisor of h; h by default (MHA), 1 is MQA
            (Shazeer 2019), between them GQA (Ainslie et al. 2023).
        head_dim: size d_k of queries and keys, d_model / num_heads by default.
        value_dim: size d_v of values, head_dim by default.
        bias: on the projections.
        rotary: rotary positions on queries and keys (self attention only).
        qk_norm: RMS norm of each query and key head before the product (Dehghani et al. 2023, 2302.05442).
        options: context_dim and dropout, as in `AttentionLayer`.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        bias: bool = False,
        rotary: bool = False,
        qk_norm: bool = False,
        **options: Any,
    ) -> None:
        head_dim = default_head_dim(d_model, num_heads, head_dim)
        super().__init__(d_model, num_heads, rotary=head_dim if rotary else None, **options)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ShapeError(f"num_heads={num_heads} is not divisible by num_kv_heads={num_kv_heads}")
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        self.value_dim = head_dim if value_dim is None else value_dim
        self.q_proj = nn.Linear(d_model, num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(self.context_dim, num_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(self.context_dim, num_kv_heads * self.value_dim, bias=bias)
        self.q_norm = nn.RMSNorm(head_dim) if qk_norm else None
        self.k_norm = nn.RMSNorm(head_dim) if qk_norm else None

    def project(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As in `AttentionLayer`."""
        q = split(self.q_proj(x), self.num_heads)  # [b, n, h·d] -> [b, h, n, d]
        k = split(self.k_proj(source), self.num_kv_heads)
        v = split(self.v_proj(source), self.num_kv_heads)
        return *self.normed(q, k), v

    def normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys after their norms, if there are any."""
        if self.q_norm is None or self.k_norm is None:
            return q, k
        # In the norm's own dtype: autocast narrows what the projections give, not the norm's weights.
        return self.q_norm(q.to(self.q_norm.weight.dtype)), self.k_norm(k.to(self.k_norm.weight.dtype))


def split(x: Tensor, heads: int) -> Tensor:
    """[b, n, heads·d] to [b, heads, n, d]; no copy."""
    b, n, width = x.shape
    return x.view(b, n, heads, width // heads).transpose(1, 2)
