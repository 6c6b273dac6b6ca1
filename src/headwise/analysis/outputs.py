"""Similarity of head outputs: cosine, CKA and mutual information of all pairs of heads of all layers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.analysis.checks import Weights, checked_outputs, checked_weights, counts, head_names
from headwise.analysis.inner import ELEMENTS, inner_products
from headwise.analysis.moments import (
    Centred,
    Whitening,
    centred,
    check_shrinkage,
    check_tokens,
    cross_moments,
    surplus,
    whitening,
)
from headwise.analysis.similarity import HeadSimilarity, apart, mirrored, symmetric
from headwise.errors import ConfigError, ShapeError, check_choice

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
    names = head_names(counts(layers))
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
    starts = torch.tensor([0, *counts(layers)]).cumsum(0).tolist()
    overlap = torch.zeros(len(names), len(names), dtype=torch.float64)
    shared = torch.zeros_like(overlap)
    for a, c, moments in cross_moments(ready):
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
