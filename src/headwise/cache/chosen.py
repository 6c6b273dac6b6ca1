"""A cache with holes: keys and values of the heads that each token selected."""

import torch
from torch import Tensor

from headwise.cache.base import StoredCache, described
from headwise.cache.room import Room
from headwise.errors import ConfigError, check_whole
from headwise.masks import Mask, Window


class ChosenCache(StoredCache):
    """Keeps keys and values of each head for the tokens that selected it, for `SparseHeadMixture(keys="chosen")`.

    A token with k of h heads takes k / h of the numbers that `KVCache` keeps. Capacity doubles as the most selected
    head needs it, for all heads.

    Args:
        window: keys that a query attends to are among this many last tokens, its own included; None for all. Older
            ones are masked, not removed.
    """

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.window = None if window is None else check_whole("ChosenCache", "window", window, 1)
        self._room: Room | None = None  # of keys and values [b, h, capacity, d], and of their positions
        self._counts = torch.empty(0, dtype=torch.long)  # [b, h]
        self.chosen = torch.empty(0, dtype=torch.bool)  # [b, seen, h]

    def limits(self, n: int, num_heads: int) -> Mask | None:
        """Return the mask of the window, which hides no new token, or None without one."""
        return None if self.window is None else Window(self.window, max(0, n - 1))

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append no tokens, [b, h, 0, d], and return all keys and values [b, h, seen, d], with zeros where a token did
        not select the head. Raises ConfigError for tokens: a layer that computes all heads for each leaves no holes."""
        kind = self._kind_of(k, v)
        if k.shape[0] * k.shape[2]:
            raise ConfigError(
                "cache=ChosenCache(): keeps the heads that tokens selected, of SparseHeadMixture(keys='chosen'); give "
                "other layers a KVCache()"
            )
        none = torch.empty(0, dtype=torch.long, device=k.device)
        chosen = torch.empty(kind.batch, k.shape[2], kind.heads, dtype=torch.bool, device=k.device)
        self.store(k.new_empty(0, kind.key), v.new_empty(0, kind.value), chosen, none, none, none, none)
        *held, positions = self.read(list(range(kind.heads)))
        at = torch.arange(len(positions), device=k.device)[:, None], positions
        found_k, found_v = (
            x.new_zeros(len(positions), self.seen + 1, x.shape[-1]).index_put(at, x)[:, : self.seen] for x in held
        )
        return found_k.unflatten(0, (kind.batch, kind.heads)), found_v.unflatten(0, (kind.batch, kind.heads))

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
        kind = self._kind_of(k[:0].expand(b, h, 0, -1), v[:0].expand(b, h, 0, -1))
        room = self._room
        if room is None or not self.seen:
            self._counts = torch.zeros(b, h, dtype=torch.long, device=k.device)
            held = k.new_empty(b, h, 0, k.shape[-1]), v.new_empty(b, h, 0, v.shape[-1])
            room = Room((*held, torch.empty(b, h, 0, dtype=torch.long, device=k.device)), 0)
            self.chosen = chosen[:, :0]
        counts = self._counts + chosen.sum(1)
        at = (entries, heads, self._counts[entries, heads] + ranks)
        self._room = _with(room, self.seen, n, _most(counts), at, (k, v, positions + self.seen))
        self._room.written = self.seen + n
        self._counts, self.chosen = counts, torch.cat((self.chosen, chosen), 1)
        self._kind, self._seen = kind, self.seen + n

    def read(self, members: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys and values [b·i, m', d] of some heads, and their positions [b·i, m'], increasing; unused places
        have the position `seen`."""
        counts = self._counts[:, members]
        most = _most(counts)
        k, v, positions = (x[:, members, :most].flatten(0, 1) for x in self._parts)
        unused = torch.arange(most, device=k.device) >= counts.flatten()[:, None]
        return k, v, positions.masked_fill(unused, self.seen)

    def __repr__(self) -> str:
        return described(self, window=self.window)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values in use: (selected heads of all tokens) · (d_k + d_v) · bytes per element."""
        one = sum(x.shape[-1] * x.element_size() for x in self._parts[:2])
        return int(self._counts.sum()) * one

    @property
    def _parts(self) -> tuple[Tensor, ...]:
        return () if self._room is None else self._room.parts

    def _crop(self, length: int) -> None:
        self.chosen = self.chosen[:, :length]
        self._counts = self.chosen.sum(1)

    def _select(self, indices: Tensor) -> None:
        indices = indices.to(self._counts.device)
        self._room = Room([x.index_select(0, indices) for x in self._parts], self.seen)
        self._counts, self.chosen = (x.index_select(0, indices) for x in (self._counts, self.chosen))


def _most(counts: Tensor) -> int:
    return int(counts.max()) if counts.numel() else 0  # an empty batch has no tokens


def _with(room: Room, seen: int, n: int, needed: int, at: tuple[Tensor, ...], new: tuple[Tensor, ...]) -> Room:
    """The room of `seen` tokens with vectors of n more: the same one where it can be written to."""
    parts, have = room.parts, room.capacity
    if needed > have:
        size = max(needed, 2 * have) - have
        parts = tuple(torch.cat((x, x.new_zeros(*x.shape[:2], size, *x.shape[3:])), 2) for x in parts)
    if room.differentiable or any(x.requires_grad for x in new):
        return Room([x.index_put(at, y) for x, y in zip(parts, new, strict=True)], seen)
    if needed <= have and not room.claimed(seen, seen + n):
        parts = tuple(x.clone() for x in parts)
    for x, y in zip(parts, new, strict=True):
        x.index_put_(at, y)
    return room if parts is room.parts else Room(parts, seen)
