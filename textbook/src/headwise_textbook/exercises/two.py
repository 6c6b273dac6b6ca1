"""Exercises, part two: our solutions of what heads are, and other forms of them."""

import torch
from torch import Tensor

from headwise_textbook.exercises.exercise import Draw, exercise, normal


# why_heads
@exercise(lambda draw: (draw.weights(draw.size(1, 4), draw.size(), draw.size()),))
def favourite_key(weights: Tensor) -> Tensor:
    return weights.mean(-2).argmax(-1)


@exercise(lambda draw: (draw.weights(draw.size(1, 4), draw.size(), draw.size()),))
def mean_head(weights: Tensor) -> tuple[Tensor, Tensor]:
    mean = weights.mean(0)
    return mean, (weights - mean).abs().amax((-2, -1))


@exercise(lambda draw: (draw.size(1, 7),))
def two_patterns(n: int) -> Tensor:
    each = torch.arange(n)
    return torch.nn.functional.one_hot(torch.stack((each, (each - 1).clamp(min=0))), n).float()


# head_kinds
def _causal(draw: Draw) -> tuple[Tensor]:
    h, n = draw.size(1, 3), draw.size(2, 7)
    return (draw.normal(h, n, n).masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -torch.inf).softmax(-1),)


@exercise(_causal)
def previous_score(weights: Tensor) -> Tensor:
    return weights.diagonal(-1, -2, -1).mean(-1)


@exercise(lambda draw: (draw.size(2, 12),))
def uniform_previous(n: int) -> float:
    return sum(1 / (i + 1) for i in range(1, n)) / (n - 1)


@exercise(lambda draw: (draw.whole(3, draw.size(1, 8)),))
def induction_keys(ids: Tensor) -> Tensor:
    n = len(ids)
    found = torch.zeros(n, n, dtype=torch.bool)
    found[:, 1:] = ids[:, None] == ids[None, :-1]
    return found & torch.ones(n, n, dtype=torch.bool).tril(-1)


# subspaces
@exercise(
    lambda draw: (
        draw.normal(d := draw.size(3, 7), k := draw.size(1, 2)) + torch.eye(d, k) * 0.1,
        draw.normal(d, k) + torch.eye(d, k) * 0.3,
    ),
    tolerance=2e-3,
)
def largest_angle(a: Tensor, b: Tensor) -> Tensor:
    cosines = torch.linalg.svdvals(torch.linalg.qr(a.double())[0].T @ torch.linalg.qr(b.double())[0])
    return cosines.clamp(max=1.0).min().arccos()


@exercise(lambda draw: (draw.normal(draw.size(1, 4), draw.size(), draw.size(1, 4)) + 0.1,), tolerance=1e-3)
def cosines(heads: Tensor) -> Tensor:
    unit = torch.nn.functional.normalize(heads.flatten(1), dim=-1)
    return unit @ unit.T


@exercise(
    lambda draw: (
        draw.normal(n := draw.size(1, 6), k := draw.size(1, 6)).round() @ draw.normal(k, n).round(),
        draw.size(1, 6),
    )
)
def fits_one_head(scores: Tensor, d_k: int) -> bool:
    return int(torch.linalg.matrix_rank(scores.double())) <= d_k


# mixing
@exercise(normal("h n d", "h n d", "h n d", h=(1, 4), d=(1, 4)), tolerance=1e-3)
def heads_attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = (torch.einsum("hnd,gnd->nhg", q, k) / q.shape[-1] ** 0.5).softmax(-1)
    return torch.einsum("nhg,gnd->hnd", p, v)


