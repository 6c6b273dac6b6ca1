"""Edits of attention calls: which heads and tokens they are of, and the edits themselves."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from headwise.errors import ConfigError, DTypeError, ShapeError, check_declared, whole_number
from headwise.fields import Section
from headwise.map import AttentionMap
from headwise.masks import Forbidden, Grid, Mask, Span, real_tokens
from headwise.masks.grid import NO_GAP
from headwise.rule import Rule
from headwise.scores import Score


def kv_heads(x: Tensor, heads: range, num_heads: int) -> Tensor:
    """The KV heads of k or v [b, h_kv, m, d] that these query heads read; a view of whole groups or parts of one."""
    group = num_heads // x.shape[1]
    start, stop = heads.start // group, -(-heads.stop // group)
    if stop - start == 1 or (heads.start % group == 0 and heads.stop % group == 0):
        return x[:, start:stop]
    return x[:, torch.tensor([head // group for head in heads], device=x.device)]


def of_heads(q: Tensor, k: Tensor, rule: Rule, heads: range) -> tuple[Tensor, Tensor, Rule]:
    """Return queries, keys and rule of these query heads."""
    num_heads = q.shape[1]
    if len(heads) == num_heads:
        return q, k, rule
    part = {"h": Section(heads.start, heads.stop, num_heads)}
    return q[:, heads.start : heads.stop], kv_heads(k, heads, num_heads), rule.cut(part)


Tokens: TypeAlias = int | slice | Sequence[int] | Tensor | None


def checked_tokens(name: str, tokens: Tokens) -> Tokens:
    """A set of tokens as `selection` reads it, or an error: positions or a slice in each sequence, from its end if
    negative; boolean [tokens], or [b, columns] with padding; None for all."""
    if tokens is None or isinstance(tokens, slice):
        return tokens
    if isinstance(tokens, bool | str):
        raise ConfigError(f"{name}={tokens!r}: expected positions of tokens, a slice or a boolean tensor")
    if (one := whole_number(tokens)) is not None:
        return [one]
    if isinstance(tokens, np.ndarray):
        tokens = torch.as_tensor(tokens)
    if isinstance(tokens, Tensor) and tokens.dtype == torch.bool:
        if tokens.ndim not in (1, 2):
            raise ShapeError(f"{name}: expected boolean [tokens] or [b, columns], got shape {tuple(tokens.shape)}")
        return tokens.detach().cpu()
    if isinstance(tokens, Tensor):
        if tokens.is_floating_point() or tokens.ndim != 1:
            raise DTypeError(
                f"{name}: expected positions [k] or a boolean tensor, got {tokens.dtype} {tuple(tokens.shape)}"
            )
        return [int(at) for at in tokens.tolist()]
    places = [whole_number(at) for at in tokens] if isinstance(tokens, Sequence) else [None]
    found = [at for at in places if at is not None]
    if len(found) < len(places):
        raise ConfigError(f"{name}={tokens!r}: expected positions of tokens, a slice or a boolean tensor")
    return found


class Columns(NamedTuple):
    """The columns of some queries or keys of a batch."""

    position: Tensor  # int64 [b or 1, size], of each in the sequence of its batch entry; −1 for padding
    lengths: Tensor  # [b or 1], tokens of each sequence
    first: int  # number of the first column

    @classmethod
    def of(cls, real: Tensor | None, size: int) -> "Columns":
        """All columns of a batch, of which `real`, boolean [b or 1, size], are no padding; all if None."""
        real = torch.ones(1, size, dtype=torch.bool, device="cpu") if real is None else real
        return cls((real.cumsum(-1) - 1).masked_fill(~real, -1), real.sum(-1), 0)

    def part(self, first: int, size: int) -> "Columns":
        """Return the columns first … first + size − 1."""
        return Columns(self.position[:, first : first + size], self.lengths, first)


def selection(tokens: Tokens, columns: Columns) -> Tensor:
    """Which columns are in the set of `checked_tokens`: boolean [b or 1, size] on the CPU; positions may be missing."""
    size = columns.position.shape[1]
    if tokens is None:
        return torch.ones(1, size, dtype=torch.bool, device="cpu")
    if isinstance(tokens, Tensor) and tokens.ndim == 2:
        here = tokens[:, columns.first : columns.first + size]
        return torch.nn.functional.pad(here, (0, size - here.shape[1]))
    lengths = columns.lengths.tolist()
    chosen = torch.zeros(len(lengths), max(lengths) + 1, dtype=torch.bool, device="cpu")  # the last one for padding
    for row, length in zip(chosen, lengths, strict=True):
        if isinstance(tokens, Tensor):
            row[: len(tokens)] = tokens[: len(row)]
            row[length:] = False
        elif isinstance(tokens, slice):
            row[range(*tokens.indices(length))] = True
        else:
            assert isinstance(tokens, Sequence)
            row[[at % length for at in tokens if -length <= at < length]] = True
    wide = max(len(chosen), len(columns.position))
    at = columns.position % chosen.shape[1]
    return chosen.expand(wide, -1).gather(1, at.expand(wide, -1))


@dataclass(frozen=True)
class Arguments:
    """The arguments of `attend` for some consecutive heads of a module.

    Attributes:
        q, k, v, mask, scale, scores: as in `attend`, for these heads alone.
        heads: their numbers in the module. num_heads: of the whole module.
        name: of the module. gap: as in `attend`. at_end: whether the queries are the last of the keys' tokens, as in
            self attention. placed: whether where they are is known. extra: the number of first keys that are no tokens,
            as of add_bias_kv. real: which of the keys' tokens, those too that a cache has dropped, are no padding,
            boolean [b or 1, tokens]; None if all are.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    scale: float
    scores: tuple[Score, ...]
    heads: range
    num_heads: int
    name: str
    gap: Span = NO_GAP
    at_end: bool = True
    placed: bool = True
    extra: int = 0
    real: Tensor | None = None

    @property
    def grid(self) -> Grid:
        """The size of the attention matrix."""
        b, h, n, _ = self.q.shape
        return Grid(b, h, n, self.k.shape[2], gap=self.gap, extra=self.extra)

    def queries(self, tokens: Tokens) -> Tensor:
        """Which queries are in a set of tokens: boolean [b or 1, n].

        Raises:
            ConfigError: if they are not all queries, and where the queries are is not known.
        """
        if tokens is not None and not self.placed:
            n, m = self.grid.n, self.grid.m
            raise ConfigError(
                f"queries={tokens}: where the {n} queries of {self.name or 'the model'} are among its {m} keys is not "
                f"known, as no mask determines it; an edit of all queries (queries=None) is possible"
            )
        if not self.at_end:
            return self._selected(tokens, Columns.of(None, self.grid.n))
        columns = Columns.of(self.real, self.grid.tokens)
        return self._selected(tokens, columns.part(self.grid.first_token, self.grid.n))

    def keys(self, tokens: Tokens) -> Tensor:
        """Which keys are in a set of tokens: boolean [b or 1, m]. Keys that are no tokens are in None alone."""
        if tokens is None:
            return torch.ones(1, self.grid.m, dtype=torch.bool, device="cpu")
        return self.grid.of_keys(self._selected(tokens, Columns.of(self.real, self.grid.tokens)))

    def _selected(self, tokens: Tokens, columns: Columns) -> Tensor:
        if isinstance(tokens, Tensor) and tokens.ndim == 2 and len(tokens) not in (1, self.grid.b):
            raise ShapeError(
                f"{self.name or 'the model'}: its call is a batch of {self.grid.b}, but a set of tokens is boolean "
                f"{list(tokens.shape)}; expected [tokens], or [{self.grid.b}, columns]"
            )
        return selection(tokens, columns)


