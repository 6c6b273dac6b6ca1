"""The shares of each read of a map, and of measures, in `headwise.map.gradients`: their derivatives on a tile."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, cast

import torch
from torch import Tensor

from headwise.errors import KernelError
from headwise.kernels.reads import Matrix, TileReads
from headwise.map.gradients import Leaf, Share, Shares, Sweep
from headwise.masks import Span
from headwise.rule import grouped, grouped_t
from headwise.rule.tiles import scores_at
from headwise.stats import Measure, Measurements, Statistic
from headwise.stats.base import RowMeasure, RowState, tensors_of, with_tensors


class LogSums(Shares):
    """Of the log-sum-exp itself, [b, h, n]."""

    def rows(self, rows: Span, lse: Tensor, sweep: Sweep) -> Tensor | None:
        return self.grad[:, :, slice(*rows)]

    def of(self, tiles: tuple[Leaf, ...]) -> list[Share]:
        return [Share(None)]


class Entries(Shares):
    """Of weights at some indices [batch, heads, rows, cols], or of their logarithms."""

    def __init__(self, batch: range, heads: range, rows: range, cols: range, *, logs: bool = False) -> None:
        self.places, self.logs = (batch, heads, rows, cols), logs

    def reaches(self, rows: Span) -> bool:
        return any(rows.start <= i < rows.stop for i in self.places[2])

    def of(self, tiles: tuple[Leaf, ...]) -> list[Share]:
        return [Share(self.by_weights(tiles[0]))] if self.logs else super().of(tiles)

    def by_weights(self, tile: Leaf) -> Tensor:
        g = tile.lse.new_zeros(tile.shape)
        batch, heads = (torch.tensor(list(x), device=g.device) for x in self.places[:2])
        (i, rows), (j, cols) = (
            _among(given, span, g.device) for given, span in zip(self.places[2:], (tile.rows, tile.cols), strict=True)
        )
        g[batch[:, None, None, None], heads[:, None, None], i[:, None], j] = self.grad[:, :, rows][..., cols]
        return g


def _among(given: range, span: Span, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which of the given indices are in a span: their places in it, and among those given."""
    every = torch.tensor(list(given), dtype=torch.long, device=device)
    (at,) = ((every >= span.start) & (every < span.stop)).nonzero(as_tuple=True)
    return every[at] - span.start, at


