"""What each query may look at, as a small algebra: no n×m mask is ever stored.

    >>> from headwise import Causal, Sinks, Window
    >>> mask = Causal() & (Window(2) | Sinks(1))          # a sliding window that keeps the first key
    >>> print(mask.to_dense(5, 5)[0, 0].int())
    tensor([[1, 0, 0, 0, 0],
            [1, 1, 0, 0, 0],
            [1, 1, 1, 0, 0],
            [1, 0, 1, 1, 0],
            [1, 0, 0, 1, 1]], dtype=torch.int32)

True (1) means *may attend*. When there are fewer queries than keys, the queries stand at the *end* of the
keys: query i of n has the position i + m - n on the key axis. So one mask serves a full pass, a chunk and a
single decoding step alike (FlashAttention's bottom-right convention; PyTorch's `is_causal` is top-left).

    Causal(), n=2, m=4:   1 1 1 0
                          1 1 1 1

A kernel asks a mask for the `state` of a tile (EMPTY, FULL or MIXED), answered from the edges of the tile
alone, and calls `allowed` only for MIXED ones.
"""

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from headwise.errors import ConfigError, DTypeError, ShapeError


class State(enum.Enum):
    """What a mask says of a whole tile."""

    EMPTY = 0
    MIXED = 1
    FULL = 2


class Grid(NamedTuple):
    """The size of the attention matrix that a mask is asked about: batch, heads, queries, keys."""

    b: int
    h: int
    n: int
    m: int

    @property
    def shift(self) -> int:
        """Position of query 0 on the key axis."""
        return self.m - self.n


class Span(NamedTuple):
    """A half-open range of rows or columns."""

    start: int
    stop: int


class Mask(ABC):
    """Base of all masks. Compose with `&` and `|`."""

    @abstractmethod
    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        """Boolean [b or 1, h or 1, len(rows), len(cols)] for query indices `rows` and key indices `cols`."""

    @abstractmethod
    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        """EMPTY or FULL only if that holds in every batch and head of the tile; MIXED is always allowed."""

    def check(self, grid: Grid) -> None:  # noqa: B027 - most masks fit any size
        """Raise ShapeError if the mask cannot be laid over such a matrix."""

    def only(self, batch: int, head: int) -> "Mask":
        """The mask as one batch entry and head sees it, for a grid of batch 1 and one head."""
        return self

    def __and__(self, other: "Mask") -> "Mask":
        return And(self, _mask(other))

    def __or__(self, other: "Mask") -> "Mask":
        return Or(self, _mask(other))

    def to_dense(self, n: int, m: int, *, batch: int = 1, heads: int = 1) -> Tensor:
        """The mask as a boolean tensor [b or 1, h or 1, n, m]; for small sizes, to look at."""
        grid = Grid(batch, heads, n, m)
        self.check(grid)
        return self.allowed(torch.arange(n), torch.arange(m), grid).expand(-1, -1, n, m)


@dataclass(frozen=True)
class Everything(Mask):
    """Every query may see every key (what `mask=None` means)."""

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        return torch.ones(1, 1, len(rows), len(cols), dtype=torch.bool, device=rows.device)

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        return State.FULL


@dataclass(frozen=True)
class Causal(Mask):
    """A query sees the keys up to and including its own position."""

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        return ((rows + grid.shift)[:, None] >= cols)[None, None]

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        if cols.start > rows.stop - 1 + grid.shift:
            return State.EMPTY
        return State.FULL if cols.stop - 1 <= rows.start + grid.shift else State.MIXED

    def check(self, grid: Grid) -> None:
        if grid.n > grid.m:
            raise ShapeError(
                f"mask=Causal(): {grid.n} queries stand at the end of {grid.m} keys, so there must be at most as "
                f"many queries as keys; for cross attention leave Causal() out"
            )


@dataclass(frozen=True)
class Window(Mask):
    """A sliding window: a query sees `left` keys up to and including its own position, and `right` after it.

    `Causal() & Window(128)` is the usual one: 128 keys, the query's own among them (Beltagy et al. 2020;
    Mistral's `sliding_window`). `right` defaults to 0.
    """

    left: int
    right: int = 0

    def __post_init__(self) -> None:
        if self.left < 1 or self.right < 0:
            raise ConfigError(f"Window(left={self.left}, right={self.right}): left must be >= 1 and right >= 0")

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        distance = (rows + grid.shift)[:, None] - cols
        return ((distance < self.left) & (distance >= -self.right))[None, None]

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        nearest = rows.start + grid.shift - (cols.stop - 1)  # smallest distance in the tile
        farthest = rows.stop - 1 + grid.shift - cols.start
        if nearest >= self.left or farthest < -self.right:
            return State.EMPTY
        return State.FULL if farthest < self.left and nearest >= -self.right else State.MIXED


