"""A cache with a window per KV head."""

from collections.abc import Sequence

from torch import Tensor

from headwise.cache.base import Kind, described, kind_of
from headwise.cache.storage import Rows, storages
from headwise.errors import ShapeError, check_whole
from headwise.masks import HeadWindows, Mask, Span
from headwise.masks.head_windows import check_windows


class BudgetCache:
    """Keeps the last `windows[i]` tokens of KV head i (None: all), and the first `sinks` of every head.

    With this cache and `Causal()`, a layer computes the same as a full pass with `Causal() & cache.mask(num_heads)`.
    Memory is proportional to the windows; during a call the keys are laid out as a rectangle.

    Args:
        windows: one per KV head.
        stored, key_parts: as in `KVCache`.
    Source: retrieval heads and streaming heads, Xiao et al. 2024, 2410.10819.
    """

    def __init__(
        self, windows: Sequence[int | None], sinks: int = 0, *, stored: str | None = None,
        key_parts: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.windows, self.sinks = check_windows("BudgetCache", windows), check_whole("BudgetCache", "sinks", sinks, 0)
        k, v = storages(stored, key_parts)
        self._k = [Rows(k, spare=window is None) for window in self.windows]
        self._v = [Rows(v, spare=window is None) for window in self.windows]
        self._kind: Kind | None = None
        self.seen = 0

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
        kind = kind_of(k, v, self._kind)
        if kind.heads != len(self.windows):
            raise ShapeError(
                f"BudgetCache: {len(self.windows)} windows, but keys {tuple(k.shape)} of {kind.heads} heads"
            )
        new = [
            [rows.encoded(x[:, i : i + 1]) for i, rows in enumerate(heads)] for heads, x in ((self._k, k), (self._v, v))
        ]
        found = []
        for heads, parts in zip((self._k, self._v), new, strict=True):
            for rows, part in zip(heads, parts, strict=True):
                rows.add(part)
            found.append(self._rectangle([rows.read() for rows in heads]))
            for rows, window in zip(heads, self.windows, strict=True):
                if window is not None:
                    rows.cut(self.sinks, window - 1)
        self._kind, self.seen = kind, self.seen + k.shape[2]
        return found[0], found[1]

    def __repr__(self) -> str:
        return described(self, windows=list(self.windows), sinks=self.sinks)

    @property
    def gap(self) -> Span:
        """The tokens that no head holds any more."""
        first = 0 if None in self.windows else self.sinks
        return Span(first, first + self.seen - max(rows.length for rows in self._k))

    @property
    def nbytes(self) -> int:
        """Bytes in use, summed over heads."""
        return sum(rows.nbytes for rows in (*self._k, *self._v))

    def _rectangle(self, heads: list[Tensor]) -> Tensor:
        """Join [b, 1, m_i, d] of each head to [b, h_kv, m, d]; shorter heads were cut, so they begin with sinks."""
        b, _, _, d = heads[0].shape
        out = heads[0].new_zeros(b, len(heads), max(x.shape[2] for x in heads), d)
        for i, x in enumerate(heads):
            start = self.sinks if x.shape[2] < out.shape[2] else 0
            out[:, i, :start] = x[:, 0, :start]
            out[:, i, out.shape[2] - (x.shape[2] - start) :] = x[:, 0, start:]
        return out
