"""The mathematics of merging KV heads, on plain matrices.

A query of head i is x Q_i and a key of head j is y K_j, so a score is x Q_i K_jᵀ yᵀ; a head's output is a mean of
y V_j, which W_O maps to y V_j O_i. All matrices have an additional row for the bias, if there is one.

    Q [g, e, d_k], K [r, e_c, d_k], V [r, e_c, d_v], O [g, d_v, e_o]: r KV heads to merge, and their g query heads
"""

import torch
from torch import Tensor


def shared_keys(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries [g, e, d_k] and one K [e_c, d_k] with Σ_i ‖Q_i K_jᵀ − Q'_i K'ᵀ‖² least, over all of rank d_k.

    Exact if K_j = K_1 A_j. For scores without rotary positions and norms, which do not commute with A_j.
    """
    basis, inner = _joined(k)  # K_j = basis @ inner_j
    of_query = inner.repeat_interleave(len(q) // len(k), 0)  # [g, k, d]
    maps = q @ of_query.mT  # Q_i K_jᵀ in the basis, [g, e, k]
    top = _leading((maps.mT @ maps).sum(0), k.shape[-1])
    return _balanced(maps @ top, basis @ top, k)


def shared_rotary_keys(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """As `shared_keys`, with maps that commute with rotary positions: one complex factor per head for each rotated pair
    (t, t + d/2), taken as a complex number. Exact if K_j = K_1 diag(a_j) in this sense."""
    of_query = len(q) // len(k)
    pairs = [torch.complex(*x.chunk(2, -1)).permute(2, 0, 1) for x in (q, k)]  # [d/2, g, e], [d/2, r, e_c]
    queries, keys = pairs
    weight = queries.abs().square().sum(-1).unflatten(1, (len(k), of_query)).sum(-1).sqrt()  # [d/2, r]
    weight = weight.clamp_min(1e-12 * float(weight.max()) + 1e-300)
    left = torch.linalg.svd((keys * weight[..., None]).mT, full_matrices=False)[0][..., 0]  # [d/2, e_c]
    factor = (left.conj()[:, None] * keys).sum(-1)  # κ_j ≈ left · factor_j, [d/2, r]
    scaled = queries * factor.conj().repeat_interleave(of_query, 1)[..., None]
    shared_q, shared_k = (torch.cat((x.real, x.imag), 0) for x in (scaled, left))  # [d, g, e], [d, e_c]
    return _balanced(shared_q.permute(1, 2, 0), shared_k.mT, k)


def shared_values(v: Tensor, o: Tensor) -> tuple[Tensor, Tensor]:
    """Return one V [e_c, d_v] and outputs [g, d_v, e_o] with Σ_i ‖V_j O_i − V' O'_i‖² least. Exact if V_j = V_1 B_j."""
    basis, inner = _joined(v)
    maps = inner.repeat_interleave(len(o) // len(v), 0) @ o  # V_j O_i in the basis, [g, k, e_o]
    top = _leading((maps @ maps.mT).sum(0), v.shape[-1])
    out, shared = _balanced(top.mT @ maps, basis @ top, v)
    return shared, out


def lost(a: Tensor, b: Tensor, new_a: Tensor, new_b: Tensor) -> float:
    """√(Σ_i ‖A_i B_i − A'_i B'_i‖² / Σ_i ‖A_i B_i‖²), computed without the products: A [g, m, d], B [g, d, n]."""
    before = _square_norm(a, b)
    difference = _square_norm(torch.cat((a, -new_a), -1), torch.cat((b, new_b), -2))
    return float((difference.clamp_min(0.0) / before.clamp_min(1e-300)).sqrt())  # rounding may fall below 0


def cosine(x: Tensor) -> Tensor:
    """⟨X_i, X_j⟩ / ‖X_i‖‖X_j‖ for all pairs of [r, …]: 1 for heads that are equal up to a factor."""
    flat = torch.nn.functional.normalize(x.flatten(1), dim=-1)
    return flat @ flat.mT


def overlap(x: Tensor) -> Tensor:
    """Mean squared cosine of the principal angles between the columns of X_i and X_j [r, e, d]: 1 where X_i = X_j A."""
    q = torch.linalg.qr(x)[0]
    return torch.einsum("iea,jeb->ijab", q, q).square().sum((-1, -2)) / q.shape[-1]


def rotary_overlap(x: Tensor) -> Tensor:
    """Mean over rotated pairs of |⟨κ_i, κ_j⟩|² / ‖κ_i‖²‖κ_j‖² [r, e, d]: 1 if they are equal up to a complex factor."""
    pairs = torch.nn.functional.normalize(torch.complex(*x.chunk(2, -1)), dim=1)  # [r, e, d/2]
    return torch.einsum("iet,jet->ijt", pairs.conj(), pairs).abs().square().mean(-1)


def similar_groups(similarity: Tensor, count: int) -> list[list[int]]:
    """Return heads in `count` groups of equal size, similar ones together: [r, r] to lists of head numbers.

    Greedy, from the most similar group on; then pairs of heads are exchanged while that increases the sum of the
    similarities within groups. Not always optimal, which is a hard problem.
    """
    heads, size = len(similarity), len(similarity) // count
    s = ((similarity + similarity.mT) / 2).double().clone().fill_diagonal_(0.0)
    free, groups = list(range(heads)), []
    while free:
        inside = s[free][:, free]
        best = inside.clone().fill_diagonal_(-torch.inf).topk(size - 1, -1) if size > 1 else None
        seed = 0 if best is None else int(best.values.sum(-1).argmax())
        members = [free[seed]] + ([] if best is None else [free[int(j)] for j in best.indices[seed]])
        groups.append(members)
        free = [head for head in free if head not in members]
    _exchange(s, groups)
    return sorted(sorted(group) for group in groups)


def _exchange(s: Tensor, groups: list[list[int]]) -> None:
    """Exchange heads of two groups while the sum of similarities within groups increases."""
    better = True
    while better:
        better = False
        for one in groups:
            for other in groups:
                if one is other:
                    break
                to_one, to_other = s[:, one].sum(-1), s[:, other].sum(-1)
                for i, a in enumerate(one):
                    gain = [float(to_other[a] - to_one[a] + to_one[b] - to_other[b] - 2 * s[a, b]) for b in other]
                    j = max(range(len(gain)), key=gain.__getitem__)
                    if gain[j] > 1e-9:
                        one[i], other[j] = other[j], a
                        better = True
                        break


def _joined(x: Tensor) -> tuple[Tensor, Tensor]:
    """X_j = basis @ inner_j: an orthonormal basis [e, k] of all columns of [r, e, d], and inner [r, k, d]."""
    basis, inner = torch.linalg.qr(torch.cat(list(x), -1))
    return basis, torch.stack(inner.split(x.shape[-1], -1))


def _leading(gram: Tensor, count: int) -> Tensor:
    """The eigenvectors [k, count] of the largest eigenvalues; zeros where there are fewer."""
    vectors = torch.linalg.eigh(gram)[1].flip(-1)[:, :count]
    return torch.nn.functional.pad(vectors, (0, count - vectors.shape[-1]))


def _balanced(many: Tensor, one: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Rescale both factors of a product so that `one` has the mean norm of the heads that it replaces."""
    size = like.norm() / len(like) ** 0.5
    scale = size / one.norm().clamp_min(1e-300)
    return (many / scale, one * scale) if float(scale) > 0 else (many, one)


def _square_norm(a: Tensor, b: Tensor) -> Tensor:
    return ((a.mT @ a) * (b @ b.mT)).sum()
