"""Whether a head that looks at a token makes that token more likely: its output circuit, without the pattern."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headwise.errors import ShapeError

AGAINST = 1000  # tokens whose logits are compared with the token's own


def copying(
    values: Sequence[Tensor],
    outputs: Sequence[Tensor],
    unembedding: Tensor,
    ids: Tensor,
    span: slice,
    kinds: Tensor,
    heads: int,
) -> np.ndarray:
    """For each head, the mean over tokens j of a span of the share of other tokens whose logit v_j W_O W_U raises less
    than that of token j itself (ties count half): [layers, heads]. 0.5 is chance, 1 is a head that copies.

    Only the direct path counts: what later layers and the last norm make of it does not.

    Args:
        values: of each layer, [s, h_kv, n, d_v]; outputs: of each layer, [h, d_v, d_model]; unembedding: [V, d_model].
        ids: [s, n]; span: the places j. kinds: tokens to compare with; of more than 1000, the first ones of an even
            choice.
    Source: Elhage et al. 2021 (the OV circuit); Olsson et al. 2022, 2209.11895 (copying).
    """
    _check(values, outputs, unembedding, ids, heads)
    against = kinds[torch.linspace(0, len(kinds) - 1, min(AGAINST, len(kinds))).round().long()].to(unembedding.device)
    tokens = ids[:, span].flatten()  # [places]
    other = against[None] != tokens[:, None]  # [places, against]
    rows = unembedding.float()
    found = np.empty((len(values), heads))
    for layer, (value, output) in enumerate(zip(values, outputs, strict=True)):
        group = heads // value.shape[1]
        for head in range(heads):
            read = value[:, head // group, span].flatten(0, 1).float() @ output[head].float()  # [places, d_model]
            own = (read * rows[tokens]).sum(-1, keepdim=True)
            logits = read @ rows[against].T
            below = (logits < own).double() + 0.5 * (logits == own).double()
            found[layer, head] = float((below * other).sum() / other.sum())
    return found


def _check(values: Sequence[Tensor], outputs: Sequence[Tensor], unembedding: Tensor, ids: Tensor, heads: int) -> None:
    if len(values) != len(outputs):
        raise ShapeError(f"outputs: {len(outputs)} of them for {len(values)} layers of values; give one for each")
    if unembedding.ndim != 2:
        raise ShapeError(f"unembedding: shape {tuple(unembedding.shape)}, expected [vocabulary, d_model]")
    for layer, (value, output) in enumerate(zip(values, outputs, strict=True)):
        if value.ndim != 4 or (value.shape[0], value.shape[2]) != tuple(ids.shape) or heads % value.shape[1]:
            raise ShapeError(
                f"values[{layer}]: shape {tuple(value.shape)}, expected [{ids.shape[0]}, key heads, {ids.shape[1]}, "
                f"d_v] for {heads} heads"
            )
        wanted = heads, value.shape[3], unembedding.shape[1]
        if tuple(output.shape) != wanted:
            raise ShapeError(f"outputs[{layer}]: shape {tuple(output.shape)}, expected {wanted}, heads × d_v × d_model")