@dataclass(frozen=True)
class Placed:
    """An edit of some modules, as subscribed. applied: for each call, its module's name, and whether it had a token of
    each set; before: `Arguments.real` of a module's last call, boolean [b or 1, tokens]."""

    edit: "Edit"
    applied: list[tuple[str, bool]]
    name: str = ""  # of the module
    before: dict[str, Tensor] = field(default_factory=dict)


class Edit:
    """A change of attention, for some heads and queries. A subclass defines `changed`.

    Args:
        heads: numbers of the query heads; None for all.
        queries: the queries to change; None for all. See `headwise.interventions` for sets of tokens.
    Attributes:
        by_row: whether `changed` itself changes only the selected queries; otherwise the call is computed with and
            without the edit, and each query takes its own.
        own_keys: whether the weights afterwards are those of the keys and the scale that the model computed.
    """

    by_row: ClassVar[bool] = False
    own_keys: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        check_declared(cls, Edit, {"changed": "the arguments of a call with the edit"})

    def __init__(self, heads: Sequence[int] | int | None = None, queries: Tokens = None) -> None:
        owner = type(self).__name__
        self.heads: tuple[int, ...] | None = None
        if heads is not None:
            one = whole_number(heads)
            given = [one] if one is not None else heads
            if isinstance(given, str) or not isinstance(given, Iterable) or not (given := list(given)):
                raise ConfigError(f"{owner}(heads={heads!r}): expected numbers of heads, or None for all")
            numbers = [head for head in map(whole_number, given) if head is not None and head >= 0]
            if len(numbers) < len(given):
                raise ConfigError(f"{owner}(heads={heads!r}): expected whole numbers, counted from 0")
            self.heads = tuple(sorted(set(numbers)))
        self.tokens: Mapping[str, Tokens] = {"queries": checked_tokens(f"{owner}(queries)", queries)}

    def changed(self, call: Arguments) -> Arguments:
        """Return the arguments of the call with the edit, which applies to all of its heads."""
        raise NotImplementedError

    def mask(self, call: Arguments) -> Mask:
        """Return the mask of a whole call with the edit, in which only `heads` are affected; for maps."""
        return call.mask

    def rows(self, call: Arguments) -> Tensor:
        """Which queries it changes: boolean [b or 1, n]."""
        return call.queries(self.tokens["queries"])

    def applies(self, call: Arguments) -> bool:
        """Whether the call has a token of each set."""
        return bool(self.rows(call).any())

    def chosen(self, call: Arguments) -> Tensor:
        """Which heads of a whole call it changes: boolean [h]. ConfigError for a head that the module lacks."""
        if self.heads is None:
            return torch.ones(call.num_heads, dtype=torch.bool, device="cpu")
        if self.heads[-1] >= call.num_heads:
            raise ConfigError(
                f"{type(self).__name__}(heads={list(self.heads)}): {call.name or 'the module'} has "
                f"{call.num_heads} heads, counted from 0"
            )
        found = torch.zeros(call.num_heads, dtype=torch.bool, device="cpu")
        found[list(self.heads)] = True
        return found

    def __repr__(self) -> str:
        given = {"heads": None if self.heads is None else list(self.heads), **self.tokens}
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in given.items())})"


