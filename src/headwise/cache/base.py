"""The cache protocol, the base class of headwise's caches, and the vectors that they store."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from headwise.cache.storage import Room, Storage
from headwise.errors import ConfigError, DeviceError, DTypeError, ShapeError, check_whole
from headwise.kernels.quantized import Vectors
from headwise.masks import Mask, Span
from headwise.rule import check_dense

FEW = 64  # vectors for which room is made at least


class Encoded(NamedTuple):
    """Encoded tensors, and the dtype before encoding."""

    parts: tuple[Tensor, ...]
    dtype: torch.dtype

    def of(self, heads: list[int]) -> "Encoded":
        """Those of some heads."""
        return Encoded(tuple(of_heads(part, heads) for part in self.parts), self.dtype)


class Rows:
    """Stored vectors [b, h, length, d], added at O(1) copies on average, cut and selected; copies are independent."""

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
    """Encode k and v [b, h, n, d] without adding them, or raise; those of one token together, in half the time."""
    if keys.storage is values.storage and k.shape[2] == 1 and k.shape == v.shape and k.dtype == v.dtype:
        with suppress(DTypeError):  # which is raised again, for keys or values alone
            both = keys.encoded(torch.stack((k, v)))
            of_keys, of_values = zip(*(part.unbind() for part in both.parts), strict=True)
            return Encoded(of_keys, both.dtype), Encoded(of_values, both.dtype)
    return keys.encoded(k), values.encoded(v)


def added(keys: Rows, values: Rows, k: Encoded, v: Encoded) -> tuple[Vectors, Vectors]:
    """Add k and v, the results of `encoded`, and return all as `stored` does; both, or neither if memory ends."""
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


class Cache(Protocol):
    """A KV cache: one object per layer, given as `cache=` at every step.

    Optional: `take`, as `append`, but returns what `attend` reads, such as quantized keys and values; `gap`, a `Span`
    of the tokens that no head holds any more: it begins after those that are always kept, and is empty before any is
    dropped; `parts` and `take_parts`, if some KV heads hold other tokens: a list of their indices, increasing, with the
    cache that has only them, and as `take`, but a list of what each of these returns.
    """

    @property
    def seen(self) -> int:
        """The number of tokens so far, which is the position of the next one."""

    def limits(self, n: int, num_heads: int) -> Mask | None:
        """Return the mask of the next call's n queries over the keys that it returns, or None for all keys. The layer
        combines it with the caller's mask."""

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values [b, h_kv, n, d]; return those visible to any of the new queries."""

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values in use."""


def remembered(cache: Cache, k: Tensor, v: Tensor) -> tuple[Vectors, Vectors]:
    """Append and return keys and values for `attend`: quantized if the cache stores them so and has `take`."""
    take = getattr(cache, "take", cache.append)
    return take(k, v)


def gap_of(cache: Cache | None) -> Span:
    """The tokens that a cache has dropped for all heads."""
    gap: Span = getattr(cache, "gap", Span(0, 0))
    return gap


class StoredCache(ABC):
    """What headwise's caches have in common: `seen`, and changes of what they hold.

    `copy.copy(cache)` is an independent cache, which another thread may use. It is made at once: both share the memory
    until one of them writes where the other has written, and then moves.

    >>> import copy, torch, headwise as hw
    >>> layer, prompt = hw.MultiHeadAttention(16, 2), hw.KVCache()
    >>> y = layer(torch.randn(1, 5, 16), mask=hw.Causal(), cache=prompt)
    >>> beams = copy.copy(prompt)
    >>> beams.select([0, 0, 0])                                               # three continuations of one prompt
    >>> y = layer(torch.randn(3, 4, 16), mask=hw.Causal(), cache=beams)
    >>> beams.crop(7)                                                         # two of the four tokens are accepted
    >>> prompt.seen, beams.seen
    (5, 7)
    """

    only_appends: ClassVar[bool] = False  # whether an append drops no vector
    _kind: "Kind | None"
    _seen: int

    def __init__(self) -> None:
        self._kind, self._seen = None, 0

    @property
    def seen(self) -> int:
        """The number of tokens so far, which is the position of the next one."""
        return self._seen

    def crop(self, length: int) -> None:
        """Drop all tokens but the first `length`, such as rejected ones of speculative decoding: the next call is the
        same as if they had never been given. Costs nothing, unless something else holds the keys, such as a map. After
        `crop(0)` the cache takes a batch of any size.

        Raises:
            ConfigError: if there are fewer tokens, or if the cache has already dropped some that the next query may
                attend to then. It is left as it was.
        """
        length = check_whole("crop", "length", length, 0)
        if length > self._seen:
            raise ConfigError(f"crop(length={length}): the cache has seen {self._seen} tokens")
        if length < self._seen:
            mark = Mark(self, appends=False)
            try:
                self._crop(length)
            except BaseException:
                mark.restore()
                raise
            self._seen = length

    def select(self, indices: Sequence[int] | Tensor) -> None:
        """Keep these entries of the batch, in this order: reorders, repeats and removes them, as in beam search.
        The next call has as many entries. A cache without tokens has no entries yet, and stays as it is.

        Args:
            indices: whole numbers [new batch size].
        """
        chosen = _indices(indices)
        batch, entries = self._batch, chosen.tolist()
        if batch is None:
            return
        if wrong := [i for i in entries if not 0 <= i < batch]:
            raise ShapeError(f"select(indices): {wrong[0]} is not an entry of the batch of {batch}")
        if entries != list(range(batch)):
            self._select(chosen)
            self._kind = None if self._kind is None else self._kind._replace(batch=len(entries))

    @property
    def _batch(self) -> int | None:
        """The number of entries of the batch; None if it is not known yet."""
        return None if self._kind is None or not self._seen else self._kind.batch

    def _kind_of(self, k: Tensor, v: Tensor) -> "Kind":
        """The kind of new keys and values; raises if the cached one differs. Any without tokens, or after `crop(0)`."""
        return kind_of(k, v, self._kind if self._seen else None)

    def __copy__(self: "Stored") -> "Stored":
        new = object.__new__(type(self))
        vars(new).update(_kept(vars(self), shared=True))
        return new

    @abstractmethod
    def _crop(self, length: int) -> None:
        """`crop` to fewer tokens than there are."""

    @abstractmethod
    def _select(self, indices: Tensor) -> None:
        """`select` other entries than there are; they exist."""


