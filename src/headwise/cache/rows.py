"""Stored vectors of a cache, which can grow, be cut and be selected from."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.cache.room import Room
from headwise.cache.storage import Storage
from headwise.kernels.quantized import Vectors

FEW = 64  # vectors for which room is made at least


class Encoded(NamedTuple):
    """Encoded tensors, and the dtype before encoding."""

    parts: tuple[Tensor, ...]
    dtype: torch.dtype

    def of(self, heads: list[int]) -> "Encoded":
        """Those of some heads."""
        return Encoded(tuple(of_heads(part, heads) for part in self.parts), self.dtype)


class Rows:
    """Stored vectors [b, h, length, d], which can grow, be cut and be selected from. Copies are independent.

    Room for twice as many is made as needed, so that adding one copies O(1) vectors on average.

    Args:
        capacity: number of vectors to allocate at once.
    """

    def __init__(self, storage: Storage, *, capacity: int | None = None) -> None:
        self._storage, self._capacity = storage, capacity
        self._room: Room | None = None
        self._start = 0  # of the vectors in the room
        self._first, self._dropped = 0, 0  # `_dropped` more follow the first `_first` there, which are not held
        self._dtype = torch.float32
        self.length = 0

    def encoded(self, x: Tensor) -> Encoded:
        """Encode x [b, h, n, d] without adding it; raises if it cannot be stored."""
        return Encoded(self._storage.encode(x if self._storage.differentiable else x.detach()), x.dtype)

    def add(self, new: Encoded) -> None:
        """Add the result of `encoded`; as a copy of all vectors if gradients flow to them."""
        n, end = new.parts[0].shape[2], self._start + self.length
        room, self._dtype = self._room, new.dtype
        with_graph = any(part.requires_grad for part in new.parts) or (room is not None and room.differentiable)
        if with_graph or self._dropped:
            held = self._pieces() or [[] for _ in new.parts]
            self._set([torch.cat((*pieces, part), 2) for pieces, part in zip(held, new.parts, strict=True)])
            return
        if room is None or end + n > room.capacity or not room.writable(end):
            room, end = self._moved(new.parts, self.length + n), self.length
        room.write(end, new.parts)
        self.length += n

    def read(self) -> Tensor:
        """Return all vectors, [b, h, length, d]; a view if no decoding is needed."""
        return self._storage.decode(self._held(), self._dtype)

    def stored(self) -> Vectors:
        """Return all vectors in a form that attention can read, quantized if they are stored so."""
        return self._storage.stored(self._held(), self._dtype)

    def cut(self, first: int, last: int) -> None:
        """Keep the first `first` and the last `last` vectors only. Tensors read before are unchanged."""
        room, dropped = self._room, self.length - first - last
        if room is None or dropped <= 0:
            return
        self._settle()
        if not (room.differentiable or torch.compiler.is_compiling()):
            if not first and room.capacity <= _enough(last, last + 1):
                self._start, self.length = self._start + dropped, last
                return
            if first and dropped <= max(FEW, last):  # what follows is copied only once, when more are added
                self._first, self._dropped, self.length = first, dropped, first + last
                return
        start = self.length - last
        self._set([torch.cat((part[:, :, :first], part[:, :, start:]), 2) for part in self._held()])

    def crop(self, length: int) -> None:
        """Keep the first `length` vectors. Tensors read before are unchanged."""
        self._settle()
        self.length = min(self.length, length)

    def select(self, indices: Tensor) -> None:
        """Keep these batch entries, in this order."""
        room = self._room
        if room is None:
            return
        indices = indices.to(room.parts[0].device)
        found = [part.index_select(0, indices) for part in self._held()]
        if room.differentiable or torch.compiler.is_compiling():
            self._set(found)
            return
        new = _like(found, room.capacity)
        new.write(0, found)
        self._room, self._start, self._dropped = new, 0, 0

    def __copy__(self) -> "Rows":  # a tenth of the time of the default, in every call of a layer
        new = object.__new__(Rows)
        vars(new).update(vars(self))
        return new

    def share(self) -> None:
        """Note that a copy was made, which refers to the same memory."""
        if self._room is not None:
            self._room.shared = True

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        parts = () if self._room is None else self._room.parts
        return sum(part[:, :, :1].numel() * part.element_size() for part in parts) * self.length

    def _pieces(self) -> list[list[Tensor]]:
        """The vectors of each part of the room, in pieces that follow each other."""
        if self._room is None:
            return []
        start, end = self._start, self._start + self.length + self._dropped
        if not self._dropped:
            return [[part[:, :, start:end]] for part in self._room.parts]
        at = start + self._first
        return [[part[:, :, start:at], part[:, :, at + self._dropped : end]] for part in self._room.parts]

    def _held(self) -> list[Tensor]:
        return [pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2) for pieces in self._pieces()]

    def _settle(self) -> None:
        """Remove what was dropped from the room."""
        if self._dropped:
            self._set(self._held())

    def _set(self, parts: Sequence[Tensor]) -> None:
        """Hold these vectors and no more."""
        self._start, self._dropped, self.length = 0, 0, parts[0].shape[2]
        self._room = Room(parts, self.length)

    def _moved(self, like: Sequence[Tensor], length: int) -> Room:
        """Move the vectors to a new room, for as many as `length`."""
        size, held = _enough(self.length, length) if self._capacity is None else self._capacity, self._held()
        if self._room is not None and not self._start and length <= self._room.capacity:
            size = self._room.capacity
        self._room, self._start = _like(like, size), 0
        if held:
            self._room.write(0, held)
        return self._room


def _enough(held: int, needed: int) -> int:
    """How many vectors to make room for."""
    return max(FEW, needed, 2 * held)


def _like(parts: Sequence[Tensor], size: int) -> Room:
    """A new room for vectors like these."""
    return Room([part.new_empty(*part.shape[:2], size, part.shape[3]) for part in parts], 0)


def of_heads(x: Tensor, heads: list[int]) -> Tensor:
    """x[:, heads], without a copy if they are consecutive."""
    first, count = heads[0], len(heads)
    if count == x.shape[1]:
        return x
    return x[:, first : first + count] if heads == list(range(first, first + count)) else x[:, heads]
