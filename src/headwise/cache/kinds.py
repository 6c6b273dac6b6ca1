"""The kinds of caches: full, sliding windows, chosen heads, ragged batches, budgets per KV head."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.cache.base import Encoded, Kind, Rows, StoredCache, added, described, encoded
from headwise.cache.storage import Room, storages
from headwise.errors import ConfigError, ShapeError, check_sequence, check_whole
from headwise.kernels.quantized import Vectors, decoded
from headwise.masks import HeadWindows, Lengths, Mask, Sinks, Span, Window
from headwise.masks.grid import NO_GAP
from headwise.masks.positional import check_windows


class RowsCache(StoredCache):
    """A cache whose keys and values are rows of all KV heads together."""

    _k: Rows
    _v: Rows

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append, and return what the new queries may attend to, [b, h_kv, m, d]: what is held, and the new ones."""
        found_k, found_v = self.take(k, v)
        return decoded(found_k), decoded(found_v)

    def take(self, k: Tensor, v: Tensor) -> tuple[Vectors, Vectors]:
        """As `append`, but quantized keys and values stay quantized, as `attend` supports them."""
        return self.put(self._kind_of(k, v), *self.encoded(k, v))

    def put(self, kind: Kind, k: Encoded, v: Encoded) -> tuple[Vectors, Vectors]:
        """`take`, of keys and values as they are stored."""
        found = added(self._k, self._v, k, v)
        self._kind, self._seen = kind, self.seen + k.parts[0].shape[2]
        return found

    def encoded(self, k: Tensor, v: Tensor) -> tuple[Encoded, Encoded]:
        """Keys and values as they are stored; nothing is changed."""
        return encoded(self._k, self._v, k, v)

    @property
    def nbytes(self) -> int:
        """Bytes in use: 2 · batch · num_kv_heads · held tokens · head_dim · bytes per element (if values are as wide as
        keys), and 4 more per int8 vector. Held: all tokens, sinks + window − 1, or the longest sequence."""
        return self._k.nbytes + self._v.nbytes

    def _crop(self, length: int) -> None:
        for rows in (self._k, self._v):
            rows.crop(length)

    def _select(self, indices: Tensor) -> None:
        for rows in (self._k, self._v):
            rows.select(indices)


class KVCache(RowsCache):
    """Keeps all keys and values. Capacity doubles as needed, so a step copies O(1) tokens on average.

    However tokens are split into calls, every query attends to the stored keys and values, so prefill and decoding
    return the same as one call for all tokens.

    Args:
        stored: None keeps the dtype of the keys; or "float32", "bfloat16", "float16" or "int8". Half precision is
            converted back in each call, which saves memory and costs time. int8 is read directly where the compiled
            kernel decodes (on a CPU, without gradients), which saves both; elsewhere it is dequantized. It has one
            float32 scale per vector: an element x changes by at most s = max|x| / 254, a logit by at most
            scale·‖q‖₁·s_k =: ε, and an output by at most (e^(2ε) − 1)·max|v| + s_v. This holds in float32 and where
            int8 is read directly; dequantizing to half precision rounds once more, in bfloat16 by up to |x| / 256.
        key_parts: with "int8", widths of the parts of a key with a scale each, such as (latent_dim, rope_dim) of
            `LatentAttention`.
        capacity: number of tokens to allocate at once; more raise ShapeError.
    """

    only_appends = True

    def __init__(
        self, *, stored: str | None = None, key_parts: Sequence[int] | None = None, capacity: int | None = None
    ) -> None:
        super().__init__()
        self.capacity = None if capacity is None else check_whole("KVCache", "capacity", capacity, 1)
        k, v = storages(stored, key_parts)
        self._k, self._v = Rows(k, capacity=capacity), Rows(v, capacity=capacity)

    def limits(self, n: int, num_heads: int) -> None:
        """Return None: every query may attend to all cached keys."""

    def take(self, k: Tensor, v: Tensor) -> tuple[Vectors, Vectors]:
        """As `append`, but quantized keys and values stay quantized, as `attend` supports them."""
        kind, n = self._kind_of(k, v), k.shape[2]
        if self.capacity is not None and self.seen + n > self.capacity:
            raise ShapeError(
                f"KVCache(capacity={self.capacity}): holds {self.seen} tokens, and {n} more do not fit; give a larger "
                f"capacity, or SlidingCache"
            )
        return self.put(kind, *self.encoded(k, v))

    def __repr__(self) -> str:
        return described(self, capacity=self.capacity)

    @property
    def gap(self) -> Span:
        """Empty: all tokens are held."""
        return NO_GAP


