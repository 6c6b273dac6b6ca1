"""Multi-head attention: grouped-query and cross attention, rotary positions, QK-norm, caches and maps."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from headwise.costs.work import Counts, divided, positive
from headwise.errors import ConfigError, DTypeError, ShapeError
from headwise.nn.base import AttentionLayer, ProjectedLayer, copy_into
from headwise.nn.layout import INDEPENDENT, Layout, Part, Resizing
from headwise.nn.owned import check_copied
from headwise.nn.steps import Notes, Preset, Steps
from headwise.wording import tr

Kind = TypeVar("Kind", bound=AttentionLayer)


class MultiHeadAttention(ProjectedLayer):
    """MultiHead(X, C) = Concat(head_1 … head_h) W_O,  head_i = softmax(Q_i K_iᵀ / √d_k) V_i.

    Q_i = X W_i^Q, K_i = C W_i^K, V_i = C W_i^V, with C = X unless a context is given (Vaswani et al. 2017, §3.2.2).
    Each projection holds the matrices of all heads side by side; `from_heads` and `per_head_weights` convert from
    and to one matrix per head, which is the same function.

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
    Cost: two operations for each weight and token, and 2·n·m·h·(d_k + d_v) for the attention.
    Source: Vaswani et al. 2017, 1706.03762; Shazeer 2019, 1911.02150; Ainslie et al. 2023, 2305.13245.
    """

    coupling = INDEPENDENT
    resizing = Resizing(merges=True)
    outside_attend = ""
    notes = Notes(
        summary=tr("every head attends with queries, keys and values of its own"),
        use=tr("the default; `num_kv_heads` makes it GQA, or MQA with 1, for long texts and large batches"),
        source="Vaswani et al. 2017, 1706.03762; MQA: Shazeer 2019, 1911.02150; GQA: Ainslie et al. 2023, 2305.13245",
        parameters="d·h·d_k + d·h_kv·(d_k + d_v) + h·d_v·d",
        work="a token: one for each parameter; a pair: h·(d_k + d_v)",
        cache="h_kv·(d_k + d_v)",
        limits={},
        map=None,
        compared=None,
        form_of=None,
    )
    presets = (
        Preset(
            name="mqa",
            summary=tr(
                "All heads share one key and value head (Shazeer 2019, 1911.02150): the cache is h times smaller."
            ),
            given={"num_kv_heads": 1},
            instead="gqa",
        ),
        Preset(
            name="gqa",
            summary=tr("h / h_kv heads share each key and value head (Ainslie et al. 2023, 2305.13245)."),
            needs={"num_kv_heads": "a divisor of num_heads"},
        ),
    )

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
        super().__init__(
            d_model, num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, value_dim=value_dim,
            context_dim=context_dim, bias=bias, dropout=dropout, rotary=rotary, qk_norm=qk_norm,
        )  # fmt: skip
        self.o_proj = nn.Linear(num_heads * self.value_dim, d_model, bias=bias)

    def layout(self) -> Layout:
        """As in `ProjectedLayer`, and columns of W_O."""
        return super().layout().into(self.o_proj, self.value_dim)

    @staticmethod
    def costs(
        d_model: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        bias: bool | str = False,
        qk_norm: bool | str = False,
        learned_sinks: bool = False,
        kv_copies: bool = False,
        shared_kv: bool = False,
        values_of_keys: bool = False,
    ) -> Counts:
        """d·h·d_k + d·h_kv·(d_k + d_v) + h·d_v·d weights; 2n²h(d_k + d_v) FLOPs (Vaswani et al. 2017, 1706.03762).

        bias: on all projections, or on those of "qkvo" whose letters are given. qk_norm: a learned scale on queries
        and one on keys, of d_k numbers, or "each": of d_k numbers for each head. learned_sinks: a logit per head in
        the softmax's denominator. kv_copies: the cache has the keys and values of each query head, copies of those of
        its KV head, as transformers has for Falcon 40B. shared_kv: keys and values are those of another layer, as in
        the last layers of Gemma 3n. values_of_keys: values are the projected keys, which are cached as both.
        """
        d, h = d_model, num_heads
        d_k = divided(d, h) if head_dim is None else head_dim
        d_v = d_k if value_dim is None else value_dim
        kv = h if num_kv_heads is None else num_kv_heads
        positive(d_model=d, num_heads=h, num_kv_heads=kv, head_dim=d_k, value_dim=d_v)
        if h % kv:
            raise ShapeError("num_heads={h} is not divisible by num_kv_heads={kv}", h=h, kv=kv)
        letters = bias if isinstance(bias, str) else "qkvo" if bias else ""
        of_keys, of_values = (0, 0) if shared_kv else (kv * d_k, 0 if values_of_keys else kv * d_v)
        biases = {"q": h * d_k, "k": of_keys, "v": of_values, "o": d}
        if set(letters) - set(biases):
            raise ConfigError(f"bias={bias!r}: expected True, False, or letters of 'qkvo'")
        if isinstance(qk_norm, str) and qk_norm != "each":
            raise ConfigError(f"qk_norm={qk_norm!r}: expected True, False or 'each'")
        normed = (h, of_keys // d_k) if qk_norm == "each" else (1, int(not shared_kv))
        scales = sum(normed) * d_k if qk_norm else 0
        extra = sum(biases[letter] for letter in set(letters)) + scales + (h if learned_sinks else 0)
        counts = Counts(
            parameters=d * (h * d_k + of_keys + of_values) + h * d_v * d + extra, shared=bool(shared_kv),
            width=d, heads=h, per_query=d * h * d_k, per_key=d * (of_keys + of_values), scores=h * d_k,
            weighted_sum=h * d_v, output=h * d_v * d, query=h * d_k, keys=kv * d_k, values=kv * d_v, concat=h * d_v,
            key_vectors=kv, value_vectors=kv,
        )  # fmt: skip
        if not kv_copies:
            return counts
        copied = replace(counts, keys=h * d_k, values=h * d_v, key_vectors=h, value_vectors=h)
        return replace(counts, decoding=copied)

    def steps(self, x: Tensor, note: Steps) -> None:
        note.output(self, note.attended(*note.projected(self, x)))

    def per_head_weights(self) -> dict[str, Tensor]:
        """Return the matrices of each head as views: "q" [h, d_model, d_k], "k" [h_kv, context_dim, d_k],
        "v" [h_kv, context_dim, d_v] and "o" [h, d_v, d_model], so that head_i's query is x @ q[i] and
        y = Σ_i head_i @ o[i]. ConfigError if a projection is an adapter, which has no matrix."""
        self.check_owned()
        return {
            "q": self.q_proj.weight.view(self.num_heads, self.head_dim, self.d_model).mT,
            "k": self.k_proj.weight.view(self.num_kv_heads, self.head_dim, self.context_dim).mT,
            "v": self.v_proj.weight.view(self.num_kv_heads, self.value_dim, self.context_dim).mT,
            "o": self.o_proj.weight.mT.view(self.num_heads, self.value_dim, self.d_model),
        }

    def check_owned(self) -> None:
        """Raise ConfigError if a projection is not a linear map with weights of its own, such as an adapter, or if the
        module's forward was replaced on the instance."""
        check_copied(type(self).__name__, self, self.layout().parts)

    @classmethod
    def from_heads(cls, q: Tensor, k: Tensor, v: Tensor, o: Tensor, **options: Any) -> "MultiHeadAttention":
        """Return a module from one matrix per head, shapes as in `per_head_weights`; options as in the constructor."""
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
        """Return a module that computes the same function as an `nn.MultiheadAttention`, with copied weights.

        The result is batch-first regardless of `other.batch_first`, and True in its masks means "may attend", the
        opposite of `attn_mask` and `key_padding_mask`. Parameters require gradients where those of `other` do.
        """
        if not isinstance(other, nn.MultiheadAttention):
            raise DTypeError(f"from_torch(other): expected an nn.MultiheadAttention, got {type(other).__name__}")
        names = ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight")
        check_copied(type(other).__name__, other, [Part("qkv", other, name, 0, "query", 1) for name in names])
        unlike = {"add_bias_kv": other.bias_k is not None, "add_zero_attn": other.add_zero_attn}
        for name, present in {**unlike, "kdim different from vdim": other.kdim != other.vdim}.items():
            if present:
                raise ConfigError(f"nn.MultiheadAttention with {name} is not supported")
        bias = other.in_proj_bias is not None
        module = cls(
            other.embed_dim, other.num_heads, context_dim=other.kdim, bias=bias, dropout=other.dropout
        ).to(other.out_proj.weight)  # fmt: skip
        for own, given in _same_numbers(module, other):
            _copy(given, own)
        return module.train(other.training)

    def to_torch(self) -> nn.MultiheadAttention:
        """Return an `nn.MultiheadAttention(batch_first=True)` with the same weights and outputs; ConfigError if it
        cannot express this module (grouped keys, other head sizes, rotary positions, QK-norm)."""
        square = self.num_heads * self.head_dim == self.d_model and self.value_dim == self.head_dim
        if self.num_kv_heads != self.num_heads or not square or self.rotary or self.q_norm:
            raise ConfigError(
                "nn.MultiheadAttention supports neither grouped keys, nor other values of head_dim and value_dim, nor "
                "rotary positions, nor QK-norm; this module uses at least one of them"
            )
        self.check_owned()
        bias = self.q_proj.bias is not None
        other = nn.MultiheadAttention(
            self.d_model, self.num_heads, dropout=self.dropout, bias=bias, kdim=self.context_dim,
            vdim=self.context_dim, batch_first=True,
        ).to(self.q_proj.weight)  # fmt: skip
        for own, to in _same_numbers(self, other):
            _copy(own, to)
        return other.train(self.training)


