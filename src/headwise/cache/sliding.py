"""The last keys and values, and the first."""

from collections.abc import Sequence

from torch import Tensor

from headwise.cache.base import Kind, kind_of, told
from headwise.cache.storage import Rows, storages
from headwise.errors import check_whole
from headwise.kernels.eight_bits import Vectors, decoded
from headwise.masks import Mask, Sinks, Window


class SlidingCache:
    """Keeps the last `window` tokens, and the first `sinks` (StreamingLLM, Xiao et al. 2023, 2309.17453).

    A layer that is given it, with `Causal()`, computes what a full pass with
    `Causal() & (Window(window) | Sinks(sinks))` does: memory is O(window), whatever the length.

    stored, key_parts: as in `KVCache`.
    """

    def __init__(
        self, window: int, sinks: int = 0, *, stored: str | None = None, key_parts: Sequence[int] | None = None
    ) -> None:
        self.window = check_whole("SlidingCache", "window", window, 1)
        self.sinks = check_whole("SlidingCache", "sinks", sinks, 0)
        self._k, self._v = (Rows(storage) for storage in storages(stored, key_parts))
        self._kind: Kind | None = None
        self.seen = 0

    def limits(self, n: int, num_heads: int) -> Mask | None:
        """The window, where several queries come at once; one query may see all that is held."""
        return None if n == 1 else Window(self.window) | Sinks(self.sinks) if self.sinks else Window(self.window)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what the new queries may look at: sinks, the last window − 1 tokens before them, and them."""
        found_k, found_v = self.take(k, v)
        return decoded(found_k), decoded(found_v)

    def take(self, k: Tensor, v: Tensor) -> tuple[Vectors, Vectors]:
        """The same as `attend` takes them: eight bits stay as they are."""
        kind = kind_of(k, v, self._kind)
        found = []
        for rows, new in ((self._k, self._k.encoded(k)), (self._v, self._v.encoded(v))):
            rows.add(new)
            found.append(rows.stored())
            rows.cut(self.sinks, self.window - 1)
        self._kind, self.seen = kind, self.seen + k.shape[2]
        return found[0], found[1]

    def __repr__(self) -> str:
        return told(self, window=self.window, sinks=self.sinks)

    @property
    def nbytes(self) -> int:
        """Bytes held: those of at most sinks + window − 1 tokens (the next token is its own last key)."""
        return self._k.nbytes + self._v.nbytes
