"""How information mixes across layers: attention rollout, as a product of maps that are never stored, and attention
flow, the maximum flow from input tokens to a position with weights as capacities.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headwise.analysis.checks import checked_maps
from headwise.errors import ConfigError, ShapeError, not_installed, whole_number
from headwise.map import AttentionMap
from headwise.masks import real_tokens
from headwise.rule import compute


class Rollout:
    """R = Ã_L ⋯ Ã_2 Ã_1 with Ã_l = (1 − r)·Σ_h w_h A_lh + r·I, an n × n matrix for each batch entry that is applied but
    never stored: R_ij is the share of token j at position i after all layers. Returned by `rollout`.

    `R @ x` and `R.T @ y` compute one product with each layer's map; memory is O(heads · n) for each column of x.
    """

    def __init__(self, layers: Sequence["Mixing"], residual: float) -> None:
        self._layers, self._residual = layers, residual

    @property
    def shape(self) -> tuple[int, int, int]:
        """(b, n, n)"""
        b, _, n, _ = self._layers[0].map.shape
        return b, n, n

    @property
    def T(self) -> "TransposedRollout":
        """The transpose, for `rollout(maps).T @ y`."""
        return TransposedRollout(self)

    def __matmul__(self, x: Tensor) -> Tensor:
        """R @ x for x [n], [n, e] or [b, n, e]: [b, n] or [b, n, e]."""
        return self._through(x, transposed=False)

    def row(self, i: int) -> Tensor:
        """The share of each input token at position i, [b, n]. Negative i counts from the end."""
        n, number = self.shape[1], whole_number(i)
        if number is None or not -n <= number < n:
            raise IndexError(f"rollout: position {i!r} is out of range for {n}")
        one = self._layers[0].map.lse.new_zeros(n)
        one[number] = 1.0
        return self.T @ one

    def __repr__(self) -> str:
        b, n, _ = self.shape
        return f"Rollout({len(self._layers)} layers, {b} × {n} × {n}, residual {self._residual:g}; not stored)"

    @torch.no_grad()
    def _through(self, x: Tensor, *, transposed: bool) -> Tensor:
        b, n, _ = self.shape
        given = tuple(x.shape)
        wide = x[:, None] if x.ndim == 1 else x
        wide = wide[None] if wide.ndim == 2 else wide
        if wide.ndim != 3 or wide.shape[0] not in (1, b) or wide.shape[1] != n:
            raise ShapeError(f"rollout @ x: x has shape {given}, expected ({n},), ({n}, e) or ({b}, {n}, e)")
        wide = wide.detach().expand(b, -1, -1)
        for layer in reversed(self._layers) if transposed else self._layers:
            wide = wide.to(layer.map.lse)  # layers may differ in dtype and device
            mixed = layer.transposed_times(wide) if transposed else layer.times(wide)
            wide = self._residual * wide + (1 - self._residual) * mixed
        return wide[..., 0] if x.ndim == 1 else wide


class TransposedRollout:
    """Rᵀ: the positions that the information of each input token reaches."""

    def __init__(self, whole: Rollout) -> None:
        self._whole = whole

    @property
    def shape(self) -> tuple[int, int, int]:
        """(b, n, n)"""
        return self._whole.shape

    @property
    def T(self) -> Rollout:
        """The rollout itself."""
        return self._whole

    def __matmul__(self, y: Tensor) -> Tensor:
        """Rᵀ @ y for y [n], [n, e] or [b, n, e]: [b, n] or [b, n, e]."""
        return self._whole._through(y, transposed=True)


@dataclass(frozen=True)
class Mixing:
    """How one layer mixes tokens: M = D⁻¹ Σ_h w_h A_h diag(u_h), never stored; rows whose sum is 0 are 0."""

    map: AttentionMap
    weights: Tensor  # w [h], with sum 1
    norms: Tensor | None  # u [b, h, n], or None for ones
    total: Tensor | None  # D, the sums of the rows [b, n], where u is given

    @classmethod
    def of(cls, amap: AttentionMap, weights: Tensor, norms: Tensor | None) -> "Mixing":
        """Make one, with its row sums."""
        if norms is None:
            return cls(amap, weights, None, None)
        sums = torch.einsum("h,bhn->bn", weights.to(amap.lse), (amap @ norms[..., None])[..., 0])
        return cls(amap, weights, norms, torch.where(sums > 0, sums, torch.inf))

    def times(self, x: Tensor) -> Tensor:
        """M @ x for x [b, n, e]."""
        own = x[:, None] if self.norms is None else x[:, None] * self.norms[..., None]
        mixed = torch.einsum("h,bhne->bne", self.weights.to(x), self.map @ own)
        return mixed if self.total is None else mixed / self.total[..., None]

    def transposed_times(self, y: Tensor) -> Tensor:
        """Mᵀ @ y for y [b, n, e]."""
        own = y if self.total is None else y / self.total[..., None]
        mixed = self.map.T @ own[:, None]
        mixed = mixed if self.norms is None else mixed * self.norms[..., None]
        return torch.einsum("h,bhne->bne", self.weights.to(y), mixed)

    def dense(self, batch: int) -> Tensor:
        """M of one batch entry, [n, n] float64 on the CPU."""
        heads = self.map[batch].double().cpu()
        if self.norms is not None and self.total is not None:
            heads = heads * (self.norms[batch, :, None] / self.total[batch, :, None]).double().cpu()
        return torch.einsum("h,hij->ij", self.weights.cpu(), heads)


def mixings(
    maps: Sequence[AttentionMap], head_weights: Sequence[Tensor] | None, value_norms: Sequence[Tensor] | None
) -> list[Mixing]:
    """The layers, checked."""
    layers = checked_maps(maps, square=True)
    if value_norms is not None and len(value_norms) != len(layers):
        raise ShapeError(f"value_norms: {len(value_norms)} layers, expected the {len(layers)} of maps")
    found = []
    for layer, (amap, weights) in enumerate(zip(layers, shares(layers, head_weights), strict=True)):
        norms = None if value_norms is None else value_norms[layer].detach().to(amap.lse)
        if norms is not None:
            b, h, n, _ = amap.shape
            if norms.shape != (b, h, n):
                raise ShapeError(f"value_norms[{layer}]: shape {tuple(norms.shape)}, expected ({b}, {h}, {n})")
            if not bool((torch.isfinite(norms) & (norms >= 0)).all()):
                raise ConfigError(f"value_norms[{layer}]: expected finite numbers ≥ 0")
        found.append(Mixing.of(amap, weights, norms))
    return found


def rollout(
    maps: Sequence[AttentionMap], *, residual: float = 0.5, head_weights: Sequence[Tensor] | None = None,
    value_norms: Sequence[Tensor] | None = None,
) -> Rollout:  # fmt: skip
    """Attention rollout (Abnar & Zuidema 2020, 2005.00928 §2.2): the product of the maps of all layers, each mixed with
    the identity for the residual connection.

        >>> import torch, headwise as hw
        >>> q = torch.randn(1, 2, 500, 8)
        >>> maps = [hw.attend(q, q, q, mask=hw.Causal(), return_map=True)[1] for _ in range(3)]
        >>> flow = hw.analysis.rollout(maps)
        >>> flow.row(-1).shape, (flow @ torch.ones(500)).shape
        (torch.Size([1, 500]), torch.Size([1, 500]))

    Heads are averaged, which is linear, so no matrix is stored. The maximum over heads is not supported, since it
    requires all weights of all heads at once. A rollout is not causal evidence: without `value_norms` it ignores values
    and output projections, and always the feed-forward networks and the angles between contributions.

    Args:
        maps: one for each layer, starting with the first, with as many keys as queries.
        residual: r from 0 to 1, the share of the residual connection; 0.5 in the paper, 0 for attention alone.
        head_weights: for each layer [h] ≥ 0, scaled to sum 1; equal by default.
        value_norms: for each layer [b, h, n] (`value_norms`): weights are multiplied by the norms of what they add, and
            rows scaled to sum 1, so that heads that add more count more (Kobayashi et al. 2020, 2004.10102).
    Returns:
        `Rollout`. Its rows sum to 1, except for fully masked queries and, without `value_norms`, the weight of learned
        sinks.
    Raises:
        ShapeError, ConfigError: naming the argument.
    """
    layers = mixings(maps, head_weights, value_norms)
    if not 0.0 <= residual <= 1.0:
        raise ConfigError(f"residual={residual}: expected 0 to 1")
    return Rollout(layers, float(residual))


def shares(layers: list[AttentionMap], given: Sequence[Tensor] | None) -> list[Tensor]:
    """Weights of the heads of each layer, each summing to 1."""
    if given is None:
        return [torch.full((amap.shape[1],), 1 / amap.shape[1], dtype=torch.float64) for amap in layers]
    if len(given) != len(layers):
        raise ShapeError(f"head_weights: {len(given)} layers, expected the {len(layers)} of maps")
    found = []
    for layer, (amap, weights) in enumerate(zip(layers, given, strict=True)):
        weights = compute(torch.as_tensor(weights).detach()).double()
        if weights.shape != (amap.shape[1],):
            raise ShapeError(f"head_weights[{layer}]: shape {tuple(weights.shape)}, expected ({amap.shape[1]},)")
        if not (bool(torch.isfinite(weights).all()) and bool((weights >= 0).all()) and bool(weights.sum() > 0)):
            raise ConfigError(f"head_weights[{layer}]: expected finite numbers ≥ 0, not all of them 0")
        found.append(weights / weights.sum())
    return found


MOST_EDGES = 1 << 20
WHOLE = 1 << 28  # the capacity 1 as an integer; SciPy's maximum flow takes int32


@torch.no_grad()
def attention_flow(
    maps: Sequence[AttentionMap],
    position: int,
    *,
    batch: int = 0,
    residual: float = 0.5,
    head_weights: Sequence[Tensor] | None = None,
    value_norms: Sequence[Tensor] | None = None,
) -> Tensor:
    """Maximum flow from each input token to one position of the last layer (Abnar & Zuidema 2020, 2005.00928 §2.3):
    [n] float64, one for each column of the batch. Requires SciPy.

    Nodes are positions between layers, capacities the mixed weights (1 − r)·Σ_h w_h A_lh + r·I, as in `rollout`. The
    weights of all layers are in memory at once, and each token requires a maximum flow of its own: it supports up to
    2²⁰ weights over all layers (six layers of 418 tokens). Capacities are rounded to 2⁻²⁸, so the error of a flow is at
    most n·2⁻²⁸.

    Args:
        position: of the last layer, counted from the first token of the batch entry, or from its last one if negative;
            padding is not counted, as far as the mask shows it.
        maps, residual, head_weights, value_norms: as in `rollout`.
    Raises:
        ShapeError, ConfigError: naming the argument; also if the maps are too large.
    """
    try:
        from scipy import sparse
        from scipy.sparse import csgraph
    except ImportError:
        raise not_installed("attention_flow", "scipy") from None
    layers = mixings(maps, head_weights, value_norms)
    b, _, n, _ = layers[0].map.shape
    at, entry = whole_number(position), whole_number(batch)
    if entry is None or not 0 <= entry < b:
        raise ConfigError(f"batch={batch!r}: expected 0 to {b - 1}")
    last = layers[-1].map.rule.only(entry, 0)
    real = real_tokens(last.mask, last.grid)
    tokens = range(n) if real is None else real[0].nonzero().flatten().tolist()
    if at is None or not -len(tokens) <= at < len(tokens):
        raise ConfigError(f"position={position!r}: expected −{len(tokens)} to {len(tokens) - 1}")
    if not 0.0 <= residual <= 1.0:
        raise ConfigError(f"residual={residual}: expected 0 to 1")
    if len(layers) * n * n > MOST_EDGES:
        raise ConfigError(
            f"maps: {len(layers)} layers of {n} × {n} weights, expected at most {MOST_EDGES:,} in all, since maximum "
            f"flow requires each of them; rollout(maps) has no such limit"
        )
    sources, targets, widths = [], [], []
    for k, layer in enumerate(layers):
        mixed = layer.dense(entry) * (1 - residual) + residual * torch.eye(n, dtype=torch.float64)
        query, key = mixed.nonzero().T
        sources.append(k * n + key)  # a key of layer k, at its input
        targets.append((k + 1) * n + query)
        widths.append((mixed[query, key] * WHOLE).round())
    size = (len(layers) + 1) * n
    edges = [torch.cat(part).numpy().astype(np.int32) for part in (widths, sources, targets)]
    graph = sparse.csr_array((edges[0], (edges[1], edges[2])), shape=(size, size), dtype=np.int32)
    sink = len(layers) * n + tokens[at]
    flows = [csgraph.maximum_flow(graph, token, sink).flow_value / WHOLE for token in range(n)]
    return torch.tensor(flows, dtype=torch.float64)