Stored = TypeVar("Stored", bound=StoredCache)


class Mark:
    """The state of a cache, to return to if what changes it fails. One that only `appends` is cut to its former length,
    so that memory is free at once; not with gradients: they would flow to the vectors that stay."""

    def __init__(self, cache: object, *, appends: bool = True) -> None:
        self._cache = cache
        self._held: dict[str, Any] = {}
        self._lengths: list[tuple[Rows, int]] = []
        self._within: list[Mark] = []
        appends = appends and not torch.is_grad_enabled()
        longer = appends and isinstance(cache, StoredCache) and cache.only_appends and cache.seen > 0
        for name, x in getattr(cache, "__dict__", {}).items():
            if longer and isinstance(x, Rows):
                self._lengths.append((x, x.length))
            elif isinstance(x, list) and x and isinstance(x[0], StoredCache):
                self._within += [Mark(each, appends=appends) for each in x]
            else:
                self._held[name] = _kept(x, shared=False)

    def restore(self) -> None:
        """Return to it."""
        for mark in self._within:
            mark.restore()
        for rows, length in self._lengths:
            rows.crop(length)
        if self._held:
            vars(self._cache).update(self._held)


_UNCHANGING = (int, str, tuple, type(None))


def _kept(value: Any, shared: bool) -> Any:
    """What a cache holds now, for the same cache or another: numbers that are written later are beyond those."""
    if type(value) in _UNCHANGING:  # most are
        return value
    if isinstance(value, dict):
        return {name: _kept(each, shared) for name, each in value.items()}
    if isinstance(value, list):
        return [_kept(each, shared) for each in value]
    if isinstance(value, StoredCache):
        new = object.__new__(type(value))
        vars(new).update(_kept(vars(value), shared))
        return new
    if isinstance(value, Room) and shared:
        value.shared = True
    if not isinstance(value, Rows):
        return value
    if shared and value._room is not None:
        value._room.shared = True
    return copy(value)


def _indices(indices: Sequence[int] | Tensor) -> Tensor:
    wrong = ShapeError(f"select(indices): expected whole numbers [new batch size], got {indices!r}")
    try:
        found = torch.as_tensor(indices, device=indices.device if isinstance(indices, Tensor) else "cpu")
    except (TypeError, ValueError, RuntimeError):
        raise wrong from None
    whole = not (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool)
    if found.ndim != 1 or (len(found) and not whole):
        raise wrong
    return found.long()


def described(cache: Cache, **options: object) -> str:
    """Return a one-line description: options, tokens and bytes."""
    given = ", ".join(f"{name}={value!r}" for name, value in options.items() if value not in (None, 0))
    return f"{type(cache).__name__}({given}): {cache.seen:,} tokens seen, {cache.nbytes:,} bytes held"


class Kind(NamedTuple):
    """Properties of keys and values that must not change while a cache is in use."""

    batch: int
    heads: int
    key: int  # widths
    value: int
    dtypes: tuple[torch.dtype, torch.dtype]  # of keys and of values
    device: torch.device


def kind_of(k: Tensor, v: Tensor, held: Kind | None) -> Kind:
    """Return the kind of new keys and values; raises if it differs from the cached one."""
    for name, x in (("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise DTypeError(f"cache: {name}: expected a torch.Tensor, got {type(x).__name__}")
        check_dense(f"cache: {name}", x)
        if x.ndim != 4:
            raise ShapeError(f"cache: {name}: expected [batch, heads, tokens, width], got shape {tuple(x.shape)}")
        if not x.is_floating_point():
            raise DTypeError(f"cache: {name}: expected a floating dtype, got {x.dtype}")
    if k.shape[:3] != v.shape[:3]:
        raise ShapeError(f"cache: k {tuple(k.shape)} and v {tuple(v.shape)} differ in batch, heads or tokens")
    if k.device != v.device:
        raise DeviceError(f"cache: k is on {k.device}, but v is on {v.device}; move them to one device")
    kind = Kind(k.shape[0], k.shape[1], k.shape[3], v.shape[3], (k.dtype, v.dtype), k.device)
    if held is None or kind == held:
        return kind
    if kind[:4] != held[:4]:
        raise ShapeError(
            f"cache: new keys and values {_sizes(kind)} do not match the cached ones {_sizes(held)}; use a "
            f"new cache for each layer, each design and each batch"
        )
    if kind.dtypes != held.dtypes:
        new, old = (" and ".join(sorted({str(dtype) for dtype in x.dtypes})) for x in (kind, held))
        raise DTypeError(f"cache: new keys and values are {new}, the cached ones are {old}; use a new cache")
    raise DeviceError(f"cache: new keys are on {kind.device}, the cached ones on {held.device}; use a new cache")


def _sizes(kind: Kind) -> str:
    return f"[batch {kind.batch}, heads {kind.heads}, widths {kind.key} and {kind.value}]"
