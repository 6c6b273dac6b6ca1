"""Attention of selected (query, head) pairs only, for sparse mixtures of heads, and its masks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.cache import Cache
from headwise.fields import Array
from headwise.kernels.compiling import eager
from headwise.kernels.graph import listed
from headwise.map import AttentionMap
from headwise.map.attention import attend_to, nonfinite
from headwise.masks import Everything, Grid, Mask, Span, State, spans
from headwise.masks.grid import NO_GAP
from headwise.nn.base import normed, split
from headwise.nn.gated_output import Gates
from headwise.nn.steps import rotated
from headwise.rule import Rule


class Picked(Mask):
    """The rows of another mask over `grid` that were selected for its heads [b, i]: entry (b, i) of this mask's grid
    has one head, m keys, and as row r the query `positions[b, i, r]`, increasing."""

    holds = None

    def __init__(self, mask: Mask, grid: Grid, heads: Tensor, positions: Tensor) -> None:
        self.mask, self.grid, self.heads = mask, grid, heads
        self.positions = positions
        self._first = listed(positions.amin((0, 1)))  # of each row over all entries
        self._last = listed(positions.amax((0, 1)))

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        positions = self.positions[:, :, rows.to(self.positions.device)]
        start, stop = int(positions.min()), int(positions.max()) + 1
        whole = self.mask.allowed(torch.arange(start, stop, device=cols.device), cols, self.grid)
        batch = torch.arange(whole.shape[0], device=cols.device)[:, None, None]
        head = self.heads[:, :, None] if whole.shape[1] > 1 else 0
        tile = whole[batch, head, positions - start]  # [b, i, r, cols]
        return tile.reshape(-1, 1, len(rows), len(cols))

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        start = min(self._first[rows.start : rows.stop])
        stop = max(self._last[rows.start : rows.stop]) + 1
        return self.mask.state(Span(start, stop), cols, self.grid)

    def spans(self, grid: Grid) -> Tensor | None:
        found = self.mask.spans(self.grid)
        if found is None:
            return None
        b, i, c = self.positions.shape
        batch = torch.arange(b, device="cpu")[:, None, None] if len(found) > 1 else 0
        return found[batch, self.positions.cpu()].reshape(b * i, c, *found.shape[2:])

    def starts(self, grid: Grid) -> Tensor | None:
        found = self.mask.starts(self.grid)
        return found if found is None or len(found) == 1 else found.repeat_interleave(self.positions.shape[1], 0)

    def check(self, grid: Grid) -> None:
        self.mask.check(self.grid)

    def __repr__(self) -> str:
        return f"Picked({self.mask!r}, <{self.positions.shape[-1]} of {self.grid.n} queries>)"


@dataclass(frozen=True, eq=False)
class Rows(Mask):
    """Only the queries of `rows`, boolean [b, h, n]; the others are fully masked."""

    rows: Tensor
    holds = {"rows": Array("bhn")}

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        return self.rows.to(rows.device)[:, :, rows, None].expand(-1, -1, -1, len(cols))

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        part = self.rows[:, :, rows.start : rows.stop]
        if not bool(part.any()):
            return State.EMPTY
        return State.FULL if bool(part.all()) else State.MIXED

    def starts(self, grid: Grid) -> None:
        return None  # what is chosen divides no sequences

    def __repr__(self) -> str:
        return f"Rows(<{int(self.rows.sum())} of {self.rows.numel()}>)"


class Pairs(Mask):
    """Another mask over `grid` of selected queries, `positions` [b·i, c] (−1: none, fully masked), and keys [b·i, m']
    (increasing; `grid.m`: none). Entry (b, j) of this mask's grid has one head, `heads[j]` of the other mask."""

    holds = None

    def __init__(self, mask: Mask, grid: Grid, heads: Tensor, positions: Tensor, keys: Tensor) -> None:
        self.mask, self.grid, self.heads, self.positions, self.keys = mask, grid, heads, positions, keys

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        at = self.positions[:, rows.to(self.positions.device)].to(cols.device)
        key = self.keys[:, cols.to(self.keys.device)].to(cols.device)
        start, stop = int(at.clamp_min(0).amin()), int(at.amax()) + 1
        if stop <= start:
            return torch.zeros(len(at), 1, *at.shape[1:], key.shape[1], dtype=torch.bool, device=cols.device)
        query = torch.arange(start, stop, device=cols.device)
        whole = self.mask.allowed(query, torch.arange(self.grid.m, device=cols.device), self.grid)
        cell = torch.arange(len(at), device=cols.device)
        batch = cell // len(self.heads) if len(whole) > 1 else 0 * cell
        head = self.heads.to(cols.device)[cell % len(self.heads)] if whole.shape[1] > 1 else 0 * cell
        row, col = (at - start).clamp_min(0), key.clamp_max(self.grid.m - 1)
        tile = whole[batch[:, None, None], head[:, None, None], row[:, :, None], col[:, None]]
        return (tile & (at >= 0)[..., None] & (key < self.grid.m)[:, None])[:, None]

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        return State.MIXED

    def spans(self, grid: Grid) -> Tensor | None:
        found = self.mask.spans(self.grid)
        if found is None:
            return None
        at, keys = self.positions.cpu(), self.keys.cpu().contiguous()
        batch = torch.arange(len(at))[:, None] // len(self.heads) if len(found) > 1 else 0
        ends = found[batch, at.clamp_min(0)].long() * (at >= 0)[..., None, None]  # [b·i, c, K, 2]
        ends = torch.searchsorted(keys, ends.flatten(1)).view(ends.shape).int()
        return spans.tidy(ends[..., 0], ends[..., 1])

    def starts(self, grid: Grid) -> Tensor:
        keys = self.keys.cpu().contiguous()
        whole = self.mask.starts(self.grid)
        whole = torch.zeros(1, self.grid.m, dtype=torch.long) if whole is None else whole
        key = keys.clamp_max(self.grid.m - 1)
        start = whole.repeat_interleave(len(keys) // len(whole), 0).gather(1, key)
        column = torch.searchsorted(keys, start).clamp_max(grid.m - 1)
        there = (keys.gather(1, column) == start) & (keys < self.grid.m)
        return torch.where(there, column, grid.m)  # the first key is not among the selected ones: no weight

    def check(self, grid: Grid) -> None:
        self.mask.check(self.grid)

    def __repr__(self) -> str:
        return f"Pairs({self.mask!r}, <{self.positions.shape[-1]} of {self.grid.n} queries>)"


@dataclass(frozen=True, eq=False)
class Columns(Mask):
    """Only the keys of `columns`, boolean [b, h, m]."""

    columns: Tensor
    holds = {"columns": Array("bhm")}

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        return self.columns.to(cols.device)[:, :, None, cols].expand(-1, -1, len(rows), -1)

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        part = self.columns[:, :, cols.start : cols.stop]
        if not bool(part.any()):
            return State.EMPTY
        return State.FULL if bool(part.all()) else State.MIXED

    def starts(self, grid: Grid) -> None:
        return None  # what is chosen divides no sequences

    def __repr__(self) -> str:
        return f"Columns(<{int(self.columns.sum())} of {self.columns.numel()}>)"


SIMILAR = 0.75  # heads whose loads are within this factor are computed in one call, padded to the largest

Result = tuple[Tensor, AttentionMap | None, Tensor | None]  # y, map, concat


@dataclass(frozen=True)
class SparseCall:
    """One call of a sparse mixture: `layer` is a `ProjectedLayer` with an `o_proj`, `options` are those of `attend`."""

    layer: Any
    x: Tensor
    source: Tensor
    gates: Gates
    cache: Cache | None
    options: dict[str, Any]
    return_concat: bool


@dataclass(frozen=True)
class Picks:
    """Queries of some heads: `heads` [b, i], and `positions` [b, i, c] among the n queries. A head with fewer than c
    queries repeats its last one, with `filled` [b, i, c] False."""

    heads: Tensor
    positions: Tensor
    filled: Tensor

    @property
    def index(self) -> tuple[Tensor, Tensor, Tensor]:
        """Batch entry, head and position of the filled places, each [filled.sum()]."""
        entry = torch.arange(len(self.heads), device=self.heads.device)[:, None, None]
        whole = entry, self.heads[..., None], self.positions
        entry, heads, positions = (x.expand_as(self.positions)[self.filled] for x in whole)
        return entry, heads, positions


@eager  # the selected heads are known only at run time
def by_sequence(call: SparseCall) -> Result:
    """Compute the same heads for every token of a sequence, with gathered matrices."""
    layer, x = call.layer, call.x
    b, n, h = x.shape[0], x.shape[1], layer.num_heads
    heads = call.gates.chosen[:, 0].nonzero()[:, 1].view(b, -1)  # [b, i], increasing; equally many in each row
    q, k, v = (
        split(_gathered(linear, y, heads, h), heads.shape[1])
        for linear, y in ((layer.q_proj, x), (layer.k_proj, call.source), (layer.v_proj, call.source))
    )
    q, k = layer.apply_rope(normed(q, layer.q_norm), normed(k, layer.k_norm), 0)
    positions = torch.arange(n, device=x.device).expand(*heads.shape, n)
    picks = Picks(heads, positions, torch.ones_like(positions, dtype=torch.bool))
    grid = Grid(b, h, n, k.shape[2])
    out, part = _attend(call, grid, picks, q, k, v)
    out = out * call.gates.weights[:, 0].gather(-1, heads)[..., None, None].to(out.dtype)
    w_o = layer.o_proj.weight.mT.view(h, layer.value_dim, layer.d_model)[heads].flatten(1, 2)  # [b, i·d_v, d_model]
    y = torch.bmm(layer.merge(out, x), w_o)
    y = y if layer.o_proj.bias is None else y + layer.o_proj.bias.to(y.dtype)
    extras = Extras(call, grid, v)
    extras.add(picks, out, part)
    own = torch.arange(b, device=x.device)[:, None], heads
    extras.add_keys(own, k)
    extras.add_values(own, v)
    return y, extras.map(), extras.concat()


@eager  # the number of queries per head is known only at run time
def by_token(call: SparseCall) -> Result:
    """Compute each query for its own heads: queries are grouped by head, and heads with similar loads share a call."""
    layer, x = call.layer, call.x
    b, n, h = x.shape[0], x.shape[1], layer.num_heads
    group, h_kv = h // layer.num_kv_heads, layer.num_kv_heads
    loads = listed(call.gates.chosen.sum(1).amax(0))  # of each head, in the batch entry that uses it most
    start = 0 if call.cache is None else call.cache.seen
    used = list(range(h_kv))
    if call.cache is None:  # a cache must hold all keys, as a later token may select any head
        used = [j for j in used if any(loads[j * group : (j + 1) * group])]
    k = normed(split(_of_heads(layer.k_proj, call.source, used, h_kv), len(used)), layer.k_norm)
    k = k if layer.rotary is None else layer.rotary(k, start)
    v = split(_of_heads(layer.v_proj, call.source, used, h_kv), len(used))
    if call.cache is not None:
        k, v = call.cache.append(k, v)
    grid = Grid(b, h, n, k.shape[2], gap=call.options.get("gap", NO_GAP))
    extras = Extras(call, grid, v)
    extras.add_keys((slice(None), used), k)
    extras.add_values((slice(None), used), v)
    angles = None if layer.rotary is None else layer.rotary.table(k, n, start)  # of the queries
    w_q, b_q = heads_of(layer.q_proj, h)
    w_o = layer.o_proj.weight.view(layer.d_model, h, layer.value_dim)
    first = torch.arange(b, device=x.device)[:, None, None] * n  # row of each entry
    flat, gates = x.reshape(b * n, -1), call.gates.weights.reshape(b * n, h)
    y = v.new_zeros(b * n, layer.d_model)
    for members in buckets(loads, n):
        picks = _picks(call.gates.chosen, members, max(loads[i] for i in members))
        at, rows = picks.positions, first + picks.positions
        tokens = [flat.index_select(0, rows[:, j].flatten()).view(b, -1, flat.shape[1]) for j in range(len(members))]
        # [b, i, c, d_k]
        q = torch.stack([F.linear(x, w_q[i], b_q[i]) for i, x in zip(members, tokens, strict=True)], 1)
        q = normed(q, layer.q_norm)
        q = q if angles is None else rotated(q, *(part[at] for part in angles))
        of = [used.index(i // group) for i in members]
        own = of == list(range(len(used)))
        out, part = _attend(call, grid, picks, q, k if own else k[:, of], v if own else v[:, of])
        out = out.masked_fill(~picks.filled[..., None], 0.0)  # a repeated query may be NaN, and 0 · NaN too
        weights = gates[rows, picks.heads[..., None]] * picks.filled
        out = out * weights[..., None].to(out.dtype)
        for j, i in enumerate(members):
            head = F.linear(out[:, j], w_o[:, i])  # [b, c, d_model]
            y.index_add_(0, rows[:, j].flatten(), head.flatten(0, 1).to(y.dtype))
        extras.add(picks, out, part)
    y = y if layer.o_proj.bias is None else y + layer.o_proj.bias.to(y.dtype)
    return y.view(b, n, -1), extras.map(), extras.concat()


def without_data(call: SparseCall) -> Result:
    """Compute all heads, for tensors that only have shapes: which heads were selected is not known."""
    layer = call.layer
    q, k, v = layer.project(call.x, call.source)
    q, k = layer.apply_rope(q, k, 0 if call.cache is None else call.cache.seen)
    if call.cache is not None:
        k, v = call.cache.append(k, v)
    out, amap = attend_to(q.to(v.dtype), k.to(v.dtype), v, **call.options)
    concat = layer.merge(out * call.gates.weights.mT[..., None].to(out.dtype), call.x)
    return layer.output(concat), amap, concat


def _attend(
    call: SparseCall, grid: Grid, picks: Picks, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, AttentionMap | None]:
    """Attend from q [b, i, c, d] to keys and values [b, i, m, d] of the same heads; return [b, i, c, d_v] and the map
    of these rows, None without `return_map`."""
    b, i, c, _ = q.shape
    mask = call.options["mask"] or Everything()
    mask.check(grid)
    q, k = q.to(v.dtype), k.to(v.dtype)
    first = torch.zeros(min(1, grid.n), dtype=torch.long, device="cpu")
    whole = picks.positions.shape[-1] == grid.n and bool(picks.filled.all())  # all queries, in order
    if whole and mask.allowed(first, first[: grid.m], grid).shape[1] == 1:  # and the mask of all heads is one
        return attend_to(q, k, v, **call.options)
    # Each head has queries of its own: heads become batch entries, and the mask maps rows to positions.
    options = dict(call.options)
    if mask != Everything():
        options["mask"] = Picked(mask, grid, picks.heads, picks.positions)
    out, part = attend_to(*(x.reshape(b * i, 1, *x.shape[2:]) for x in (q, k, v)), **options)
    return out.view(b, i, c, -1), part


class Extras:
    """The map and the concatenation of all h heads, assembled from the computed parts."""

    def __init__(self, call: SparseCall, grid: Grid, v: Tensor, keys: Tensor | None = None) -> None:
        """keys: boolean [b, m, h], which keys exist in each head; None for all."""
        self._call, self._grid, self._keys = call, grid, keys
        self._part: AttentionMap | None = None
        b, h, n, m = grid
        layer = call.layer
        wide = torch.promote_types(v.dtype, torch.float32)
        if call.options["return_map"]:
            self._q, self._k = (
                v.new_zeros(b, h, n, layer.head_dim),
                v.new_zeros(b, layer.num_kv_heads, m, layer.head_dim),
            )
            # A head that a query did not select is fully masked for it: log-sum-exp −∞, weights 0.
            self._lse = torch.full((b, h, n), -torch.inf, dtype=wide, device=v.device)
            self._bad_values = torch.zeros(b, layer.num_kv_heads, dtype=torch.long, device=v.device)
        self._concat = v.new_zeros(b, n, h, layer.value_dim) if call.return_concat else None

    def add_keys(self, at: Any, k: Tensor) -> None:
        """Set the keys of the heads at an index of [b, h_kv]."""
        if self._call.options["return_map"]:
            self._k[at] = k.detach().to(self._k.dtype)

    def add_values(self, at: Any, v: Tensor) -> None:
        """Count what is not finite among the values […, m, d_v] of the heads at an index of [b, h_kv]."""
        if self._call.options["return_map"]:
            self._bad_values[at] = nonfinite(v)

    def add(self, picks: Picks, out: Tensor, part: AttentionMap | None) -> None:
        """Set the weighted output [b, i, c, d_v] of some heads, and the map of their rows."""
        if part is None and self._concat is None:
            return
        entry, heads, positions = picks.index
        if part is not None:
            self._part = part
            self._q[entry, heads, positions] = part.q.view(*picks.filled.shape, -1)[picks.filled]
            self._lse[entry, heads, positions] = part.lse.view(picks.filled.shape)[picks.filled]
        if self._concat is not None:
            self._concat = self._concat.index_put((entry, positions, heads), out[picks.filled])

    def map(self) -> AttentionMap | None:
        """Return the map [b, h, n, m]; only selected pairs have weights."""
        if self._part is None:
            return None
        b, h, n, _ = self._grid
        rows = Rows(self._call.gates.chosen.transpose(1, 2).expand(b, h, n))
        mask = self._call.options["mask"]
        mask = rows if mask is None else mask & rows
        mask = mask if self._keys is None else mask & Columns(self._keys.transpose(1, 2))
        rule = Rule(mask, self._part.rule.scale, self._grid)
        part = self._part
        return AttentionMap(
            self._q, self._k, self._lse, rule, kernel=part.kernel, named=part.named, refusals=part.refusals,
            nonfinite_values=self._bad_values if bool(self._bad_values.any()) else None,
        )  # fmt: skip

    def concat(self) -> Tensor | None:
        """Return [b, n, h·d_v], zeros where a head was not selected."""
        return None if self._concat is None else self._concat.flatten(2)


def heads_of(linear: nn.Linear, heads: int) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
    """Return the weight [d, in] and the bias [d] of each head as views."""
    weights = linear.weight.view(heads, -1, linear.in_features).unbind()
    return weights, [None] * heads if linear.bias is None else linear.bias.view(heads, -1).unbind()


def _stacked(linear: nn.Linear, heads: int) -> tuple[Tensor, Tensor | None]:
    """Return the weight [heads, d, in] and the bias [heads, d] as views."""
    bias = None if linear.bias is None else linear.bias.view(heads, -1)
    return linear.weight.view(heads, -1, linear.in_features), bias


def _of_heads(linear: nn.Linear, x: Tensor, which: list[int], heads: int) -> Tensor:
    """Return linear(x) [b, n, len(which)·d] of some heads."""
    if len(which) == heads:
        return linear(x)
    weight, bias = _stacked(linear, heads)
    return F.linear(x, weight[which].flatten(0, 1), None if bias is None else bias[which].flatten())


def _gathered(linear: nn.Linear, x: Tensor, which: Tensor, heads: int) -> Tensor:
    """Return linear(x) [b, n, i·d] of the heads `which` [b, i], which differ between batch entries."""
    weight, bias = _stacked(linear, heads)
    y = torch.bmm(x, weight[which].flatten(1, 2).mT)
    return y if bias is None else y + bias[which].flatten(1)[:, None].to(y.dtype)


def buckets(loads: list[int], full: int) -> list[list[int]]:
    """Group the heads that are used by similar load; heads used by all queries form groups of their own."""
    buckets: list[list[int]] = []
    for i in sorted((i for i, load in enumerate(loads) if load > 0), key=lambda i: -loads[i]):
        first = loads[buckets[-1][0]] if buckets else 0
        if buckets and loads[i] >= first * (1.0 if first == full else SIMILAR):
            buckets[-1].append(i)
        else:
            buckets.append([i])
    return [sorted(bucket) for bucket in buckets]


def _picks(chosen: Tensor, members: list[int], size: int) -> Picks:
    """Return the queries that selected each of some heads, from chosen [b, n, h]: `size` places per head."""
    selected = chosen[:, :, members].transpose(1, 2)  # [b, i, n]
    order = (~selected).to(torch.uint8).argsort(dim=-1, stable=True)[..., :size]  # selected queries first, in order
    count = selected.sum(-1, keepdim=True)
    place = torch.arange(size, device=chosen.device)
    positions = order.gather(-1, torch.minimum(place, (count - 1).clamp_min(0)))
    heads = torch.tensor(members, device=chosen.device).expand(len(chosen), -1)
    return Picks(heads, positions, place < count)