class Largest(Shares):
    """Of the largest weights of each row, given their keys [b, h, n, count], −1 for none."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys

    def by_weights(self, tile: Leaf) -> Tensor:
        rows = slice(*tile.rows)
        keys = self.keys[:, :, rows] - tile.cols.start
        inside = (keys >= 0) & (keys < tile.cols.size)
        g = self.grad[:, :, rows] * inside
        return tile.lse.new_zeros(tile.shape).scatter_add_(-1, keys.clamp(0, tile.cols.size - 1), g)


class Received(Shares):
    """Of the weight that each key receives, [b, h, m]."""

    def by_weights(self, tile: Leaf) -> Tensor:
        return self.grad[:, :, None, slice(*tile.cols)]


class Diagonals(Shares):
    """Of the sums along the diagonals of some of the keys, [b, h, n + keys − 1]."""

    def __init__(self, n: int, cols: Span) -> None:
        self.n, self.cols = n, cols

    def by_weights(self, tile: Leaf) -> Tensor | None:
        if not self.cols.start <= tile.cols.start < self.cols.stop:
            return None
        i, j = (torch.arange(*span, device=tile.lse.device) for span in (tile.rows, tile.cols))
        return self.grad[..., j - self.cols.start - i[:, None] + self.n - 1]


class SquareMeans(Shares):
    """Of the mean weight of squares of `cell` × `cell` of a rectangle; count: of their unmasked pairs."""

    def __init__(self, rows: Span, cols: Span, cell: int, count: Tensor) -> None:
        self.at, self.cell, self.count = (rows, cols), cell, count

    def start(self, grad: Tensor, operand: Tensor | None, blocks: Sequence[Span], sweep: Sweep) -> None:
        self.grad = grad / self.count.clamp_min(1)

    def reaches(self, rows: Span) -> bool:
        return rows.start < self.at[0].stop and self.at[0].start < rows.stop

    def by_weights(self, tile: Leaf) -> Tensor:
        return self._spread(self.grad, tile)

    def _spread(self, squares: Tensor, tile: Leaf) -> Tensor:
        """The value of its square for each pair of a tile; 0 for pairs that are in none."""
        i, j = self._squares(tile)
        found = squares[:, :, i.clamp(0, squares.shape[2] - 1)][..., j.clamp(0, squares.shape[3] - 1)]
        return found * ((i >= 0)[:, None] & (j >= 0))

    def _squares(self, tile: Leaf) -> tuple[Tensor, Tensor]:
        """The row and the column of the squares of each row and column of a tile; −1 for none."""
        found = []
        for span, of in zip((tile.rows, tile.cols), self.at, strict=True):
            at = torch.arange(*span, device=tile.lse.device)
            inside = (at >= of.start) & (at < of.stop)
            found.append(torch.where(inside, (at - of.start) // self.cell, -1))
        return found[0], found[1]


class SquareMaxima(SquareMeans):
    """Of the largest weight of squares; equal ones share its gradient, as in torch.amax."""

    def start(self, grad: Tensor, operand: Tensor | None, blocks: Sequence[Span], sweep: Sweep) -> None:
        self.largest, ties = torch.zeros_like(grad), torch.zeros_like(grad)
        for which in ("largest", "ties"):
            for rows in filter(self.reaches, blocks):
                for (tile,) in sweep(rows):
                    if which == "largest":
                        self._join(self.largest, tile, tile.weights, "amax")
                    else:
                        self._join(ties, tile, self._is_largest(tile), "sum")
        self.grad = grad / ties.clamp_min(1)

    def by_weights(self, tile: Leaf) -> Tensor:
        return self._spread(self.grad, tile) * self._is_largest(tile)

    def _is_largest(self, tile: Leaf) -> Tensor:
        # The weights of a tile are the same each time it is computed, up to the rounding of other threads' sums.
        close = 1.0 - 8 * torch.finfo(tile.lse.dtype).eps
        return (tile.weights >= close * self._spread(self.largest, tile)).to(tile.lse)

    def _join(self, into: Tensor, tile: Leaf, x: Tensor, how: str) -> None:
        """Add to the squares, or raise them to, the numbers x [b, h, r, c] of their pairs."""
        i, j = self._squares(tile)
        x = x[:, :, i >= 0][..., j >= 0]
        i, j = i[i >= 0], j[j >= 0]
        if not x.numel():
            return
        wide = into.new_zeros(*x.shape[:3], into.shape[3])
        wide = wide.scatter_reduce(3, j.expand(x.shape), x, how)
        into.scatter_reduce_(2, i[:, None].expand(wide.shape), wide, how)


class Product(Shares):
    """Of weights @ x, [b, h, n, e]; the operand is x [b, h_kv or h, m, e]."""

    def start(self, grad: Tensor, operand: Tensor | None, blocks: Sequence[Span], sweep: Sweep) -> None:
        assert operand is not None
        self.grad, self.x = grad, operand.to(grad.dtype)
        self.learned = torch.zeros_like(self.x)

    def by_weights(self, tile: Leaf) -> Tensor:
        return grouped(self.grad[:, :, slice(*tile.rows)], self.x[:, :, slice(*tile.cols)].mT)

    def add_operand(self, tile: Leaf) -> None:
        assert self.learned is not None
        grad = self.grad[:, :, slice(*tile.rows)]
        self.learned[:, :, slice(*tile.cols)] += grouped_t(tile.weights, grad, self.x.shape[1])


class TransposedProduct(Shares):
    """Of weightsᵀ @ y, [b, h, m, e]; the operand is y [b, h, n, e]."""

    def start(self, grad: Tensor, operand: Tensor | None, blocks: Sequence[Span], sweep: Sweep) -> None:
        assert operand is not None
        self.grad, self.y = grad, operand.to(grad.dtype)
        self.learned = torch.zeros_like(self.y)

    def by_weights(self, tile: Leaf) -> Tensor:
        return grouped(self.y[:, :, slice(*tile.rows)], self.grad[:, :, slice(*tile.cols)].mT)

    def add_operand(self, tile: Leaf) -> None:
        assert self.learned is not None
        self.learned[:, :, slice(*tile.rows)] += grouped(tile.weights, self.grad[:, :, slice(*tile.cols)])


class RowFunctions(Shares):
    """Of functions with a value for each row, [functions, b, h, n]: `RowMeasure`s, or others that have their methods
    `partial` (of a tile of each map), `combine`, `value` and `counted`. Their derivatives are those that autograd finds
    on a tile."""

    def __init__(self, functions: Sequence[Any]) -> None:
        self.functions = functions

    def start(self, grad: Tensor, operand: Tensor | None, blocks: Sequence[Span], sweep: Sweep) -> None:
        wanted = grad.flatten(1).any(1).tolist()
        self.wanted = [(f, x) for f, x, want in zip(self.functions, grad, wanted, strict=True) if want]
        self.depends, self.varies = ([False] * len(self.wanted) for _ in range(2))

    def rows(self, rows: Span, lse: Tensor, sweep: Sweep) -> Tensor | None:
        """Finds the gradients of the partials of each tile, `by_partial`, through what joins them."""
        plain = all(_is_sum(f) for f, _ in self.wanted)
        parts: list[list[Tensor]] = [[] for _ in self.wanted]
        starts = []
        for tiles in () if plain else sweep(rows):
            starts.append(tiles[0].cols.start)
            for (f, _), of_tiles in zip(self.wanted, parts, strict=True):
                of_tiles.append(f.partial(*tiles))
        direct = torch.zeros_like(lse)
        self.by_partial: list[Callable[[int], Tensor]] = []
        for at, (f, grad) in enumerate(self.wanted):
            of_rows = grad[:, :, slice(*rows)].masked_fill(lse == -torch.inf, 0.0)
            if plain or not starts:
                self.by_partial.append(lambda _, of_rows=of_rows: of_rows)  # type: ignore[misc]
                continue
            of_lse, of_parts = _through(f, parts[at], lse, of_rows)
            if of_lse is not None:
                direct += of_lse
                self.depends[at] = True
            found = dict(zip(starts, of_parts, strict=True))
            self.by_partial.append(found.__getitem__)
        return direct

    def of(self, tiles: tuple[Leaf, ...]) -> list[Share]:
        leaves = [x for tile in tiles for x in tile.leaves()]
        outputs, grads = [], []
        with torch.enable_grad():
            for at, (f, _) in enumerate(self.wanted):
                part = f.partial(*tiles)
                if part.requires_grad:
                    self.depends[at] = True
                    outputs.append(part)
                    grads.append(self.by_partial[at](tiles[0].cols.start).to(part.dtype))
                elif not self.varies[at]:
                    self.varies[at] = bool(part.any())
        if not outputs:
            return [Share(None) for _ in tiles]
        found = torch.autograd.grad(outputs, leaves, grads, allow_unused=True)
        return [Share(*found[at : at + 3]) for at in range(0, len(found), 3)]

    def done(self) -> None:
        for (f, _), depends, varies in zip(self.wanted, self.depends, self.varies, strict=True):
            if varies and not depends:
                raise KernelError(
                    "measure {name!r} has no gradient: it counts, or is otherwise not computed from the weights by "
                    "operations that autograd can differentiate; read it without a gradient (.detach())",
                    name=f.name,
                )


def _is_sum(f: Any) -> bool:
    """Whether the value of a row is the sum of its partials, and no row is left out that is not fully masked."""
    kind = type(f)
    return isinstance(f, RowMeasure) and all(
        getattr(kind, name) is getattr(RowMeasure, name) for name in ("combine", "value", "counted")
    )


def _through(f: Any, parts: list[Tensor], lse: Tensor, grad: Tensor) -> tuple[Tensor | None, list[Tensor]]:
    """The gradients by the log-sum-exp and by each partial of a block of rows, from that of the rows' values."""
    with torch.enable_grad():
        lse = lse.detach().requires_grad_()
        leaves = [part.detach().requires_grad_() for part in parts]
        total = leaves[0]
        for leaf in leaves[1:]:
            total = f.combine(total, leaf)
        value, counted = f.value(total, lse), f.counted(total, lse)
        found: Sequence[Tensor | None]
        if value.requires_grad:
            given = grad.masked_fill(~counted, 0.0).to(value.dtype)
            of_lse, *found = torch.autograd.grad(value, [lse, *leaves], given, allow_unused=True)
        else:
            of_lse, found = None, [None] * len(leaves)
    blank = ~counted
    of_lse = None if of_lse is None else of_lse.masked_fill(blank, 0.0)
    return of_lse, [
        torch.zeros_like(part) if x is None else x.masked_fill(blank if x.ndim == 3 else blank[..., None], 0.0)
        for part, x in zip(parts, found, strict=True)
    ]


