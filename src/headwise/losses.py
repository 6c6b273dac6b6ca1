"""Losses on attention, for training: each is a number to add to the loss of a model, in O(n) memory.

    >>> import torch, headwise as hw
    >>> q, k, v = (torch.randn(1, 4, 100, 16, requires_grad=True) for _ in range(3))
    >>> out, amap = hw.attend(q, k, v, mask=hw.Causal(), return_map=True, differentiable=True)
    >>> loss = out.square().mean() + 0.01 * hw.losses.entropy_floor(amap, 2.0) + 1e-4 * hw.losses.z_loss(amap)
    >>> loss.backward()

All take a map of `attend(…, return_map=True, differentiable=True)`, or several, of which they return the mean: an
iterable of maps, or the record of `watch(…, differentiable=True)` or the handle of `attach(…, differentiable=True)`,
which have the maps of a model's last forward.

Letters: b batch, h heads, n queries, m keys, p_ij weights, S_ij scores. Means are over batch entries, heads and queries
that are not fully masked.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from headwise.errors import ConfigError, DTypeError, ShapeError
from headwise.map import AttentionMap
from headwise.map.pairs import Heads
from headwise.stats import ClassMass, Measure, SinkMass, row_measure
from headwise.stats.registry import MEASURES

__all__ = [
    "class_mass",
    "distance",
    "distillation",
    "entropy_ceiling",
    "entropy_floor",
    "guided_diagonal",
    "head_similarity",
    "indexer_kl",
    "max_logit",
    "output_similarity",
    "pairs",
    "z_loss",
]


class Watched(Protocol):
    """What has the maps of a model's last forward: the record of `watch`, the handle of `attach`."""

    @property
    def maps(self) -> Mapping[str, Any]: ...


Maps = AttentionMap | Iterable[AttentionMap] | Watched  # one map or several, whose losses are averaged


def entropy_floor(attention: Maps, floor: float, *, normalized: bool = False) -> Tensor:
    """Mean over heads of max(0, floor − H), H being the head's mean entropy: against entropy collapse, in which
    training becomes unstable.

    Args:
        attention: the map or maps. floor: in nats; with `normalized`, a share of the largest possible entropy, 0 to 1.
    Returns:
        A number, 0 if no head is below.
    Source: Zhai et al. 2023, 2303.06296 (attention entropy Ent(A) and its collapse).
    """
    name = "normalized_entropy" if normalized else "entropy"
    return _mean("entropy_floor", attention, lambda amap: _over_heads(amap, name, lambda x: floor - x))


def entropy_ceiling(attention: Maps, ceiling: float, *, normalized: bool = False) -> Tensor:
    """Mean over heads of max(0, H − ceiling): for heads that attend to few keys.

    Args:
        attention: the map or maps. ceiling: as the floor of `entropy_floor`; so is normalized.
    Returns:
        A number, 0 if no head is above.
    Source: the counterpart of `entropy_floor`; cf. Correia et al. 2019, 1909.00015 (sparse attention).
    """
    name = "normalized_entropy" if normalized else "entropy"
    return _mean("entropy_ceiling", attention, lambda amap: _over_heads(amap, name, lambda x: x - ceiling))


def guided_diagonal(
    attention: Maps, g: float = 0.2, *, queries: Tensor | None = None, keys: Tensor | None = None
) -> Tensor:
    """Mean of Σ_j p_ij W_ij with W_ij = 1 − exp(−(i/N − j/M)² / 2g²): for alignments near the diagonal, as of speech
    and text.

    Args:
        attention: the map or maps, usually of cross attention. g: how far from the diagonal weights are free.
        queries, keys: [b], the lengths N and M of each batch entry if it is padded; n and m by default. Padding should
            be masked too.
    Returns:
        A number, 0 to 1. It is M times the mean over all pairs, which the paper takes.
    Raises:
        ConfigError: for a g that is not positive; ShapeError: for lengths that are not [b].
    Source: Tachibana et al. 2017, 1710.08969 (guided attention loss, W_nt).
    """

    def loss(amap: AttentionMap) -> Tensor:
        b, _, n, m = amap.shape
        sizes = []
        for name, given, size in (("queries", queries, n), ("keys", keys, m)):
            if given is not None and torch.as_tensor(given).shape != (b,):
                raise ShapeError(f"guided_diagonal({name}): expected a length for each of {b} batch entries")
            found = torch.full((b,), size) if given is None else torch.as_tensor(given)
            sizes.append(found.to(amap.q.device).clamp_min(1).double()[:, None, None, None])

        def partial(tile):  # type: ignore[no-untyped-def]
            i, j = (torch.arange(*span, device=tile.lse.device).double() for span in (tile.rows, tile.cols))
            away = i[:, None] / sizes[0] - j / sizes[1]
            return (tile.weights * (1.0 - (-away.square() / (2 * g * g)).exp()).to(tile.weights)).sum(-1)

        return _rows(amap, row_measure("guided_diagonal", partial))

    if not g > 0:
        raise ConfigError(f"guided_diagonal(g={g}): expected g > 0")
    return _mean("guided_diagonal", attention, loss)


