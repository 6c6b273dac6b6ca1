"""A cache for a batch of sequences of different lengths."""

from collections.abc import Sequence

from torch import Tensor

from headwise.cache.base import Kind, described, kind_of
from headwise.cache.storage import Rows, storages
from headwise.errors import ConfigError, ShapeError, check_whole
from headwise.masks import Lengths


class RaggedCache:
    """Keeps the tokens of each sequence in a batch without padding.

    The first call has the prompts, padded on the *left* to one length, so that all end together; every later call
    appends the same number of tokens to each sequence. The layer masks the padding, so each sequence has the same
    outputs as alone (rotary positions count from the beginning of the padding, but only distances matter).

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

    def __init__(
        self, lengths: Sequence[int], *, stored: str | None = None, key_parts: Sequence[int] | None = None
    ) -> None:
        if not len(lengths):
            raise ConfigError("RaggedCache(lengths=[]): expected one length per sequence of the batch")
        self._prompts = [check_whole("RaggedCache", "length", length, 1) for length in lengths]
        k, v = storages(stored, key_parts)
        self._k = [Rows(k, spare=True) for _ in lengths]
        self._v = [Rows(v, spare=True) for _ in lengths]
        self._kind: Kind | None = None
        self.seen = 0

    @property
    def lengths(self) -> list[int]:
        """Number of cached tokens of each sequence."""
        return [rows.length for rows in self._k]

    def mask(self, n: int) -> Lengths:
        """Return the mask of real keys and queries in the next call, of n tokens."""
        check_whole("mask", "n", n, 1)
        if self._kind is None:
            return Lengths(self._prompts, self._prompts, side="right")
        return Lengths([length + n for length in self.lengths], side="right")

    def limits(self, n: int, num_heads: int) -> Lengths:
        """Return `mask(n)`."""
        return self.mask(n)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append and return keys and values [b, h_kv, m, d], each sequence right-aligned with zeros before it."""
        kind, n, first = kind_of(k, v, self._kind), k.shape[2], self._kind is None
        if kind.batch != len(self._prompts):
            raise ShapeError(f"RaggedCache: {len(self._prompts)} lengths, but keys {tuple(k.shape)} of {kind.batch}")
        if first and max(self._prompts) > n:
            raise ShapeError(f"RaggedCache: a prompt of {max(self._prompts)} tokens, but the first call has {n}")
        real = self._prompts if first else [n] * kind.batch
        new = [
            [rows.encoded(x[i : i + 1, :, n - real[i] :]) for i, rows in enumerate(sequences)]
            for sequences, x in ((self._k, k), (self._v, v))
        ]
        found = []
        for sequences, parts, x in zip((self._k, self._v), new, (k, v), strict=True):
            for rows, part in zip(sequences, parts, strict=True):
                rows.add(part)
            width = n if first else max(rows.length for rows in sequences)
            out = x.new_zeros(x.shape[0], x.shape[1], width, x.shape[3])
            for i, rows in enumerate(sequences):
                out[i, :, width - rows.length :] = rows.read()[0]
            found.append(out)
        self._kind, self.seen = kind, self.seen + n
        return found[0], found[1]

    def __repr__(self) -> str:
        return described(self, lengths=self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes in use, summed over sequences."""
        return sum(rows.nbytes for rows in (*self._k, *self._v))
