"""Scores as terms that every kernel can compute."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from headwise.errors import ConfigError
from headwise.masks import Span


@dataclass(frozen=True)
class Terms:
    """One score, or all of a rule, as tensors with their graph.

    Attributes:
        n: queries.
        soft_cap: 0.0 for none.
        relative: [h or 1, n + m − 1] in the accumulating dtype, or None; entry j − i + n − 1 is added to S_ij.
        split: 0, or the first key after a gap in the distances. `relative` is then two such tables, one after the
            other, [h or 1, 2n + m − 2]: of the keys before it, and of the others. For one query both are one table.
        biases: each [b or 1, h or 1, n or 1, m or 1]; kept separate, as their sum may be larger than each of them.
        sinks: [h] in the accumulating dtype, or None.
    """

    n: int
    soft_cap: float = 0.0
    relative: Tensor | None = None
    biases: tuple[Tensor, ...] = ()
    sinks: Tensor | None = None
    split: int = 0

    def added(self, rows: Span, cols: Span) -> Iterator[Tensor]:
        """Yield what is added to a tile, each [b or 1, h or 1, r or 1, c or 1]."""
        if self.relative is not None:
            # Each row starts one entry before the row above it.
            parts = [
                self.relative[:, strip].unfold(-1, part.size, 1).flip(1)[None]
                for part, strip in self.strips(rows, cols)
            ]
            yield parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        for bias in self.biases:
            yield bias[cell(bias, rows, cols)]

    def added_at(self, i: Tensor, j: Tensor) -> Iterator[Tensor]:
        """Yield the same for any query and key indices, each [b or 1, h or 1, len(i) or 1, len(j) or 1]."""
        if self.relative is not None:
            yield self.relative[:, self.entries(i[:, None], j)][None]
        for bias in self.biases:
            tall = bias if bias.shape[2] == 1 else bias[:, :, i]
            yield tall if bias.shape[3] == 1 else tall[..., j]

    def entries(self, i: Tensor, j: Tensor) -> Tensor:
        """Return the entries of `relative` of pairs of query and key indices, which broadcast."""
        found = j - i + self.n - 1
        return found + (self.n - 1) * (j >= self.split) if self.split else found

    def strips(self, rows: Span, cols: Span) -> list[tuple[Span, slice]]:
        """Return the entries of `relative` that a tile reads: its diagonals, from the lower left on. A tile with keys
        on both sides of the split has two parts, each with its keys."""
        if cols.start < self.split < cols.stop:
            parts = Span(cols.start, self.split), Span(self.split, cols.stop)
            return [strip for part in parts for strip in self.strips(rows, part)]
        shift = self.n + (self.n - 1 if 0 < self.split <= cols.start else 0)
        return [(cols, slice(cols.start - rows.stop + shift, cols.stop - 1 - rows.start + shift))]


def together(n: int, terms: Iterable[Terms]) -> Terms:
    """Join the terms of several scores.

    Raises:
        ConfigError: for two soft caps, which do not combine to one, or distances with different gaps.
    """
    given = list(terms)
    if len(given) == 1:
        return given[0]
    caps = [one.soft_cap for one in given if one.soft_cap]
    if len(caps) > 1:
        raise ConfigError(f"score: soft caps of {caps[0]} and {caps[1]}; expected at most one")
    splits = {one.split for one in given if one.split}
    if len(splits) > 1:
        raise ConfigError(f"score: distances with gaps before keys {sorted(splits)}; expected at most one gap")
    split = splits.pop() if splits else 0
    return Terms(
        n,
        caps[0] if caps else 0.0,
        _all(torch.add, [_split(one, split) for one in given]),
        tuple(bias for one in given for bias in one.biases),
        _all(torch.logaddexp, [one.sinks for one in given]),  # their weights are added
        split,
    )


def beside(before: Terms, after: Terms, widths: tuple[int, int]) -> Terms:
    """Join the terms that one score has over the first keys and over the others; `widths` counts both."""
    tables = [one.relative for one in (before, after) if one.relative is not None]
    biases = (
        torch.cat([bias.expand(-1, -1, -1, width) for bias, width in zip(pair, widths, strict=True)], -1)
        for pair in zip(before.biases, after.biases, strict=True)
    )
    split = widths[0] if tables and before.n > 1 else 0
    return Terms(
        before.n, before.soft_cap, torch.cat(tables, -1) if tables else None, tuple(biases), before.sinks, split
    )  # fmt: skip


def _split(terms: Terms, at: int) -> Tensor | None:
    """The `relative` of terms, as two tables if `at` is not 0."""
    table = terms.relative
    if table is None or at == terms.split:
        return table
    return torch.cat((table[:, : at + terms.n - 1], table[:, at:]), -1)


def _all(join: Callable[[Tensor, Tensor], Tensor], given: list[Tensor | None]) -> Tensor | None:
    found = [x for x in given if x is not None]
    return reduce(join, found) if found else None


def cell(bias: Tensor, rows: Span, cols: Span) -> tuple[slice, ...]:
    """Return the index of a tile in a bias [b or 1, h or 1, n or 1, m or 1]."""
    sides = zip(bias.shape[2:], (rows, cols), strict=True)
    return slice(None), slice(None), *(slice(0, 1) if size == 1 else slice(*span) for size, span in sides)