@dataclass(frozen=True)
class Sinks(Mask):
    """Only the first `count` keys; join it with `|` to a window (StreamingLLM, Xiao et al. 2023)."""

    count: int

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ConfigError(f"Sinks({self.count}): the number of sink keys must be >= 0")

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        return (cols < self.count).expand(len(rows), -1)[None, None]

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        if cols.start >= self.count:
            return State.EMPTY
        return State.FULL if cols.stop <= self.count else State.MIXED


class Lengths(Mask):
    """Padding: sequence i of the batch has only `keys[i]` real keys, and `queries[i]` real queries if given.

    A query that is padding sees nothing: its output is 0 and no measure counts it. `side` says where the
    real ones are, "left" (padding after them, the default) or "right" (padding before them).
    """

    def __init__(
        self, keys: Sequence[int] | Tensor, queries: Sequence[int] | Tensor | None = None, *, side: str = "left"
    ) -> None:
        self.keys = _lengths("keys", keys)
        self.queries = None if queries is None else _lengths("queries", queries)
        if side not in ("left", "right"):
            raise ConfigError(f"Lengths(side={side!r}): expected 'left' or 'right', where the real tokens are")
        self.side = side

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        real = self._real(self.keys, cols, grid.m)[:, None, None, :]
        if self.queries is not None:
            real = real & self._real(self.queries, rows, grid.n)[:, None, :, None]
        return real.expand(-1, 1, len(rows), -1)

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        states = [self._span_state(self.keys, cols, grid.m)]
        if self.queries is not None:
            states.append(self._span_state(self.queries, rows, grid.n))
        return min(states, key=lambda state: state.value)

    def check(self, grid: Grid) -> None:
        for name, lengths, size in (("keys", self.keys, grid.m), ("queries", self.queries, grid.n)):
            if lengths is None:
                continue
            if len(lengths) != grid.b:
                raise ShapeError(f"mask=Lengths({name}=…): {len(lengths)} lengths for a batch of {grid.b}")
            if int(lengths.max()) > size:
                raise ShapeError(f"mask=Lengths({name}=…): length {int(lengths.max())} exceeds the {size} {name}")

    def only(self, batch: int, head: int) -> Mask:
        queries = None if self.queries is None else self.queries[batch : batch + 1]
        return Lengths(self.keys[batch : batch + 1], queries, side=self.side)

    def _real(self, lengths: Tensor, index: Tensor, size: int) -> Tensor:
        lengths = lengths.to(index.device)[:, None]
        return index < lengths if self.side == "left" else index >= size - lengths

    def _span_state(self, lengths: Tensor, span: Span, size: int) -> State:
        low, high = int(lengths.min()), int(lengths.max())
        start, stop = span if self.side == "left" else (size - span.stop, size - span.start)
        if start >= high:
            return State.EMPTY
        return State.FULL if stop <= low else State.MIXED

    def __repr__(self) -> str:
        queries = "" if self.queries is None else f", queries={self.queries.tolist()}"
        return f"Lengths({self.keys.tolist()}{queries}, side={self.side!r})"


class Documents(Mask):
    """Packed sequences: a query sees only keys of its own document.

    `ids` is an integer tensor [m] or [b, m] with the document of each *key*; a negative id is padding, which
    sees nothing and is seen by nobody. Queries, standing at the end of the keys, take the ids they stand on.
    """

    def __init__(self, ids: Sequence[int] | Tensor) -> None:
        self.ids = torch.atleast_2d(torch.as_tensor(ids))
        if self.ids.ndim != 2 or self.ids.is_floating_point() or self.ids.dtype == torch.bool:
            raise DTypeError(
                f"Documents(ids): expected integers [m] or [b, m], got {self.ids.dtype} {tuple(self.ids.shape)}"
            )

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        ids = self.ids.to(rows.device)
        of_query, of_key = ids[:, rows + grid.shift], ids[:, cols]
        return ((of_query[:, :, None] == of_key[:, None, :]) & (of_key >= 0)[:, None, :])[:, None]

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        of_query = self.ids[:, rows.start + grid.shift : rows.stop + grid.shift]
        of_key = self.ids[:, cols.start : cols.stop]
        first_q, last_q = torch.aminmax(of_query, dim=1)
        first_k, last_k = torch.aminmax(of_key, dim=1)
        if bool(((last_q < first_k) | (last_k < first_q) | (last_k < 0)).all()):
            return State.EMPTY
        one = (first_q == last_q) & (first_k == last_k) & (first_q == first_k) & (first_k >= 0)
        return State.FULL if bool(one.all()) else State.MIXED

    def check(self, grid: Grid) -> None:
        if self.ids.shape[1] != grid.m or self.ids.shape[0] not in (1, grid.b) or grid.n > grid.m:
            raise ShapeError(
                f"mask=Documents(ids): ids have shape {tuple(self.ids.shape)}, expected ({grid.m},) or "
                f"({grid.b}, {grid.m}) for {grid.n} queries and {grid.m} keys"
            )

    def only(self, batch: int, head: int) -> Mask:
        return self if len(self.ids) == 1 else Documents(self.ids[batch])

    def __repr__(self) -> str:
        return f"Documents(<{self.ids.shape[0]}×{self.ids.shape[1]} ids>)"


