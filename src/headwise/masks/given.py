"""Masks that depend on the data: lengths, packed documents, boolean tensors; padding; and masks apart from tensors.

Separates a mask from its tensors, so that autograd saves these like any others. Tensors saved by `save_for_backward`
are checked for in-place changes, and can be offloaded or recomputed (saved-tensor hooks, gradient checkpointing).
Tensors inside other objects are not. All that counts positions finds padding here: measures, edits and roles.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import pad

from headwise.errors import ConfigError, DTypeError, ShapeError
from headwise.fields import Array, Word
from headwise.masks import spans, starts
from headwise.masks.base import And, Kept, Mask, kept
from headwise.masks.grid import Grid, Span, State
from headwise.masks.positional import Causal, Everything, Sinks


class Lengths(Mask):
    """Padding: sequence i of the batch has `keys[i]` real keys, and `queries[i]` real queries if given.

    Padding queries are fully masked: their output is 0 and no measure counts them. `side` is the side of the real
    tokens: "left" (padding after them, the default) or "right" (padding before them).
    """

    holds = {"keys": Array("b"), "queries": Array("b", optional=True), "side": Word()}

    def __init__(
        self, keys: Sequence[int] | Tensor, queries: Sequence[int] | Tensor | None = None, *, side: str = "left"
    ) -> None:
        self.keys = _lengths("keys", keys)
        self.queries = None if queries is None else _lengths("queries", queries)
        if side not in ("left", "right"):
            raise ConfigError(f"Lengths(side={side!r}): expected 'left' or 'right', the side of the real tokens")
        self.side = side

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        real = self._real(self.keys, cols, grid.m)[:, None, None, :]
        if self.queries is not None:
            real = real & self._real(self.queries, rows, grid.n)[:, None, :, None]
        return real.expand(-1, 1, rows.shape[0], -1)

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        states = [self._span_state(self.keys, cols, grid.m)]
        if self.queries is not None:
            states.append(self._span_state(self.queries, rows, grid.n))
        return min(states, key=lambda state: state.value)

    def spans(self, grid: Grid) -> Tensor:
        lengths = self.keys.long()[:, None].expand(-1, grid.n)  # [b, n]
        if self.queries is not None:
            lengths = lengths * self._real(self.queries, torch.arange(grid.n, device="cpu"), grid.n)
        if self.side == "left":
            return spans.one(0, lengths, grid.m)
        return spans.one(grid.m - lengths, grid.m, grid.m)

    def starts(self, grid: Grid) -> Tensor | None:
        return None if self.side == "left" else (grid.m - self.keys)[:, None].expand(-1, grid.m)

    def check(self, grid: Grid) -> None:
        for name, lengths, size in (("keys", self.keys, grid.m), ("queries", self.queries, grid.n)):
            if lengths is None:
                continue
            if len(lengths) != grid.b:
                raise ShapeError(f"mask=Lengths({name}=…): {len(lengths)} lengths for a batch of {grid.b}")
            low, high = _range(lengths) if _known(lengths) else (0, 0)
            if low < 0:
                raise ShapeError(f"mask=Lengths({name}=…): length {low}, expected lengths >= 0")
            if high > size:
                raise ShapeError(f"mask=Lengths({name}=…): length {high} exceeds the {size} {name}")

    @property
    def padding(self) -> bool:
        return self.queries is None

    def real_tokens(self, grid: Grid) -> Tensor:
        return grid.of_tokens(self._real(self.keys, torch.arange(grid.m, device="cpu"), grid.m))

    def over_tokens(self, grid: Grid) -> Mask:
        if self.queries is not None:
            return self
        left = self.side == "left"
        queries = (self.keys - grid.shift).clamp(min=0) if left else self.keys.clamp(max=grid.n)
        return Lengths(self.keys, queries, side=self.side)

    def _real(self, lengths: Tensor, index: Tensor, size: int) -> Tensor:
        lengths = lengths.to(index.device)[:, None]
        return index < lengths if self.side == "left" else index >= size - lengths

    def _span_state(self, lengths: Tensor, span: Span, size: int) -> State:
        low, high = _range(lengths)
        start, stop = span if self.side == "left" else (size - span.stop, size - span.start)
        if start >= high:
            return State.EMPTY
        return State.FULL if stop <= low else State.MIXED

    def __repr__(self) -> str:
        queries = "" if self.queries is None else f", queries={self.queries.tolist()}"
        return f"Lengths({self.keys.tolist()}{queries}, side={self.side!r})"


class Documents(Mask):
    """Packed sequences: a query may attend to keys of its own document only.

    `ids` is an integer tensor [m] or [b, m] with the document of each *key*; negative ids are padding, which is masked
    both as query and as key. Queries are aligned to the end of the keys and have the ids of their positions.
    """

    holds = {"ids": Array("bm")}
    placed = True

    def __init__(self, ids: Sequence[int] | Tensor) -> None:
        self.ids = torch.atleast_2d(as_given(ids))
        if self.ids.ndim != 2 or not _is_whole(self.ids):
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

    def spans(self, grid: Grid) -> Tensor | None:
        ids = self.ids.cpu().long()
        real, key = ids >= 0, torch.arange(grid.m, device="cpu")
        opens = torch.ones_like(real)  # whether a run of one id begins here
        opens[:, 1:] = ids[:, 1:] != ids[:, :-1]
        sorted_ids = ids.sort(-1).values
        distinct = torch.ones_like(real)
        distinct[:, 1:] = sorted_ids[:, 1:] != sorted_ids[:, :-1]
        if not torch.equal((opens & real).sum(-1), (distinct & (sorted_ids >= 0)).sum(-1)):
            return None  # an id occurs in two separate runs
        start = torch.where(opens, key, 0).cummax(-1).values
        closes = torch.ones_like(real)
        closes[:, :-1] = opens[:, 1:]
        stop = torch.where(closes, key + 1, grid.m).flip(-1).cummin(-1).values.flip(-1).masked_fill(~real, 0)
        return spans.one(start[:, grid.shift :], stop[:, grid.shift :], grid.m)

    def starts(self, grid: Grid) -> Tensor:
        ids = self.ids.cpu().long()
        if not grid.m:
            return ids
        # Keys of one id lie together in a stable order, also where the id occurs in several runs.
        sorted_ids, order = ids.sort(dim=-1, stable=True)
        opens = torch.ones_like(ids, dtype=torch.bool)
        opens[:, 1:] = sorted_ids[:, 1:] != sorted_ids[:, :-1]
        run = torch.where(opens, torch.arange(grid.m, device="cpu"), 0).cummax(-1).values
        first = torch.zeros_like(ids).scatter_(1, order, order.gather(1, run))
        return first.masked_fill(ids < 0, grid.m)

    def real_tokens(self, grid: Grid) -> Tensor:
        return grid.of_tokens(self.ids >= 0)

    def check(self, grid: Grid) -> None:
        inside = 0 <= grid.shift <= grid.m - grid.n
        if self.ids.shape[1] != grid.m or self.ids.shape[0] not in (1, grid.b) or not inside:
            raise ShapeError(
                f"mask=Documents(ids): ids have shape {tuple(self.ids.shape)}, expected ({grid.m},) or "
                f"({grid.b}, {grid.m}) for {grid.n} queries and {grid.m} keys, with each query at the position of a key"
            )

    def __repr__(self) -> str:
        return f"Documents(<{self.ids.shape[0]}×{self.ids.shape[1]} ids>)"


class Dense(Mask):
    """Any boolean mask, [n, m], [b, n, m] or [b, h, n, m] (b and h may be 1); True means may attend."""

    holds = {"mask": Array("bhnm")}

    def __init__(self, mask: Tensor) -> None:
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            given = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise DTypeError(f"Dense(mask): expected a boolean tensor (True = may attend), got {given}")
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

    @property
    def boolean(self) -> Tensor:
        return self.mask

    def starts(self, grid: Grid) -> Tensor:
        shown = self.mask[:, :, :1] if self.padding else self.mask  # of padding, all rows are equal
        _, _, n, m = shown.shape
        return starts.of_rows(lambda start, stop: shown[:, :, start:stop], n, m, self.padding)

    @property
    def padding(self) -> bool:
        return self.mask.stride(2) == 0 and self.mask.shape[1] == 1

    def over_tokens(self, grid: Grid) -> Mask:
        # Padding with holes as one document: O(n) memory instead of a boolean n×m.
        return Documents(self.mask[:, 0, 0].cpu().long() - 1) if self.padding else self

    def part(self, rows: Span, cols: Span, grid: Grid) -> Mask:
        return Dense(self.mask[:, :, rows.start : rows.stop, cols.start : cols.stop])

    def __repr__(self) -> str:
        return f"Dense(<{'×'.join(map(str, self.mask.shape))}>)"


def both(*masks: Mask | None) -> Mask | None:
    """The intersection of the masks; None masks nothing."""
    given = [mask for mask in masks if mask is not None]
    if not given:
        return None
    result = given[0]
    for mask in given[1:]:
        result = result & mask
    return result


def shortest(mask: Mask) -> Mask:
    """The mask with a shorter form of the boolean tensors in it, where their values have one; on a GPU, as it is, where
    reading them would wait for it."""
    parts = conjuncts(mask)
    if not any(type(part) is Dense and part.mask.is_cpu for part in parts):
        return mask
    return both(*(_shortest(part) if type(part) is Dense else part for part in parts)) or Everything()


def _shortest(given: Dense) -> Mask | None:
    cells = given.mask
    if cells.shape[2] == 0:
        return given
    return shortest_padding(cells[:, 0, 0], cells.shape[2]) if given.padding else shortest_boolean(cells)


def shortest_padding(real: Tensor, n: int, before: int = 0) -> Mask | None:
    """The mask of a padding mask [b, m], True for tokens, for n queries: `Lengths` if the tokens are contiguous, with
    padding on either side, else a `Dense` whose rows share memory."""
    if bool(real.all()):
        return None
    real = pad(real, (before, 0), value=True)
    m = real.shape[1]
    count = real.sum(-1)
    ahead = real.int().argmax(-1)  # padding before the first real key; 0 if there is none
    behind = real.flip(-1).int().argmax(-1)
    ahead, behind = ahead.where(count > 0, 0), behind.where(count > 0, m)
    if not torch.equal(ahead + count + behind, torch.full_like(count, m)):
        return Dense(real[:, None, None, :].expand(-1, 1, n, -1))
    left = Lengths(m - behind) if bool(behind.any()) else None
    right = Lengths(m - ahead, side="right") if bool(ahead.any()) else None
    return both(left, right)


def shortest_boolean(allowed: Tensor, before: int = 0) -> Mask | None:
    """The mask of a boolean tensor [b or 1, h or 1, n, m], True = may attend: None or `Causal` if it matches them, and
    with its padding beside it."""
    if bool(allowed.all()):
        return None
    n, m = allowed.shape[2:]
    if n <= m:
        causal = torch.ones(n, m, dtype=torch.bool, device=allowed.device).tril_(m - n)
        if all(torch.equal(one, causal) for one in allowed.flatten(0, 1)):
            return Causal() | Sinks(before) if before else Causal()
    mask, real = Dense(pad(allowed, (before, 0), value=True) if before else allowed), _unpadded(allowed)
    if real is None:
        return mask
    if len(real) == 1:  # of any batch
        return mask & Dense(pad(real, (before, 0), value=True)[:, None, None].expand(-1, -1, n, -1))
    return both(mask, shortest_padding(real, n, before))


def _unpadded(allowed: Tensor) -> Tensor | None:
    """Which keys of a boolean [b or 1, h or 1, n, m] are no padding, [b or 1, m]: some are hidden from all queries, and
    all others are seen by their own query in some head, unlike the last one of a strictly causal mask. None if that is
    not so."""
    if allowed.shape[2] != allowed.shape[3]:
        return None
    seen = allowed.flatten(1, 2).any(1)
    own = allowed.diagonal(dim1=2, dim2=3).any(1)
    return seen if not bool(seen.all()) and torch.equal(own, seen) else None


def as_given(value: Sequence[int] | Tensor) -> Tensor:
    """Return whole numbers as a tensor: a tensor unchanged, others on the CPU whatever PyTorch's default device."""
    return value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")