def copied_as(kind: Callable[..., Kind], other: MultiHeadAttention, **options: Any) -> Kind:
    """A layer of another kind with the sizes, options, dtype and mode of this module, and weights of its own."""
    other.check_owned()
    if other.q_norm is not None:
        options["qk_norm"] = True
    return kind(
        other.d_model, other.num_heads, num_kv_heads=other.num_kv_heads, head_dim=other.head_dim,
        value_dim=other.value_dim, context_dim=other.context_dim, bias=other.q_proj.bias is not None,
        dropout=other.dropout, rotary=other.rotary is not None, **options,
    ).to(other.q_proj.weight).train(other.training)  # fmt: skip


def copy_projections(other: MultiHeadAttention, into: nn.Module) -> None:
    """Copy projections and norms to those of the same names in another module."""
    copy_into(
        (getattr(into.get_submodule(name), x), getattr(child, x))
        for name, child in other._modules.items() for x in ("weight", "bias") if getattr(child, x, None) is not None
    )  # fmt: skip


def _same_numbers(own: MultiHeadAttention, other: nn.MultiheadAttention) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Parameters of the two modules that hold the same numbers, stacked by rows."""
    linears = [own.q_proj, own.k_proj, own.v_proj]
    pairs: list[tuple[list[Tensor], list[Tensor]]] = [([own.o_proj.weight], [other.out_proj.weight])]
    if other._qkv_same_embed_dim:
        pairs.append(([linear.weight for linear in linears], [other.in_proj_weight]))
    else:
        separate = (other.q_proj_weight, other.k_proj_weight, other.v_proj_weight)
        pairs += [([linear.weight], [weight]) for linear, weight in zip(linears, separate, strict=True)]
    if other.in_proj_bias is not None:
        pairs.append(([linear.bias for linear in linears], [other.in_proj_bias]))
        pairs.append(([own.o_proj.bias], [other.out_proj.bias]))
    return pairs


def _copy(source: list[Tensor], target: list[Tensor]) -> None:
    """Copy the rows of parameters; copies of parameters that do not require gradients do not either."""
    trained = any(parameter.requires_grad for parameter in source)
    with torch.no_grad():
        for parameter, rows in zip(target, torch.cat(source).split([len(one) for one in target]), strict=True):
            parameter.copy_(rows)
            parameter.requires_grad_(trained)
