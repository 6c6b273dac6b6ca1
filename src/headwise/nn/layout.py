"""The heads of a design: their slices of parameters and of caches, their coupling and sizes, and checks.

Attention with a cache that holds other tokens for some KV heads. Each part of it attends alone, so that a step reads
what is held and no more. A map is of all heads together, and is made of the keys that `append` returns instead.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from operator import index
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from headwise.cache import Cache
from headwise.cache.base import gap_of, of_heads
from headwise.errors import ConfigError, DTypeError, unknown_option
from headwise.fields import Section
from headwise.kernels.quantized import QuantizedKV, Vectors
from headwise.kernels.spread import check_local
from headwise.masks import Grid, Mask
from headwise.rule import check_dense
from headwise.scores import Score, check_scores

# Arguments before the options in every constructor.
_SIZES = frozenset({"self", "d_model", "num_heads"})


def size(name: str, value: object, least: int = 1) -> int:
    """Return a whole number of at least `least`, Python's or NumPy's, as int; ConfigError otherwise."""
    try:
        number = None if isinstance(value, bool) else index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or number < least:
        raise ConfigError(
            "{name}={value!r}: expected a whole number of at least {least}", name=name, value=value, least=least
        )
    return number


def flag(name: str, value: object) -> bool:
    """Return an option that is on or off as bool; ConfigError for anything but True and False, or 1 and 0."""
    if not isinstance(value, (bool, int, np.bool_)) or value not in (True, False):
        raise ConfigError(f"{name}={value!r}: expected True or False")
    return bool(value)


def check_share(name: str, value: object) -> None:
    """Raise ConfigError for anything but a number from 0 to 1, 1 excluded."""
    if not isinstance(value, Real) or not 0.0 <= float(value) < 1.0:
        raise ConfigError(f"{name}={value!r}: expected 0 <= {name} < 1")


def parameters_of(design: type[nn.Module]) -> dict[str, inspect.Parameter]:
    """Return the options of a design's constructor, its own before those of base classes that it passes options to."""
    found: dict[str, inspect.Parameter] = {}
    for kind in design.__mro__:
        if "__init__" not in vars(kind):
            continue
        parameters = inspect.signature(vars(kind)["__init__"]).parameters.values()
        named = {p.name: p for p in parameters if p.kind is not p.VAR_KEYWORD and p.name not in _SIZES}
        found = named | found
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break  # it passes no options on
    return found


def check_option(owner: str, option: str, value: object, known: Iterable[str]) -> None:
    """Raise ConfigError for an unknown option, with the closest match and all known options."""
    known = list(known)
    if option not in known:
        raise unknown_option(option, value, owner, known)


def check_input(module: nn.Module, name: str, x: object) -> None:
    """DTypeError if x is not a dense tensor, or has a dtype that no weight of the module has (any under autocast, which
    converts it); ConfigError under PyTorch's context parallelism. Inside torch.compile nothing is checked."""
    if not isinstance(x, Tensor):
        raise DTypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    if torch.compiler.is_compiling():
        return
    check_local()
    first = next(module.parameters(), None)
    check_dense(name, x)
    if first is None or x.dtype == first.dtype:
        return
    dtypes = {p.dtype: None for p in module.parameters() if p.is_floating_point()}  # quantized weights do not count
    if not dtypes or x.dtype in dtypes or (x.is_floating_point() and torch.is_autocast_enabled(x.device.type)):
        return
    have = " and ".join(str(dtype) for dtype in dtypes)
    expected = str(next(iter(dtypes))).removeprefix("torch.")
    raise DTypeError(
        f"{name} is {x.dtype}, but the weights of {type(module).__name__} are {have}; convert one of them, for "
        f"example {name}.to(torch.{expected})"
    )


def check_cache(cache: object) -> None:
    """Raise DTypeError if this is not a cache."""
    if cache is None:
        return
    if isinstance(cache, type) or not all(hasattr(cache, name) for name in ("seen", "limits", "append")):
        given = f"the class {cache.__name__}" if isinstance(cache, type) else type(cache).__name__
        raise DTypeError(f"cache: expected a headwise cache such as KVCache(), got {given}")


