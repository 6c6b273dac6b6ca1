"""Multi-head latent attention (MLA): keys and values of all heads come from one small latent, and only it is cached."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.costs.work import Counts, divided, positive
from headwise.errors import ConfigError, check_choice
from headwise.map.attention import attend_to
from headwise.nn.base import AttentionLayer, split
from headwise.nn.forms import drawn
from headwise.nn.layout import INDEPENDENT, Layout, Part, Resizing, linear_parts, size
from headwise.nn.steps import Notes, Rotary, Steps
from headwise.wording import tr


class LatentAttention(AttentionLayer):
    """c = C W^DKV,  k_i = [c W_i^UK ; rope(C W^KR)],  v_i = c W_i^UV,  q_i = [X W_i^Q ; rope(X W_i^QR)],
    head_i = softmax(q_i k_iᵀ / √(d_h + d_h^R)) v_i,  y = Concat(head_1 … head_h) W^O.

    The latent c [m, d_c] and one rotary key [m, d_h^R], shared by all heads, are cached: d_c + d_h^R numbers per
    token instead of h·(d_k + d_v).

    There are two forms of the same function: "plain" computes the keys and values of every head from the latent;
    "absorbed" applies W^UK to the queries and W^UV to the outputs, so that the latent itself is the key and value of
    one shared head, which suits decoding. "auto" selects the form with fewer operations for the given sizes. In the
    absorbed form no head has values of its own: the map's `nonfinite_values` [b, 1] are those of the latent, without
    what W^UV makes of it.

    Args:
        latent_dim: d_c, 4·d_h by default. head_dim: d_h; value_dim: d_v.
        rope_dim: d_h^R, even, about d_h / 2 by default; 0 for no positions, which allows a context.
        query_latent_dim: width of a latent for the queries (W^DQ, W^UQ); None computes the queries from x directly.
        latent_norm: RMS norm of the latents, before they are cached.
        form: "auto", "plain" or "absorbed".
        d_model, num_heads, options: context_dim and dropout, as in `MultiHeadAttention`.

    Parameters: context_dim·(d_c + d_h^R) + h·d_c·(d_h + d_v) + h·(d_h + d_h^R)·d_model + h·d_v·d_model, without a
        latent for queries.
    Cost: plain 2·m·h·d_c·(d_h + d_v) + 2·n·m·h·(d_h + d_h^R + d_v); absorbed 2·n·h·d_c·(d_h + d_v) +
        2·n·m·h·(2·d_c + d_h^R), beside the projections of x.
    Source: DeepSeek-AI 2024, 2405.04434, §2.1, eqs. 9–19.
    """

    coupling = INDEPENDENT
    resizing = Resizing()
    outside_attend = "keys and values are computed from the latent inside the attention, in one of two forms"
    refused_options = frozenset({"num_kv_heads", "rotary"})
    notes = Notes(
        summary=tr("keys and values of all heads from one small latent"),
        use=tr("you need many heads with a small cache"),
        source="DeepSeek-AI 2024, 2405.04434, §2.1",
        parameters="d·(d_c + d_r) + h·d_c·(d_k + d_v) + h·(d_k + d_r)·d + h·d_v·d",
        work="a pair: h·(d_k + d_r + d_v), or h·(2·d_c + d_r) on the latents themselves",
        cache="d_c + d_r",
        limits={
            "`num_kv_heads`": "all heads share one latent",
            "context with `rope_dim` > 0": "a context has positions of its own",
        },
        map=None,
        compared=None,
        form_of=None,
    )

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        latent_dim: int | None = None,
        rope_dim: int | None = None,
        query_latent_dim: int | None = None,
        latent_norm: bool = False,
        form: str = "auto",
        **options: Any,
    ) -> None:
        super().__init__(d_model, num_heads, **options)
        h, d_h, d_v = num_heads, self.head_dim, self.value_dim
        if self.num_kv_heads != h or self.rotary is not None:
            raise ConfigError(
                "num_kv_heads, rotary: not supported, as all heads share one latent and one rotary key; see rope_dim"
            )
        check_choice("form", form, ("auto", "plain", "absorbed"))
        d_c = 4 * d_h if latent_dim is None else size("latent_dim", latent_dim)
        d_r = 2 * -(-d_h // 4) if rope_dim is None else size("rope_dim", rope_dim, 0)
        query_latent_dim = None if query_latent_dim is None else size("query_latent_dim", query_latent_dim)
        if d_r and self.context_dim != d_model:
            raise ConfigError(
                f"rope_dim={d_r}: requires self attention, as a context has positions of its own; give rope_dim=0"
            )
        self.latent_dim, self.rope_dim, self.form = d_c, d_r, form
        self.rotary = Rotary(d_r) if d_r else None
        self.q_down = None if query_latent_dim is None else nn.Linear(d_model, query_latent_dim, bias=False)
        self.q_proj = nn.Linear(d_model if query_latent_dim is None else query_latent_dim, h * (d_h + d_r), bias=False)
        self.kv_down = nn.Linear(self.context_dim, d_c + d_r, bias=False)  # W^DKV and W^KR side by side
        self.k_up = drawn(h, d_h, d_c, inputs=d_c)
        self.v_up = drawn(h, d_v, d_c, inputs=d_c)
        self.o_proj = nn.Linear(h * d_v, d_model, bias=False)
        self.kv_norm = nn.RMSNorm(d_c) if latent_norm else None
        self.q_norm = nn.RMSNorm(query_latent_dim) if latent_norm and query_latent_dim is not None else None

    @property
    def cached_elements(self) -> int:
        """Numbers per token in a cache: d_c + d_h^R."""
        return self.latent_dim + self.rope_dim

    @property
    def without_positions(self) -> str:
        return f"rope_dim=0 (this layer has rope_dim={self.rope_dim})"

    def project(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [b, h, n, d_h + d_h^R], the latent with the shared rotary key [b, 1, m, d_c + d_h^R] as
        keys, and empty values."""
        x = x if self.q_down is None else _normed(self.q_down(x), self.q_norm)
        q = split(self.q_proj(x), self.num_heads)
        c, k_r = self.kv_down(source).split((self.latent_dim, self.rope_dim), -1)
        latent = torch.cat((_normed(c, self.kv_norm), k_r), -1)[:, None]
        return q, latent, latent[..., :0]

    def apply_rope(self, q: Tensor, k: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Apply rotary positions to the last d_h^R channels of the queries and of the latent."""
        if self.rotary is None:
            return q, k
        q_c, q_r = q.split((self.head_dim, self.rope_dim), -1)
        c, k_r = k.split((self.latent_dim, self.rope_dim), -1)
        return torch.cat((q_c, self.rotary(q_r, start)), -1), torch.cat((c, self.rotary(k_r, start)), -1)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Any]:
        """As in `AttentionLayer`, from the latent [b, 1, m, d_c + d_h^R]."""
        scale = (self.head_dim + self.rope_dim) ** -0.5
        q_c, q_r = q.split((self.head_dim, self.rope_dim), -1)
        c, k_r = k.split((self.latent_dim, self.rope_dim), -1)
        if self.is_absorbed(q.shape[2], k.shape[2]):
            q_c = torch.einsum("bhnd,hdc->bhnc", q_c, self.k_up)  # q·(c W^UK) = (q W^UKᵀ)·c
            q = torch.cat((q_c.to(k.dtype), q_r), -1)
            mixed, amap = attend_to(q, k, c, scale=scale, **options)
            return torch.einsum("bhnc,hvc->bhnv", mixed, self.v_up), amap
        k_c = torch.einsum("bmc,hdc->bhmd", c[:, 0], self.k_up).to(q.dtype)
        values = torch.einsum("bmc,hvc->bhmv", c[:, 0], self.v_up).to(q.dtype)
        keys = torch.cat((k_c, k_r.expand(-1, self.num_heads, -1, -1)), -1)
        return attend_to(q, keys, values, scale=scale, **options)

    def is_absorbed(self, n: int, m: int) -> bool:
        """Whether n queries over m keys are computed in the absorbed form."""
        if self.form != "auto":
            return self.form == "absorbed"
        d_h, d_v, d_c, d_r = self.head_dim, self.value_dim, self.latent_dim, self.rope_dim
        plain = m * d_c * (d_h + d_v) + n * m * (d_h + d_r + d_v)
        return n * d_c * (d_h + d_v) + n * m * (2 * d_c + d_r) < plain

    def layout(self) -> Layout:
        """Rows of W^Q, each followed by those of W^QR; one matrix per head of W^UK and W^UV; columns of W^O. All heads
        share the rotary key, and the norms come before these maps."""
        parts = linear_parts("q", self.q_proj, 0, "query", self.head_dim + self.rope_dim)
        parts += [Part(letter, self, f"{letter}_up", 0, "query", 1) for letter in "kv"]
        layout = Layout(
            tuple(parts), rotary=self.rotary is not None, shared_key=self.rope_dim,
            missing="" if self.kv_norm is None else "their matrices are products with a norm between the factors",
        )  # fmt: skip
        return layout.into(self.o_proj, self.value_dim)

    def head_matrices(self) -> dict[str, Tensor]:
        """As in `AttentionLayer`: the products of the down- and up-projections (eqs. 9–19)."""
        d_c, d_r, h = self.latent_dim, self.rope_dim, self.num_heads
        down_c, down_r = self.kv_down.weight.detach().split((d_c, d_r))  # [d_c, d_model], [d_h^R, d_model]
        q = self.q_proj.weight.detach()
        q = q if self.q_down is None else q @ self.q_down.weight.detach()
        k = torch.einsum("hdc,ce->hed", self.k_up.detach(), down_c)
        return {
            "q": q.unflatten(0, (h, -1)).mT,
            "k": torch.cat((k, down_r.mT.expand(h, -1, -1)), -1),
            "v": torch.einsum("hdc,ce->hed", self.v_up.detach(), down_c),
            "o": self.o_proj.weight.detach().mT.unflatten(0, (h, self.value_dim)),
        }

    @staticmethod
    def costs(
        d_model: int,
        num_heads: int,
        *,
        latent_dim: int | None = None,
        rope_dim: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        query_latent_dim: int | None = None,
        latent_norm: bool = False,
    ) -> Counts:
        """Keys and values of all heads come from one latent c of size d_c, with one rotary key of size d_h^R: the cache
        holds d_c + d_h^R numbers per token (DeepSeek-V2, 2405.04434, §2.1).

        A full pass computes each head's keys and values from c; a decoding step applies these matrices to the query and
        the output, and attends to c itself. latent_norm: learned scales on c and on the latent of the queries.
        """
        d, h = d_model, num_heads
        d_h = divided(d, h) if head_dim is None else head_dim
        d_v = d_h if value_dim is None else value_dim
        d_c = 4 * d_h if latent_dim is None else latent_dim
        d_r = 2 * -(-d_h // 4) if rope_dim is None else rope_dim
        c_q = 0 if query_latent_dim is None else query_latent_dim
        positive(d_model=d, num_heads=h, latent_dim=d_c, head_dim=d_h, value_dim=d_v)
        positive(least=0, rope_dim=d_r, query_latent_dim=c_q)
        query = c_q * (d + h * (d_h + d_r)) if c_q else d * h * (d_h + d_r)
        down, up_k, up_v, out = d * (d_c + d_r), d_c * h * d_h, d_c * h * d_v, h * d_v * d
        shared = 1 if d_r else 0
        whole = Counts(
            parameters=query + down + up_k + up_v + out + (d_c + c_q if latent_norm else 0),
            width=d, heads=h, per_query=query, per_key=down + up_k + up_v, scores=h * (d_h + d_r),
            weighted_sum=h * d_v, output=out, query=h * (d_h + d_r), keys=h * d_h + d_r, values=h * d_v,
            concat=h * d_v, key_vectors=h + shared, value_vectors=h,
        )  # fmt: skip
        folded = replace(
            whole, per_query=query + up_k, per_key=down, scores=h * (d_c + d_r), weighted_sum=h * d_c,
            output=up_v + out, query=h * (d_c + d_r), keys=d_c + d_r, values=0, concat=h * d_c,
            key_vectors=1 + shared, value_vectors=0,
        )  # fmt: skip
        return replace(whole, decoding=folded)

    def steps(self, x: Tensor, note: Steps) -> None:
        """As in `AttentionLayer`: the plain form, with the scores of the absorbed one."""
        d_c, d_h, d_r = self.latent_dim, self.head_dim, self.rope_dim
        source, letter = x, "X"
        if self.q_down is not None:
            source, letter = _normed(self.q_down(x), self.q_norm), "C_Q"
            note("q_latent", source, "b n d_q", "C_Q = X W_DQ", tr("a small latent for the queries"))
        q = note(
            "q_joined", split(self.q_proj(source), self.num_heads), "b h n d_h+d_R",
            f"Q_i = {letter} [W_i^Q ; W_i^QR]", tr("queries: content, then position"))  # fmt: skip
        down = self.kv_down(x)
        c, k_r = _normed(down[..., :d_c], self.kv_norm), down[..., d_c:]
        note("latent", c, "b n d_c", "C = X W_DKV", tr("one small latent for keys and values, which is cached"))
        if self.rotary is not None:
            note("k_rope", k_r, "b n d_R", "K_R = X W_KR", tr("one rotary key shared by all heads"))
            k_r = self.rotary(k_r)
            note("k_rope_rotated", k_r, "b n d_R", "rope(K_R)",
                 tr("rotary positions are applied to this key"))  # fmt: skip
            q = torch.cat((q[..., :d_h], self.rotary(q[..., d_h:])), -1)
            note("q_joined_rotated", q, "b h n d_h+d_R", "[Q_i ; rope(Q_i^R)]",
                 tr("rotary positions are applied to the position part of the queries"))  # fmt: skip
        k, v = torch.einsum("bmc,hdc->bhmd", c, self.k_up), torch.einsum("bmc,hvc->bhmv", c, self.v_up)
        note("k_up", k, "b h m d_h", "K_i = C W_i^UK", tr("the keys of each head, from the latent"))
        note("v_up", v, "b h m d_v", "V_i = C W_i^UV", tr("the values of each head, from the latent"))
        if d_r:
            k = torch.cat((k, k_r[:, None].expand(-1, self.num_heads, -1, -1)), -1)
            note("k_joined", k, "b h m d_h+d_R", "[K_i ; K_R]",
                 tr("content key and rotary key, concatenated"))  # fmt: skip
        scores = note(
            "scores_latent", q @ k.mT * (d_h + d_r) ** -0.5, "b h n m", "S = Q Kᵀ / √(d_h + d_R)",
            tr("how well each query matches each key"))  # fmt: skip
        queries = torch.einsum("bhnd,hdc->bhnc", q[..., :d_h], self.k_up)
        absorbed = (queries @ c[:, None].mT + q[..., d_h:] @ k_r[:, None].mT) * (d_h + d_r) ** -0.5
        note(
            "absorbed", absorbed, "b h n m", "(Q_i W_i^UKᵀ) Cᵀ",
            tr("the same scores from the latent alone, with W^UK applied to the queries, as in decoding"))  # fmt: skip
        note.output(self, note.heads(note.weights(scores), v))

    def extra_repr(self) -> str:
        """The sizes, for print(module)."""
        return f"{super().extra_repr()}, latent_dim={self.latent_dim}, rope_dim={self.rope_dim}, form={self.form!r}"


def _normed(x: Tensor, norm: nn.RMSNorm | None) -> Tensor:
    return x if norm is None else norm(x.to(norm.weight.dtype)).to(x.dtype)
