"""The similarity of heads: a head × head matrix that prints, groups and saves itself; that of their maps.

>>> import torch, headwise as hw
>>> one, two = torch.randn(2, 1, 3, 40, 8)                      # two layers of three heads
>>> two[:, 1] = one[:, 2]
>>> alike = hw.analysis.output_similarities([one, two], ["cka"])["cka"]
>>> alike.pairs(1)[0].names, round(alike["L0H2", "L1H1"], 3)
(('L0H2', 'L1H1'), 1.0)
"""

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.analysis.checks import checked_maps, head_names
from headwise.base.files import write_text
from headwise.base.run import Progress
from headwise.errors import ConfigError, not_installed
from headwise.map import AttentionMap
from headwise.masks import Span, State
from headwise.rule import score_tile
from headwise.rule.tiles import COMPUTING, Scratch
from headwise.table.show import Printed

MOST_GROUPS = 64  # tried by `groups()` without arguments


@dataclass(frozen=True)
class Pair:
    """Two heads and their similarity; `error` is a standard error, or None if the value is exact."""

    names: tuple[str, str]
    value: float
    error: float | None


@dataclass(frozen=True, repr=False)
class HeadSimilarity(Printed):
    """A number for each pair of heads, over all layers.

    Attributes:
        kind: what is compared, such as "CKA of outputs"; unit: of the numbers; note: remarks on how to read them.
        names: L0H0, L0H1, …, of rows and columns.
        matrix: [G, G] float64 on the CPU.
        distance: [G, G] ≥ 0, 0 on the diagonal, for grouping heads; None if the matrix is directed (row writes, column
            reads), so that heads cannot be grouped.
        chance: the average for unrelated heads, or None if it is 0 or unknown.
        error: [G, G] standard errors, or None if the numbers are exact.
        small_is_alike: whether small numbers mean similar heads, as for a divergence.
    """

    kind: str
    names: tuple[str, ...]
    matrix: Tensor
    distance: Tensor | None
    unit: str = ""
    chance: float | None = None
    error: Tensor | None = None
    note: str = ""
    small_is_alike: bool = False

    def __getitem__(self, pair: tuple[str, str]) -> float:
        """The number for two heads by name: `alike["L0H1", "L2H0"]`."""
        i, j = map(self._index, pair)
        return float(self.matrix[i, j])

    def pairs(self, count: int = 10) -> list[Pair]:
        """The most similar pairs of different heads; if directed, those with the largest numbers."""
        if count < 1:
            raise ConfigError(f"pairs(count={count}): expected at least 1")
        if self.distance is None:
            at = (~torch.eye(len(self.names), dtype=torch.bool)).nonzero()
            rank = -self.matrix[at[:, 0], at[:, 1]]
        else:
            at = torch.triu_indices(len(self.names), len(self.names), 1).T
            rank = self.distance[at[:, 0], at[:, 1]]
        best = at[torch.sort(rank, stable=True).indices[:count]].tolist()
        return [
            Pair(
                (self.names[i], self.names[j]),
                float(self.matrix[i, j]),
                None if self.error is None else float(self.error[i, j]),
            )
            for i, j in best
        ]

    @cached_property
    def order(self) -> list[int]:
        """All heads, with similar ones next to each other: the leaves of the average linkage tree."""
        leaves = [[head] for head in range(len(self.names))]
        for left, right in self.linkage[:, :2].astype(int):
            leaves.append(leaves[left] + leaves[right])
        return leaves[-1]

    @cached_property
    def linkage(self) -> np.ndarray:
        """The tree in the format of `scipy.cluster.hierarchy`, [G − 1, 4]: average linkage (Sokal & Michener 1958) with
        optimal leaf order (Bar-Joseph et al. 2001), the latter for at most 512 heads."""
        if self.distance is None:
            raise ConfigError(f"{self.kind}: rows and columns mean different things, so heads cannot be grouped by it")
        far = self.distance.numpy()
        if not np.isfinite(far).all():
            raise ConfigError(f"{self.kind}: distance has entries that are NaN or infinite, so heads cannot be grouped")
        tree = _average_linkage(far)
        return _ordered(tree, far) if 2 < len(far) <= 512 else tree

    def groups(self, count: int | None = None, *, within: float | None = None) -> list[list[str]]:
        """Groups of heads, the largest first. Requires SciPy.

        Without arguments, the number of groups, up to 64, has the highest mean silhouette (Rousseeuw 1987).

        Args:
            count: the number of groups (fewer if heads have the same distance).
            within: the largest average distance between parts of a group, instead of a number of groups.
        """
        size = len(self.names)
        if count is not None and (within is not None or not 1 <= count <= size):
            raise ConfigError(
                f"groups(count={count}, within={within}): expected 1 to {size} groups, or within, not both"
            )
        if within is not None and not within >= 0:
            raise ConfigError(f"groups(within={within}): expected a distance ≥ 0")
        tree = self.linkage
        if size == 1:
            return [list(self.names)]
        try:
            from scipy.cluster.hierarchy import fcluster as cut
        except ImportError:
            raise not_installed("groups()", "scipy") from None
        if within is not None:
            labels = cut(tree, within, "distance")
        elif count is not None:
            labels = cut(tree, count, "maxclust")
        else:
            assert self.distance is not None  # checked by linkage
            far = self.distance.numpy()
            tried = [cut(tree, k, "maxclust") for k in range(2, min(MOST_GROUPS, size - 1) + 1)]
            labels = max(tried, key=lambda found: _silhouette(far, found), default=np.ones(size, int))
        members: dict[int, list[str]] = {}
        for i in self.order:
            members.setdefault(int(labels[i]), []).append(self.names[i])
        return sorted(members.values(), key=len, reverse=True)

    def to_json(self, *, grouped: bool = False) -> str:
        """Everything as JSON; `grouped` adds the order, and groups, which require SciPy."""
        content: dict[str, Any] = {
            "kind": self.kind, "unit": self.unit, "note": self.note, "chance": self.chance, "names": self.names,
            "matrix": self.matrix.tolist(), "error": None if self.error is None else self.error.tolist(),
        }  # fmt: skip
        if grouped:
            content |= {"order": [self.names[i] for i in self.order], "groups": self.groups()}
        return json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n"

    def save(self, path: str | os.PathLike[str], *, grouped: bool = False) -> None:
        """Write `to_json` to a file, whole or not at all."""
        write_text(path, self.to_json(grouped=grouped))

    def rows(self, count: int = 10) -> tuple[list[str], list[list[str]]]:
        """Header and rows as text: the most similar pairs."""
        directed = self.distance is None
        head = ["writes" if directed else "head", "reads" if directed else "head", self.unit or "similarity"]
        body = [[*pair.names, f"{pair.value:.4g}"] for pair in self.pairs(count)]
        if self.error is not None:
            head.append("standard error")
            for line, pair in zip(body, self.pairs(count), strict=True):
                line.append(f"{pair.error:.2g}")
        return head, body

    @property
    def title(self) -> str:
        """One line: what is compared, and the value of unrelated heads."""
        chance = "" if self.chance is None else f"; by chance {self.chance:.3g}"
        return f"{self.kind}, {len(self.names)} heads{chance}"

    def _index(self, name: str) -> int:
        if name not in self.names:
            raise ConfigError(f"head {name!r}: expected a name from {self.names[0]} to {self.names[-1]}")
        return self.names.index(name)


