"""What heads move between tokens: similarity and composition of QK and OV circuits, their subspaces, norms of values;
and how that mixes across layers: attention rollout, as a product of maps that are never stored, and attention flow, the
maximum flow from input tokens to a position with weights as capacities.

A head scores x_i W_Q W_Kᵀ x_jᵀ and moves x_j W_V W_O (Elhage et al. 2021, "A Mathematical Framework for Transformer
Circuits"). These products do not include layer norms, biases and rotary angles; a gain can be multiplied into the
projections beforehand.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headwise.analysis.checks import Weights, checked_maps, checked_weights, head_names, per_query_head
from headwise.analysis.information import cosines, unit_size
from headwise.analysis.linear import Factors, inner_products
from headwise.analysis.similarity import HeadSimilarity, apart, symmetric
from headwise.errors import ConfigError, DTypeError, ShapeError, check_choice, not_installed, whole_number
from headwise.interventions import Arguments, Edit
from headwise.kernels import events
from headwise.map import AttentionMap
from headwise.masks import real_tokens
from headwise.models.attaching import Attachment, intervene, model_of
from headwise.models.find import find_heads
from headwise.models.site import HeadSite
from headwise.rule import compute


@torch.no_grad()
def circuit_similarity(weights: Sequence[Weights], circuit: str = "ov") -> HeadSimilarity:
    """Cosine between the circuits of all heads: of W_Q W_Kᵀ ("qk"), which tokens a head attends to, or of W_V W_O
    ("ov"), what it moves from them.

    No d_model × d_model matrix is stored. Random circuits have 0 on average.

    Args:
        weights: for each layer a dictionary with "q" and "k", or "v" and "o"; see `headwise.analysis.subspace_overlap`.
    """
    check_choice("circuit", circuit, ("qk", "ov"))
    factors = _qk(weights) if circuit == "qk" else _ov(weights)
    matrix = cosines(inner_products(factors))
    names = head_names(list(map(len, factors[0])))
    return HeadSimilarity(f"cosine of {circuit.upper()} circuits", names, matrix, apart(1 - matrix), "cosine")


@torch.no_grad()
def composition(weights: Sequence[Weights], kind: str = "k") -> HeadSimilarity:
    """How much each head reads of the output of each earlier one: ‖A·B‖_F / (‖A‖_F‖B‖_F) for the OV circuit A of a head
    (row) and the reading circuit B of a head of a later layer (column).

    B is W_Q W_Kᵀ for "q" composition, its transpose W_K W_Qᵀ for "k", and W_V W_O for "v" (Elhage et al. 2021, with
    circuits acting from the right, as in x W). Random circuits have about 1/√d_model, given as `chance`; heads of the
    same or an earlier layer than the writer have 0.

    Args:
        weights: for each layer a dictionary with "v", "o", and "q", "k" unless `kind` is "v".
    Returns:
        A directed `HeadSimilarity`: rows write, columns read. Rounding errors are at most about 1e-3 in float32.
    """
    check_choice("kind", kind, "qkv")
    writes = _ov(weights)
    reads = _ov(weights) if kind == "v" else _qk(weights)
    if kind == "k":
        reads = reads[1], reads[0]
    # ‖V O · L Rᵀ‖ = ‖R_V O · L R_Rᵀ‖ with V = Q R_V, R = Q R_R: the orthonormal parts do not change the norm.
    before = [torch.linalg.qr(v, "r").R @ o.mT for v, o in zip(*writes, strict=True)]
    after = [left @ torch.linalg.qr(right, "r").R.mT for left, right in zip(*reads, strict=True)]
    if before[0].shape[-1] != after[0].shape[-2]:
        raise ShapeError(
            f"weights[0]['o']: writes {before[0].shape[-1]} dimensions, expected {after[0].shape[-2]}, as are read"
        )
    left = [x.mT for x in before]
    # ‖X Y‖² = ⟨XᵀX, Y Yᵀ⟩
    square = inner_products((left, left), (after, after)).clamp_min(0.0)
    norms = [torch.cat([x.flatten(1).double().norm(dim=1) for x in part]) for part in (left, after)]
    size = norms[0][:, None] * norms[1]
    matrix = torch.where(size > 0, square.sqrt() / torch.where(size > 0, size, 1.0), 0.0).cpu()
    layer = torch.repeat_interleave(torch.tensor(list(map(len, left))))
    names = head_names(list(map(len, left)))
    note = "rows write, columns read; norms, biases and rotary angles are not included"
    return HeadSimilarity(
        f"{kind.upper()} composition", names, matrix.masked_fill(layer[:, None] >= layer, 0.0), None, "composition",
        chance=after[0].shape[-2] ** -0.5, note=note,
    )  # fmt: skip


def _qk(weights: Sequence[Weights]) -> Factors:
    """W_Q and W_K, [h, d_model, d_k] each."""
    found = checked_weights(weights, "qk")
    keys = per_query_head(found["k"], found["q"], "k")
    for layer, (q, k) in enumerate(zip(found["q"], keys, strict=True)):
        if q.shape != k.shape:
            raise ShapeError(
                f"weights[{layer}]['k']: heads of {tuple(k.shape[1:])}, expected {tuple(q.shape[1:])} as 'q'"
            )
    return _scaled(found["q"]), _scaled(keys)


def _ov(weights: Sequence[Weights]) -> Factors:
    """W_V and W_Oᵀ, [h, d_model, d_v] each."""
    found = checked_weights(weights, "vo")
    values = per_query_head(found["v"], found["o"], "v")
    for layer, (v, o) in enumerate(zip(values, found["o"], strict=True)):
        if v.shape[2] != o.shape[1]:
            raise ShapeError(f"weights[{layer}]['o']: d_v {o.shape[1]}, expected the {v.shape[2]} of 'v'")
    return _scaled(values), _scaled([o.mT for o in found["o"]])


def _scaled(layers: list[Tensor]) -> list[Tensor]:
    return [unit_size(x) for x in layers]


@torch.no_grad()
def principal_angles(one: Tensor, two: Tensor) -> Tensor:
    """Principal angles between the column spaces of two matrices, ascending, in radians from 0 to π/2.

    cos θ = svd(Q₁ᵀQ₂) of orthonormal bases; near 1, the sine from the svd of Q₂ − Q₁Q₁ᵀQ₂ is more accurate
    (Björck & Golub 1973; Knyazev & Argentati 2002).

    Args:
        one, two: [..., d_model, d] and [..., d_model, e] with full column rank and d, e ≤ d_model.
    Returns:
        [..., min(d, e)] float64.
    Raises:
        ShapeError, DTypeError, ConfigError: naming the argument, also if columns are linearly dependent.
    """
    for name, x in (("one", one), ("two", two)):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise DTypeError(f"{name}: expected a floating-point tensor [..., d_model, d]")
        if x.ndim < 2 or not 0 < x.shape[-1] <= x.shape[-2]:
            raise ShapeError(f"{name}: shape {tuple(x.shape)}, expected [..., d_model, d] with 0 < d ≤ d_model")
        if not bool(torch.isfinite(x).all()):
            raise ConfigError(f"{name}: {int((~torch.isfinite(x)).sum())} entries are NaN or infinite")
    if one.shape[-2] != two.shape[-2]:
        raise ShapeError(f"two: columns of {two.shape[-2]} entries, expected the {one.shape[-2]} of one")
    bases = []
    for name, x in (("one", one), ("two", two)):
        basis, rank = _bases(x.double())
        if bool((rank < x.shape[-1]).any()):
            raise ConfigError(f"{name}: {x.shape[-1]} columns span only {int(rank.min())} dimensions")
        bases.append(basis)
    first, second = sorted(bases, key=lambda x: x.shape[-1], reverse=True)
    cross = first.mT @ second
    cosine = torch.linalg.svdvals(cross).clamp(max=1.0)  # descending: angles ascend
    sine = torch.linalg.svdvals(second - first @ cross).clamp(max=1.0).flip(-1)
    return torch.where(cosine.square() < 0.5, torch.acos(cosine), torch.asin(sine))


@torch.no_grad()
def subspace_overlap(weights: Sequence[Weights], side: str) -> HeadSimilarity:
    """The overlap of the subspaces that heads read or write: mean cos²θ of the principal angles between the column
    spaces of W_Q, W_K or W_V, or the row spaces of W_O.

    1 if one contains the other, 0 if they are orthogonal; two random subspaces have max(d₁, d₂)/d_model on
    average. It is ‖Q₁ᵀQ₂‖²_F / min(d₁, d₂) of orthonormal bases, so no angles are computed;
    `principal_angles` returns those of two heads. The rank of a projection counts singular values above 1e-5 of the
    largest one.

    Args:
        weights: for each layer a dictionary with `side`: "q" [h, d_model, d_k], "k" [h_kv, d_model, d_k],
            "v" [h_kv, d_model, d_v] or "o" [h, d_v, d_model]. Shared KV heads appear once: L0KV0, L0KV1, …
    Returns:
        `HeadSimilarity`; a head with a projection of 0 has 0 with all heads, including itself.
    """
    check_choice("side", side, "qkvo")
    layers = checked_weights(weights, side)[side]
    columns = [x.mT if side == "o" else x for x in layers]
    d_model = columns[0].shape[1]
    shared = side in "kv" and any("q" in w and w["q"].shape[0] != w[side].shape[0] for w in weights)
    found = [_bases(unit_size(x)) for x in columns]
    bases, rank = [basis for basis, _ in found], torch.cat([rank for _, rank in found]).double().cpu()
    common = symmetric(inner_products((bases, bases)))
    overlap = (common / torch.minimum(rank, rank[:, None]).clamp_min(1.0)).clamp(0.0, 1.0)
    overlap.diagonal().copy_((rank > 0).double())
    names = head_names(list(map(len, layers)), "KV" if shared else "H")
    kind = f"overlap of the subspaces of W_{side.upper()}"
    return HeadSimilarity(kind, names, overlap, apart(1 - overlap), "mean cos²", chance=float(rank.max()) / d_model)


def _bases(x: Tensor) -> tuple[Tensor, Tensor]:
    """Orthonormal bases of the column spaces of [..., D, d], columns beyond the rank 0; and the ranks."""
    # The singular values are those of the small triangular factor; its left vectors rotate Q.
    q, r = torch.linalg.qr(x)
    u, s, _ = torch.linalg.svd(r)
    keep = s > s.amax(-1, keepdim=True) * (1e-5 if x.dtype == torch.float32 else 1e-10)
    return (q @ u) * keep[..., None, :].to(q), keep.sum(-1)


def value_norms(
    model: nn.Module | Attachment, run: Callable[[], Any], *, sites: Sequence[HeadSite] | None = None
) -> dict[str, Tensor]:
    """‖v_j W_O^h‖ of every head h and token j: the length of what a weight of 1 on it adds to the residual stream.

        >>> import torch, headwise as hw
        >>> model = torch.nn.Sequential(hw.MultiHeadAttention(16, 4), hw.MultiHeadAttention(16, 4))
        >>> x = torch.randn(1, 7, 16)
        >>> with hw.watch(model, maps="lazy") as record:
        ...     y = model(x)
        >>> norms = hw.analysis.value_norms(model, lambda: model(x))
        >>> norms["0"].shape
        torch.Size([1, 4, 7])
        >>> added = record.maps["0"][0, 2, -1] * norms["0"][0, 2]               # to the last token by head 2, [7]
        >>> flow = hw.analysis.rollout([*record.maps.values()], value_norms=[*norms.values()])

    A weight alone does not say what is added: the value of a token with a large weight may be small, as that of an
    attention sink often is. Norms of values and weights multiply; a rollout or flow of the products is
    `rollout(maps, value_norms=…)`.

    Args:
        model: any that `hw.intervene` and `find_heads` support, or for attention that is written by hand the handle of
            `hw.attach(model, batch=…)`.
        run: a function that runs the model once, without a KV cache, as the maps' run did.
        sites: of `find_heads(model)`; all by default.
    Returns:
        name of the module → [b, h, m] float32 or float64, in the order of the calls; a module that is called several
        times as name, name#2, … (as records name their maps).
    Raises:
        ConfigError: if no attention was called, within `hw.intervene`, or for a module without an output projection of
            each head.
    Source: Kobayashi et al. 2020, 2004.10102, §3 (without the norm that follows).
    """
    if events.editing:
        raise ConfigError("value_norms: the attention of a model is edited (hw.intervene); call it outside of that")
    places = {site.name: site for site in (find_heads(model_of(model)) if sites is None else sites)}
    keep = Keep()
    with torch.no_grad(), intervene(model, keep, layers=list(places), unused="ignore"):
        run()
    if not keep.calls:
        raise ConfigError("run: called no attention of the model; expected a function that runs it once")
    norms = {name: projections(site) for name, site in places.items()}
    return {name: _norms(call.v, norms[events.module_name(name)]) for name, call in keep.calls.items()}


class Keep(Edit):
    """Changes nothing, and keeps the arguments of each call by its name."""

    by_row = True

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, Arguments] = {}

    def changed(self, call: Arguments) -> Arguments:
        self.calls[events.call_name(call.name, self.calls)] = call
        return call


def projections(site: HeadSite) -> Tensor:
    """A matrix R [h, ·, d_v] for each head with ‖R v‖ = ‖v W_O‖, no larger than d_v × d_v."""
    weights = site.weights()
    if "o" not in weights:
        raise ConfigError(
            f"{site.name or type(site.module).__name__}: its heads have no output projection of their own"
        )
    return torch.linalg.qr(compute(weights["o"]).mT, mode="r").R  # W_Oᵀ = Q R, and Q keeps norms


def _norms(v: Tensor, projection: Tensor) -> Tensor:
    heads = compute(v).repeat_interleave(len(projection) // v.shape[1], 1)
    return (heads @ projection.to(heads).mT).norm(dim=-1)


class Rollout:
    """R = Ã_L ⋯ Ã_2 Ã_1 with Ã_l = (1 − r)·Σ_h w_h A_lh + r·I, an n × n matrix for each batch entry that is applied but
    never stored: R_ij is the share of token j at position i after all layers. Returned by `rollout`.

    `R @ x` and `R.T @ y` compute one product with each layer's map; memory is O(heads · n) for each column of x.
    """

    def __init__(self, layers: Sequence["Mixing"], residual: float, _transpose: "Rollout | None" = None) -> None:
        self._layers, self._residual, self._transpose = layers, residual, _transpose

    @property
    def shape(self) -> tuple[int, int, int]:
        """(b, n, n)"""
        b, _, n, _ = self._layers[0].map.shape
        return b, n, n

    @property
    def T(self) -> "Rollout":
        """The transpose, for `rollout(maps).T @ y`: the positions that the information of each input token reaches."""
        return self._transpose or Rollout(self._layers, self._residual, self)

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
        how = f"residual {self._residual:g}{', transposed' if self._transpose else ''}; not stored"
        return f"Rollout({len(self._layers)} layers, {b} × {n} × {n}, {how})"

    @torch.no_grad()
    def __matmul__(self, x: Tensor) -> Tensor:
        """R @ x for x [n], [n, e] or [b, n, e]: [b, n] or [b, n, e]."""
        b, n, _ = self.shape
        given = tuple(x.shape)
        wide = x[:, None] if x.ndim == 1 else x
        wide = wide[None] if wide.ndim == 2 else wide
        if wide.ndim != 3 or wide.shape[0] not in (1, b) or wide.shape[1] != n:
            raise ShapeError(f"rollout @ x: x has shape {given}, expected ({n},), ({n}, e) or ({b}, {n}, e)")
        wide = wide.detach().expand(b, -1, -1)
        for layer in reversed(self._layers) if self._transpose else self._layers:
            wide = wide.to(layer.map.lse)  # layers may differ in dtype and device
            mixed = layer.transposed_times(wide) if self._transpose else layer.times(wide)
            wide = self._residual * wide + (1 - self._residual) * mixed
        return wide[..., 0] if x.ndim == 1 else wide


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
    """The layers, checked; weights of their heads sum to 1."""
    layers = checked_maps(maps, square=True)
    for name, given in (("value_norms", value_norms), ("head_weights", head_weights)):
        if given is not None and len(given) != len(layers):
            raise ShapeError(f"{name}: {len(given)} layers, expected the {len(layers)} of maps")
    found = []
    for layer, amap in enumerate(layers):
        b, h, n, _ = amap.shape
        weights, norms = torch.ones(h, dtype=torch.float64), None
        if head_weights is not None:
            weights = compute(torch.as_tensor(head_weights[layer]).detach()).double()
            if weights.shape != (h,):
                raise ShapeError(f"head_weights[{layer}]: shape {tuple(weights.shape)}, expected ({h},)")
            if not (bool(torch.isfinite(weights).all()) and bool((weights >= 0).all()) and bool(weights.sum() > 0)):
                raise ConfigError(f"head_weights[{layer}]: expected finite numbers ≥ 0, not all of them 0")
        if value_norms is not None:
            norms = value_norms[layer].detach().to(amap.lse)
            if norms.shape != (b, h, n):
                raise ShapeError(f"value_norms[{layer}]: shape {tuple(norms.shape)}, expected ({b}, {h}, {n})")
            if not bool((torch.isfinite(norms) & (norms >= 0)).all()):
                raise ConfigError(f"value_norms[{layer}]: expected finite numbers ≥ 0")
        found.append(Mixing.of(amap, weights / weights.sum(), norms))
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
