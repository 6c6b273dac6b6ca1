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
        biases: each [b or 1, h or 1, n or 1, m or 1]; kept separate, as their sum may be larger than each of them.
        sinks: [h] in the accumulating dtype, or None.
    """

    n: int
    soft_cap: float = 0.0
    relative: Tensor | None = None
    biases: tuple[Tensor, ...] = ()
    sinks: Tensor | None = None

    def added(self, rows: Span, cols: Span) -> Iterator[Tensor]:
        """Yield what is added to a tile, each [b or 1, h or 1, r or 1, c or 1]."""
        if self.relative is not None:
            strip = self.relative[:, self.strip(rows, cols)]
            # Each row starts one entry before the row above it.
            yield strip.unfold(-1, cols.size, 1).flip(1)[None]
        for bias in self.biases:
            yield bias[cell(bias, rows, cols)]

    def added_at(self, i: Tensor, j: Tensor) -> Iterator[Tensor]:
        """Yield the same for any query and key indices, each [b or 1, h or 1, len(i) or 1, len(j) or 1]."""
        if self.relative is not None:
            yield self.relative[:, j - i[:, None] + self.n - 1][None]
        for bias in self.biases:
            tall = bias if bias.shape[2] == 1 else bias[:, :, i]
            yield tall if bias.shape[3] == 1 else tall[..., j]

    def strip(self, rows: Span, cols: Span) -> slice:
        """Return the entries of `relative` that a tile reads: its diagonals, from the lower left on."""
        return slice(cols.start - rows.stop + self.n, cols.stop - 1 - rows.start + self.n)


def together(n: int, terms: Iterable[Terms]) -> Terms:
    """Join the terms of several scores.

    Raises:
        ConfigError: for two soft caps, which do not combine to one.
    """
    given = list(terms)
    if len(given) == 1:
        return given[0]
    caps = [one.soft_cap for one in given if one.soft_cap]
    if len(caps) > 1:
        raise ConfigError(f"score: soft caps of {caps[0]} and {caps[1]}; expected at most one")
    return Terms(
        n,
        caps[0] if caps else 0.0,
        _all(torch.add, [one.relative for one in given]),
        tuple(bias for one in given for bias in one.biases),
        _all(torch.logaddexp, [one.sinks for one in given]),  # their weights are added
    )


def _all(join: Callable[[Tensor, Tensor], Tensor], given: list[Tensor | None]) -> Tensor | None:
    found = [x for x in given if x is not None]
    return reduce(join, found) if found else None


def cell(bias: Tensor, rows: Span, cols: Span) -> tuple[slice, ...]:
    """Return the index of a tile in a bias [b or 1, h or 1, n or 1, m or 1]."""
    sides = zip(bias.shape[2:], (rows, cols), strict=True)
    return slice(None), slice(None), *(slice(0, 1) if size == 1 else slice(*span) for size, span in sides)