def symmetric(matrix: Tensor) -> Tensor:
    """The mean of a matrix and its transpose, float64 on the CPU, as rounding differs between (i, j) and (j, i)."""
    matrix = matrix.double().cpu()
    return (matrix + matrix.T) / 2


def mirrored(upper: Tensor) -> Tensor:
    """The upper triangle, mirrored below the diagonal."""
    upper = upper.triu()
    return upper + upper.triu(1).T


def apart(distance: Tensor) -> Tensor:
    """Distances clamped to at least 0, with 0 on the diagonal."""
    return distance.clamp_min(0.0).fill_diagonal_(0.0)


def _silhouette(far: np.ndarray, labels: np.ndarray) -> float:
    """Mean of (b − a) / max(a, b), the mean distance a to a head's own group and b to the nearest other; 0 if alone."""
    names = np.unique(labels)
    if len(names) < 2:
        return -1.0
    member = labels[:, None] == names  # [G, groups]
    sizes = member.sum(0)
    sums = far @ member
    own = (sums * member).sum(1) / np.maximum(sizes[member.argmax(1)] - 1, 1)
    others = np.where(member, np.inf, sums / sizes).min(1)
    most = np.maximum(own, others)
    score = np.divide(others - own, most, out=np.zeros_like(most), where=most > 0)
    return float(np.where(sizes[member.argmax(1)] == 1, 0.0, score).mean())