class SlidingCache(RowsCache):
    """Keeps the last `window` tokens, and the first `sinks` (StreamingLLM, Xiao et al. 2023, 2309.17453).

    With this cache and `Causal()`, a layer computes the same as a full pass with
    `Causal() & (Window(window) | Sinks(sinks))`. Memory is O(window) for any length.

    stored, key_parts: as in `KVCache`.
    """

    def __init__(
        self, window: int, sinks: int = 0, *, stored: str | None = None, key_parts: Sequence[int] | None = None
    ) -> None:
        super().__init__()
        self.window = check_whole("SlidingCache", "window", window, 1)
        self.sinks = check_whole("SlidingCache", "sinks", sinks, 0)
        self._k, self._v = (Rows(storage) for storage in storages(stored, key_parts))

    def limits(self, n: int, num_heads: int) -> Mask | None:
        """Return the window for several queries, which hides no new token; None for one, which may attend to all cached
        keys."""
        if n == 1:
            return None
        near = Window(self.window, max(0, n - 1))
        return near | Sinks(self.sinks) if self.sinks else near

    def put(self, kind: Kind, k: Encoded, v: Encoded) -> tuple[Vectors, Vectors]:
        """`take`, of keys and values as they are stored."""
        found = super().put(kind, k, v)
        for rows in (self._k, self._v):
            rows.cut(self.sinks, self.window - 1)
        return found

    def __repr__(self) -> str:
        return described(self, window=self.window, sinks=self.sinks)

    @property
    def gap(self) -> Span:
        """The tokens that are not held any more."""
        return Span(self.sinks, self.sinks + self.seen - self._k.length)

    def _crop(self, length: int) -> None:
        dropped, first = self.gap, max(self.sinks, length - self.window + 1)  # that the next query attends to
        if dropped.size and first < min(length, dropped.stop):
            raise ConfigError(
                f"crop(length={length}): with window={self.window} and sinks={self.sinks}, the tokens {dropped.start} "
                f"to {dropped.stop - 1} were dropped, some of which the next query may attend to; keep "
                f"copy.copy(cache) from before the tokens that may be rejected"
            )
        super()._crop(length)


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


class RaggedCache(RowsCache):
    """Keeps all tokens of sequences of different lengths, right-aligned: shorter ones have zeros before them.

    The first call has the prompts, padded on the *left* to one length, so that all end together; every later call
    appends the same number of tokens to each sequence. The layer masks the padding, so each sequence has the same
    outputs as alone (rotary positions count from the beginning of the padding, but only distances matter). `seen` and
    `crop` count the padding of the first call; padding that all sequences have is not kept after it.

    >>> import torch, headwise as hw
    >>> layer, cache = hw.MultiHeadAttention(16, 2), RaggedCache([5, 2])
    >>> for n in (5, 1):
    ...     y = layer(torch.randn(2, n, 16), mask=hw.Causal(), cache=cache)
    >>> cache.lengths
    [6, 3]

    Args:
        lengths: real tokens of each prompt.
        stored, key_parts: as in `KVCache`.
    """

    only_appends = True  # after its first call, which no mark with tokens precedes

    def __init__(
        self, lengths: Sequence[int], *, stored: str | None = None, key_parts: Sequence[int] | None = None
    ) -> None:
        super().__init__()
        entries = check_sequence("RaggedCache", "lengths", lengths, "one length per sequence of the batch")
        self._prompts = [check_whole("RaggedCache", "length", length, 1) for length in entries]
        self._lengths = [0] * len(entries)
        self._k, self._v = (Rows(storage) for storage in storages(stored, key_parts))

    @property
    def lengths(self) -> list[int]:
        """Number of cached tokens of each sequence."""
        return list(self._lengths)

    def mask(self, n: int) -> Lengths:
        """Return the mask of real keys and queries in the next call, of n tokens."""
        check_whole("mask", "n", n, 0)
        if not self.seen:
            return Lengths(self._prompts, self._prompts, side="right")
        return Lengths([length + n for length in self._lengths], side="right")

    def limits(self, n: int, num_heads: int) -> Lengths:
        """Return `mask(n)`."""
        return self.mask(n)

    def take(self, k: Tensor, v: Tensor) -> tuple[Vectors, Vectors]:
        """As `append`, but quantized keys and values stay quantized, as `attend` supports them."""
        kind, n, first = self._kind_of(k, v), k.shape[2], not self.seen
        if kind.batch != len(self._prompts):
            raise ShapeError(f"RaggedCache: {len(self._prompts)} lengths, but keys {tuple(k.shape)} of {kind.batch}")
        if first:
            if max(self._prompts) > n:
                raise ShapeError(f"RaggedCache: a prompt of {max(self._prompts)} tokens, but the first call has {n}")
            start = n - torch.tensor(self._prompts, device=k.device)
            padding = (torch.arange(n, device=k.device) < start[:, None])[:, None, :, None]
            k, v = k.masked_fill(padding, 0), v.masked_fill(padding, 0)
        found = self.put(kind, *self.encoded(k, v))
        if first:
            self._trim(max(self._prompts))
        self._lengths = list(self._prompts) if first else [length + n for length in self._lengths]
        return found

    def __repr__(self) -> str:
        return described(self, lengths=self.lengths)

    @property
    def gap(self) -> Span:
        """The padding that all sequences had."""
        return Span(0, self.seen - self._k.length)

    @property
    def _batch(self) -> int:
        return len(self._prompts)

    def _trim(self, length: int) -> None:
        """Keep the last tokens only."""
        for rows in (self._k, self._v):
            rows.cut(0, length)

    def _crop(self, length: int) -> None:
        fewer = self.seen - length
        for rows in (self._k, self._v):
            rows.crop(max(0, rows.length - fewer))
        self._lengths = [max(0, length - fewer) for length in self._lengths]

    def _select(self, indices: Tensor) -> None:
        entries = indices.tolist()
        self._prompts, self._lengths = ([each[i] for i in entries] for each in (self._prompts, self._lengths))
        super()._select(indices)
        self._trim(max(self._lengths, default=0))


