"""A cache for a batch of sequences of different lengths."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.cache.base import StoredCache, described
from headwise.cache.rows import Rows, added, encoded
from headwise.cache.storage import storages
from headwise.errors import ShapeError, check_sequence, check_whole
from headwise.kernels.quantized import Vectors, decoded
from headwise.masks import Lengths, Span


class RaggedCache(StoredCache):
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

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append and return keys and values [b, h_kv, m, d], each sequence right-aligned with zeros before it."""
        found_k, found_v = self.take(k, v)
        return decoded(found_k), decoded(found_v)

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
        found = added(self._k, self._v, *encoded(self._k, self._v, k, v))
        if first:
            self._trim(max(self._prompts))
        self._kind, self._seen = kind, self.seen + n
        self._lengths = list(self._prompts) if first else [length + n for length in self._lengths]
        return found

    def __repr__(self) -> str:
        return described(self, lengths=self.lengths)

    @property
    def gap(self) -> Span:
        """The padding that all sequences had."""
        return Span(0, self.seen - self._k.length)

    @property
    def nbytes(self) -> int:
        """Bytes in use: of as many tokens as the longest sequence has, for each."""
        return self._k.nbytes + self._v.nbytes

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
        for rows in (self._k, self._v):
            rows.select(indices)
        self._trim(max(self._lengths, default=0))
