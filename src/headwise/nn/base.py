"""The base class of all head designs: the call, its checks, and the order of the steps."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from headwise.cache import Cache, KVCache, SlidingCache, remembered
from headwise.cache.base import Mark, gap_of
from headwise.costs.work import Counts
from headwise.errors import ConfigError, ShapeError
from headwise.kernels import events
from headwise.map.arguments import check_mask, check_measures, of_argument
from headwise.map.attention import attend_to
from headwise.masks import Everything, Grid, Mask
from headwise.nn.layout import (
    Coupling,
    Layout,
    Resizing,
    Run,
    attend_in_parts,
    check_cache,
    check_input,
    check_option,
    check_share,
    flag,
    linear_parts,
    over_cache,
    parameters_of,
    runs_of,
    size,
)
from headwise.nn.steps import Notes, Preset, Rotary, Steps
from headwise.publishing import published
from headwise.scores import Score
from headwise.scores.base import listed
from headwise.stats import Measure
from headwise.table.show import Shown

Design = TypeVar("Design", bound="AttentionLayer")


class AttentionLayer(Shown, nn.Module):
    """Computes y from x and a context:  project → apply_rope → cache → attention → merge → output.

    A design defines `project` and `o_proj` (or `output`), and overrides any other step in which it differs. A design
    that is registered in `DESIGNS` also defines the parts of `CONTRACT` in `nn/registry.py` in its own class body.

    Args:
        d_model: width of x.
        num_heads: query heads h. num_kv_heads: key and value heads, a divisor of h; h by default (MHA), 1 is MQA
            (Shazeer 2019), between them GQA (Ainslie et al. 2023).
        head_dim: size d_k of queries and keys, d_model / num_heads by default.
        value_dim: size d_v of values, head_dim by default.
        context_dim: width of the context in cross attention, d_model by default.
        dropout: dropout probability of the attention weights in training.
        rotary: rotary positions on queries and keys (self attention only).
    Attributes:
        takes_context, takes_cache, takes_mask, takes_score: whether the call supports this argument; otherwise it
            raises ConfigError.
        takes_none_as: the reason for each argument that is not supported.
        at_end: whether the queries of self attention are the last of its keys' tokens.
        coupling: whether the heads depend on each other. resizing: which numbers of heads can change.
        outside_attend: how tokens interact outside one call of `attend`; "" if they do not.
        refused_options: inherited options of the constructor that the design does not support.
        presets: other names of the design, each with values of some options; those of its own class only.
        notes: its description in documentation and reports.
    """

    takes_context: ClassVar[bool] = True
    takes_cache: ClassVar[bool] = True
    takes_mask: ClassVar[bool] = True
    takes_score: ClassVar[bool] = True
    takes_none_as: ClassVar[Mapping[str, str]] = {}
    at_end: ClassVar[bool] = True
    refused_options: ClassVar[frozenset[str]] = frozenset()
    presets: ClassVar[tuple[Preset, ...]] = ()
    notes: ClassVar[Notes]
    o_proj: nn.Linear  # W_O, of the designs that have one

    # Defaults of a class that does not define them.
    coupling: ClassVar[Coupling] = Coupling("output", "how its heads depend on each other is not known")
    resizing: ClassVar[Resizing] = Resizing("how its heads lie in its parameters is not known")
    outside_attend: ClassVar[str] = "how its tokens interact is not known"

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        context_dim: int | None = None,
        dropout: float = 0.0,
        rotary: bool = False,
    ) -> None:
        super().__init__()
        d_model, num_heads = size("d_model", d_model), size("num_heads", num_heads)
        if head_dim is None:
            if d_model % num_heads:
                raise ShapeError(
                    "d_model={d_model} is not divisible by num_heads={num_heads}; or give head_dim",
                    d_model=d_model,
                    num_heads=num_heads,
                )
            head_dim = d_model // num_heads
        head_dim = size("head_dim", head_dim)
        value_dim = head_dim if value_dim is None else size("value_dim", value_dim)
        context_dim = d_model if context_dim is None else size("context_dim", context_dim)
        num_kv_heads = num_heads if num_kv_heads is None else size("num_kv_heads", num_kv_heads)
        if num_heads % num_kv_heads:
            raise ShapeError(
                "num_heads={num_heads} is not divisible by num_kv_heads={num_kv_heads}",
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
            )
        if flag("rotary", rotary) and context_dim != d_model:
            raise ConfigError("rotary=True: requires self attention, as a context has positions of its own")
        check_share("dropout", dropout)
        self.d_model, self.num_heads, self.num_kv_heads = d_model, num_heads, num_kv_heads
        self.head_dim, self.value_dim, self.context_dim = head_dim, value_dim, context_dim
        self.dropout = dropout
        self.rotary = Rotary(head_dim) if rotary else None

    @staticmethod
    def costs(*sizes: Any, **options: Any) -> Counts:
        """Return what one layer of these sizes costs, by formulas. `headwise plan` shows the docstring's summary.

        The parameters are the sizes of the constructor by name; those without a default are required. `**options` are
        the keyword arguments of the standard layer, `DESIGNS[STANDARD]`.
        """
        raise NotImplementedError

    def steps(self, x: Tensor, note: Steps) -> None:
        """Compute self attention on x [b, n, d_model] by its definition and note each step: its tensor, axes, formula
        and explanation, as in `Steps`. The last step is y, as the call computes it."""
        raise NotImplementedError

    @classmethod
    def build(cls: type[Design], d_model: int, num_heads: int, **options: Any) -> Design:
        """Return a layer of the given sizes; ConfigError for an option that it does not support."""
        known = parameters_of(cls)
        for option, value in options.items():
            check_option(cls.__name__, option, value, known)
        return cls(d_model, num_heads, **options)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        score: Score | Sequence[Score] = (),
        cache: Cache | None = None,
        return_map: bool = False,
        measures: Sequence[str | Measure] = (),
        return_concat: bool = False,
        differentiable: bool = False,
    ) -> Any:
        """Attend from x [b, n, d_model] to itself or to context [b, m, context_dim].

        Args:
            mask: which keys each query may attend to: a mask or a tensor, as in `attend`. With a cache the keys are
                those of all tokens so far and the new ones, and queries are aligned to their end, so `Causal()` applies
                at every step; keys that the cache has dropped, for all heads or for some, are masked automatically, and
                a tensor may have them or not.
            score: score modifications, as in `attend`; with a cache as `mask`: distances are those between the tokens,
                whatever the cache has dropped, and a `Bias` may have the dropped keys or not.
            cache: a KV cache, self attention only; x is then the next n tokens. Gradients flow to cached keys and
                values too, unless they are quantized; decode under `torch.no_grad()`. A call that raises leaves the
                cache as it was.
            return_map, measures, differentiable: as in `attend`; the last raises if the map is not that of one call.
            return_concat: also return Concat(head_1 … head_h) [b, n, h·d_v], the input of `output`.
        Returns:
            y [b, n, d_model]; with return_map (y, map); with return_concat (y, concat); with both (y, map, concat).
        """
        check_measures(measures, return_map, differentiable)
        scores = listed(score)
        given, own = mask, scores
        if isinstance(mask, Tensor):
            mask, bias = self._mask_of_tensor(mask, x, context, cache)
            scores = scores + bias
        self.check(x, context, cache, mask, scores)
        options: dict[str, Any] = {"dropout_p": self.dropout if self.training else 0.0}
        parts = None
        if cache is not None and not return_map and self._attends_in_parts(cache):
            parts = self._parts(given, own, x, cache)
        if parts is not None:
            options["parts"] = parts
        else:
            if cache is not None:
                mask, scores = over_cache(mask, scores, cache, self._all(x, cache), held=isinstance(given, Tensor))
            options["mask"] = mask
            if scores:
                options["score"] = scores
        if differentiable:
            options["differentiable"] = True
        source, to_itself = x if context is None else context, context is None and self.at_end

        def compute(*, return_map: bool, **more: Any) -> tuple[Tensor, Any, Any]:
            given = {**options, "return_map": return_map, **more}
            if cache is not None and (return_map or events.editing):  # positions are read
                gap = gap_of(cache)
                given |= {"gap": gap} if gap.start < gap.stop else {}
            return self.compute(x, source, cache, given, return_concat)

        undo = None if cache is None or torch.compiler.is_compiling() else Mark(cache).restore
        try:
            if events.subscribed(self):
                y, amap, concat = published(
                    self, compute, mask=mask, to_itself=to_itself, return_map=return_map, measures=measures, undo=undo
                )
            else:
                y, amap, concat = compute(return_map=return_map, measures=measures)
            if differentiable and torch.is_grad_enabled() and not getattr(amap, "differentiable", False):
                raise ConfigError(f"differentiable=True: the map of this {type(self).__name__} has no gradients")
        except BaseException:
            if undo is not None:
                undo()
            raise
        extras = [extra for extra, wanted in ((amap, return_map), (concat, return_concat)) if wanted]
        return (y, *extras) if extras else y

    def _mask_of_tensor(
        self, mask: Tensor, x: Tensor, context: Tensor | None, cache: Cache | None
    ) -> tuple[Mask | None, tuple[Score, ...]]:
        """Convert a mask given as a tensor; inputs are checked first, since its shape depends on theirs."""
        self.check(x, context, cache, Everything(), ())
        keys = (x if context is None else context).shape[1] + (0 if cache is None else cache.seen)
        gap = gap_of(cache)
        if gap.start < gap.stop:
            if mask.ndim and mask.shape[-1] == keys:
                mask = torch.cat((mask[..., : gap.start], mask[..., gap.stop :]), -1)
            keys -= gap.size
        return of_argument(mask, Grid(x.shape[0], self.num_heads, x.shape[1], keys))

    def compute(
        self, x: Tensor, source: Tensor, cache: Cache | None, options: dict[str, Any], return_concat: bool
    ) -> tuple[Tensor, Any, Any]:
        """Return y, the map and the concatenation; the map is None without `return_map`. Options as in `attend`."""
        q, k, v = self.project(x, source)
        q, k = self.apply_rope(q, k, 0 if cache is None else cache.seen)
        if cache is not None and "parts" in options:
            heads, amap = attend_in_parts(self.attention, cache, q, k, v, **options), None
        else:
            if cache is not None:  # keys stay quantized only where they are passed to `attend` unchanged
                remember: Any = partial(remembered, cache) if self._passes_vectors else cache.append
                k, v = remember(k, v)
            q, k = q.to(v.dtype), k.to(v.dtype)  # under autocast, norms may widen what projections narrowed
            heads, amap = self.attention(q, k, v, **options)
        concat = self.merge(heads, x)
        return self.output(concat), amap, concat

    def project(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [b, h, n, d_k] of x, and keys [b, h_kv, m, d_k] and values [b, h_kv, m, d_v] of the source."""
        raise NotImplementedError

    def apply_rope(self, q: Tensor, k: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Apply rotary positions to queries and keys, from position `start` on."""
        return (q, k) if self.rotary is None else (self.rotary(q, start), self.rotary(k, start))

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Any]:
        """Return the output of every head [b, h, n, d_v], and the map or None; options as in `attend`."""
        return attend_to(q, k, v, **options)

    def merge(self, heads: Tensor, x: Tensor) -> Tensor:
        """Concatenate the heads: [b, h, n, d_v] to [b, n, h·d_v]."""
        return heads.transpose(1, 2).flatten(2)

    def output(self, concat: Tensor) -> Tensor:
        """Return y [b, n, d_model] = Concat(head_1 … head_h) W_O."""
        return self.o_proj(concat)

    @property
    def _passes_vectors(self) -> bool:
        """Whether queries, keys and values are passed to `attend` unchanged."""
        return getattr(self.attention, "__func__", None) is AttentionLayer.attention

    def _attends_in_parts(self, cache: Cache) -> bool:
        """Whether KV heads that hold other tokens attend apart; see `nn/layout.py`."""
        heads = sum(len(heads) for heads, _ in getattr(cache, "parts", ()))
        if not heads or self.num_heads % heads or events.editing or events.subscribed(self):
            return False
        return self._passes_vectors and type(self).compute is AttentionLayer.compute

    def _all(self, x: Tensor, cache: Cache) -> Grid:
        """The grid over all tokens, those that the cache has dropped too."""
        return Grid(x.shape[0], self.num_heads, x.shape[1], cache.seen + x.shape[1])

    def _parts(
        self, mask: Mask | Tensor | None, scores: tuple[Score, ...], x: Tensor, cache: Cache
    ) -> list[list[Run]] | None:
        """The runs of each part of the cache; None if the mask is a tensor of the keys that all parts hold together."""
        grid, found = self._all(x, cache), []
        parts = cache.parts  # type: ignore[attr-defined]
        if isinstance(mask, Tensor) and mask.ndim and mask.shape[-1] not in (1, grid.m):
            return None
        group = self.num_heads // sum(len(each) for each, _ in parts)
        for heads, part in parts:
            if isinstance(mask, Tensor):
                own, bias = self._mask_of_tensor(mask, x, None, part)
                found.append(runs_of(heads, part, group, own, scores + bias, grid, x.device, held=True))
            else:
                found.append(runs_of(heads, part, group, mask, scores, grid, x.device))
        return found

    def check(
        self, x: Tensor, context: Tensor | None, cache: Cache | None, mask: Mask | None, scores: tuple[Score, ...] = ()
    ) -> None:
        """Raise ConfigError, ShapeError or DTypeError if the layer does not support this call."""
        check_input(self, "x", x)
        if x.ndim != 3 or x.shape[-1] != self.d_model:
            raise ShapeError(f"x: expected [batch, seq, d_model={self.d_model}], got shape {tuple(x.shape)}")
        given = {"context": context, "cache": cache, "mask": mask, "score": scores or None}
        for name, value in given.items():
            if value is not None and not getattr(self, f"takes_{name}"):
                reason = self.takes_none_as.get(name, "see its docstring for the reason")
                raise ConfigError(f"{type(self).__name__} does not support `{name}`: {reason}")
        check_mask(mask)
        check_cache(cache)
        if context is None:
            if self.context_dim != self.d_model:
                raise ShapeError(
                    f"context: required, as context_dim={self.context_dim} differs from d_model={self.d_model}"
                )
            return
        check_input(self, "context", context)
        if context.ndim != 3 or context.shape[-1] != self.context_dim or context.shape[0] != x.shape[0]:
            raise ShapeError(
                f"context: expected [{x.shape[0]}, seq, {self.context_dim}], got shape {tuple(context.shape)}"
            )
        if cache is not None:
            raise ConfigError("cache: supports self attention only; leave out cache=… or context=…")
        if self.rotary is not None:
            raise ConfigError(f"context: requires {self.without_positions}, as a context has positions of its own")

    @classmethod
    def is_described(cls) -> bool:
        """Whether the class itself defines its `FACTS`. Those of its base may not apply, since a subclass may have
        parameters and steps of its own."""
        return vars(cls).keys() >= set(FACTS)

    def layout(self) -> Layout:
        """Return which slices of each parameter belong to which head, or why there are none."""
        return Layout(missing="this design does not define its layout")

    def head_matrices(self) -> dict[str, Tensor] | None:
        """Return the matrices of each head as "q" [h, d_model, d_k], "k" [h_kv, context_dim, d_k], "v" [h_kv,
        context_dim, d_v] and "o" [h, d_v, d_model], detached; None if they are the parts of `layout` themselves."""
        return None

    def last_weights(self) -> Sequence[Tensor]:
        """Return the weights of the last linear map, whose output is added to the residual stream of a block."""
        last = [part.tensor for part in self.layout().parts if part.letter == "o"]
        return [weight for x in last for weight in ([x] if isinstance(x, Tensor) else x)]

    def new_cache(self, window: int | None = None) -> Cache:
        """Return an empty cache for this layer, of all tokens or of the last `window` ones."""
        return KVCache() if window is None else SlidingCache(window)

    def resize(self, num_heads: int, num_kv_heads: int) -> None:
        """Set the numbers of heads after the parameters have been resized."""
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads

    @property
    def reads_ahead(self) -> str:
        """Why y of a token depends on later tokens even under a causal mask; "" if it does not."""
        return ""

    @property
    def without_positions(self) -> str:
        """The option that disables rotary positions, and its current value, for error messages."""
        return "rotary=False (this layer has rotary=True)"

    def extra_repr(self) -> str:
        """The sizes, for print(module)."""
        names = ("d_model", "num_heads", "num_kv_heads", "head_dim", "value_dim")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


# Attributes that each class defines for itself, since no base can know what a subclass adds.
FACTS = ("coupling", "resizing", "outside_attend")


def copy_into(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair into the first, without autograd."""
    with torch.no_grad():
        for into, value in pairs:
            into.copy_(value)


class ProjectedLayer(AttentionLayer):
    """Q_i = X W_i^Q, K_i = C W_i^K, V_i = C W_i^V, with the matrices of all heads side by side in one map each. bias:
    on the projections; qk_norm: RMS norm of each query and key head (Dehghani et al. 2023, 2302.05442)."""

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