def pairs(attention: Maps, wanted: Tensor, *, heads: Sequence[int] | None = None) -> Tensor:
    """−ln p_ij of given pairs of query i and key j, mean over the queries that have pairs, and over heads: supervision
    of heads by syntax, coreference, alignments or human rationales.

    Args:
        attention: the map or maps. wanted: integers [pairs, 2] of (i, j), in all batch entries, or [pairs, 3] of
            (batch entry, i, j); the keys of one query share it evenly. heads: which heads are supervised; None: all.
    Returns:
        A number in nats; 0 if each query attends to its key alone.
    Raises:
        ConfigError: for a pair whose key is masked, with the index of its query; ShapeError, DTypeError: for pairs that
            do not fit.
    Source: Strubell et al. 2018, 1804.08199 (syntactically-informed self-attention).
    """

    def loss(amap: AttentionMap) -> Tensor:
        b, h, n, m = amap.shape
        keys, weights = _targets(wanted, b, n, m, amap.q.device)
        if heads is not None and not all(0 <= head < h for head in heads):
            raise ShapeError(f"losses.pairs(heads={list(heads)}): expected heads from 0 to {h - 1}")
        taught = [float(heads is None or head in heads) for head in range(h)]
        weights = weights * weights.new_tensor(taught)[:, None, None]
        return amap.cross_entropy((keys, weights), empty=True).sum() / (weights.sum(-1) > 0).sum().clamp_min(1)

    return _mean("pairs", attention, loss)


def class_mass(attention: Maps, members: Tensor | None = None, *, most: float = 0.0) -> Tensor:
    """Mean over heads of max(0, mass − most), the mass being the mean weight on a class of keys: against sinks, or for
    less weight on separators, punctuation or images.

    Args:
        attention: the map or maps. members: boolean [m] or [b, m]; None: the first token of each sequence, the sink.
        most: the mass that costs nothing, 0 to 1.
    Returns:
        A number, 0 if no head has more.
    Source: Xiao et al. 2023, 2309.17453 (sinks); Clark et al. 2019, 1906.04341 §3.2 (separators).
    """
    measure = SinkMass() if members is None else ClassMass(members)
    return _mean("class_mass", attention, lambda amap: _over_heads(amap, measure, lambda x: x - most))


def distance(attention: Maps, *, most: float = 0.0) -> Tensor:
    """Mean over heads of max(0, D − most), D = mean of Σ_j p_ij |i − j| in tokens: for local attention.
    Source: Vig & Belinkov 2019, 1906.04284 (attention distance); Sukhbaatar et al. 2019, 1905.07799 (span penalty)."""
    return _mean("distance", attention, lambda amap: _over_heads(amap, "mean_distance", lambda x: x - most))


def head_similarity(attention: Maps) -> Tensor:
    """Mean of Σ_j p^a_ij p^b_ij over pairs of different heads a, b: less of it makes heads attend to other keys.

    It is computed from the sum over heads, Σ_b p^b, without pairs. A map of one head has 0.
    Source: Li et al. 2018, 1810.10183 (disagreement regularization of attended positions).
    """

    def partial(tile):  # type: ignore[no-untyped-def]
        others = tile.weights.sum(1, keepdim=True) - tile.weights
        return (tile.weights * others).sum(-1) / max(1, tile.shape[1] - 1)

    return _mean("head_similarity", attention, lambda amap: _rows(amap, row_measure("head_similarity", partial)))