@dataclass(frozen=True)
class Part:
    """The slices of one parameter by head: head i has `width` entries of the axis, from `start + i · width` on.

    Attributes:
        letter: "q", "k", "v" or "o" for the matrices and their biases; another name for other parameters by head.
        owner, name: the module that holds the parameter, and its attribute name. An `nn.ParameterList` has one entry
            per head, with axis 0, width 1 and start 0.
        heads: "query" or "key", the kind of heads it is sliced by.
    """

    letter: str
    owner: nn.Module
    name: str
    axis: int
    heads: str
    width: int
    start: int = 0

    @property
    def tensor(self) -> Tensor | nn.ParameterList:
        """The current parameter."""
        found: Tensor | nn.ParameterList = getattr(self.owner, self.name)
        return found

    def entries(self, head: int) -> slice:
        """Return the slice of one head along the axis."""
        first = self.start + head * self.width
        return slice(first, first + self.width)


@dataclass(frozen=True)
class Coupling:
    """The first step in which heads depend on each other: "scores"; "heads", the outputs that are concatenated;
    "output", the map after it; "" if y is a sum over heads. why: the reason in one sentence, for error messages."""

    at: Literal["", "scores", "heads", "output"] = ""
    why: str = ""

    @property
    def of_heads(self) -> str:
        """Why the concatenated heads are not the outputs of one `attend` call, each of its own head; "" if they are."""
        return self.why if self.at in ("scores", "heads") else ""


INDEPENDENT = Coupling()


@dataclass(frozen=True)
class Resizing:
    """Which numbers of heads of an existing module can change.

    Attributes:
        fixed: why its number of heads cannot change, in one sentence; "" if it can.
        merges: whether KV heads can be merged while the query heads stay. q, k, v and o are then linear maps, and
            their parts are rows of W_Q, W_K, W_V and columns of W_O.
        unknown_rotary: why it is not known which channel pairs of queries and keys rotary positions rotate, in one
            sentence; "" if they are the pairs (t, t + d/2), or if there are no rotary positions.
    """

    fixed: str = ""
    merges: bool = False
    unknown_rotary: str = ""


@dataclass(frozen=True)
class Layout:
    """Which slices of the parameters of a module belong to which head.

    Attributes:
        parts: one for each parameter axis that is sliced by heads. Parameters in no part are shared by all heads.
        output: the module that is called with Concat(head_1 … head_h) [..., n, h·d_v], or None.
        norms: norms of queries and keys per head, with weights shared by all heads.
        rotary: whether queries and keys have rotary positions.
        shared_key: number of trailing channels of every query and key, beyond the layer's `head_dim`, whose key is
            shared by all heads.
        missing: why the heads have no matrices of their own, in one sentence; "" if they do.
    """

    parts: tuple[Part, ...] = ()
    output: nn.Module | None = None
    norms: tuple[nn.Module, ...] = ()
    rotary: bool = False
    shared_key: int = 0
    missing: str = ""

    def more(self, parts: Iterable[Part]) -> "Layout":
        """Return the layout with further parts."""
        return replace(self, parts=(*self.parts, *parts))

    def into(self, linear: nn.Module, value_dim: int, *, called: bool = True) -> "Layout":
        """Return the layout with W_O, whose inputs are the heads.

        Args:
            linear: W_O. called: whether the module is called with the concatenation, which makes it `output`.
        """
        joined = self.more(linear_parts("o", linear, 1, "query", value_dim))
        return replace(joined, output=linear) if called else joined


def linear_parts(letter: str, owner: nn.Module, axis: int, heads: str, width: int, start: int = 0) -> list[Part]:
    """Return the parts of a linear map whose inputs (axis 1) or outputs (axis 0) are the heads, in the layout [out, in]
    of `nn.Linear`. The bias of a map with heads as inputs belongs to no head."""
    parts = [Part(letter, owner, "weight", axis, heads, width, start)]
    if axis == 0 and getattr(owner, "bias", None) is not None:
        parts.append(Part(letter, owner, "bias", 0, heads, width, start))
    return parts


def no_layout(what: str, why: str) -> ConfigError:
    """Return the error for heads without matrices of their own."""
    return ConfigError(f"{what}: its heads have no matrices of their own: {why}")


