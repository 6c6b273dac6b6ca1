"""Relevance: what each key contributes to a number that a model computes, through the weights of attention.

All of it is the matrix of the weights with a second factor of low rank, P ∘ (G Vᵀ), where G is the gradient of the
number with respect to the outputs of the heads and V are the values: G Vᵀ is that with respect to the weights. The
matrix is read in parts, multiplied and pooled, and never stored (`headwise.rule.weighted`).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.analysis.flow import Keep
from headwise.errors import ConfigError, ShapeError, whole_number
from headwise.interventions import Arguments
from headwise.kernels import events, run as run_call
from headwise.kernels.call import Call
from headwise.map import AttentionMap
from headwise.map.attention import attend
from headwise.map.index import TransposedMap, operand, reading, select
from headwise.models.attaching import Attachment, intervene, model_of
from headwise.models.find import find_heads
from headwise.models.site import HeadSite, tapped
from headwise.rule import pooling
from headwise.rule.weighted import LowRank, Weighted


class RelevanceMap:
    """The matrix P ∘ (G Vᵀ) of a map, [b, h, n, m], computed on demand: entry (i, j) is p_ij Σ_c G_ic V_jc, the signed
    contribution of key j through the output of query i, exact for that path. A row sums to Σ_c G_ic O_ic.

        >>> import torch, headwise as hw
        >>> q, k, v = torch.randn(3, 1, 4, 1000, 32)
        >>> out, amap = hw.attend(q, k, v, return_map=True)
        >>> found = hw.analysis.RelevanceMap(amap, torch.ones_like(out), v)
        >>> found.row(-1).shape, found.pool(50).shape, (found @ v).shape
        (torch.Size([1, 4, 1000]), torch.Size([1, 4, 50, 50]), torch.Size([1, 4, 1000, 32]))

    Args:
        amap: the map. gradient: G, [b, h, n, d_v], of the outputs of the heads. values: V, [b, h_kv, m, d_v].
        positive: negative entries are 0, as in gradient × attention.
    Raises:
        ShapeError: if the sizes do not fit the map.
    Source: Chefer et al. 2021, 2103.15679, eq. 5 (∇A ⊙ A); with `positive`, its positive part.
    """

    def __init__(self, amap: AttentionMap, gradient: Tensor, values: Tensor, *, positive: bool = False) -> None:
        (b, h, n, m), h_kv = amap.shape, amap.k.shape[1]
        if gradient.ndim != 4 or gradient.shape[:3] != (b, h, n):
            raise ShapeError(f"gradient: shape {tuple(gradient.shape)}, expected [{b}, {h}, {n}, d_v]")
        if tuple(values.shape) not in ((b, h_kv, m, gradient.shape[3]), (b, h, m, gradient.shape[3])):
            expected = f"[{b}, {h_kv}, {m}, {gradient.shape[3]}] as the gradient and the keys"
            raise ShapeError(f"values: shape {tuple(values.shape)}, expected {expected}")
        self.map, self.gradient, self.values = amap, gradient.detach(), values.detach()
        self.is_positive, self.differentiable = positive, False

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(b, h, n, m)"""
        return self.map.shape

    @property
    def positive(self) -> "RelevanceMap":
        """Gradient × attention: the same with 0 for negative entries."""
        return RelevanceMap(self.map, self.gradient, self.values, positive=True)

    @property
    def q(self) -> Tensor:
        """The map's queries."""
        return self.map.q

    @property
    def k(self) -> Tensor:
        """The map's keys."""
        return self.map.k

    @property
    def lse(self) -> Tensor:
        """The map's log-sum-exp."""
        return self.map.lse.detach()

    @cached_property
    def _weighted(self) -> Weighted:
        exact = self.map.detach().with_exact()
        q, k, g, v = (x.to(exact.lse.dtype) for x in (exact.q, exact.k, self.gradient, self.values))
        return Weighted(q, k, exact.lse, exact.rule, LowRank(g, v, positive=self.is_positive))

    def _read(self, what: str, *given: Tensor) -> Tensor:
        found: Tensor = getattr(self._weighted, what)(*(x.to(self._weighted.lse.dtype) for x in given))
        return found.to(self.lse.dtype)

    @reading
    def __getitem__(self, index: Any) -> Tensor:
        """The entries of a tile, by an index as of the map."""
        return select(index, self.shape, lambda *places: self._weighted.entries(*places).to(self.lse.dtype))

    def row(self, i: int) -> Tensor:
        """What each key contributes through query i, [b, h, m]. A negative i counts from the end."""
        return self[:, :, i, :]

    @reading
    def __matmul__(self, x: Tensor) -> Tensor:
        """The product with x [m, e], or [b, h or h_kv, m, e]: [b, h, n, e]."""
        return self._read("times", operand(x, self, "keys"))

    @property
    def T(self) -> "TransposedMap[RelevanceMap]":
        """The transpose, for products."""
        return TransposedMap(self)

    @reading
    def sums(self) -> tuple[Tensor, Tensor]:
        """What all keys contribute through each query [b, h, n], and each key through all queries [b, h, m]."""
        of_queries, of_keys = self._weighted.sums()
        return of_queries.to(self.lse.dtype), of_keys.to(self.lse.dtype)

    @reading
    def pool(self, size: int) -> Tensor:
        """A picture at most `size` wide and high, as `AttentionMap.pool`: means over the unmasked pairs of squares."""
        return self._weighted.squares(pooling.cell_for(size, "mean", *self.shape[2:])).to(self.lse.dtype)

    def __repr__(self) -> str:
        b, h, n, m = self.shape
        return (
            f"RelevanceMap({b} × {h} heads, {n} queries × {m} keys{', positive part' * self.is_positive}; not stored)"
        )