class BudgetCache(StoredCache):
    """Keeps the last `windows[i]` tokens of KV head i (None: all), and the first `sinks` of every head.

    With this cache and `Causal()`, a layer computes the same as a full pass with `Causal() & cache.mask(num_heads)`.
    Memory is proportional to the windows, and so is the time of a step: heads with equal windows attend together, to
    what they hold, and each distinct window takes another 0.1 ms or so. Only for an attention map are the keys of
    all heads laid out as one rectangle.

    Args:
        windows: one per KV head.
        stored, key_parts: as in `KVCache`.
    Source: retrieval heads and streaming heads, Xiao et al. 2024, 2410.10819.
    """

    def __init__(
        self, windows: Sequence[int | None], sinks: int = 0, *, stored: str | None = None,
        key_parts: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.windows, self.sinks = check_windows("BudgetCache", windows), check_whole("BudgetCache", "sinks", sinks, 0)
        # Heads with equal windows hold the same tokens, and share a cache.
        self._heads = [[i for i, one in enumerate(self.windows) if one == each] for each in dict.fromkeys(self.windows)]
        self._caches = [
            KVCache(stored=stored, key_parts=key_parts)
            if window is None
            else SlidingCache(window, self.sinks, stored=stored, key_parts=key_parts)
            for window in dict.fromkeys(self.windows)
        ]

    def mask(self, num_heads: int) -> HeadWindows:
        """Return the mask with which a full pass of a layer with `num_heads` query heads computes the same."""
        if num_heads < 1 or num_heads % len(self.windows):
            raise ShapeError(f"num_heads={num_heads} is not a multiple of the {len(self.windows)} windows")
        group = num_heads // len(self.windows)
        return HeadWindows([window for window in self.windows for _ in range(group)], self.sinks)

    def limits(self, n: int, num_heads: int) -> Mask | None:
        """Return the windows of the heads; None if a single query may attend to all cached keys."""
        return None if n == 1 and len(set(self.windows)) == 1 else self.mask(num_heads)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append and return keys and values [b, h_kv, m, d]: sinks first, then zeros for heads with fewer tokens, then
        the last tokens and the new ones."""
        parts = self.take_parts(k, v)
        return self._rectangle([decoded(keys) for keys, _ in parts]), self._rectangle([decoded(x) for _, x in parts])

    def take_parts(self, k: Tensor, v: Tensor) -> list[tuple[Vectors, Vectors]]:
        """Append keys and values, and return those of each of `parts`, [b, heads, m_i, d], as `take` of it does."""
        kind = self._kind_of(k, v)
        if kind.heads != len(self.windows):
            raise ShapeError(
                f"BudgetCache: {len(self.windows)} windows, but keys {tuple(k.shape)} of {kind.heads} heads"
            )
        new_k, new_v = self._caches[0].encoded(k, v)  # all store in the same way
        found = [
            cache.put(kind._replace(heads=len(heads)), new_k.of(heads), new_v.of(heads)) for heads, cache in self.parts
        ]
        self._kind, self._seen = kind, self.seen + k.shape[2]
        return found

    @property
    def parts(self) -> list[tuple[list[int], KVCache | SlidingCache]]:
        """The KV heads of each window, and their cache."""
        return list(zip(self._heads, self._caches, strict=True))

    def __repr__(self) -> str:
        return described(self, windows=list(self.windows), sinks=self.sinks)

    @property
    def gap(self) -> Span:
        """The tokens that no head holds any more."""
        first = 0 if None in self.windows else self.sinks
        return Span(first, first + min(cache.gap.size for cache in self._caches))

    @property
    def nbytes(self) -> int:
        """Bytes in use, summed over heads."""
        return sum(cache.nbytes for cache in self._caches)

    def _rectangle(self, parts: Sequence[Tensor]) -> Tensor:
        """Join [b, heads, m_i, d] to [b, h_kv, m, d]; shorter ones were cut, so they begin with sinks."""
        if len(parts) == 1:
            return parts[0]
        b, _, _, d = parts[0].shape
        out = parts[0].new_zeros(b, len(self.windows), max(x.shape[2] for x in parts), d)
        for heads, x in zip(self._heads, parts, strict=True):
            start = self.sinks if x.shape[2] < out.shape[2] else 0
            out[:, heads, :start] = x[:, :, :start]
            out[:, heads, out.shape[2] - (x.shape[2] - start) :] = x[:, :, start:]
        return out

    def _crop(self, length: int) -> None:
        for cache in self._caches:
            cache.crop(length)

    def _select(self, indices: Tensor) -> None:
        for cache in self._caches:
            cache.select(indices)