def output_similarity(out: Tensor) -> Tensor:
    """Mean cosine between the outputs of different heads at the same query, of outputs [b, h, n, d]; vectors of 0 have
    cosine 0. Raises ShapeError for another shape. Source: Li et al. 2018, 1810.10183 (disagreement regularization of
    outputs)."""
    if not isinstance(out, Tensor) or out.ndim != 4:
        raise ShapeError("output_similarity(out): expected the output of attend, [b, h, n, d]")
    h = out.shape[1]
    out = out.float() if out.dtype != torch.float64 else out
    size = out.square().sum(-1, keepdim=True)
    units = out * size.masked_fill(size == 0, torch.inf).rsqrt()  # no gradient at 0
    both = units.sum(1).square().sum(-1) - units.square().sum((1, -1))
    return both.mean() / max(1, h * (h - 1))


def distillation(student: Maps, teacher: Maps, *, heads: Heads = None) -> Tensor:
    """Mean KL(teacher ‖ student) over heads and queries; the teacher gets no gradient.

    Args:
        student, teacher: maps of the same batch, queries and keys, or equally many of them, such as of layers. heads:
            the teacher's head or heads for each of the student's, as of `AttentionMap.kl`.
    Returns:
        A number in nats.
    Raises:
        ConfigError: for numbers of maps or heads that differ, and as `AttentionMap.kl`.
    Source: Wang et al. 2020, 2002.10957 (MiniLM: L_AT).
    """

    def loss(amap: AttentionMap, target: AttentionMap) -> Tensor:
        return _over_queries(amap, amap.kl(target, heads=heads))

    return _following("distillation", student, teacher, loss)


def indexer_kl(index: Maps, attention: Maps, *, per_head: bool = False) -> Tensor:
    """Mean over queries of KL(p ‖ softmax(I)), which trains an indexer I to choose the keys that attention uses.

    Args:
        index: the map of the indexer's scores, with its own queries and keys and usually one head. Its mask is that of
            the keys allowed: all earlier ones in the dense stage, those chosen in the sparse one.
        attention: the map of the attention that it follows, which gets no gradient; of several, equally many.
        per_head: False: p is the sum of the weights over heads, divided by its sum over the allowed keys. True: each
            head's weights are divided by their sum over the allowed keys first, and the mean of the divergences counts.
            What learned sinks take is divided out of each head before.
    Returns:
        A number in nats. Its denominator is over the allowed keys, in the target as in the indexer.
    Raises:
        ConfigError: for numbers of maps that differ, and as `AttentionMap.kl`.
    Source: DeepSeek-V3.2, 2512.02556 (lightning indexer: dense warm-up and sparse training).
    """

    def loss(amap: AttentionMap, target: AttentionMap) -> Tensor:
        heads = range(target.shape[1])
        groups = [[i] for i in heads] if per_head else [list(heads)]
        each = [amap.kl(target, heads=[group] * amap.shape[1], renormalized=True) for group in groups]
        return _over_queries(amap, torch.stack(each).mean(0))

    return _following("indexer_kl", index, attention, loss)


def z_loss(attention: Maps) -> Tensor:
    """Mean of log² Z_i, Z_i = Σ_j exp S_ij: keeps scores from drifting; the usual factor is 1e-4.
    Source: Chowdhery et al. 2022, 2204.02311, §5 (PaLM, there of the output's softmax)."""

    def loss(amap: AttentionMap) -> Tensor:
        lse = amap.lse
        return _over_queries(amap, lse.masked_fill(lse == -torch.inf, 0.0).square())

    return _mean("z_loss", attention, loss)


def max_logit(attention: Maps, most: float = 100.0) -> Tensor:
    """Mean over heads of max(0, max_ij S_ij − most): against exploding logits.
    Source: Kimi K2, 2507.20534, §2.1 (there by clipping weights at τ = 100)."""
    return _mean("max_logit", attention, lambda amap: _over_heads(amap, "max_logit", lambda x: x - most))


def _mean(name: str, attention: Maps, loss: Callable[[AttentionMap], Tensor]) -> Tensor:
    """The mean of a loss over maps, which must have gradients."""
    maps = _listed(name, attention)
    cut = [amap.layer for amap in maps if not amap.differentiable]
    if cut and torch.is_grad_enabled():
        raise ConfigError(
            "losses.{name}: this map has no gradients, and the loss would train nothing (layer: {layer}); give "
            "differentiable=True to attend, to the layer, to hw.watch or to hw.attach, outside of torch.no_grad(), in "
            "which torch.utils.checkpoint runs the forward pass too with use_reentrant=True",
            name=name, layer=cut[0] or "–",
        )  # fmt: skip
    return torch.stack([loss(amap) for amap in maps]).mean()


