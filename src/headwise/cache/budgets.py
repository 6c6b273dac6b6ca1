"""A window of its own for each key head: long memory only for the heads that use it."""

from collections.abc import Sequence

from torch import Tensor

from headwise.cache.base import Kind, kind_of, told
from headwise.cache.storage import Rows, storages
from headwise.errors import ShapeError, check_whole
from headwise.masks import HeadWindows, Mask
from headwise.masks.head_windows import check_windows


class BudgetCache:
    """Keeps for key head i the last `windows[i]` tokens (None: all), and the first `sinks` for every head.

    A layer that is given it, with `Causal()`, computes what a full pass with `Causal() & cache.mask(num_heads)` does.
    What is held is as large as the windows say; the keys of one call are laid out as a rectangle while it runs.

    Args:
        windows: one for each key and value head.
        stored, key_parts: as in `KVCache`.
    Source: heads that need all tokens beside heads that need sinks and the last ones, Xiao et al. 2024, 2410.10819.
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
        """What a full pass of a layer with so many query heads is masked with to compute the same."""
        if num_heads < 1 or num_heads % len(self.windows):
            raise ShapeError(f"num_heads={num_heads} is not a multiple of the {len(self.windows)} windows")
        group = num_heads // len(self.windows)
        return HeadWindows([window for window in self.windows for _ in range(group)], self.sinks)

    def limits(self, n: int, num_heads: int) -> Mask | None:
        """The heads' windows; nothing where one query may see all that is held."""
        return None if n == 1 and len(set(self.windows)) == 1 else self.mask(num_heads)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values [b, h_kv, m, d]: sinks first, then zeros where a head keeps less than others, then
        its last tokens and the new ones."""
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
        return told(self, windows=list(self.windows), sinks=self.sinks)

    @property
    def nbytes(self) -> int:
        """Bytes held, of every head by its own window."""
        return sum(rows.nbytes for rows in (*self._k, *self._v))

    def _rectangle(self, heads: list[Tensor]) -> Tensor:
        """[b, 1, m_i, d] of each head as [b, h_kv, m, d]; a shorter one has been cut, so its sinks are its first."""
        b, _, _, d = heads[0].shape
        out = heads[0].new_zeros(b, len(heads), max(x.shape[2] for x in heads), d)
        for i, x in enumerate(heads):
            start = self.sinks if x.shape[2] < out.shape[2] else 0
            out[:, i, :start] = x[:, 0, :start]
            out[:, i, out.shape[2] - (x.shape[2] - start) :] = x[:, 0, start:]
        return out
