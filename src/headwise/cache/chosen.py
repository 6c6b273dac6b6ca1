"""A cache with holes: keys and values of the heads that each token selected."""

from typing import NoReturn

import torch
from torch import Tensor

from headwise.cache.base import Kind, described, kind_of
from headwise.errors import ConfigError, check_whole
from headwise.masks import Mask, Window


class ChosenCache:
    """Keeps keys and values of each head for the tokens that selected it, for `SparseHeadMixture(keys="chosen")`.

    A token with k of h heads takes k / h of the numbers that `KVCache` keeps. Capacity doubles as the most selected
    head needs it, for all heads.

    Args:
        window: keys that a query attends to are among this many last tokens, its own included; None for all. Older
            ones are masked, not removed.
    """

    def __init__(self, window: int | None = None) -> None:
        self.window = None if window is None else check_whole("ChosenCache", "window", window, 1)
        self._k = self._v = self._positions = torch.empty(0)
        self._counts = torch.empty(0, dtype=torch.long)  # [b, h]
        self._kind: Kind | None = None
        self.chosen = torch.empty(0, dtype=torch.bool)  # [b, seen, h]
        self.seen = 0

    def limits(self, n: int, num_heads: int) -> Mask | None:
        """Return the mask of the window, or None without one."""
        return None if self.window is None else Window(self.window)

    def append(self, k: Tensor, v: Tensor) -> NoReturn:
        """Raise ConfigError: a layer that computes all heads for each token leaves no holes."""
        raise ConfigError(
            "cache=ChosenCache(): keeps the heads that tokens selected, of SparseHeadMixture(keys='chosen'); give "
            "other layers a KVCache()"
        )

    def store(
        self, k: Tensor, v: Tensor, chosen: Tensor, heads: Tensor, entries: Tensor, positions: Tensor, ranks: Tensor
    ) -> None:
        """Store the keys and values [pairs, d] of a selection.

        Args:
            chosen: boolean [b, n, h]; which heads the n tokens selected.
            heads, entries, positions, ranks: [pairs], the head, batch entry and token of each key, and the number of
                earlier tokens among the n that selected the head in this entry.
        """
        b, n, h = chosen.shape
        kind = kind_of(k[:0].expand(b, h, 0, -1), v[:0].expand(b, h, 0, -1), self._kind)
        if self._kind is None:
            self._counts = torch.zeros(b, h, dtype=torch.long, device=k.device)
            self._k, self._v = k.new_empty(b, h, 0, k.shape[-1]), v.new_empty(b, h, 0, v.shape[-1])
            self._positions = torch.empty(b, h, 0, dtype=torch.long, device=k.device)
            self.chosen = chosen[:, :0]
        counts = self._counts + chosen.sum(1)
        self._grow(int(counts.max()))
        at = (entries, heads, self._counts[entries, heads] + ranks)
        self._k, self._v = _put(self._k, at, k), _put(self._v, at, v)
        self._positions = _put(self._positions, at, positions + self.seen)
        self._counts, self.chosen = counts, torch.cat((self.chosen, chosen), 1)
        self._kind, self.seen = kind, self.seen + n

    def read(self, members: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys and values [b·i, m', d] of some heads, and their positions [b·i, m'], increasing; unused places
        have the position `seen`."""
        counts = self._counts[:, members]
        most = int(counts.max())
        k, v, positions = (x[:, members, :most].flatten(0, 1) for x in (self._k, self._v, self._positions))
        unused = torch.arange(most, device=k.device) >= counts.flatten()[:, None]
        return k, v, positions.masked_fill(unused, self.seen)

    def __repr__(self) -> str:
        return described(self, window=self.window)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values in use: (selected heads of all tokens) · (d_k + d_v) · bytes per element."""
        if self._kind is None:
            return 0
        one = self._k.shape[-1] * self._k.element_size() + self._v.shape[-1] * self._v.element_size()
        return int(self._counts.sum()) * one

    def _grow(self, needed: int) -> None:
        have = self._k.shape[2]
        if needed <= have:
            return
        more = max(needed, 2 * have) - have
        self._k, self._v, self._positions = (
            torch.cat((x, x.new_zeros(*x.shape[:2], more, *x.shape[3:])), 2)
            for x in (self._k, self._v, self._positions)
        )


def _put(held: Tensor, at: tuple[Tensor, ...], new: Tensor) -> Tensor:
    """Write in place, unless autograd needs the tensor as it was."""
    if torch.is_grad_enabled() and (held.requires_grad or new.requires_grad):
        return held.index_put(at, new)
    return held.index_put_(at, new)