def _following(
    name: str, attention: Maps, targets: Maps, loss: Callable[[AttentionMap, AttentionMap], Tensor]
) -> Tensor:
    """The mean of a loss over maps and those that they follow, which get no gradient."""
    maps, followed = _listed(name, attention), _listed(name, targets)
    if len(maps) != len(followed):
        raise ConfigError(
            "losses.{name}: {count} maps to train, and {followed} that they follow; expected as many",
            name=name, count=len(maps), followed=len(followed),
        )  # fmt: skip
    each = iter(followed)
    return _mean(name, maps, lambda amap: loss(amap, next(each).detach()))


def _listed(name: str, attention: Maps) -> list[AttentionMap]:
    """The maps of what is given; ConfigError if there are none."""
    given: Any = attention if isinstance(attention, AttentionMap) else getattr(attention, "maps", attention)
    if isinstance(given, Mapping):
        given = list(given.values())
        if not given:
            raise ConfigError(
                "losses.{name}: there are no maps of a last forward: expected hw.watch(…, differentiable=True) or "
                "hw.attach(…, differentiable=True), and a forward of which headwise computed or measured the attention",
                name=name,
            )
    maps = list(given) if isinstance(given, Iterable) and not isinstance(given, AttentionMap) else [given]
    for amap in maps:
        if not isinstance(amap, AttentionMap):
            raise DTypeError(f"losses.{name}: expected attention maps, got {type(amap).__name__}")
    if not maps:
        raise ConfigError(f"losses.{name}: expected at least one map")
    return maps


def _over_heads(amap: AttentionMap, measure: str | Measure, cost: Callable[[Tensor], Tensor]) -> Tensor:
    """The mean of max(0, cost) of a measure over the heads of batch entries that are not fully masked; the measure is
    that of the call if it has it, with its graph."""
    found = None
    if isinstance(measure, str):
        found = None if amap.measured is None else amap.measured.get(measure)
        measure = MEASURES[measure]()
    if found is None or (torch.is_grad_enabled() and not found.requires_grad):
        found = next(iter(amap.measure(measure).values()))
    with torch.no_grad():
        lit = (amap.lse != -torch.inf).any(-1)
    return torch.where(lit, cost(found).clamp_min(0.0), 0.0).sum() / lit.sum().clamp_min(1)


def _rows(amap: AttentionMap, measure: Measure) -> Tensor:
    """The mean over queries of a measure of rows."""
    return _over_queries(amap, amap.measure(measure, rows=True).rows[measure.name])


def _over_queries(amap: AttentionMap, rows: Tensor) -> Tensor:
    """The mean of [b, h, n] over queries that are not fully masked, where others have 0."""
    with torch.no_grad():
        count = (amap.lse != -torch.inf).sum()
    return rows.sum() / count.clamp_min(1)


def _targets(wanted: Tensor, b: int, n: int, m: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Pairs as keys and weights [b, 1, n, count], as `AttentionMap.cross_entropy` takes them."""
    if not isinstance(wanted, Tensor) or wanted.is_floating_point() or wanted.dtype == torch.bool:
        raise DTypeError("losses.pairs(wanted): expected a tensor of whole numbers")
    if wanted.ndim != 2 or wanted.shape[1] not in (2, 3) or not len(wanted):
        raise ShapeError(f"losses.pairs(wanted): expected [pairs, 2] or [pairs, 3], got {tuple(wanted.shape)}")
    wanted = wanted.to(device).long()
    if wanted.shape[1] == 2:
        entries = torch.arange(b, device=device).repeat_interleave(len(wanted))[:, None]
        wanted = torch.cat((entries, wanted.repeat(b, 1)), 1)
    sizes = torch.tensor([b, n, m], device=device)
    if bool(((wanted < 0) | (wanted >= sizes)).any()):
        raise ShapeError(f"losses.pairs(wanted): an index is out of range for {b} entries, {n} queries and {m} keys")
    place, keys = wanted[:, 0] * n + wanted[:, 1], wanted[:, 2]
    order = place.argsort(stable=True)
    place, keys = place[order], keys[order]
    counts = torch.bincount(place, minlength=b * n)
    rank = torch.arange(len(place), device=device) - (counts.cumsum(0) - counts)[place]
    found = torch.full((b * n, int(counts.max())), -1, device=device)
    found[place, rank] = keys
    found = found.view(b, 1, n, -1)
    return found, (found >= 0).float()
