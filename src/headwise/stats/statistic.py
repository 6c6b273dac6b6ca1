"""What a statistic is: a number of each query, or of each key, that a kernel can compute in its pass over the keys.

Kernels return float32 (natural logarithms, weights before dropout, 0 for a fully masked query). Measures declare which
statistics they can be computed from. A file of `headwise.stats` defines a statistic and the measures computed from it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from headwise.errors import check_declared
from headwise.masks import Span


@dataclass(frozen=True, eq=False)
class Compiled:
    """The function of the compiled kernels that computes a statistic, and its arguments.

    Each kernel has a table of the functions that it has, by signature; a kernel without this one leaves the statistic
    out of its result.

    Attributes:
        name: of the function.
        numbers: its integer arguments.
        keys, queries: its arguments with a value for each key [1 or b, m] and each query [1 or b, n], float32 or int32.
        count: the size of the last axis of a result [b, h, n, count]. None: the result is [b, h, n], or [b, h, m] for a
            statistic of keys.
        dtype: of the result.
        per: as of the statistic.
    """

    name: str
    numbers: tuple[int, ...] = ()
    keys: Tensor | None = None
    queries: Tensor | None = None
    count: int | None = None
    dtype: torch.dtype = torch.float32
    per: Literal["query", "key"] = "query"

    @cached_property
    def signature(self) -> str:
        """Such as `"key_weights(float32[m]): float32[b, h, n]"`."""
        arguments = ["int"] * len(self.numbers)
        tensors = (self.keys, "m"), (self.queries, "n")
        arguments += [f"{_name(x.dtype)}[{size}]" for x, size in tensors if x is not None]
        arguments += ["count"] * (self.count is not None)
        shape = ["b", "h", "m" if self.per == "key" else "n", *["count"] * (self.count is not None)]
        return f"{self.name}({', '.join(arguments)}): {_name(self.dtype)}[{', '.join(shape)}]"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Statistic:
    """A number per query, or per key.

    A class declares everything that calls in parts and ring attention need to combine the numbers of many blocks; there
    are no defaults.

    Attributes:
        name: what it is called.
        per: whether it is a number of each "query", [b, h, n, …], or of each "key", added up over the queries,
            [b, h, m].
        joins: how the numbers of two sets of keys are joined; None if the two numbers do not determine it.
        placed: whether it depends on the distance of queries and keys, not only on which keys a query has.
    """

    name: str
    per: Literal["query", "key"]
    joins: "Join | None"
    placed: bool

    @property
    def compiled(self) -> Compiled | None:
        """The function of the compiled kernels that computes it; None if there is none. Kernels read it in every call:
        it is made once."""
        return None

    def __init_subclass__(cls, *, abstract: bool = False, **options: Any) -> None:
        """`abstract`: the class leaves something for its own subclasses to declare."""
        super().__init_subclass__(**options)
        if not abstract:
            check_declared(cls, Statistic, {
                "per": "whether it is a number of each query or of each key",
                "joins": "how the numbers of two sets of keys are joined, a stats.Join or None",
                "placed": "whether it depends on the distance of queries and keys",
                "at": "the statistic as some of the keys have it",
                "rows": "the statistic as a block of queries has it",
                "only": "the statistic as one batch entry has it",
            })  # fmt: skip

    def at(self, cols: Span) -> "Statistic | None":
        """The statistic as these keys have it, counted from the first of them; None where it is 0 for all of them."""
        raise NotImplementedError

    def rows(self, rows: Span) -> "Statistic":
        """The statistic as a block of queries has it."""
        raise NotImplementedError

    def only(self, batch: int) -> "Statistic":
        """The statistic as one batch entry has it."""
        raise NotImplementedError

    def of_blocks(self, parts: Sequence[Tensor]) -> Tensor:
        """Of the whole matrix, from what blocks of queries, in order, have."""
        return torch.stack(list(parts)).sum(0) if self.per == "key" else torch.cat(list(parts), 2)


class Part(NamedTuple):
    """A set of keys of a row, beside the other keys of it.

    Attributes:
        log_share: the log of the share of the row's mass that they have, [b, h, n].
        of: their numbers, [b, h, n] for each statistic.
    """

    log_share: Tensor
    of: Mapping[Statistic, Tensor]


class Join(ABC):
    """How the numbers of two disjoint sets of keys become that of both.

    Attributes:
        empty: the number of no keys.
        beside: other statistics whose numbers are needed too.
    """

    empty: ClassVar[float] = 0.0
    beside: tuple[Statistic, ...] = ()

    @abstractmethod
    def shared(self, x: Tensor, log_share: Tensor) -> Tensor:
        """What a set of keys contributes to a row in which it has that share."""

    def both(self, statistic: Statistic, one: Part, other: Part) -> Tensor:
        """The number of the two sets together; a sum unless overridden."""
        return self.shared(one.of[statistic], one.log_share) + self.shared(other.of[statistic], other.log_share)

    def beside_sink(self, x: Tensor, log_share: Tensor) -> Tensor:
        """The number after a learned sink, which leaves that share to the keys."""
        return self.shared(x, log_share)


class _Mass(Join):
    def shared(self, x: Tensor, log_share: Tensor) -> Tensor:
        return log_share.exp() * x


MASS = _Mass()  # Σ share · x: a sum of weights, or of weights times something


@dataclass(frozen=True)
class OfWeights(Statistic):
    """A number per query that the weights of its row determine, whichever keys they are of.

    name, joins, placed, compiled: the attributes of `Statistic`.
    """

    name: str
    joins: Join | None = MASS
    per = "query"
    placed: bool = False
    compiled: Compiled | None = field(default=None, compare=False)

    def at(self, cols: Span) -> Statistic | None:
        return self

    def rows(self, rows: Span) -> Statistic:
        return self

    def only(self, batch: int) -> Statistic:
        return self