def _average_linkage(far: np.ndarray) -> np.ndarray:
    """The tree that always joins the two groups with the smallest average distance of their heads."""
    count = len(far)
    far, groups, sizes = far + np.diag([np.inf] * count), list(range(count)), [1] * count
    tree = np.zeros((count - 1, 4))
    for step in range(count - 1):
        i, j = divmod(int(far.argmin()), count)
        both = sizes[i] + sizes[j]
        tree[step] = *sorted((groups[i], groups[j])), far[i, j], both
        far[i] = far[:, i] = (sizes[i] * far[i] + sizes[j] * far[j]) / both
        far[i, i] = far[j] = far[:, j] = np.inf
        groups[i], sizes[i] = count + step, both
    return tree


def _ordered(tree: np.ndarray, far: np.ndarray) -> np.ndarray:
    """The tree with its branches turned so that the distances of neighbouring leaves have the smallest sum."""
    leaves = [[head] for head in range(len(far))]
    costs = [np.zeros((1, 1)) for _ in leaves]  # of each branch: the smallest sums, by its first and its last leaf
    pairs = tree[:, :2].astype(int)
    for left, right in pairs:
        across = _least(_least(costs[left], far[np.ix_(leaves[left], leaves[right])]), costs[right])
        costs.append(
            np.block([[np.full_like(costs[left], np.inf), across], [across.T, np.full_like(costs[right], np.inf)]])
        )
        leaves.append(leaves[left] + leaves[right])
    first, last = divmod(int(across.argmin()), across.shape[1])
    turned, open_ends = tree.copy(), [(len(costs) - 1, leaves[left][first], leaves[right][last])]
    while open_ends:
        branch, first, last = open_ends.pop()
        if branch < len(far):
            continue
        left, right = pairs[branch - len(far)]
        if first not in leaves[left]:
            left, right = right, left
        turned[branch - len(far), :2] = left, right
        ends = costs[left][leaves[left].index(first)][:, None] + far[np.ix_(leaves[left], leaves[right])]
        i, j = divmod(int((ends + costs[right][:, leaves[right].index(last)]).argmin()), len(leaves[right]))
        open_ends += (left, first, leaves[left][i]), (right, leaves[right][j], last)
    return turned


