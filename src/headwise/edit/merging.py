"""Merging of KV heads: converts multi-head attention to grouped-query (GQA) or multi-query attention (MQA).

>>> import torch, headwise as hw
>>> layer = hw.MultiHeadAttention(64, 8)
>>> done = merge_kv(layer, 2, method="svd", copy=True)
>>> done.model.num_kv_heads, len(done.merges[""].groups)
(2, 2)

A query of head i is x Q_i and a key of head j is y K_j, so a score is x Q_i K_jᵀ yᵀ; a head's output is a mean of
y V_j, which W_O maps to y V_j O_i. All matrices have an additional row for the bias, if there is one:
Q [g, e, d_k], K [r, e_c, d_k], V [r, e_c, d_v], O [g, d_v, e_o]: r KV heads to merge, and their g query heads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.edit.pruning import aligned, by_site, change, check_finite, check_weights, count_parameters
from headwise.errors import ConfigError, check_choice, whole_number
from headwise.models import KINDS, HeadSite, find_heads
from headwise.models.configuration.sizes import update_config
from headwise.models.site import pick_heads, put
from headwise.nn.owned import copied

METHODS = ("mean", "first", "cluster", "svd")
Groups = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Merge:
    """The KV heads (groups) that were merged to one each and the query heads of one module, by their previous numbers;
    lost_…: relative Frobenius error of W_Q W_Kᵀ and W_V W_O of all heads, expected for isotropic inputs, 0 if exact."""

    module: str
    groups: tuple[tuple[int, ...], ...]
    queries: tuple[int, ...]
    lost_scores: float
    lost_values: float


@dataclass(frozen=True)
class Merged:
    """The result of `merge_kv`: the model that was given, or its copy, and one `Merge` for each changed module, by
    name."""

    model: nn.Module
    method: str
    merges: dict[str, Merge]
    parameters_before: int
    parameters_after: int

    def __repr__(self) -> str:
        first = f"method {self.method}; parameters {change(self.parameters_before, self.parameters_after)}"
        rows = [
            (
                m.module, f"{sum(map(len, m.groups))} → {len(m.groups)}", f"{100 * m.lost_scores:.1f} %",
                f"{100 * m.lost_values:.1f} %", " ".join("(" + " ".join(map(str, group)) + ")" for group in m.groups),
            )
            for m in self.merges.values()
        ]  # fmt: skip
        head = ("module", "KV heads", "error of W_Q W_Kᵀ", "error of W_V W_O", "shared by")
        return f"{first}; errors are relative and can exceed 100 %\n{aligned(head, rows)}"


def merge_kv(
    model: nn.Module,
    num_kv_heads: int | Mapping[str | int, int],
    method: str = "mean",
    *,
    groups: Mapping[str | int, Groups] | None = None,
    copy: bool = False,
) -> Merged:
    """Merge groups of KV heads to one each. Query heads are reordered with their KV heads; the order of heads does not
    affect the output.

    Args:
        model: a `MultiHeadAttention` or a model with them, such as `Decoder`; a Llama-like one of transformers; or
            attention that is written by hand, after `find_heads(model, batch)`. Where its code repeats no KV heads, the
            linear maps of keys and values are replaced by a module that does.
        num_kv_heads: number of KV heads afterwards, a divisor of the current number; or a mapping from sites, which
            leaves the others unchanged.
        method: how a group is merged, and how groups are formed unless `groups` is given.
            "mean": the mean of adjacent heads (Ainslie et al. 2023). "first": the first of adjacent heads.
            "cluster": the mean of heads with similar W_K and W_V (cosine).
            "svd": the matrices with the least error of W_Q W_Kᵀ and W_V W_O, with one map per head absorbed into W_Q
            and W_O; groups are heads whose W_K and W_V span similar subspaces. It is exact if W_K and W_V of a group
            are equal up to invertible maps. With rotary positions, the maps are one complex factor per rotated pair,
            as no others commute with them; with QK-norm keys are averaged.
        groups: for some sites, lists of KV heads to merge, such as those of `group_heads`.
        copy: merge in a deepcopy; the model itself is unchanged.
    Returns:
        `Merged`. It is exact if all heads of a group had the same keys and values; otherwise `heal` can reduce the
        loss.
    Raises:
        ConfigError: for a number that is not a divisor, invalid groups, designs and models that do not support it, and
            weights that are quantized, parametrized, unknown, shared by two modules, not finite or on the meta device.
            The model is unchanged then.
    Source: Ainslie et al. 2023, 2305.13245; like heads first, Chen et al. 2024, 2412.20677.
    """
    check_choice("method", method, METHODS)
    sites = find_heads(model)
    counts = (
        by_site("num_kv_heads", sites, num_kv_heads)
        if isinstance(num_kv_heads, Mapping)
        else dict.fromkeys(range(len(sites)), num_kv_heads)
    )
    chosen = by_site("groups", sites, groups or {})
    for i in chosen:
        if i not in counts:
            raise ConfigError(f"groups: {sites[i].place} is not among the sites of num_kv_heads")
    for i, count in counts.items():
        _check_site(sites[i], method)
        counts[i] = _checked_count(sites[i], count)
    check_weights(model, [sites[i] for i in counts])
    check_finite([sites[i] for i in counts])
    found = {i: _groups(sites[i], count, method, chosen.get(i)) for i, count in counts.items()}
    before = count_parameters(model)
    result = copied(model) if copy else model
    own = find_heads(result) if copy else sites
    for i in found:
        own[i].anatomy.share(own[i])
    merges = {own[i].name: _merge(own[i], each, method) for i, each in found.items()}
    update_config(result)
    return Merged(result, method, merges, before, count_parameters(result))


def group_heads(site: HeadSite, count: int, outputs: Tensor | None = None, *, method: str = "cluster") -> Groups:
    """Return the KV heads of a site in `count` groups of equal size, similar ones together.

    Args:
        outputs: outputs of the query heads on some text, [b, h, n, d_v], from `record_heads`: groups heads with similar
            outputs (cosine, mean over the pairs of query heads of two KV heads). None groups heads with similar
            weights, by `method`, "cluster" or "svd" (see `merge_kv`).
    """
    check_choice("method", method, ("cluster", "svd"))
    _check_site(site, method)
    count = _checked_count(site, count)
    if outputs is None:
        return similar_groups(_similarity(site, method), count)
    if outputs.ndim != 4 or outputs.shape[1] != site.num_heads:
        raise ConfigError(f"outputs: expected [b, h={site.num_heads}, n, d_v], got shape {tuple(outputs.shape)}")
    group = site.num_heads // site.num_kv_heads
    pairs = cosine(outputs.detach().double().transpose(0, 1))
    return similar_groups(pairs.unflatten(0, (-1, group)).unflatten(-1, (-1, group)).mean((1, 3)), count)


def _check_site(site: HeadSite, method: str) -> None:
    resizing = site.anatomy.resizing(site)
    if not resizing.merges:
        known = ", and ".join(kind.merged for kind in KINDS if kind.merged)
        raise ConfigError(
            f"{site.place}: {type(site.module).__name__} does not support merging of KV heads; supported: {known}"
        )
    if method == "svd" and resizing.unknown_rotary:
        raise ConfigError(f"method='svd': {resizing.unknown_rotary}. The other methods do not require it")


def _checked_count(site: HeadSite, count: object) -> int:
    found = whole_number(count)
    if found is None or found < 1 or site.num_kv_heads % found:
        raise ConfigError(
            "num_kv_heads={count!r}: {place} has {num_kv_heads} KV heads; expected a divisor of that",
            count=count,
            place=site.place,
            num_kv_heads=site.num_kv_heads,
        )
    return found


def _groups(site: HeadSite, count: int, method: str, given: Groups | None) -> list[list[int]]:
    size = site.num_kv_heads // count
    if given is None:
        if method in ("cluster", "svd"):
            return [list(group) for group in group_heads(site, count, method=method)]
        return [list(range(i, i + size)) for i in range(0, site.num_kv_heads, size)]
    found = [[head if (number := whole_number(head)) is None else number for head in group] for group in given]
    if sorted(head for group in found for head in group) != list(range(site.num_kv_heads)) or any(
        len(group) != size for group in found
    ):
        raise ConfigError(
            f"groups: {site.place}: {found}; expected {count} groups of {size}, in which each of the "
            f"{site.num_kv_heads} KV heads occurs once"
        )
    return found


def _merge(site: HeadSite, groups: list[list[int]], method: str) -> Merge:
    """Reorder the heads, then replace each group by its merged head."""
    ratio, size = site.num_heads // site.num_kv_heads, len(groups[0])
    order = [head for group in groups for head in group]
    queries = [head * ratio + i for head in order for i in range(ratio)]
    pick_heads(site, queries, order)
    q, k, v, o = _extended(site)
    new = []
    for i in range(len(groups)):
        of_keys, of_queries = slice(i * size, (i + 1) * size), slice(i * size * ratio, (i + 1) * size * ratio)
        new.append(_shared(site, q[of_queries], k[of_keys], v[of_keys], o[of_queries], method))
    new_q, new_o = (torch.cat([each[i] for each in new]) for i in (0, 3))
    new_k, new_v = (torch.stack([each[i] for each in new]) for i in (1, 2))
    per_query = [x.repeat_interleave(len(q) // len(x), 0) for x in (k, new_k, v, new_v)]
    scores = lost(q, per_query[0].mT, new_q, per_query[1].mT)
    values = lost(per_query[2], o, per_query[3], new_o)
    maps: dict[str, Any] = {part.letter: part.owner for part in site.parts() if part.letter in "qkvo"}
    for letter, x in (("q", new_q), ("k", new_k), ("v", new_v)) if method == "svd" else (("k", new_k), ("v", new_v)):
        linear, bias = maps[letter], maps[letter].bias  # [heads, in + 1, d], the last row is the bias
        put(linear, "weight", x[:, :-1].mT.flatten(0, 1).to(linear.weight))
        if bias is not None:
            put(linear, "bias", x[:, -1].flatten().to(bias))
    if method == "svd":
        put(maps["o"], "weight", new_o.flatten(0, 1).mT.to(maps["o"].weight))
    site.anatomy.resize(site, site.num_heads, len(groups))
    return Merge(site.place, tuple(map(tuple, groups)), tuple(queries), scores, values)


def _shared(
    site: HeadSite, q: Tensor, k: Tensor, v: Tensor, o: Tensor, method: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the queries, the shared K and V, and the outputs of a group."""
    if method == "first":
        return q, k[0], v[0], o
    if method != "svd":
        return q, k.mean(0), v.mean(0), o
    new_v, new_o = shared_values(v, o)
    layout = site.layout()
    if layout.norms:
        return q, k.mean(0), new_v, new_o
    new_q, new_k = (shared_rotary_keys if layout.rotary else shared_keys)(q, k)
    return new_q, new_k, new_v, new_o


