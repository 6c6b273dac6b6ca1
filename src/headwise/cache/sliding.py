"""The sliding-window cache with attention sinks."""

from collections.abc import Sequence

from torch import Tensor

from headwise.cache.base import Kind, StoredCache, described
from headwise.cache.rows import Encoded, Rows, added, encoded
from headwise.cache.storage import storages
from headwise.errors import ConfigError, check_whole
from headwise.kernels.quantized import Vectors, decoded
from headwise.masks import Mask, Sinks, Span, Window


class SlidingCache(StoredCache):
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

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append and return what is visible to the new queries: sinks, the last window − 1 tokens, and the new ones."""
        found_k, found_v = self.take(k, v)
        return decoded(found_k), decoded(found_v)

    def take(self, k: Tensor, v: Tensor) -> tuple[Vectors, Vectors]:
        """As `append`, but quantized keys and values stay quantized, as `attend` supports them."""
        return self.put(self._kind_of(k, v), *self.encoded(k, v))

    def put(self, kind: Kind, k: Encoded, v: Encoded) -> tuple[Vectors, Vectors]:
        """`take`, of keys and values as they are stored."""
        found = added(self._k, self._v, k, v)
        for rows in (self._k, self._v):
            rows.cut(self.sinks, self.window - 1)
        self._kind, self._seen = kind, self.seen + k.parts[0].shape[2]
        return found

    def encoded(self, k: Tensor, v: Tensor) -> tuple[Encoded, Encoded]:
        """Keys and values as they are stored; nothing is changed."""
        return encoded(self._k, self._v, k, v)

    def __repr__(self) -> str:
        return described(self, window=self.window, sinks=self.sinks)

    @property
    def gap(self) -> Span:
        """The tokens that are not held any more."""
        return Span(self.sinks, self.sinks + self.seen - self._k.length)

    @property
    def nbytes(self) -> int:
        """Bytes in use, of at most sinks + window − 1 tokens (the next token is its own last key)."""
        return self._k.nbytes + self._v.nbytes

    def _crop(self, length: int) -> None:
        dropped, first = self.gap, max(self.sinks, length - self.window + 1)  # that the next query attends to
        if dropped.size and first < min(length, dropped.stop):
            raise ConfigError(
                f"crop(length={length}): with window={self.window} and sinks={self.sinks}, the tokens {dropped.start} "
                f"to {dropped.stop - 1} were dropped, some of which the next query may attend to; keep "
                f"copy.copy(cache) from before the tokens that may be rejected"
            )
        for rows in (self._k, self._v):
            rows.crop(length)

    def _select(self, indices: Tensor) -> None:
        for rows in (self._k, self._v):
            rows.select(indices)