def _least(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The product of two matrices with sums for products, and minima for sums."""
    return np.stack([(row[:, None] + other).min(0) for row in one])


ROWS, KEYS = 16, 512  # of a tile of all heads
CACHED = 1 << 21  # features of all heads at once, 8 MB in float32
BLOCK = 1 << 24  # numbers of all pairs at once

# JS(p, q) = ½ ln 2 · Σ(p + q) − Σ √(p q)·κ(ln p/q), with κ(ω) = cosh(ω/2) ln(2 cosh(ω/2)) − (ω/2) sinh(ω/2). Like all
# such kernels κ is a sum of cosines (Vedaldi & Zisserman 2012, PAMI 34(3)), and √(p q)·cos λ(ln p − ln q) a product
# of a function of p and one of q: one matrix product for all pairs instead of a logarithm for each. These eight waves
# minimise the largest error relative to (p + q)/2, 1.7e-5, by linear programming, with κ(0) = ln 2 exact, so that equal
# rows have divergence 0.
STEP = 0.23566828
AMPLITUDES = {0: 0.23387826, 1: 0.30257650, 2: 0.10612281, 3: 0.03480685, 4: 0.01009626, 5: 0.00368301, 6: 0.00148486,
              8: 0.00049863}  # fmt: skip
WAVES = [part for multiple in AMPLITUDES for part in ("cos", "sin")[: 1 + (multiple > 0)]]
ERROR = 2e-5  # nats, bound of the error of the waves


@torch.no_grad()
def map_divergence(
    maps: Sequence[AttentionMap], *, rows: int | None = 256, seed: int = 0, progress: Progress | None = None
) -> HeadSimilarity:
    """Jensen–Shannon divergence of all heads of all layers in nats, mean over queries: 0 for equal weights, ln 2
    for heads that never attend to the same key.

    JS(p, q) = H((p + q)/2) − (H(p) + H(q))/2 (Lin 1991; between heads: Clark et al. 2019, 1906.04341 §4.4). The
    weight of a learned sink counts as one more key. Rows that are fully masked in one of two maps are left out.

    Args:
        maps: one for each layer, all of one input.
        rows: the number of sampled queries of all batch entries: one at random from each stretch of equal length. Each
            is computed over all its keys, and `error` is the standard error of the mean. None, or at least as many as
            there are queries: all of them, without an error.
        seed: of the random queries.
        progress: called with the rows done and the rows in all.
    Returns:
        `HeadSimilarity`; a row's divergence is exact to 2e-5 nats. Heads are grouped by √JS, which is a metric
        (Endres & Schindelin 2003).
    Cost: 30 FLOPs for each pair of heads, row and key in sight. Memory: O(heads²) beside the maps.
    """
    layers = checked_maps(maps)
    b, _, n, _ = layers[0].shape
    heads = [amap.shape[1] for amap in layers]
    if rows is not None and rows < 2:
        raise ConfigError(f"rows={rows}: expected at least 2, or None for all")
    if rows is not None and rows >= b * n:
        rows = None
    chosen = torch.arange(b * n) if rows is None else _drawn(b * n, rows, seed)
    mean = _Mean(sum(heads), layers[0].lse.device)
    done = 0
    for batch, part in _parts(chosen, n, sum(heads)):
        mean.add(*_divergences(layers, batch, part.to(layers[0].lse.device)))
        done += len(part)
        if progress is not None:
            progress(COMPUTING, done, len(chosen))
    unseen = mirrored(mean.count).fill_diagonal_(1) == 0
    if bool(unseen.any()):
        one, two = (head_names(heads)[i] for i in unseen.nonzero()[0].tolist())
        raise ConfigError(f"maps: {one} and {two} have no row in common in which neither is fully masked")
    matrix = symmetric(mean.value()).clamp(0.0, math.log(2)).fill_diagonal_(0.0)
    error = None if rows is None else symmetric(mean.error(len(chosen) / (b * n))).fill_diagonal_(0.0)
    counted = "all rows" if rows is None else f"{rows} of {b * n} rows, seed {seed}"
    note = f"{counted}; each exact to {ERROR:g} nats"
    return HeadSimilarity(
        "Jensen–Shannon divergence of maps", head_names(heads), matrix, apart(matrix.sqrt()), "nats", error=error,
        note=note, small_is_alike=True,
    )  # fmt: skip


def _drawn(size: int, count: int, seed: int) -> Tensor:
    """One index at random from each of `count` stretches of [0, size), ascending."""
    edges = torch.arange(count + 1) * size // count
    draw = torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return edges[:-1] + (draw * edges.diff()).long()


def _parts(chosen: Tensor, n: int, heads: int) -> Iterator[tuple[int, Tensor]]:
    """Batch entry and query indices, in parts whose pairs of heads fit in memory."""
    size = max(1, min(ROWS, BLOCK // heads**2))
    for batch in range(int(chosen[0]) // n, int(chosen[-1]) // n + 1):
        here = chosen[(chosen >= batch * n) & (chosen < (batch + 1) * n)] - batch * n
        for start in range(0, len(here), size):
            yield batch, here[start : start + size]


def _divergences(layers: list[AttentionMap], batch: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """JS of each row and pair, and which are valid, [r, G, G]; filled only partly below the diagonal."""
    heads = [amap.shape[1] for amap in layers]
    mass = torch.zeros(len(rows), sum(heads), dtype=torch.float64, device=rows.device)
    common = mass.new_zeros(len(rows), sum(heads), sum(heads))
    for weights in _tiles(layers, batch, rows):
        mass += weights.sum(-1, dtype=torch.float64)
        _add_common(common, weights)
    # The weight of a learned sink is the rest of the row, as one more key.
    has_sink = torch.tensor([amap.rule.terms(amap.lse).sinks is not None for amap in layers])
    if bool(has_sink.any()):
        sunk = has_sink.repeat_interleave(torch.tensor(heads)).to(rows.device)
        sink = torch.where(sunk, (1 - mass).clamp_min(0.0), 0.0)
        mass += sink
        _add_common(common, sink[..., None])
    seen = torch.cat([amap.lse[batch, :, rows] != -torch.inf for amap in layers]).T  # [r, G]
    total = math.log(2) / 2 * (mass[:, :, None] + mass[:, None]) - common
    counted = seen[:, :, None] & seen[:, None]
    return torch.where(counted, total, 0.0), counted


def _tiles(layers: list[AttentionMap], batch: int, rows: Tensor) -> Iterator[Tensor]:
    """Weights of all heads of all layers for the same keys, [r, G, c]."""
    m = layers[0].shape[3]
    streams = [row_tiles(amap, batch, rows, KEYS) for amap in layers]
    waiting = [next(stream, None) for stream in streams]
    for start in range(0, m, KEYS):
        parts, lit = [], False
        for k, amap in enumerate(layers):
            tile = waiting[k]
            if tile is not None and tile[0].start == start:
                parts.append(tile[1])
                lit = True
                waiting[k] = next(streams[k], None)
            else:
                parts.append(amap.lse.new_zeros(amap.shape[1], len(rows), min(KEYS, m - start)))
        if lit:
            yield torch.cat(parts).transpose(0, 1)


def _add_common(common: Tensor, weights: Tensor) -> None:
    """Add Σ_j √(p q)·κ(ln p/q) of all pairs, i ≤ j, to common [r, G, G], for weights [r, G, c]."""
    heads, keys = weights.shape[1:]
    half, width = heads // 2, max(64, CACHED // (heads * len(WAVES)))
    scratch = Scratch()
    for row, total in zip(weights, common, strict=True):
        for start in range(0, keys, width):
            features = _features(row[:, start : start + width], scratch)
            total[:half] += features[:half] @ features.T
            total[half:, half:] += features[half:] @ features[half:].T


def _features(weights: Tensor, scratch: Scratch) -> Tensor:
    """[G, c] → [G, F·c] with ⟨features of p, features of q⟩ = √(p q)·κ(ln p/q), summed over c."""
    heads, keys = weights.shape
    out = scratch.take("features", (heads, len(WAVES), keys), weights)
    root = weights.sqrt()
    # ln 0 would be −∞; the factor √0 makes the feature 0.
    angle = weights.clamp_min(torch.finfo(weights.dtype).tiny).log_().mul_(STEP)
    cosine = angle.cos()
    before, now = [root, torch.zeros_like(root)], [cosine * root, angle.sin_().mul_(root)]
    twice = cosine.mul_(2)
    at = 0
    for multiple in range(max(AMPLITUDES) + 1):
        if multiple in AMPLITUDES:
            for part in before[: 1 + (multiple > 0)]:
                torch.mul(part, AMPLITUDES[multiple] ** 0.5, out=out[:, at])
                at += 1
        # cos (l+1)θ = 2 cos θ · cos lθ − cos (l−1)θ, likewise for sin. With signs + + − − + + − − …, which cancel in
        # products of two features, this is one operation in place.
        sign = 1.0 if multiple % 2 else -1.0
        before, now = now, [x.addcmul_(twice, y, value=sign) for x, y in zip(before, now, strict=True)]
    return out.view(heads, -1)


class _Mean:
    """The mean over rows of a number for each pair and its standard error, accumulated by blocks of rows."""

    def __init__(self, heads: int, device: torch.device) -> None:
        self.total, self.count, self.steps, self.step_count = torch.zeros(
            4, heads, heads, dtype=torch.float64, device=device
        )
        self.last: tuple[Tensor, Tensor] | None = None

    def add(self, values: Tensor, counted: Tensor) -> None:
        """Add rows in ascending order: values and which of them are valid, [r, G, G]."""
        self.total += values.sum(0)
        self.count += counted.sum(0)
        if self.last is not None:
            values, counted = torch.cat((self.last[0], values)), torch.cat((self.last[1], counted))
        both = counted[1:] & counted[:-1]
        self.steps += torch.where(both, values.diff(dim=0).square(), 0.0).sum(0)
        self.step_count += both.sum(0)
        self.last = values[-1:].clone(), counted[-1:].clone()

    def value(self) -> Tensor:
        return mirrored(self.total / self.count.clamp_min(1))

    def error(self, share: float) -> Tensor:
        """From differences of neighbouring rows, half their mean square being about the variance within a stretch, or
        more (Wolter 2007, Introduction to Variance Estimation, §8.2). share: of the rows that were sampled."""
        variance = self.steps / (2 * self.step_count.clamp_min(1))
        return mirrored((variance / self.count.clamp_min(1) * (1 - share)).sqrt())


def row_tiles(amap: AttentionMap, batch: int, rows: Tensor, width: int) -> Iterator[tuple[Span, Tensor]]:
    """Exact weights of ascending `rows` of one batch entry: (keys, [h, r, c]), without fully masked tiles."""
    h, m = amap.shape[1], amap.shape[3]
    held = slice(batch, batch + 1)
    q, lse = amap.q[held, :, rows], amap.lse[held, :, rows]
    terms = amap.rule.terms(amap.lse)
    minus = lse.masked_fill(lse == -torch.inf, torch.inf)  # fully masked rows have weights of 0
    span = Span(int(rows[0]), int(rows[-1]) + 1)

    def here(x: Tensor) -> Tensor:
        return x[held] if x.shape[0] > 1 else x

    for start in range(0, m, width):
        cols = Span(start, min(start + width, m))
        state = amap.mask.state(span, cols, amap.rule.grid)
        if state is State.EMPTY:
            continue
        keys = torch.arange(cols.start, cols.stop, device=rows.device)
        k = amap.k[held, :, cols.start : cols.stop]
        added = [here(term) for term in terms.added_at(rows, keys)]
        logs = score_tile(q, k, amap.rule.scale, terms.soft_cap, added, minus=minus)
        if state is not State.FULL:
            allowed = here(amap.mask.allowed(rows, keys, amap.rule.grid))
            logs.masked_fill_(~allowed, -torch.inf)
        yield cols, logs.exp_().view(h, len(rows), len(keys))