@exercise(normal("g*r n d", "g g", g=(1, 3), r=(1, 3), d=(1, 4)))
def mix_groups(heads: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("ab,gbnd->gand", w, heads.unflatten(0, (-1, w.shape[0]))).flatten(0, 1)


@exercise(lambda draw: (draw.normal(d := draw.size(), d), draw.normal(d, draw.size())))
def folded(group: Tensor, first: Tensor) -> Tensor:
    return group @ first


# block_diagonal
@exercise(normal("h a b", h=(1, 4), a=(1, 4), b=(1, 4)))
def block_diag(blocks: Tensor) -> Tensor:
    return torch.block_diag(*blocks)


@exercise(normal("n h*a", "h a b", h=(1, 4), a=(1, 4), b=(1, 4)))
def grouped_linear(x: Tensor, blocks: Tensor) -> Tensor:
    h, a, _ = blocks.shape
    return torch.einsum("nha,hab->nhb", x.unflatten(-1, (h, a)), blocks).flatten(1)


@exercise(
    lambda draw: (
        draw.normal(d := draw.size(), (h := draw.size(1, 4)) * (k := draw.size(1, 3)))
        * draw.booleans(d, h * k)
        * draw.booleans(d, h * k),
        h,
    )
)
def channels_read(w: Tensor, num_heads: int) -> Tensor:
    return (w != 0).unflatten(-1, (num_heads, -1)).any(-1).T


# contraction
@exercise(normal("b n d", "h k d", b=(1, 3), h=(1, 4), k=(1, 4)))
def queries(x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("bnd,hkd->bhnk", x, w)


@exercise(normal("b h n k", "h k d", b=(1, 3), h=(1, 4), k=(1, 4)))
def output(heads: Tensor, wo: Tensor) -> Tensor:
    return torch.einsum("bhnk,hkd->bnd", heads, wo)


@exercise(normal("h k d", h=(1, 4), k=(1, 4)))
def one_matrix(w: Tensor) -> Tensor:
    return w.flatten(0, 1).T


# convolution
@exercise(lambda draw: (draw.size(1, 7), draw.size(0, 4) - 2))
def shift_head(n: int, offset: int) -> Tensor:
    return _shifted(n, offset)


def _shifted(n: int, offset: int) -> Tensor:
    each = torch.arange(n)
    return (each[None] == each[:, None] + offset).float()


@exercise(lambda draw: (draw.normal(2 * draw.size(0, 2) + 1), draw.size(1, 7)))
def convolution_matrix(kernel: Tensor, n: int) -> Tensor:
    r = len(kernel) // 2
    return sum((kernel[r + at] * _shifted(n, at) for at in range(-r, r + 1)), torch.zeros(n, n))


@exercise(
    lambda draw: (
        draw.normal(draw.size(), c := draw.size(1, 3)),
        draw.normal(2 * draw.size(0, 2) + 1, c, draw.size(1, 3)),
    )
)
def convolve(x: Tensor, w: Tensor) -> Tensor:
    r = len(w) // 2
    parts = [_shifted(len(x), at - r) @ x @ w[at] for at in range(len(w))]
    return torch.stack(parts).sum(0)


# basis_functions
@exercise(lambda draw: (draw.normal(n := draw.size(3, 8), draw.size(1, 2)), draw.normal(n)), tolerance=5e-3)
def fit_error(phi: Tensor, y: Tensor) -> Tensor:
    phi, y = phi.double(), y.double()
    return (phi @ torch.linalg.lstsq(phi, y[:, None]).solution[:, 0] - y).abs().max()


@exercise(lambda draw: (draw.normal(draw.size()), draw.normal(h := draw.size(1, 4)), draw.normal(h)))
def sigmoid_heads(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return (x[:, None] * a + b).sigmoid()


@exercise(normal("d", "h d k", "h k d", h=(1, 3), k=(1, 3)), tolerance=1e-3)
def single_token(x: Tensor, wv: Tensor, wo: Tensor) -> Tensor:
    return torch.einsum("d,hdk,hke->e", x, wv, wo)


# mixtures
@exercise(lambda draw: (draw.normal(draw.size(), h := draw.size(1, 6)) + torch.arange(h) * 1e-2, draw.size(1, h)))
def top_k_gate(logits: Tensor, k: int) -> Tensor:
    weights = logits.softmax(-1)
    chosen = torch.zeros_like(weights).scatter(-1, logits.topk(k).indices, 1.0)
    return weights * chosen


@exercise(lambda draw: (draw.weights(draw.size(), draw.size(1, 6)), draw.size(1, 9) / 10))
def top_p_heads(weights: Tensor, p: float) -> Tensor:
    ordered, order = weights.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    return torch.zeros_like(weights, dtype=torch.bool).scatter(-1, order, before < p)


@exercise(
    lambda draw: (
        draw.normal(h := draw.size(1, 4), n := draw.size(), k := draw.size(1, 3)),
        draw.weights(n, h),
        draw.normal(h, k, draw.size(1, 5)),
    )
)
def mixed_heads(heads: Tensor, weights: Tensor, wo: Tensor) -> Tensor:
    return torch.einsum("hnk,nh,hkd->nd", heads, weights, wo)