class Forbid(Edit):
    """The queries may not attend to the keys: their scores become −∞, and the remaining weights of a row sum to 1.

    A query that loses all its keys is fully masked, and its output is 0.

    Args:
        queries, keys: the two sets of tokens; None for all. heads: numbers of the query heads; None for all.
    Source: attention knockout, Geva et al. 2023, 2304.14767, §4.
    """

    by_row = True

    def __init__(self, queries: Tokens, keys: Tokens, *, heads: Sequence[int] | int | None = None) -> None:
        super().__init__(heads, queries)
        self.tokens = {**self.tokens, "keys": checked_tokens("Forbid(keys)", keys)}

    def changed(self, call: Arguments) -> Arguments:
        return replace(call, mask=call.mask & Forbidden(self.rows(call), call.keys(self.tokens["keys"])))

    def mask(self, call: Arguments) -> Mask:
        chosen = self.chosen(call)
        heads = None if bool(chosen.all()) else chosen
        return call.mask & Forbidden(self.rows(call), call.keys(self.tokens["keys"]), heads)

    def applies(self, call: Arguments) -> bool:
        return super().applies(call) and bool(call.keys(self.tokens["keys"]).any())


class Scale(Edit):
    """The weights of the queries on the keys are multiplied by a factor after the softmax. A row is not normalised
    again, so it sums to 1 no longer; for weights that are, see `Forbid`.

    Maps have the weights before it, as they have those before dropout.

    Args:
        factor: 0 removes what the keys contribute, 1 changes nothing; it may be negative or above 1.
        queries, keys: the two sets of tokens; None for all. heads: numbers of the query heads; None for all.
    """

    def __init__(
        self, factor: float, queries: Tokens = None, keys: Tokens = None, *, heads: Sequence[int] | int | None = None
    ) -> None:
        super().__init__(heads, queries)
        if isinstance(factor, bool) or not isinstance(factor, Real) or not math.isfinite(factor):
            raise ConfigError(f"Scale(factor={factor!r}): expected a finite number")
        self.factor: float = float(factor)
        self.tokens = {**self.tokens, "keys": checked_tokens("Scale(keys)", keys)}

    def changed(self, call: Arguments) -> Arguments:
        # The factor of a column belongs to its value as well: Σ_j (c_j p_ij) v_j = Σ_j p_ij (c_j v_j).
        keys = call.keys(self.tokens["keys"])[:, None, :, None].to(call.v.device)
        scaled = call.v * self.factor if self.factor else torch.zeros_like(call.v)  # 0 · NaN would be NaN
        return replace(call, v=torch.where(keys, scaled, call.v))

    def applies(self, call: Arguments) -> bool:
        return super().applies(call) and bool(call.keys(self.tokens["keys"]).any())

    def __repr__(self) -> str:
        return super().__repr__().replace("(", f"({self.factor:g}, ", 1)


