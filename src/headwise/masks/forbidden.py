"""Attention knocked out between sets of tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.errors import DTypeError, ShapeError
from headwise.fields import Array, Section
from headwise.masks import spans
from headwise.masks.base import Mask
from headwise.masks.grid import Grid, Span, State

MOST_RANGES = 64  # more ranges of keys than this would take as much memory as a dense mask


class Forbidden(Mask):
    """The selected queries may not attend to the selected keys; all other pairs are allowed. O(n + m) memory.

    Args:
        queries: boolean [n] or [b, n]; True selects a query. keys: boolean [m] or [b, m].
        heads: boolean [h], one per query head, if only these heads are affected; None for all.
    Raises:
        DTypeError, ShapeError: naming the argument.
    """

    holds = {"queries": Array("bn"), "keys": Array("bm"), "heads": Array("h", optional=True)}

    def __init__(
        self, queries: Sequence[bool] | Tensor, keys: Sequence[bool] | Tensor,
        heads: Sequence[bool] | Tensor | None = None,
    ) -> None:  # fmt: skip
        self.queries, self.keys = _selection("queries", queries, 2), _selection("keys", keys, 2)
        self.heads = None if heads is None else _selection("heads", heads, 1)

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        queries, keys = self.queries.to(rows.device)[:, rows], self.keys.to(cols.device)[:, cols]
        pairs = (queries[:, :, None] & keys[:, None, :])[:, None]
        return ~(pairs if self.heads is None else pairs & self.heads.to(rows.device)[:, None, None])

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        queries, keys = self.queries[:, slice(*rows)], self.keys[:, slice(*cols)]
        if self._everywhere and bool(queries.all()) and bool(keys.all()):
            return State.EMPTY
        pairs = queries.any(-1) & keys.any(-1)
        return State.MIXED if bool(pairs.any()) and self._anywhere else State.FULL

    def spans(self, grid: Grid) -> Tensor | None:
        if not self._everywhere:
            return None
        queries, open_ = self.queries.cpu(), ~self.keys.cpu()
        edge = torch.nn.functional.pad(open_, (1, 1)).int().diff(dim=-1)  # 1 where a range starts, −1 where it stops
        count = max([1, *(edge == 1).sum(-1).tolist()])
        if count > MOST_RANGES:
            return None
        ranges = torch.zeros(len(open_), count, 2, dtype=torch.long, device="cpu")
        for at, sign in enumerate((1, -1)):
            entry, place = (edge == sign).nonzero(as_tuple=True)
            ranges[entry, ((edge == sign).cumsum(-1) - 1)[entry, place], at] = place
        whole = torch.zeros(count, 2, dtype=torch.long, device="cpu")
        whole[0, 1] = grid.m
        found = torch.where(queries[:, :, None, None], ranges[:, None], whole)
        return spans.tidy(found[..., 0], found[..., 1]).int()

    def starts(self, grid: Grid) -> None:
        return None  # what is forbidden on trial divides no sequences

    def check(self, grid: Grid) -> None:
        for name, selection, size in (("queries", self.queries, grid.n), ("keys", self.keys, grid.m)):
            if selection.shape[0] not in (1, grid.b) or selection.shape[1] != size:
                raise ShapeError(
                    f"mask=Forbidden({name}=…): shape {tuple(selection.shape)}, expected ({size},) or "
                    f"({grid.b}, {size})"
                )
        if self.heads is not None and len(self.heads) != grid.h:
            raise ShapeError(f"mask=Forbidden(heads=…): {len(self.heads)} entries for {grid.h} query heads")

    @property
    def _everywhere(self) -> bool:
        return self.heads is None or bool(self.heads.all())

    @property
    def _anywhere(self) -> bool:
        return self.heads is None or bool(self.heads.any())

    def part(self, rows: Span, cols: Span, grid: Grid) -> Mask:
        found: Mask = self.cut({"n": Section(*rows, grid.n), "m": Section(*cols, grid.m)})
        return found

    def __repr__(self) -> str:
        heads = "" if self.heads is None else f", heads {self.heads.nonzero().flatten().tolist()}"
        queries, keys = (int(one.any(0).sum()) for one in (self.queries, self.keys))
        return f"Forbidden({queries} queries × {keys} keys{heads})"


def _selection(name: str, values: Sequence[bool] | Tensor, most: int) -> Tensor:
    """Boolean [size], or [b or 1, size] if `most` is 2."""
    found = torch.as_tensor(values, device="cpu") if not isinstance(values, Tensor) else values
    if found.dtype != torch.bool:
        raise DTypeError(f"Forbidden({name}=…): expected a boolean tensor, got {found.dtype}")
    if not 1 <= found.ndim <= most:
        expected = "[size]" if most == 1 else "[size] or [batch, size]"
        raise ShapeError(f"Forbidden({name}=…): expected {expected}, got shape {tuple(found.shape)}")
    return found[None] if found.ndim < most else found
