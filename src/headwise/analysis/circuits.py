"""QK and OV circuits of heads as maps of the residual stream: their similarity and composition.

A head scores x_i W_Q W_Kᵀ x_jᵀ and moves x_j W_V W_O (Elhage et al. 2021, "A Mathematical Framework for Transformer
Circuits"). These products do not include layer norms, biases and rotary angles; a gain can be multiplied into the
projections beforehand.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.analysis.checks import Weights, checked_weights, counts, head_names, per_query_head
from headwise.analysis.inner import Factors, inner_products
from headwise.analysis.outputs import cosines, unit_size
from headwise.analysis.similarity import HeadSimilarity, apart
from headwise.errors import ShapeError, check_choice


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
    names = head_names(counts(factors[0]))
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
    layer = torch.repeat_interleave(torch.tensor(counts(left)))
    names = head_names(counts(left))
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
