"""Which heads read and write the same directions: principal angles between the subspaces of projections."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.analysis.checks import Weights, checked_weights, counts, head_names
from headwise.analysis.inner import inner_products
from headwise.analysis.outputs import unit_size
from headwise.analysis.similarity import HeadSimilarity, apart, symmetric
from headwise.errors import ConfigError, DTypeError, ShapeError, check_choice


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
    names = head_names(counts(layers), "KV" if shared else "H")
    kind = f"overlap of the subspaces of W_{side.upper()}"
    return HeadSimilarity(kind, names, overlap, apart(1 - overlap), "mean cos²", chance=float(rank.max()) / d_model)


def _bases(x: Tensor) -> tuple[Tensor, Tensor]:
    """Orthonormal bases of the column spaces of [..., D, d], columns beyond the rank 0; and the ranks."""
    # The singular values are those of the small triangular factor; its left vectors rotate Q.
    q, r = torch.linalg.qr(x)
    u, s, _ = torch.linalg.svd(r)
    keep = s > s.amax(-1, keepdim=True) * (1e-5 if x.dtype == torch.float32 else 1e-10)
    return (q @ u) * keep[..., None, :].to(q), keep.sum(-1)