class StateSums(Shares):
    """Of the state of a measure that is no `RowMeasure`, as one vector: its tensors, whose numbers are sums over tiles.

    total: the numbers of the state itself; a measure whose numbers are no sums of these has no gradient.
    """

    def __init__(self, measure: Measure, total: Tensor) -> None:
        self.measure, self.total = measure, total

    def start(self, grad: Tensor, operand: Tensor | None, blocks: Sequence[Span], sweep: Sweep) -> None:
        self.grad, self.sum, self.depends = grad, torch.zeros_like(self.total), False
        for rows in blocks:
            for (tile,) in sweep(rows):
                self.sum += vector(self._state(tile))
        if not torch.allclose(self.sum, self.total, rtol=1e-3, atol=1e-5):
            raise KernelError(
                "measure {name!r} has no gradient: its state is not the sum of those of tiles; make it a RowMeasure, "
                "or read it without a gradient (.detach())",
                name=self.measure.name,
            )

    def _state(self, tile: Leaf) -> Any:
        state = self.measure.start(tile.rule.grid, tile.lse.detach())
        self.measure.update(state, tile)
        return state

    def of(self, tiles: tuple[Leaf, ...]) -> list[Share]:
        with torch.enable_grad():
            leaves = tiles[0].leaves()
            state = vector(self._state(tiles[0]))
        if not state.requires_grad:
            return [Share(None)]
        return [Share(*torch.autograd.grad(state, leaves, self.grad.to(state.dtype), allow_unused=True))]