def _lengths(name: str, value: Sequence[int] | Tensor) -> Tensor:
    given = torch.as_tensor(value, device="cpu")
    whole = _is_whole(given) or given.shape == (0,)  # [] is floating
    # In a narrow dtype, such as uint8, differences would wrap, and PyTorch finds no minimum of wide unsigned ones.
    lengths = given.long() if whole else given
    if lengths.ndim != 1 or not whole or (_known(lengths) and _range(lengths)[0] < 0):
        raise ShapeError(f"Lengths({name}=…): expected a list of lengths >= 0, one per sequence, got {value!r}")
    return lengths


def _is_whole(x: Tensor) -> bool:
    """Whether a tensor consists of whole numbers."""
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _range(lengths: Tensor) -> tuple[int, int]:
    """The least and the largest one; zeros for an empty batch."""
    return (int(lengths.min()), int(lengths.max())) if len(lengths) else (0, 0)


def _known(lengths: Tensor) -> bool:
    """Whether the values are known: in a graph they are at run time only, when check() runs again."""
    return not (torch.compiler.is_compiling() or isinstance(lengths, FakeTensor))


@dataclass(frozen=True)
class _Place:
    """The placeholder of a tensor."""

    at: int


def take_tensors(mask: Mask) -> tuple[Mask, list[Tensor]]:
    """The mask with placeholders instead of its tensors, and these; the mask itself if it has none."""
    tensors: list[Tensor] = []

    def take(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        tensors.append(x)
        return _Place(len(tensors) - 1)

    emptied: Mask = _each(mask, take)
    return (emptied, tensors) if tensors else (mask, tensors)


def put_tensors(mask: Mask, tensors: Sequence[Tensor]) -> Mask:
    """Return the original mask from the results of `take_tensors`."""
    if not tensors:
        return mask
    filled: Mask = _each(mask, lambda x: tensors[x.at] if isinstance(x, _Place) else x)
    return filled


def _each(x: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy with `change` applied to everything but lists and masks, without cached data."""
    if isinstance(x, Mask):
        copy = object.__new__(type(x))
        held = getattr(x, "__dict__", {})
        copy.__dict__.update({name: _each(y, change) for name, y in held.items() if not isinstance(y, Kept)})
        return copy
    if type(x) in (list, tuple):
        return type(x)(_each(y, change) for y in x)
    return change(x)


def conjuncts(mask: Mask) -> list[Mask]:
    """Return the operands of `&` in a mask, or the mask alone."""
    return [*conjuncts(mask.left), *conjuncts(mask.right)] if isinstance(mask, And) else [mask]


def real_tokens(mask: Mask, grid: Grid) -> Tensor | None:
    """Return which tokens of the keys' sequence are no padding, boolean [b or 1, tokens] on the CPU, those too that a
    cache has dropped; None if all are, as far as the mask is known to show it. Computed once for each mask and size."""
    found: Tensor | None = kept("_real_tokens", lambda: _real(mask, grid), mask, (grid.n, grid.m, grid.gap, grid.extra))
    return found


class Sequences(NamedTuple):
    """The sequences in a row of the batch that a mask of self attention keeps apart."""

    number: int  # the most in a row; 1 if the mask does not depend on the data
    alone: int  # how many at one end of a row have one token each
    given: bool  # whether the mask was given as one of documents


def sequences(mask: Mask, grid: Grid) -> Sequences:
    """Return the sequences of a mask. Computed once for each mask and size."""
    found: Sequences = kept("_sequences", lambda: _sequences(mask, grid), mask, (grid.n, grid.m))
    return found


def _sequences(mask: Mask, grid: Grid) -> Sequences:
    given = any(isinstance(part, Documents) for part in conjuncts(mask))
    apart = given or any(part.boolean is not None for part in conjuncts(mask))
    start, key = mask.starts(grid) if apart and grid.m else None, torch.arange(grid.m, device="cpu")
    if start is None:
        return Sequences(1, 0, given)
    sizes = torch.zeros(len(start), grid.m + 1, dtype=torch.long, device="cpu")
    sizes.scatter_add_(1, start, torch.ones_like(start))
    alone = ((start == key) & (sizes[:, :-1] == 1)).long()
    ends = torch.stack((alone.cumprod(1), alone.flip(1).cumprod(1))).sum(-1)
    return Sequences(int((sizes[:, :-1] > 0).sum(-1).max()), int(ends.max()), given)


def _real(mask: Mask, grid: Grid) -> Tensor | None:
    real: Tensor | None = None
    for part in conjuncts(mask):
        here = part.real_tokens(grid)
        if here is not None:
            real = here.cpu() if real is None else real & here.cpu()
    return None if real is None or bool(real.all()) else real