@dataclass(frozen=True)
class Relevance:
    """What keys contribute to a number, in each layer of a model. Returned by `relevance`.

    Attributes:
        value: the number. maps: name of the attention module → `RelevanceMap`, in the order of the calls; a module that
            is called several times as name, name#2, …
    """

    value: Tensor
    maps: Mapping[str, RelevanceMap]

    def __getitem__(self, name: str) -> RelevanceMap:
        """The map of a layer."""
        return self.maps[name]

    def rollout(self, query: int = -1) -> Tensor:
        """The relevance of each input token to a position through all layers, [b, n]: row `query` of R, which starts as
        the identity and becomes R + Ā R in each layer, Ā = E_h((∇A ⊙ A)⁺). It is at least 0; memory is O(n).

        Raises:
            ConfigError: for cross attention, or layers of different sizes; IndexError: for a position that is none.
        Source: Chefer et al. 2021, 2103.15679, eqs. 5 and 6.
        """
        sizes = {(one.shape[0], *one.shape[2:]) for one in self.maps.values()}
        (b, n, m), number = next(iter(sizes)), whole_number(query)
        if len(sizes) > 1 or n != m:
            raise ConfigError(f"rollout: layers of batch, queries and keys {sorted(sizes)}; expected n × n, all alike")
        if number is None or not -n <= number < n:
            raise IndexError(f"rollout: position {query!r} is out of range for {n}")
        first = next(iter(self.maps.values()))
        found = torch.zeros(b, n, 1, dtype=first.lse.dtype, device=first.q.device)
        found[:, number] = 1.0
        for one in reversed(list(self.maps.values())):
            added: Tensor = one.positive.T @ found[:, None]
            found = found + added.mean(1)
        return found[..., 0]


def relevance(
    model: nn.Module | Attachment, run: Callable[[], Tensor], *, sites: Sequence[HeadSite] | None = None
) -> Relevance:
    """What each key contributes to a number that a model computes, such as a logit, in every head of every layer.

        >>> import torch, headwise as hw
        >>> model = torch.nn.Sequential(hw.MultiHeadAttention(16, 4), hw.MultiHeadAttention(16, 4)).eval()
        >>> x = torch.randn(1, 7, 16)
        >>> found = hw.analysis.relevance(model, lambda: model(x)[0, -1, 3])
        >>> found["1"].row(-1).shape, found.rollout().shape
        (torch.Size([1, 4, 7]), torch.Size([1, 7]))

    Args:
        model: any that `hw.intervene` and `find_heads` support, or the handle of `hw.attach(model, batch=…)`; in
            evaluation mode, as a map has the weights before dropout.
        run: a function that runs the model once, without a KV cache, and returns the number: a tensor of one element.
        sites: of `find_heads(model)`; all by default.
    Returns:
        `Relevance`. Memory is that of a training step; no n×m matrix is stored.
    Raises:
        ConfigError: in training mode, if no attention was called, for a result that is no number or does not depend on
            the heads, or within `hw.intervene`.
    Source: Chefer et al. 2021, 2103.15679; gradients of the outputs of heads as Dao et al. 2022, 2205.14135, eq. 4.
    """
    if events.editing:
        raise ConfigError("relevance: the attention of a model is edited (hw.intervene); call it outside of that")
    places = find_heads(model_of(model)) if sites is None else list(sites)
    if any(site.module.training for site in places):
        raise ConfigError("model: is in training mode, where dropout is active; call model.eval() first")
    keep, taps = Keep(), [_Tap(site) for site in places]
    with torch.enable_grad(), ExitStack() as stack:
        for tap in taps:
            stack.enter_context(tapped(tap.site, tap))
        stack.enter_context(intervene(model, keep, layers=[site.name for site in places], unused="ignore"))
        value, calls = run(), dict(keep.calls)
        if not calls:
            raise ConfigError("run: called no attention of the model; expected a function that runs it once")
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            came = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ConfigError(f"run: expected a tensor of one number, with its graph to the heads, got {came}")
        places_of = [(tap, x) for tap in taps for x in tap.outputs]
        found = torch.autograd.grad(value, [x for _, x in places_of], allow_unused=True, materialize_grads=True)
    gradients: dict[str, Tensor] = {}
    for (tap, _), gradient in zip(places_of, found, strict=True):
        gradients[events.call_name(tap.site.name, gradients)] = tap.heads(gradient)
    maps = {name: RelevanceMap(_map_of(call), gradients[name], call.v) for name, call in calls.items()}
    return Relevance(value.detach(), maps)