class LearnedMeasurements(Measurements):
    """Measurements whose values, and those of rows, are nodes of the graph."""

    by_name: Mapping[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.by_name[name]

    def only(self, measures: Sequence[Measure]) -> "Measurements":
        found = cast(LearnedMeasurements, super().only(measures))
        names = {measure.name for measure in measures}
        found.by_name, found.rows = (
            {name: x for name, x in numbers.items() if name in names} for numbers in (self.by_name, self.rows)
        )
        return found

    def detach(self) -> Measurements:
        """The numbers without gradients."""
        found = Measurements(self._measures, list(self.states.values()), self.nonfinite)
        found.nonfinite_values = self.nonfinite_values
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copy, (self.detach(),)  # a copy is no part of the graph, as of a map

    def _numbers(self) -> dict[str, Tensor]:
        return {name: x.detach() for name, x in super()._numbers().items()}  # to be shown


LARGEST_JOINT = 24.0  # log-sum-exps in float32


def resolved(of: Matrix) -> bool:
    """Whether gradients may be computed from the log-sum-exp as it is, by kernels; of larger scores by tiles, in
    float64."""
    whole = of.whole
    return whole is not None and (
        of.lse.dtype == torch.float64 or (whole.lse_size <= LARGEST_JOINT and not whole.cancels)
    )


def joint_rows(
    wanted: Sequence[Measure], given: Mapping[Statistic, Tensor], lse: Tensor, of: Matrix
) -> dict[str, Tensor]:
    """The values of rows of the measures that follow from these statistics and the log-sum-exp, all with the graph of
    the call: their gradients are computed in its backward pass (`headwise.kernels.joint`). None of large scores, which
    tiles compute in float64."""
    found: dict[str, Tensor] = {}
    rule = of.rule
    if not resolved(of):
        return found
    statistics = {s: x for s, x in given.items() if x.requires_grad}
    sinks = rule.terms(lse[..., :0]).sinks is not None  # whose share of a row has a gradient too
    for m in wanted:
        if not isinstance(m, RowMeasure) or (type(m).update, type(m).take) != (RowMeasure.update, RowMeasure.take):
            continue
        needed = m.needs(rule)
        if needed is None or any(s not in statistics for s in needed) or (sinks and not (needed or m.row_value(rule))):
            continue
        value, counted = m.row_values(statistics, lse, rule)
        if value.requires_grad:
            counted = lse != -torch.inf if counted is None else counted
            found[m.name] = value.masked_fill(~counted, 0.0)
    return found


def with_gradients(
    found: Measurements, wanted: Sequence[Measure], lse: Tensor, attach: Callable[[Tensor, Shares], Tensor],
    joint: Mapping[str, Tensor],
) -> Measurements:  # fmt: skip
    """Measurements with gradients, of those whose rows have been kept. joint: those of `joint_rows`."""
    result, states = LearnedMeasurements(wanted, list(found.states.values()), found.nonfinite), found.states
    values: dict[str, Tensor] = {}
    result.nonfinite_values, result.by_name = found.nonfinite_values, values
    by_rows = [m for m in wanted if isinstance(m, RowMeasure) and type(m).update is RowMeasure.update]
    by_tiles = [m for m in by_rows if m.name not in joint]
    result.rows = dict(joint)
    if by_tiles:
        stacked = attach(torch.stack([found.rows[m.name] for m in by_tiles]), RowFunctions(by_tiles))
        result.rows |= {m.name: x for m, x in zip(by_tiles, stacked, strict=True)}
    values |= {m.name: _of_rows(m, result.rows[m.name], states[m.name], lse) for m in by_rows}
    for m in wanted:
        if m.name not in values:
            numbers = attach(total := vector(states[m.name]), StateSums(m, total))
            values[m.name] = m.finish(with_tensors(states[m.name], of_vector(states[m.name], numbers)))
    return result


def _of_rows(measure: RowMeasure, rows: Tensor, state: RowState, lse: Tensor) -> Tensor:
    """The number per head, [b, h], of the values of rows, in their dtype; state: what they add up to."""
    if measure.reduce == "max":
        # The mean of those that are the largest, which thus share its gradient; −∞ where no row counts.
        largest = (rows.detach().double() == state.total[..., None]) & (lse != -torch.inf)
        total = (rows * largest).double().sum(-1) / largest.sum(-1).clamp_min(1)
    else:
        total = rows.double().sum(-1)
    if type(measure).finish is not RowMeasure.finish:
        return measure.finish(RowState(total, state.count))
    return (total if measure.reduce == "max" else total / state.count.clamp_min(1)).to(rows.dtype)


def log_weights(of: Matrix, batch: range, heads: range, rows: range, cols: range) -> Tensor:
    """ln of the weights at these indices, exact up to the rounding of the scores; −∞ where masked."""
    if not rows:
        return scores_at(*of[:4], batch, heads, rows, cols, less_lse=True)
    first = min(rows)
    exact = TileReads().exact(of.part(range(first, max(rows) + 1), range(of.rule.grid.m)))
    there = range(rows.start - first, rows.stop - first, rows.step)
    return scores_at(*exact[:4], batch, heads, there, cols, less_lse=True).to(of.lse.dtype)


def vector(state: Any) -> Tensor:
    """The tensors of a state as one vector in float64."""
    return torch.cat([x.double().flatten() for x in tensors_of(state)])


def of_vector(state: Any, numbers: Tensor) -> Callable[[Tensor], Tensor]:
    """What `with_tensors` takes to put the numbers of a vector into a state."""
    parts = iter(numbers.split([x.numel() for x in tensors_of(state)]))
    return lambda x: cast(Tensor, next(parts).view(x.shape).to(x.dtype))
