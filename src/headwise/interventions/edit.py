"""The base class of edits, and the arguments of an attention call that they change."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from headwise.errors import ConfigError, ShapeError, check_declared, whole_number
from headwise.interventions.tokens import Columns, Tokens, checked_tokens, selection
from headwise.masks import Grid, Mask, Span
from headwise.masks.grid import NO_GAP
from headwise.scores import Score


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
    """An edit of some modules, as subscribed.

    Attributes:
        name: of the module. applied: for each call so far, the name of its module, and whether it had a token of each
            set of the edit.
        before: name of a module → `Arguments.real` of its last call, boolean [b or 1, tokens].
    """

    edit: "Edit"
    applied: list[tuple[str, bool]]
    name: str = ""
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
        self.heads = _checked_heads(type(self).__name__, heads)
        self.tokens: Mapping[str, Tokens] = {"queries": checked_tokens(f"{type(self).__name__}(queries)", queries)}

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


def _checked_heads(owner: str, heads: Sequence[int] | int | None) -> tuple[int, ...] | None:
    if heads is None:
        return None
    one = whole_number(heads)
    given = [one] if one is not None else heads
    if isinstance(given, str) or not isinstance(given, Iterable) or not (given := list(given)):
        raise ConfigError(f"{owner}(heads={heads!r}): expected numbers of heads, or None for all")
    numbers = [head for head in map(whole_number, given) if head is not None and head >= 0]
    if len(numbers) < len(given):
        raise ConfigError(f"{owner}(heads={heads!r}): expected whole numbers, counted from 0")
    return tuple(sorted(set(numbers)))
