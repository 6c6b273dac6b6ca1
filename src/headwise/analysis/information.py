"""The information in heads' outputs: similarity of all pairs, ranks, capacity and redundancy of each."""

import math
from collections.abc import Sequence
from itertools import combinations_with_replacement

import torch
from torch import Tensor

from headwise.analysis.checks import Weights, checked_maps, checked_outputs, checked_weights, head_names
from headwise.analysis.linear import (
    ELEMENTS,
    Centred,
    Whitening,
    centred,
    check_shrinkage,
    check_tokens,
    crossed,
    effective_rank,
    inner_products,
    map_spectrum,
    surplus,
    whitening,
)
from headwise.analysis.similarity import HeadSimilarity, apart, mirrored, symmetric
from headwise.errors import ConfigError, ShapeError, check_choice
from headwise.map import AttentionMap
from headwise.table import HeadColumn, HeadTable

SIMILARITIES = ("cosine", "written", "cka", "mutual_information")


@torch.no_grad()
def output_similarities(
    outputs: Sequence[Tensor],
    kinds: Sequence[str] = ("cosine", "cka"),
    *,
    weights: Sequence[Weights] | None = None,
    shrinkage: float = 1e-3,
    corrected: bool = True,
    mask: Tensor | None = None,
) -> dict[str, HeadSimilarity]:
    """The similarity of the outputs of all heads of all layers, by one or more measures.

    - "cosine": ρ_ij = ⟨head_i, head_j⟩ / (‖head_i‖‖head_j‖) over all tokens and dimensions. Each head has its own
      basis, so 0 does not mean that the information differs.
    - "written": the cosine of what heads write into the residual stream, head_i·W_O^i, in one common basis.
    - "cka": linear CKA, ‖YᵀX‖²_F / (‖XᵀX‖_F‖YᵀY‖_F) with centred features; 1 for heads that differ by a rotation,
      a scale and a shift (Kornblith et al. 2019, 1905.00414). It is biased with few tokens: unrelated heads of
      d dimensions have about d / tokens.
    - "mutual_information": nats a token shared by two heads, assumed to be Gaussian: ½ ln(|Σ_x||Σ_y| / |Σ_xy|), in
      any basis. Tokens are assumed to be independent samples.

    "cka" and "mutual_information" share one pass over all pairs if requested together.

    Args:
        outputs: for each layer [b, h, n, d_v], before the output projection; layers may differ in h.
        weights: for each layer {"o": [h, d_v, d_model]}; for "written" only.
        shrinkage: γ; covariances are (1 − γ)Σ + γ·mean variance·I, as with noise of this share. It keeps the
            information of equal heads finite: at most (d_v/2) ln(1/(2γ − γ²)) nats.
        corrected: subtract the bias of the information from few tokens, d²/(2n) in first order. It is exact for
            Gaussian heads and γ = 0, and first order in γ, so unrelated heads can have slightly less than 0. The
            diagonal, a head with itself, is not corrected.
        mask: boolean [b, n], True for tokens that are no padding, as the attention_mask of transformers; only those
            count. Without it, all do: outputs do not show which tokens are padding.
    Returns:
        kind → `HeadSimilarity`. Heads of zeros (for "cka" and information, constant heads) have 0 with all heads,
        including themselves.
    Raises:
        ShapeError, DTypeError, ConfigError: naming the argument; also for NaN and infinite outputs.
    Memory: a copy of the outputs in float32, and d_v² · h² numbers.
    """
    for kind in kinds:
        check_choice("kinds", kind, SIMILARITIES)
    check_shrinkage(shrinkage)
    layers = checked_outputs(outputs, mask)
    names = head_names(list(map(len, layers)))
    found = {}
    if "cosine" in kinds:
        found["cosine"] = _cosine("cosine of outputs", names, _gram(layers))
    if "written" in kinds:
        if weights is None:
            raise ConfigError('weights: "written" requires {"o": [h, d_v, d_model]} of each layer')
        found["written"] = _cosine("cosine of written outputs", names, _written(layers, weights))
    if "cka" in kinds or "mutual_information" in kinds:
        found |= _second_moments(layers, names, kinds, shrinkage, corrected)
    return {kind: found[kind] for kind in kinds}


