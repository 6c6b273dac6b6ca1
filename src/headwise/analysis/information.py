"""Ranks and capacity of each head's output, and its redundancy with the other heads of its layer, as one table."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.analysis.checks import checked_maps, checked_outputs, counts
from headwise.analysis.moments import Whitening, centred, check_shrinkage, check_tokens, surplus, whitening
from headwise.analysis.spectrum import effective_rank, map_spectrum
from headwise.errors import ConfigError, ShapeError
from headwise.map import AttentionMap
from headwise.table import HeadColumn, HeadTable

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
    sizes = counts(layers)
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
            layer |= _of_map(amap, components)
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
    """The tokens that see anything in any head of any layer, boolean [b, n]; None if all do, or none, or if the maps
    are of another size."""
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
    """Degrees of freedom of the regression of each head on the others, [h]: the trace of Σ̂⁻¹(1 − γ)Σ over the others
    (Hoerl & Kennard 1970), which is all their dimensions without shrinkage.

    The inverse for the others alone is Λ_jj − Λ_ji Λ_ii⁻¹ Λ_ij; only its trace with the noise is required.
    """
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


def _of_map(amap: AttentionMap, components: int) -> dict[str, Tensor]:
    spectrum = map_spectrum(amap, components)
    return {
        "entropy": amap.measure("entropy")["entropy"].double().mean(0),
        "map_rank": spectrum.effective_rank.mean(0),
        "map_stable_rank": spectrum.stable_rank.mean(0),
    }
