"""Attention flow: the maximum flow from input tokens to a position, with weights as capacities."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.analysis.attention_rollout import shares
from headwise.analysis.checks import checked_maps
from headwise.errors import ConfigError, not_installed
from headwise.map import AttentionMap

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
) -> Tensor:
    """Maximum flow from each input token to one position of the last layer (Abnar & Zuidema 2020, 2005.00928 §2.3):
    [n] float64. Requires SciPy.

    Nodes are positions between layers, capacities the mixed weights (1 − r)·Σ_h w_h A_lh + r·I, as in `rollout`. The
    weights of all layers are in memory at once, and each token requires a maximum flow of its own: it supports up to
    2²⁰ weights over all layers (six layers of 418 tokens). Capacities are rounded to 2⁻²⁸, so the error of a flow is at
    most n·2⁻²⁸.

    Args:
        position: of the last layer; negative positions count from the end.
        maps, batch, residual, head_weights: as in `rollout`.
    Returns:
        [n] float64.
    Raises:
        ShapeError, ConfigError: naming the argument; also if the maps are too large.
    """
    csgraph, sparse = _scipy()
    layers = checked_maps(maps, square=True)
    b, _, n, _ = layers[0].shape
    if not -n <= position < n:
        raise ConfigError(f"position={position}: expected −{n} to {n - 1}")
    if not 0 <= batch < b:
        raise ConfigError(f"batch={batch}: expected 0 to {b - 1}")
    if not 0.0 <= residual <= 1.0:
        raise ConfigError(f"residual={residual}: expected 0 to 1")
    if len(layers) * n * n > MOST_EDGES:
        raise ConfigError(
            f"maps: {len(layers)} layers of {n} × {n} weights, expected at most {MOST_EDGES:,} in all, since maximum "
            f"flow needs each of them; rollout(maps) has no such limit"
        )
    sources, targets, widths = [], [], []
    for k, (amap, weights) in enumerate(zip(layers, shares(layers, head_weights), strict=True)):
        mixed = torch.einsum("h,hij->ij", weights, amap[batch].double().cpu()) * (1 - residual)
        mixed += residual * torch.eye(n, dtype=torch.float64)
        query, key = mixed.nonzero().T
        sources.append(k * n + key)  # a key of layer k, at its input
        targets.append((k + 1) * n + query)
        widths.append((mixed[query, key] * WHOLE).round())
    size = (len(layers) + 1) * n
    edges = [torch.cat(part).numpy().astype(np.int32) for part in (widths, sources, targets)]
    graph = sparse.csr_array((edges[0], (edges[1], edges[2])), shape=(size, size), dtype=np.int32)
    sink = len(layers) * n + position % n
    flows = [csgraph.maximum_flow(graph, token, sink).flow_value / WHOLE for token in range(n)]
    return torch.tensor(flows, dtype=torch.float64)


def _scipy() -> tuple[Any, Any]:
    try:
        from scipy import sparse
        from scipy.sparse import csgraph
    except ImportError:
        raise not_installed("attention_flow", "scipy") from None
    return csgraph, sparse
