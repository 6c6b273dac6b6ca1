"""A cache with a window per KV head."""

from collections.abc import Sequence

from torch import Tensor

from headwise.cache.base import StoredCache, described
from headwise.cache.full import KVCache
from headwise.cache.sliding import SlidingCache
from headwise.errors import ShapeError, check_whole
from headwise.kernels.quantized import Vectors, decoded
from headwise.masks import HeadWindows, Mask, Span
from headwise.masks.head_windows import check_windows


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