def _cosine(kind: str, names: tuple[str, ...], gram: Tensor) -> HeadSimilarity:
    matrix = cosines(gram)
    return HeadSimilarity(kind, names, matrix, apart(1 - matrix), "cosine")


def cosines(gram: Tensor) -> Tensor:
    """A Gram matrix as cosines, [G, G] float64 between −1 and 1; 0 in rows of zero length."""
    gram = symmetric(gram)
    length = gram.diagonal().clamp_min(0.0).sqrt()
    unit = torch.where(length > 0, 1 / length, 0.0)
    matrix = (gram * unit * unit[:, None]).clamp(-1.0, 1.0)
    matrix.diagonal().copy_((length > 0).double())
    return matrix


def unit_size(x: Tensor) -> Tensor:
    """[h, …] with each head's largest entry scaled to 1, so that squares do not overflow; zeros are unchanged."""
    most = x.abs().amax(tuple(range(1, x.ndim)), keepdim=True)
    return x / torch.where(most > 0, most, 1.0)


def _gram(layers: list[Tensor]) -> Tensor:
    """⟨head_i, head_j⟩ of heads scaled by `unit_size`, in blocks of tokens."""
    scaled = [unit_size(x) for x in layers]
    heads, (tokens, d) = sum(map(len, scaled)), scaled[0].shape[1:]
    total = torch.zeros(heads, heads, dtype=torch.float64, device=scaled[0].device)
    step = max(1, ELEMENTS // (heads * d))
    for start in range(0, tokens, step):
        block = torch.cat([x[:, start : start + step].flatten(1) for x in scaled])
        total += (block @ block.T).double()
    return total


def _written(layers: list[Tensor], weights: Sequence[Weights]) -> Tensor:
    """⟨head_i W_O^i, head_j W_O^j⟩, heads and weights scaled by `unit_size`."""
    written = checked_weights(weights, "o")["o"]
    shapes = [tuple(w.shape[:2]) for w in written]
    expected = [(x.shape[0], x.shape[2]) for x in layers]
    if shapes != expected:
        layer = next((k for k, pair in enumerate(zip(shapes, expected, strict=False)) if pair[0] != pair[1]), None)
        if layer is None:
            raise ShapeError(f"weights: {len(shapes)} layers, expected the {len(expected)} of outputs")
        raise ShapeError(
            f"weights[{layer}]['o']: shape {tuple(written[layer].shape)}, expected {expected[layer]} and d_model, the "
            f"heads and d_v of outputs[{layer}]"
        )
    sources = [unit_size(w).mT.to(x) for w, x in zip(written, layers, strict=True)]
    return inner_products(([unit_size(x) for x in layers], sources))


def _second_moments(
    layers: list[Tensor], names: tuple[str, ...], kinds: Sequence[str], shrinkage: float, corrected: bool
) -> dict[str, HeadSimilarity]:
    """CKA and information from one pass over the covariances of all pairs."""
    tokens, d = layers[0].shape[1:]
    informed = "mutual_information" in kinds
    if informed and corrected:
        check_tokens(tokens, 2 * d, f"2 · {d} dimensions")
    ready = [centred(x) for x in layers]
    white = [whitening(layer, shrinkage) for layer in ready] if informed else []
    starts = torch.tensor([0, *map(len, layers)]).cumsum(0).tolist()
    overlap = torch.zeros(len(names), len(names), dtype=torch.float64)
    shared = torch.zeros_like(overlap)
    for a, c in combinations_with_replacement(range(len(ready)), 2):
        moments = crossed(ready[a].values, ready[c].values) / tokens  # xᵀy of all heads of both, [h_a, d, h_c, d]
        rows, cols = slice(*starts[a : a + 2]), slice(*starts[c : c + 2])
        if "cka" in kinds:
            overlap[rows, cols] = moments.square().sum((1, 3), dtype=torch.float64).cpu()
        if informed:
            shared[rows, cols] = _information(moments, white[a], white[c], shrinkage).cpu()
    found = {}
    if "cka" in kinds:
        matrix = cosines(mirrored(overlap))
        found["cka"] = HeadSimilarity("CKA of outputs", names, matrix, apart(1 - matrix), "CKA")
    if informed:
        found["mutual_information"] = _informed(names, mirrored(shared), ready, white, corrected)
    return found


def _information(moments: Tensor, one: Whitening, two: Whitening, shrinkage: float) -> Tensor:
    """−½ ln|I − C Cᵀ| of C = L_x⁻¹ Σ_xy L_y⁻ᵀ, [h, h']."""
    h, d, w, e = moments.shape
    cross = moments.double().mul_(1 - shrinkage)
    cross = (one.root @ cross.reshape(h, d, w * e)).view(h * d, w, e).transpose(0, 1) @ two.root.mT  # [w, h·d, e]
    cross = cross.reshape(w * h, d, e)
    left = torch.baddbmm(torch.eye(d, dtype=cross.dtype, device=cross.device), cross, cross.mT, alpha=-1.0)
    lower, info = torch.linalg.cholesky_ex(left)
    logs = lower.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    # Without shrinkage, heads that determine each other share infinite information, up to rounding.
    return torch.where(info == 0, -logs, torch.inf).view(w, h).T


def _informed(
    names: tuple[str, ...], shared: Tensor, ready: list[Centred], white: list[Whitening], corrected: bool
) -> HeadSimilarity:
    tokens, d = ready[0].values.shape[1:]
    if not bool(torch.isfinite(shared[~torch.eye(len(names), dtype=torch.bool)]).all()):
        raise ConfigError(
            "shrinkage=0: two heads determine each other, so their information is infinite; give shrinkage > 0"
        )
    if corrected:
        signal = torch.cat([w.signal for w in white]).cpu() / d
        extra = surplus(tokens, d, d) * signal * signal[:, None]
        shared = shared - extra.fill_diagonal_(0.0)
    shared = symmetric(shared)
    # Linfoot's informational correlation with equal shares of all dimensions: 0 for independent, 1 for equal heads.
    correlation = (1 - torch.exp(-2 * shared.clamp_min(0.0) / d)).sqrt()
    note = "Gaussian; the diagonal is limited by the shrinkage"
    kind = "mutual information of outputs"
    return HeadSimilarity(kind, names, shared, apart(1 - correlation), "nats a token", note=note)


COLUMNS = {  # name → unit, description
    "output_rank": ("dimensions", "effective rank of the output; at most d_v (Roy & Vetterli 2007)"),
    "stable_rank": ("dimensions", "Σλ / λ₁ of the output's covariance; at most d_v"),
    "capacity": (
        "nats a token",
        "½ Σ ln(1 + λ(1 − γ)/γ): information that passes through noise of the share γ of the output's variance",
    ),
    "shared": ("nats a token", "mutual information with all other heads of the layer together; at most the capacity"),
    "redundancy": ("share", "share of the output's variance that the other heads of the layer predict linearly"),
    "complement": ("share", "1 − redundancy: the share that no other head of the layer has"),
    "entropy": ("nats", "mean entropy of the map's rows"),
    "map_rank": ("", "effective rank of the map"),
    "map_stable_rank": ("", "‖P‖²_F / σ₁² of the map"),
}


@torch.no_grad()
def head_information(
    outputs: Sequence[Tensor],
    maps: Sequence[AttentionMap] | None = None,
    *,
    shrinkage: float = 1e-3,
    corrected: bool = True,
    components: int = 32,
    mask: Tensor | None = None,
) -> HeadTable:
    """Ranks, capacity, redundancy and complementarity of each head's output; with `maps`, ranks of its map too.

    All numbers follow from one covariance of all heads of a layer: with the inverse Λ of the shrunk covariance, the
    part of head i that the others do not predict has the covariance (Λ_ii)⁻¹. Outputs are assumed to be Gaussian, and
    tokens to be independent samples.

    Args:
        outputs: for each layer [b, h, n, d_v], before the output projection.
        maps: the `AttentionMap` of each layer, of the same text, with the same heads.
        shrinkage: γ, as in `output_similarities`: noise of the share γ of each head's mean variance.
        corrected: correct for what a regression on few tokens explains by chance: the residual is divided by its
            degrees of freedom (adjusted R²), and the bias of the information is subtracted. Requires more tokens than
            the layer has output dimensions, h·d_v.
        components: singular values of each map, as in `map_spectrum`.
        mask: boolean [b, n], True for tokens that are no padding, as in `output_similarities`; only those count. By
            default those that are not fully masked queries in all `maps`, or all tokens without maps.
    Returns:
        A table with the columns of `headwise.analysis.information.COLUMNS`; `about` holds "tokens" (that count, of all
        batch entries), "shrinkage" γ, "value_dim" d_v, which bounds both ranks, and "capacity_bound" (d_v/2) ln(1/γ),
        the capacity of a head whose dimensions all have the same variance. A constant head has 0 in all columns of
        outputs; the only head of its layer has redundancy 0. With several batch entries, columns of maps are means over
        them.
    Raises:
        ShapeError, DTypeError, ConfigError: naming the argument.
    """
    check_shrinkage(shrinkage, least=1e-9)
    maps = None if maps is None else checked_maps(maps)
    layers = checked_outputs(outputs, _tokens(outputs, maps) if mask is None else mask)
    sizes = list(map(len, layers))
    tokens, d = layers[0].shape[1:]
    if maps is not None:
        if [amap.shape[1] for amap in maps] != sizes:
            raise ShapeError(f"maps: heads {[amap.shape[1] for amap in maps]} by layer, expected {sizes} as in outputs")
        b, _, n, _ = outputs[0].shape
        if (maps[0].shape[0], maps[0].shape[2]) != (b, n):
            raise ShapeError(
                f"maps: {maps[0].shape[0]} × {maps[0].shape[2]} queries, expected the {b} × {n} tokens of outputs: "
                f"both of the same text"
            )
    if corrected and max(sizes) > 1:
        check_tokens(tokens, max(sizes) * d, f"{max(sizes)} heads · {d} dimensions of a layer")
    found = [_layer(x, shrinkage, corrected) for x in layers]
    if maps is not None:
        for layer, amap in zip(found, maps, strict=True):
            spectrum = map_spectrum(amap, components)
            layer["entropy"] = amap.measure("entropy")["entropy"].double().mean(0)
            layer |= {"map_rank": spectrum.effective_rank.mean(0), "map_stable_rank": spectrum.stable_rank.mean(0)}
    columns = {
        name: HeadColumn([layer[name].cpu() for layer in found], unit=COLUMNS[name][0], description=COLUMNS[name][1])
        for name in found[0]
    }
    bound = d / 2 * math.log(1 / shrinkage)
    title = (
        f"{sum(sizes)} heads, {tokens} tokens; rank ≤ {d}, capacity ≤ {bound:.4g} nats a token at noise {shrinkage:g}"
    )
    about = {"tokens": tokens, "value_dim": d, "shrinkage": shrinkage, "capacity_bound": bound}
    return HeadTable(columns, title=title, about=about)


def _tokens(outputs: Sequence[Tensor], maps: Sequence[AttentionMap] | None) -> Tensor | None:
    """The tokens that see anything in any head, boolean [b, n]; None if all do, or none, or the maps differ in size."""
    if not maps or not isinstance(outputs[0], Tensor) or outputs[0].shape[::2] != maps[0].shape[::2]:
        return None
    sees = torch.stack([(amap.lse != -torch.inf).any(1).cpu() for amap in maps]).any(0)
    return sees if bool(sees.any()) and not bool(sees.all()) else None


def _layer(outputs: Tensor, shrinkage: float, corrected: bool) -> dict[str, Tensor]:
    layer = centred(outputs)
    white = whitening(layer, shrinkage)
    values = white.values.masked_fill(~layer.lit[:, None], 0.0)
    most = values[:, -1].clamp_min(1e-300)
    capacity = torch.log1p((1 - shrinkage) / shrinkage * values).sum(-1) / 2
    unexplained, shared = _rest(layer.values, white, shrinkage, corrected)
    redundancy = torch.where(layer.lit, (1 - unexplained).clamp(0.0, 1.0), 0.0)
    return {
        "output_rank": effective_rank(values.sqrt()),
        "stable_rank": values.sum(-1) / most,
        "capacity": capacity,
        "shared": torch.where(layer.lit, shared, 0.0),
        "redundancy": redundancy,
        "complement": torch.where(layer.lit, 1 - redundancy, 0.0),
    }


def _rest(x: Tensor, white: Whitening, shrinkage: float, corrected: bool) -> tuple[Tensor, Tensor]:
    """For each head, given the others of its layer: the unexplained share of its variance, and shared information."""
    h, tokens, d = x.shape
    if h == 1:
        one = torch.ones(1, dtype=torch.float64, device=x.device)
        return one, torch.zeros_like(one)
    flat = x.transpose(0, 1).reshape(tokens, h * d)
    # Whitened head by head: the identity then means that no two heads are correlated.
    between = (flat.T @ flat).double().div_(tokens).mul_(1 - shrinkage).view(h, d, h, d)
    between = torch.einsum("iab,ibjc,jec->iaje", white.root, between, white.root)
    own = torch.arange(h, device=x.device)
    eye = torch.eye(d, dtype=between.dtype, device=x.device)
    between[own, :, own] = eye
    lower, info = torch.linalg.cholesky_ex(between.reshape(h * d, h * d))
    if int(info) > 0:
        raise ConfigError(
            f"shrinkage={shrinkage}: too small for heads that determine each other; give a larger one, such as 1e-3"
        )
    inverse = torch.cholesky_inverse(lower).view(h, d, h, d)
    precision = inverse[own, :, own]  # [h, d, d]
    left = torch.linalg.inv(precision)
    # Back in the head's own basis, L left Lᵀ, as a share of the trace of L Lᵀ.
    root = torch.linalg.inv(white.root)
    share = ((root @ left) * root).sum((1, 2)) / root.square().sum((1, 2))
    shared = torch.linalg.slogdet(precision).logabsdet / 2
    if corrected:
        share = share * (tokens - 1) / (tokens - 1 - _freedom(inverse, left, white, shrinkage))
        rest = (white.signal.sum() - white.signal) / ((h - 1) * d)
        shared = shared - surplus(tokens, d, (h - 1) * d) * white.signal / d * rest
    return share, shared


def _freedom(inverse: Tensor, left: Tensor, white: Whitening, shrinkage: float) -> Tensor:
    """Degrees of freedom of the regression of each head on the others, [h]: tr Σ̂⁻¹(1 − γ)Σ (Hoerl & Kennard 1970). The
    inverse for the others alone is Λ_jj − Λ_ji Λ_ii⁻¹ Λ_ij; only its trace with the noise is required."""
    h, d = inverse.shape[:2]
    noise = torch.where(white.signal > 0, shrinkage, 1.0)[:, None, None]
    weight = noise * white.root @ white.root.mT  # [h, d, d]
    own = torch.arange(h, device=inverse.device)
    precision = inverse[own, :, own]
    alone = (precision * weight).sum((1, 2))
    lines = inverse.reshape(h, d, h * d)
    weighted = torch.einsum("iajb,jbc->iajc", inverse, weight).reshape(h, d, h * d)
    through = weighted @ lines.mT - precision @ weight @ precision
    return (h - 1) * d - (alone.sum() - alone - (left * through).sum((1, 2)))
