"""The size of an attention matrix, its rectangles, and the state of a tile."""

import enum
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.fields import Cuts


class State(enum.Enum):
    """Whether a mask allows none, some or all cells of a tile."""

    EMPTY = 0
    MIXED = 1
    FULL = 2


class Span(NamedTuple):
    """A half-open range of rows or columns. It unpacks to `start` and `stop`, so `len` is 2; see `size`."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many rows or columns it has."""
        return self.stop - self.start

    def moved(self, by: int) -> "Span":
        """Return the range that is `by` further."""
        return Span(self.start + by, self.stop + by)


NO_GAP = Span(0, 0)


@dataclass(frozen=True)
class Grid:
    """The size of an attention matrix: batch, heads, queries, keys. It unpacks to these.

    first: position of query 0 on the key axis; None if queries are aligned to the end of the keys. For a rectangle of a
    larger matrix it can be negative or beyond the keys.
    gap: the tokens before all queries that are not among the keys, such as those that a cache has dropped. Key j is
    token j before it, and token j + gap.size from key gap.start on. Distances are those of tokens; masks and scores are
    over the keys, as `Mask.with_gap` makes them.
    extra: the number of first keys that are no tokens, such as those of add_bias_kv, instead of a gap. Key `extra` is
    token 0, and those before it have negative numbers.
    """

    b: int
    h: int
    n: int
    m: int
    first: int | None = None
    gap: Span = NO_GAP
    extra: int = 0

    def __iter__(self) -> Iterator[int]:
        return iter((self.b, self.h, self.n, self.m))

    @property
    def shift(self) -> int:
        """Position of query 0 on the key axis."""
        return self.m - self.n if self.first is None else self.first

    @property
    def at_end(self) -> bool:
        """Whether queries are aligned to the end of the keys."""
        return self.shift == self.m - self.n

    def positions(self) -> Tensor:
        """Return the positions of the queries on the key axis, [n]."""
        return torch.arange(self.shift, self.shift + self.n, device="cpu")

    @property
    def divided(self) -> bool:
        """Whether there are keys on both sides of a gap, so that distances are not those along the key axis."""
        return self.gap.size > 0 and self.gap.start > 0

    def cut(self, cuts: Cuts) -> "Grid":
        """Return the grid of some batch entries and heads."""
        sizes: dict[str, Any] = {axis: stop - start for axis, (start, stop, _) in cuts.items()}
        return replace(self, **sizes)

    @property
    def tokens(self) -> int:
        """The number of tokens: the keys, less the extra ones, and those of the gap."""
        return self.m + self.gap.size - self.extra

    @property
    def first_token(self) -> int:
        """The token of query 0."""
        return self.shift + self.gap.size - self.extra

    def token(self, key: int) -> int:
        """Return the token of a key."""
        return key - self.extra if key < self.gap.start else key + self.gap.size - self.extra

    def key_tokens(self) -> Tensor:
        """Return the token of each key, [m]."""
        key = torch.arange(self.m, device="cpu")
        return key + self.gap.size * (key >= self.gap.start) - self.extra

    def keys_at(self, tokens: Tensor) -> Tensor:
        """Return the key of each of these tokens; −1 for those that are not among the keys."""
        behind = tokens >= self.gap.stop
        key = tokens - self.gap.size * behind + self.extra
        return key.masked_fill(~behind & (tokens >= self.gap.start) | (tokens < 0) | (key >= self.m), -1)

    def keys_before(self, token: int) -> int:
        """Return how many keys are tokens before this one."""
        return min(token, self.gap.start) + max(0, token - self.gap.stop)

    def of_keys(self, x: Tensor, fill: int = 0) -> Tensor:
        """Return what the keys have of x [..., tokens], [..., m], the extra ones `fill`; x itself if it is [..., m]."""
        if x.shape[-1] != self.tokens or not (self.gap.size or self.extra):
            return x
        if self.extra:
            return torch.nn.functional.pad(x, (self.extra, 0), value=fill)
        return torch.cat((x[..., : self.gap.start], x[..., self.gap.stop :]), -1)

    def of_tokens(self, x: Tensor) -> Tensor:
        """Return what all tokens have of boolean x [..., m], [..., tokens]: True for those that are not keys."""
        if self.extra:
            return x[..., self.extra :]
        dropped = x.new_ones(*x.shape[:-1], self.gap.size)
        return torch.cat((x[..., : self.gap.start], dropped, x[..., self.gap.start :]), -1)

    def sides(self) -> "tuple[Span, ...]":
        """Return the keys before the gap and those after it, or the extra keys and the others; all of them if there is
        neither."""
        if 0 < self.extra < self.m:
            return Span(0, self.extra), Span(self.extra, self.m)
        if not self.divided or self.gap.start >= self.m:
            return (Span(0, self.m),)
        return Span(0, self.gap.start), Span(self.gap.start, self.m)

    def with_dropped(self, count: int) -> "Grid":
        """Return the grid with `count` more keys before all queries, such as those that a cache has dropped."""
        return replace(self, m=self.m + count, first=self.shift + count, gap=NO_GAP)

    def part(self, rows: Span, cols: Span) -> "Grid":
        """Return the grid of a rectangle, with positions relative to its first key."""
        start = min(self.gap.start - cols.start, cols.size)
        gap = Span(start, start + self.gap.size) if start > 0 or not cols.start else NO_GAP
        extra = min(max(self.extra - cols.start, 0), cols.size)
        return Grid(self.b, self.h, rows.size, cols.size, self.shift + rows.start - cols.start, gap, extra)