class Dense(Mask):
    """Any boolean mask, [n, m], [b, n, m] or [b, h, n, m] (b and h may be 1); True means may attend."""

    def __init__(self, mask: Tensor) -> None:
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            came = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise DTypeError(f"Dense(mask): expected a boolean tensor (True = may attend), got {came}")
        if mask.ndim not in (2, 3, 4):
            raise ShapeError(f"Dense(mask): expected [n, m], [b, n, m] or [b, h, n, m], got {tuple(mask.shape)}")
        self.mask = mask[None, None] if mask.ndim == 2 else mask[:, None] if mask.ndim == 3 else mask

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        device = self.mask.device
        return self.mask[:, :, rows.to(device)][:, :, :, cols.to(device)].to(rows.device)

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        tile = self.mask[:, :, rows.start : rows.stop, cols.start : cols.stop]
        if not bool(tile.any()):
            return State.EMPTY
        return State.FULL if bool(tile.all()) else State.MIXED

    def check(self, grid: Grid) -> None:
        b, h, n, m = self.mask.shape
        if b not in (1, grid.b) or h not in (1, grid.h) or (n, m) != (grid.n, grid.m):
            raise ShapeError(
                f"mask=Dense(…): mask has shape {(b, h, n, m)}, expected "
                f"({grid.b} or 1, {grid.h} or 1, {grid.n}, {grid.m})"
            )

    def only(self, batch: int, head: int) -> Mask:
        b, h = self.mask.shape[:2]
        return Dense(self.mask[batch if b > 1 else 0, head if h > 1 else 0])

    def __repr__(self) -> str:
        return f"Dense(<{'×'.join(map(str, self.mask.shape))}>)"


@dataclass(frozen=True)
class _Pair(Mask):
    """Two masks together; what is the same for `&` and `|`."""

    left: Mask
    right: Mask
    sign: ClassVar[str]

    def check(self, grid: Grid) -> None:
        self.left.check(grid)
        self.right.check(grid)

    def only(self, batch: int, head: int) -> Mask:
        return type(self)(self.left.only(batch, head), self.right.only(batch, head))

    def __repr__(self) -> str:
        return f"({self.left!r} {self.sign} {self.right!r})"


class And(_Pair):
    """Keys that both masks allow."""

    sign = "&"

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        return self.left.allowed(rows, cols, grid) & self.right.allowed(rows, cols, grid)

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        left = self.left.state(rows, cols, grid)
        if left is State.EMPTY:
            return left
        return min(left, self.right.state(rows, cols, grid), key=lambda state: state.value)


class Or(_Pair):
    """Keys that either mask allows."""

    sign = "|"

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        return self.left.allowed(rows, cols, grid) | self.right.allowed(rows, cols, grid)

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        left = self.left.state(rows, cols, grid)
        if left is State.FULL:
            return left
        return max(left, self.right.state(rows, cols, grid), key=lambda state: state.value)


def _mask(value: object) -> Mask:
    if not isinstance(value, Mask):
        raise DTypeError(f"masks combine with masks, got {type(value).__name__}; wrap a boolean tensor in Dense(…)")
    return value


def _lengths(name: str, value: Sequence[int] | Tensor) -> Tensor:
    lengths = torch.as_tensor(value).cpu()
    if lengths.ndim != 1 or len(lengths) == 0 or lengths.is_floating_point() or int(lengths.min()) < 0:
        raise ShapeError(f"Lengths({name}=…): expected a list of lengths >= 0, one a sequence, got {value!r}")
    return lengths