def _similarity(site: HeadSite, method: str) -> Tensor:
    _, k, v, _ = _extended(site)
    if method == "cluster":
        return (cosine(k) + cosine(v)) / 2
    layout = site.layout()
    if layout.norms:
        return (cosine(k) + overlap(v)) / 2
    return ((rotary_overlap if layout.rotary else overlap)(k) + overlap(v)) / 2


def _extended(site: HeadSite) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return Q, K, V with a row for the bias (0 without one), and O, all in float64."""
    weights = {name: x.double() for name, x in site.weights().items()}
    biases = {part.letter: part for part in site.parts() if part.name == "bias"}
    for name in "qkv":
        x, part = weights[name], biases.get(name)
        row = x.new_zeros(len(x), 1, x.shape[-1])
        if part is not None:
            bias: Tensor = getattr(part.owner, part.name)
            row = bias.detach().double().narrow(0, part.start, len(x) * part.width).view(len(x), 1, -1)
        weights[name] = torch.cat((x, row), 1)
    return weights["q"], weights["k"], weights["v"], weights["o"]


def shared_keys(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Queries [g, e, d_k] and one K [e_c, d_k] with Σ_i ‖Q_i K_jᵀ − Q'_i K'ᵀ‖² least, over all of rank d_k; exact if
    K_j = K_1 A_j. For scores without rotary positions and norms, which do not commute with A_j."""
    basis, inner = _joined(k)  # K_j = basis @ inner_j
    of_query = inner.repeat_interleave(len(q) // len(k), 0)  # [g, k, d]
    maps = q @ of_query.mT  # Q_i K_jᵀ in the basis, [g, e, k]
    top = _leading((maps.mT @ maps).sum(0), k.shape[-1])
    return _balanced(maps @ top, basis @ top, k)


def shared_rotary_keys(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """As `shared_keys`, by maps that commute with rotary positions: one complex factor per head for each rotated pair
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
    """Heads [r, r] in `count` groups of equal size, similar ones together: greedy, then pairs are exchanged while that
    increases the similarities within groups. Not always optimal, which is a hard problem."""
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
