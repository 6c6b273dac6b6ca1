"""What each head has to say, and whether others of its layer say it too: one table, a line a head."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.analysis.given import checked_maps, checked_outputs, counts, head_names
from headwise.analysis.moments import Whitening, centred, check_shrinkage, check_tokens, surplus, whitening
from headwise.analysis.spectrum import effective_rank, map_spectrum
from headwise.errors import ConfigError, ShapeError
from headwise.files import atomic_path
from headwise.map import AttentionMap
from headwise.table.show import as_html, as_text

COLUMNS = {  # name → what it is, with its unit
    "output_rank": "effective rank of the output, dimensions; at most d_v (Roy & Vetterli 2007)",
    "stable_rank": "Σλ / λ₁ of the output's covariance, dimensions; at most d_v",
    "capacity": "½ Σ ln(1 + λ(1 − γ)/γ), nats a token: what a reader can know of the output through noise of the "
    "share γ of its variance",
    "shared": "mutual information with all other heads of the layer together, nats a token; at most the capacity",
    "redundancy": "share of the output's variance that the other heads of the layer predict linearly",
    "complement": "1 − redundancy: the share that no other head of the layer has",
    "entropy": "mean entropy of the map's rows, nats",
    "map_rank": "effective rank of the map",
    "map_stable_rank": "‖P‖²_F / σ₁² of the map",
}


@dataclass(frozen=True)
class HeadInformation:
    """Numbers of each head, over all layers. Prints itself as a table.

    Attributes:
        names: L0H0, L0H1, …; values: column → [G] float64; `headwise.analysis.information.COLUMNS` explains them.
        value_dim: d_v, the bound of both ranks: a head's output has no more dimensions, whatever it attends to.
        capacity_bound: (d_v/2) ln(1/γ) nats a token, which a head reaches whose dimensions all vary alike. It is a
            bound at this noise: without noise, a real number a dimension has none.
        tokens: of all batch entries; shrinkage: γ.
    """

    names: tuple[str, ...]
    values: dict[str, Tensor]
    value_dim: int
    capacity_bound: float
    tokens: int
    shrinkage: float

    def __getitem__(self, column: str) -> Tensor:
        """A column, [G]."""
        return self.values[column]

    @property
    def title(self) -> str:
        """One line: the bounds, and from how much they were measured."""
        return (
            f"{len(self.names)} heads, {self.tokens} tokens; rank ≤ {self.value_dim}, capacity ≤ "
            f"{self.capacity_bound:.4g} nats a token at noise {self.shrinkage:g}"
        )

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows as text, one row a head."""
        columns = [column.tolist() for column in self.values.values()]
        body = [[name, *(f"{x[i]:.4g}" for x in columns)] for i, name in enumerate(self.names)]
        return ["head", *(name.replace("_", " ") for name in self.values)], body

    def __repr__(self) -> str:
        return f"{self.title}\n{as_text(*self.table())}"

    def _repr_html_(self) -> str:
        return as_html(*self.table(), caption=self.title)

    def to_json(self) -> str:
        """Everything as JSON, numbers not rounded."""
        content = {
            "names": self.names, "tokens": self.tokens, "value_dim": self.value_dim, "shrinkage": self.shrinkage,
            "capacity_bound": self.capacity_bound, "columns": {name: COLUMNS[name] for name in self.values},
            "values": {name: column.tolist() for name, column in self.values.items()},
        }  # fmt: skip
        return json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_json` to a file, whole or not at all."""
        with atomic_path(path) as temporary:
            temporary.write_text(self.to_json(), encoding="utf-8")


@torch.no_grad()
def head_information(
    outputs: Sequence[Tensor],
    maps: Sequence[AttentionMap] | None = None,
    *,
    shrinkage: float = 1e-3,
    corrected: bool = True,
    components: int = 32,
) -> HeadInformation:
    """Ranks, capacity, redundancy and complementarity of each head's output; with `maps`, ranks of its map too.

    One covariance a layer, of all its heads, serves all: with the inverse Λ of the shrunk covariance, the part of
    head i that the others do not predict has the covariance (Λ_ii)⁻¹. Heads are taken as Gaussian, and tokens as
    independent samples.

    Args:
        outputs: for each layer [b, h, n, d_v], before the output projection.
        maps: the `AttentionMap` of each layer, of the same text, with the same heads.
        shrinkage: γ, as in `output_similarities`: noise of the share γ of each head's mean variance.
        corrected: take out what a regression on few tokens explains by chance: the residual is divided by its
            degrees of freedom (adjusted R²), and information loses its surplus. Needs more tokens than the layer
            has output dimensions, h·d_v.
        components: of the spectra of the maps; see `map_spectrum`.
    Returns:
        `HeadInformation`. A constant head has 0 in all columns; the only head of its layer has redundancy 0. With
        several batch entries, columns of maps are means over them.
    Raises:
        ShapeError, DTypeError, ConfigError: naming the argument.
    """
    check_shrinkage(shrinkage, least=1e-9)
    layers = checked_outputs(outputs)
    sizes = counts(layers)
    tokens, d = layers[0].shape[1:]
    if maps is not None:
        maps = checked_maps(maps)
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
        for columns, amap in zip(found, maps, strict=True):
            columns |= _of_map(amap, components)
    values = {name: torch.cat([columns[name] for columns in found]).cpu() for name in found[0]}
    bound = d / 2 * math.log(1 / shrinkage) if shrinkage > 0 else math.inf
    return HeadInformation(head_names(sizes), values, d, bound, tokens, shrinkage)


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
    """Of each head, given the others of its layer: share of its variance that is left, and the information shared."""
    h, tokens, d = x.shape
    if h == 1:
        one = torch.ones(1, dtype=torch.float64, device=x.device)
        return one, torch.zeros_like(one)
    flat = x.transpose(0, 1).reshape(tokens, h * d)
    # Whitened head by head: of the correlations that are left, the identity means that no two heads share anything.
    between = (flat.T @ flat).double().div_(tokens).mul_(1 - shrinkage).view(h, d, h, d)
    between = torch.einsum("iab,ibjc,jec->iaje", white.root, between, white.root)
    own = torch.arange(h, device=x.device)
    eye = torch.eye(d, dtype=between.dtype, device=x.device)
    between[own, :, own] = eye
    lower, info = torch.linalg.cholesky_ex(between.reshape(h * d, h * d))
    if int(info) > 0:
        raise ConfigError(
            f"shrinkage={shrinkage}: too little for heads that determine each other; give more, such as 1e-3"
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
    """Degrees of freedom that the regression of each head on the others takes, [h]: the trace of Σ̂⁻¹(1 − γ)Σ over the
    others (Hoerl & Kennard 1970), all their dimensions if nothing is shrunk.

    The inverse for the others alone is Λ_jj − Λ_ji Λ_ii⁻¹ Λ_ij, and only its trace with the noise is needed.
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