class Uniform(Edit):
    """Every query attends equally to all keys that the mask allows: scores, biases and learned sinks are left out.

    Args:
        heads: numbers of the query heads; None for all. queries: a set of tokens; None for all.
    """

    own_keys = False

    def changed(self, call: Arguments) -> Arguments:
        return replace(call, q=torch.zeros_like(call.q), scores=())


class Replace(Edit):
    """The weights are those of another run, and the values those of this one (activation patching of a pattern).

    The weights are computed from the queries and keys of the map: O(n) memory. Gradients flow to the values.

    Args:
        maps: the map of the other run, or name of the module → map, as `record.maps` has them. Its size must be that
            of the call, [b, h, n, m], and so are the columns of its padding.
        heads: numbers of the query heads; None for all. queries: a set of tokens; None for all.
    """

    own_keys = False

    def __init__(
        self, maps: AttentionMap | Mapping[str, AttentionMap], *, heads: Sequence[int] | int | None = None,
        queries: Tokens = None,
    ) -> None:  # fmt: skip
        super().__init__(heads, queries)
        given = maps.values() if isinstance(maps, Mapping) else [maps]
        if not given or not all(isinstance(amap, AttentionMap) for amap in given):
            raise ConfigError(
                f"Replace(maps): expected an AttentionMap, or a mapping from names of modules to them, got "
                f"{type(maps).__name__}"
            )
        self.maps = maps

    def changed(self, call: Arguments) -> Arguments:
        amap = self._map(call)
        b, _, n, m = call.grid
        if amap.shape != (b, call.num_heads, n, m):
            raise ShapeError(
                f"Replace(maps): the map of {call.name or 'the module'} is {amap.shape}, but its call is "
                f"{(b, call.num_heads, n, m)}"
            )
        if bool((_real(amap.rule.grid, real_tokens(amap.mask, amap.rule.grid)) != _real(call.grid, call.real)).any()):
            raise ShapeError(
                f"Replace(maps): the padding of {call.name or 'the module'} is in other columns than that of its map, "
                f"whose weights would be of other tokens; give it a batch that is padded alike"
            )
        q, k, rule = of_heads(amap.q, amap.k, amap.rule, call.heads)
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)  # those of the call may be grouped in another way
        v = call.v.repeat_interleave(q.shape[1] // call.v.shape[1], 1)
        return replace(call, q=q.to(v), k=k.to(v), v=v, mask=rule.mask, scale=rule.scale, scores=rule.scores)

    def _map(self, call: Arguments) -> AttentionMap:
        if isinstance(self.maps, AttentionMap):
            return self.maps
        if call.name not in self.maps:
            raise ConfigError(f"Replace(maps): no map of {call.name!r}; expected one for each module that is edited")
        return self.maps[call.name]


def _real(grid: Grid, real: Tensor | None) -> Tensor:
    """Which keys are no padding, boolean [b or 1, m], from the tokens that are not."""
    return torch.ones(1, grid.m, dtype=torch.bool, device="cpu") if real is None else grid.of_keys(real, fill=True)
