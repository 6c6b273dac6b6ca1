"""The base of designs that project queries, keys and values with one linear map each."""

from typing import Any

from torch import Tensor, nn

from headwise.nn.base import AttentionLayer
from headwise.nn.checks import flag
from headwise.nn.layout import Layout, linear_parts


class ProjectedLayer(AttentionLayer):
    """Q_i = X W_i^Q, K_i = C W_i^K, V_i = C W_i^V, with the matrices of all heads side by side in one map each.

    Args:
        bias: on the projections.
        qk_norm: RMS norm of each query and key head before the product (Dehghani et al. 2023, 2302.05442).
        options: sizes, dropout and rotary, as in `AttentionLayer`.
    """

    def __init__(
        self, d_model: int, num_heads: int, *, bias: bool = False, qk_norm: bool = False, **options: Any
    ) -> None:
        super().__init__(d_model, num_heads, **options)
        bias, qk_norm = flag("bias", bias), flag("qk_norm", qk_norm)
        h_kv, d_k, d_v = self.num_kv_heads, self.head_dim, self.value_dim
        self.q_proj = nn.Linear(d_model, num_heads * d_k, bias=bias)
        self.k_proj = nn.Linear(self.context_dim, h_kv * d_k, bias=bias)
        self.v_proj = nn.Linear(self.context_dim, h_kv * d_v, bias=bias)
        self.q_norm = nn.RMSNorm(d_k) if qk_norm else None
        self.k_norm = nn.RMSNorm(d_k) if qk_norm else None

    def project(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As in `AttentionLayer`."""
        q = split(self.q_proj(x), self.num_heads)  # [b, n, h·d] -> [b, h, n, d]
        k = split(self.k_proj(source), self.num_kv_heads)
        v = split(self.v_proj(source), self.num_kv_heads)
        return normed(q, self.q_norm), normed(k, self.k_norm), v

    def layout(self) -> Layout:
        """Rows of W_Q, W_K and W_V; designs add their other parameters."""
        norms = tuple(norm for norm in (self.q_norm, self.k_norm) if norm is not None)
        parts = (
            *linear_parts("q", self.q_proj, 0, "query", self.head_dim),
            *linear_parts("k", self.k_proj, 0, "key", self.head_dim),
            *linear_parts("v", self.v_proj, 0, "key", self.value_dim),
        )
        return Layout(parts, norms=norms, rotary=self.rotary is not None)


def normed(x: Tensor, norm: nn.RMSNorm | None) -> Tensor:
    """Apply a norm to x [b, h, n, d], or return x without one."""
    # In the norm's own dtype: under autocast the projections return a narrower one.
    return x if norm is None else norm(x.to(norm.weight.dtype))


def split(x: Tensor, heads: int) -> Tensor:
    """View [b, n, heads·d] as [b, heads, n, d]."""
    b, n, width = x.shape
    return x.view(b, n, heads, width // heads).transpose(1, 2)
