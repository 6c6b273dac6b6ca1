"""What all head designs share: one call, its checks, and the order of the steps."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn

from headwise.attention import attend_to, check_mask
from headwise.cache import Cache, remembered
from headwise.costs.counts import Counts
from headwise.errors import ConfigError, ShapeError
from headwise.events import subscribed
from headwise.mask_tensors import of_argument
from headwise.masks import Everything, Grid, Mask
from headwise.nn.checks import check_cache, check_input, check_option, parameters_of, size
from headwise.nn.layout import Coupling, Layout, Resizing
from headwise.nn.notes import Notes, Preset
from headwise.nn.positions import Rotary
from headwise.nn.steps import Steps
from headwise.publishing import published
from headwise.scores import Score
from headwise.stats import Measure

Design = TypeVar("Design", bound="AttentionLayer")


class AttentionLayer(nn.Module):
    """x and a context in, y out:  project → turn → cache → attention → merge → output.

    A design fills in `project` and `output`, and replaces another step where it differs from the textbook's. One that
    is registered in `DESIGNS` also describes itself: `costs`, `steps` and `notes`, each in its own class body.

    Args:
        d_model: width of x.
        num_heads: query heads h. num_kv_heads: key and value heads, a divisor of h; h by default (MHA), 1 is MQA
            (Shazeer 2019), between them GQA (Ainslie et al. 2023).
        head_dim: size d_k of queries and keys, d_model / num_heads by default.
        value_dim: size d_v of values, head_dim by default.
        context_dim: width of the context in cross attention, d_model by default.
        dropout: share of the attention weights dropped in training.
        rotary: rotary positions on queries and keys (self attention only).
    Attributes:
        takes_context, takes_cache, takes_mask, takes_score: what the call of this design accepts; what it does not
            raises ConfigError.
        takes_none_as: the reason, of each of them that it does not accept.
        coupling: whether its heads depend on each other. resizing: which numbers of heads can change.
        outside_attend: how tokens interact outside one call of `attend`; "" if they do not.
        refused_options: options of the constructor that it inherits and refuses, as it has its own way.
        presets: other names of the design, with some of its options given; those of its own class only.
        notes: what documentation and reports say of it.
    """

    takes_context: ClassVar[bool] = True
    takes_cache: ClassVar[bool] = True
    takes_mask: ClassVar[bool] = True
    takes_score: ClassVar[bool] = True
    takes_none_as: ClassVar[Mapping[str, str]] = {}
    refused_options: ClassVar[frozenset[str]] = frozenset()
    presets: ClassVar[tuple[Preset, ...]] = ()
    notes: ClassVar[Notes]

    # Of a class that says nothing.
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
                raise ShapeError(f"d_model={d_model} is not divisible by num_heads={num_heads}; or give head_dim")
            head_dim = d_model // num_heads
        head_dim = size("head_dim", head_dim)
        value_dim = head_dim if value_dim is None else size("value_dim", value_dim)
        context_dim = d_model if context_dim is None else size("context_dim", context_dim)
        num_kv_heads = num_heads if num_kv_heads is None else size("num_kv_heads", num_kv_heads)
        if num_heads % num_kv_heads:
            raise ShapeError(f"num_heads={num_heads} is not divisible by num_kv_heads={num_kv_heads}")
        if rotary and context_dim != d_model:
            raise ConfigError("rotary=True needs self attention: a context has positions of its own")
        if not 0.0 <= dropout < 1.0:
            raise ConfigError(f"dropout={dropout}: expected 0 <= dropout < 1")
        self.d_model, self.num_heads, self.num_kv_heads = d_model, num_heads, num_kv_heads
        self.head_dim, self.value_dim, self.context_dim = head_dim, value_dim, context_dim
        self.dropout = dropout
        self.rotary = Rotary(head_dim) if rotary else None

    @staticmethod
    def costs(*sizes: Any, **options: Any) -> Counts:
        """What one layer of these sizes costs, by formulas. The docstring's first paragraph is its line in `plan`.

        A design writes out the sizes that it takes, by the names of its constructor; those without a default are
        required. `**options` are those of the standard layer, `DESIGNS[STANDARD]`, that come after its heads.
        """
        raise NotImplementedError

    def steps(self, x: Tensor, note: Steps) -> None:
        """This layer's self attention on x [b, n, d_model] by its definition, to y: each step is noted with its
        tensor, axes, formula and words, as `Steps` takes them; the last one is y, as the call computes it."""
        raise NotImplementedError

    @classmethod
    def build(cls: type[Design], d_model: int, num_heads: int, **options: Any) -> Design:
        """The design at the given size; options as in its constructor, ConfigError for one that it does not take."""
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
    ) -> Any:
        """Attend from x [b, n, d_model] to itself or to context [b, m, context_dim].

        Args:
            mask: which keys each query may attend to: a mask or a tensor, as in `attend`. With a cache the keys are
                all the cached ones and the new ones, and queries are aligned to their end, so `Causal()` is right at
                every step; what the cache holds no longer, or not for every head, the layer masks by itself.
            score: what else changes a score, as in `attend`.
            cache: a KV cache, self attention only; x is then the next n tokens.
            return_map, measures: as in `attend`.
            return_concat: also return Concat(head_1 … head_h) [b, n, h·d_v], from which `output` makes y.
        Returns:
            y [b, n, d_model]; with return_map (y, map); with return_concat (y, concat); with both (y, map, concat).
        """
        scores = (score,) if isinstance(score, Score) else tuple(score)
        if isinstance(mask, Tensor):
            mask, bias = self._of_tensor(mask, x, context, cache)
            scores += bias
        self.check(x, context, cache, mask, scores)
        limits = None if cache is None else cache.limits(x.shape[1], self.num_heads)
        if limits is not None:
            mask = limits if mask is None else mask & limits
        options: dict[str, Any] = {"mask": mask, "dropout_p": self.dropout if self.training else 0.0}
        if scores:
            options["score"] = scores
        source = x if context is None else context

        def compute(**wanted: Any) -> tuple[Tensor, Any, Any]:
            return self.compute(x, source, cache, {**options, **wanted}, return_concat)

        if subscribed(self):
            y, amap, concat = published(
                self, compute, mask=mask, to_itself=context is None, return_map=return_map, measures=measures
            )
        else:
            y, amap, concat = compute(return_map=return_map, measures=measures)
        extras = [extra for extra, asked in ((amap, return_map), (concat, return_concat)) if asked]
        return (y, *extras) if extras else y

    def _of_tensor(
        self, mask: Tensor, x: Tensor, context: Tensor | None, cache: Cache | None
    ) -> tuple[Mask | None, tuple[Score, ...]]:
        """A mask given as a tensor; the inputs and options are checked first, since its shape depends on theirs."""
        self.check(x, context, cache, Everything(), ())
        keys = (x if context is None else context).shape[1] + (0 if cache is None else cache.seen)
        return of_argument(mask, Grid(x.shape[0], self.num_heads, x.shape[1], keys))

    def compute(
        self, x: Tensor, source: Tensor, cache: Cache | None, options: dict[str, Any], return_concat: bool
    ) -> tuple[Tensor, Any, Any]:
        """y, the map and the concatenation, the last two None if not asked for; options are those of `attend`."""
        q, k, v = self.project(x, source)
        q, k = self.apply_rope(q, k, 0 if cache is None else cache.seen)
        if cache is not None:
            k, v = self._remembered(cache, k, v)
        q, k = q.to(v.dtype), k.to(v.dtype)  # under autocast, norms may widen what projections narrowed
        heads, amap = self.attention(q, k, v, **options)
        concat = self.merge(heads, x)
        return self.output(concat), amap, concat

    def project(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [b, h, n, d_k] of x; keys [b, h_kv, m, d_k] and values [b, h_kv, m, d_v] of the source."""
        raise NotImplementedError

    def apply_rope(self, q: Tensor, k: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Queries and keys with their positions, the first of them at `start`."""
        return (q, k) if self.rotary is None else (self.rotary(q, start), self.rotary(k, start))

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Any]:
        """Every head's result [b, h, n, d_v], and the map if asked for; options as in `attend`."""
        return attend_to(q, k, v, **options)

    def merge(self, heads: Tensor, x: Tensor) -> Tensor:
        """Concat(head_1 … head_h): [b, h, n, d_v] to [b, n, h·d_v]."""
        return heads.transpose(1, 2).flatten(2)

    def output(self, concat: Tensor) -> Tensor:
        """y [b, n, d_model] of the concatenated heads."""
        raise NotImplementedError

    def _remembered(self, cache: Cache, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The cache's keys and values with the new ones: in eight bits, if it holds such, only for a layer that gives
        them to `attend` as they are, which reads those too."""
        if getattr(self.attention, "__func__", None) is AttentionLayer.attention:
            return cast(tuple[Tensor, Tensor], remembered(cache, k, v))
        return cache.append(k, v)

    def check(
        self, x: Tensor, context: Tensor | None, cache: Cache | None, mask: Mask | None, scores: tuple[Score, ...] = ()
    ) -> None:
        """Raise if the call does not fit this module."""
        check_input(self, "x", x)
        if x.ndim != 3 or x.shape[-1] != self.d_model:
            raise ShapeError(f"x: expected [batch, seq, d_model={self.d_model}], got shape {tuple(x.shape)}")
        given = {"context": context, "cache": cache, "mask": mask, "score": scores or None}
        for name, value in given.items():
            if value is not None and not getattr(self, f"takes_{name}"):
                reason = self.takes_none_as.get(name, "see its docstring for the reason")
                raise ConfigError(f"{name}: {type(self).__name__} takes none: {reason}")
        check_mask(mask)
        check_cache(cache)
        if context is None:
            if self.context_dim != self.d_model:
                raise ShapeError(
                    f"context: needed, as context_dim={self.context_dim} differs from d_model={self.d_model}"
                )
            return
        check_input(self, "context", context)
        if context.ndim != 3 or context.shape[-1] != self.context_dim or context.shape[0] != x.shape[0]:
            raise ShapeError(
                f"context: expected [{x.shape[0]}, seq, {self.context_dim}], got shape {tuple(context.shape)}"
            )
        if cache is not None:
            raise ConfigError("cache=… is for self attention, whose keys grow; leave out cache=… or context=…")
        if self.rotary is not None:
            raise ConfigError(f"context needs {self.without_positions}: a context has positions of its own")

    @classmethod
    def is_described(cls) -> bool:
        """Whether the class itself says its `FACTS`. What its base says may be wrong for it: a subclass may have
        parameters and steps of its own."""
        return vars(cls).keys() >= set(FACTS)

    def layout(self) -> Layout:
        """Where each head's numbers lie in each parameter, or why they have no such places."""
        return Layout(missing="this design is not known")

    def head_matrices(self) -> dict[str, Tensor] | None:
        """W_i^Q, W_i^K, W_i^V and W_i^O of each head as "q" [h, d_model, d_k], "k" [h_kv, context_dim, d_k], "v" [h_kv,
        context_dim, d_v] and "o" [h, d_v, d_model], detached; None if they are the parts of `layout` as they are."""
        return None

    def last_weights(self) -> Sequence[Tensor]:
        """The weights of the map that gives y, which adds to the residual stream of a block."""
        last = [part.tensor for part in self.layout().parts if part.letter == "o"]
        return [weight for x in last for weight in ([x] if isinstance(x, Tensor) else x)]

    def resize(self, num_heads: int, num_kv_heads: int) -> None:
        """Set the sizes that the layer computes with, of parameters that have so many heads already."""
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads

    @property
    def reads_ahead(self) -> str:
        """Why y of a token depends on later ones under a causal mask too, "" if it does not."""
        return ""

    @property
    def without_positions(self) -> str:
        """The option that takes the positions away, and what this layer has instead."""
        return "rotary=False (this layer has rotary=True)"

    def extra_repr(self) -> str:
        """The sizes, for print(module)."""
        return (
            f"d_model={self.d_model}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"head_dim={self.head_dim}, value_dim={self.value_dim}"
        )


# What a class says of itself alone: no base can know what a subclass adds.
FACTS = ("coupling", "resizing", "outside_attend")


def copy_into(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy the second of each pair into the first, apart from autograd."""
    with torch.no_grad():
        for into, value in pairs:
            into.copy_(value)
