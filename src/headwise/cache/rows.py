"""Stored vectors of a cache, which can grow, be cut and be selected from."""

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.cache.room import Room
from headwise.cache.storage import Storage
from headwise.errors import DTypeError
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
        self.storage, self._capacity = storage, capacity
        self._room: Room | None = None
        self._start = 0  # of the vectors in the room
        self._apart: tuple[Tensor, ...] = ()  # the first vectors, if others were dropped after them, and only then
        self._dtype = torch.float32
        self.length = 0

    def encoded(self, x: Tensor) -> Encoded:
        """Encode x [b, h, n, d] without adding it; raises if it cannot be stored."""
        return Encoded(self.storage.encode(x if self.storage.differentiable else x.detach()), x.dtype)

    def add(self, new: Encoded) -> None:
        """Add the result of `encoded`; as a copy of all vectors if gradients flow to them."""
        if not self.length:  # others may have another shape
            self.clear()
        n, begin = new.parts[0].shape[2], self._start - self._first
        end, room, self._dtype = begin + self.length, self._room, new.dtype
        with_graph = any(part.requires_grad for part in new.parts) or (room is not None and room.differentiable)
        if with_graph or (room is not None and self._apart and not room.writable(begin)):
            held = self._pieces() or [[] for _ in new.parts]
            self._set([torch.cat((*pieces, part), 2) for pieces, part in zip(held, new.parts, strict=True)])
            return
        if room is None or end + n > room.capacity or not (self._apart or room.claimed(end, end + n)):
            room, end = self._moved(new.parts, self.length + n), self.length
        elif self._apart:  # over dropped ones
            room.overwrite(begin, self._apart)
            self._start, self._apart = begin, ()
        room.write(end, new.parts)
        self.length += n

    def read(self) -> Tensor:
        """Return all vectors, [b, h, length, d]; a view if no decoding is needed."""
        return self.storage.decode(self._held(), self._dtype)

    def stored(self) -> Vectors:
        """Return all vectors in a form that attention can read, quantized if they are stored so."""
        return self.storage.stored(self._held(), self._dtype)

    def cut(self, first: int, last: int) -> None:
        """Keep the first `first` and the last `last` vectors only. Tensors read before are unchanged."""
        self._settle()
        room, held = self._room, first + last
        if room is None or self.length <= held:
            return
        if room.differentiable or torch.compiler.is_compiling() or room.capacity > _enough(held, held + 1):
            start = self.length - last
            self._set([torch.cat((part[:, :, :first], part[:, :, start:]), 2) for part in self._held()])
            return
        if first:  # so that those that follow stay where they are, and can be followed by more
            self._apart = tuple(part[:, :, self._start : self._start + first].clone() for part in room.parts)
        self._start, self.length = self._start + self.length - last, held

    def crop(self, length: int) -> None:
        """Keep the first `length` vectors. Tensors read before are unchanged."""
        self._settle()
        self.length = min(self.length, length)

    def clear(self) -> None:
        """Hold no vectors, nor memory for ones of their shape."""
        self._room, self._start, self._apart, self.length = None, 0, (), 0

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
        self._room, self._start, self._apart = new, 0, ()

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

    @property
    def _first(self) -> int:
        """How many vectors are apart."""
        return self._apart[0].shape[2] if self._apart else 0

    def _pieces(self) -> list[list[Tensor]]:
        """The vectors of each part of the room, in pieces that follow each other."""
        if self._room is None:
            return []
        start, end = self._start, self._start + self.length - self._first
        here = [part[:, :, start:end] for part in self._room.parts]
        return [[*pieces] for pieces in zip(self._apart, here, strict=True)] if self._apart else [[x] for x in here]

    def _held(self) -> list[Tensor]:
        return [pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2) for pieces in self._pieces()]

    def _settle(self) -> None:
        """Bring all vectors together."""
        if self._apart:
            self._set(self._held())

    def _set(self, parts: Sequence[Tensor]) -> None:
        """Hold these vectors and no more."""
        self._start, self._apart, self.length = 0, (), parts[0].shape[2]
        self._room = Room(parts, self.length)

    def _moved(self, like: Sequence[Tensor], length: int) -> Room:
        """Move the vectors to a new room, for as many as `length`."""
        size, held = _enough(self.length, length) if self._capacity is None else self._capacity, self._held()
        if self._room is not None and not self._start and length <= self._room.capacity:
            size = self._room.capacity
        self._room, self._start, self._apart = _like(like, size), 0, ()
        if held:
            self._room.write(0, held)
        return self._room


def encoded(keys: Rows, values: Rows, k: Tensor, v: Tensor) -> tuple[Encoded, Encoded]:
    """Encode k and v [b, h, n, d] without adding them; raises if they cannot be stored. Those of one token are encoded
    together where that is the same, in half the time."""
    if keys.storage is values.storage and k.shape[2] == 1 and k.shape == v.shape and k.dtype == v.dtype:
        with suppress(DTypeError):  # which is raised again, for keys or values alone
            both = keys.encoded(torch.stack((k, v)))
            of_keys, of_values = zip(*(part.unbind() for part in both.parts), strict=True)
            return Encoded(of_keys, both.dtype), Encoded(of_values, both.dtype)
    return keys.encoded(k), values.encoded(v)


def added(keys: Rows, values: Rows, k: Encoded, v: Encoded) -> tuple[Vectors, Vectors]:
    """Add k and v, the results of `encoded`, and return all keys and values as `stored` does. If memory does not
    suffice for one of them, neither is added."""
    held = keys.length
    try:
        keys.add(k)
        values.add(v)
        return keys.stored(), values.stored()
    except BaseException:
        for rows in (keys, values):
            rows.crop(held) if held else rows.clear()
        raise


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