class Run(NamedTuple):
    """KV heads that attend in one call, with options of `attend`. within: which of those of their part of the cache;
    None for all."""

    heads: list[int]
    within: slice | None
    options: dict[str, Any]


def runs_of(
    heads: list[int], part: Cache, group: int, mask: Mask | None, scores: tuple[Score, ...], grid: Grid,
    device: torch.device, *, held: bool = False,
) -> list[Run]:  # fmt: skip
    """The runs of one part of a cache, of the KV heads `heads` with `group` query heads each: one, or one for each
    range of heads with the same mask and scores. These are over `grid`, all query heads and all tokens; held: over the
    keys that the part holds."""
    mask, scores = over_cache(mask, scores, part, grid, held=held)
    grid = Grid(grid.b, grid.h, grid.n, grid.m - gap_of(part).size)
    if mask is not None:
        mask.check(grid)
    check_scores(scores, grid, device)
    one = {"h": Section(0, group, grid.h)}
    if all(each.cut(one) is each for each in (*scores, *([] if mask is None else [mask]))):
        return [Run(heads, None, _options(mask, scores))]
    ends = [at for at in range(1, len(heads) + 1) if at == len(heads) or heads[at] != heads[at - 1] + 1]
    runs = []
    for start, stop in zip([0, *ends], ends, strict=False):
        cuts = {"h": Section(heads[start] * group, (heads[stop - 1] + 1) * group, grid.h)}
        options = _options(None if mask is None else mask.cut(cuts), tuple(score.cut(cuts) for score in scores))
        runs.append(Run(heads[start:stop], slice(start, stop), options))
    return runs


def _options(mask: Mask | None, scores: tuple[Score, ...]) -> dict[str, Any]:
    return {"mask": mask, "score": scores} if scores else {"mask": mask}


def over_cache(
    mask: Mask | None, scores: tuple[Score, ...], cache: Cache, grid: Grid, *, held: bool = False
) -> tuple[Mask | None, tuple[Score, ...]]:
    """A mask and scores over all tokens, `grid`, as those of the keys that the cache holds and the new ones, and the
    mask of what it holds. held: whether the mask is one of held keys already."""
    gap = gap_of(cache)
    if gap.start != gap.stop and (scores or mask is not None):  # else the same object keeps what is derived from it
        kept = Grid(grid.b, grid.h, grid.n, grid.m - gap.size)
        mask = mask if held or mask is None else mask.with_gap(gap, kept)
        scores = tuple(one.with_gap(gap, kept) if isinstance(one, Score) else one for one in scores)
    limits = cache.limits(grid.n, grid.h)
    if limits is not None:
        mask = limits if mask is None else mask & limits
    return mask, scores


def attend_in_parts(
    attention: Callable[..., tuple[Tensor, Any]], cache: Cache, q: Tensor, k: Tensor, v: Tensor,
    parts: Sequence[Sequence[Run]], **options: Any,
) -> Tensor:  # fmt: skip
    """Append k and v to the cache, and return the output of every query head [b, h, n, d_v]. attention: called as
    `attend`, returns an output and a map; parts: the runs of each of `cache.parts`."""
    group = q.shape[1] // k.shape[1]
    outs: list[Tensor] = []
    order: list[int] = []
    for (keys, values), runs in zip(cache.take_parts(k, v), parts, strict=True):  # type: ignore[attr-defined]
        for run in runs:
            queries = [i for head in run.heads for i in range(head * group, (head + 1) * group)]
            some_k, some_v = _of(keys, run.within), _of(values, run.within)
            some_q = of_heads(q, queries).to(some_v.dtype)
            outs.append(attention(some_q, some_k.to(some_v.dtype), some_v, **{**options, **run.options})[0])
            order += queries
    out = torch.cat(outs, 1)
    if order == sorted(order):
        return out
    return out[:, sorted(range(len(order)), key=order.__getitem__)]


def _of(x: Vectors, within: slice | None) -> Vectors:
    if within is None:
        return x
    if isinstance(x, QuantizedKV):
        return replace(x, steps=x.steps[:, within], scales=x.scales[:, within])
    return x[:, within]