class _Tap:
    """Keeps what a module's output projection receives in each call; it starts a graph where there is none."""

    def __init__(self, site: HeadSite) -> None:
        self.site, self.outputs = site, list[Tensor]()

    def __call__(self, concat: Tensor) -> Tensor:
        self.outputs.append(concat if concat.requires_grad else concat.requires_grad_())
        return self.outputs[-1]

    def heads(self, x: Tensor) -> Tensor:
        """As [b, h, n, d_v]."""
        rows = x[None] if x.ndim == 2 else x.flatten(1, -2)  # [b, n, h·d_v]
        return rows.unflatten(-1, (self.site.num_heads, self.site.value_dim)).transpose(1, 2)


@torch.no_grad()
def _map_of(call: Arguments) -> AttentionMap:
    gap = (call.gap.start, call.gap.stop) if call.gap.size else None
    return attend(
        call.q, call.k, call.v, mask=call.mask, scale=call.scale, score=call.scores, gap=gap, return_map=True
    )[1]


class AttentionRelevance(NamedTuple):
    """The relevance of the inputs of an attention, from `attention_lrp`.

    Attributes:
        q, k, v: of queries [b, h, n, d], keys [b, h_kv, m, d] and values [b, h_kv, m, d_v].
        weights: of the weights, [b, h, n, m].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    weights: RelevanceMap


@torch.no_grad()
def attention_lrp(amap: AttentionMap, values: Tensor, relevance: Tensor, *, eps: float = 1e-6) -> AttentionRelevance:
    """AttnLRP: the relevance of q, k, v and the weights, from that of the output, by the rules for products and
    softmax.

        R^P_ij = Σ_c P_ij V_jc R_ic / (2 O_ic)        R^V_jc = Σ_i P_ij V_jc R_ic / (2 O_ic)
        R^S_ij = S_ij (R^P_ij − P_ij Σ_k R^P_ik)      R^Q_ic = Σ_j scale · q_ic k_jc R^S_ij / (2 S_ij), R^K likewise

    With G = R / (2 O), R^P is the matrix of `RelevanceMap`, and the others are the inputs times their gradients for a
    gradient G of the output, halved for q and k: one backward pass of attention, O(n) memory.

    Args:
        amap: the map. values: [b, h_kv, m, d_v]. relevance: R, of the output of the heads, [b, h, n, d_v].
        eps: added to the size of 2 O, by which R is divided. S is divided without it. Biases of scores and learned
            sinks keep their share.
    Returns:
        `AttentionRelevance`, in the dtypes of the inputs.
    Raises:
        ConfigError: for scores with a soft cap, whose rule needs S for each pair, or an eps that is not positive;
            ShapeError: as of `RelevanceMap`.
    Source: Achtibat et al. 2024, 2402.05602, Prop. 3.1 (softmax) and 3.3 (products).
    """
    if not eps > 0:
        raise ConfigError(f"attention_lrp(eps={eps}): expected eps > 0")
    if amap.rule.terms(amap.detach().lse[..., :0]).soft_cap:
        raise ConfigError("attention_lrp: scores with a soft cap are not supported; their rule needs each score")
    q, k, v = (x.detach().requires_grad_() for x in (amap.q, amap.k, values.to(amap.q.dtype)))
    RelevanceMap(amap, relevance, values)  # checks the shapes
    with torch.enable_grad():
        out = run_call(Call(q, k, v, amap.rule))[0].out
    twice = 2.0 * out.detach()
    gradient = relevance / (twice + torch.where(twice < 0, -eps, eps))
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), gradient.to(out.dtype))
    return AttentionRelevance(q * dq / 2, k * dk / 2, v * dv, RelevanceMap(amap, gradient, values))
