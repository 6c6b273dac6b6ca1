"""From the maps of one input to the tallies of every role: one pass of the kernel a layer, and a few products a query.

The similarity of two tokens is the cosine of their input embeddings, centred by the mean over the text's tokens, as all
embeddings share a large component (Mu & Viswanath 2018, 1702.01417). What counts is the similarity beyond matched
pairs: beyond the mean of the same key, and of pairs at the same distance. A head that selects keys by position alone,
or the same keys for every query, then scores 0, as does a uniform head. Pairs of equal tokens do not count.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from headwise.analysis.head_roles.score import LEFT
from headwise.analysis.head_roles.tally import Sight, Tally, band, key_weights, match_counts, match_masses, stack, tally
from headwise.map import AttentionMap
from headwise.rule import Rule, compute
from headwise.rule.tiles import Tile
from headwise.stats import ClassMass, row_measure
from headwise.stats.statistic import row_mass

NEAR = 8  # distances up to this have a mean each; all farther pairs have one mean before the query, and one after it
FLAT = 1e-4  # least mean of the largest excess of each row: below it, no pair is more similar than another


class Similarity:
    """The excess similarity of all pairs of query and key under one rule, from ids [b or 1, m], their embeddings [b or
    1, m, d] and the `words` [b or 1, m] that have a meaning."""

    def __init__(self, sight: Sight, ids: Tensor, vectors: Tensor, words: Tensor | None) -> None:
        members = sight.seen() if words is None else sight.seen() & words
        wide, m = max(len(members), len(ids)), sight.grid.m
        self._sight, self._positions = sight, torch.arange(sight.grid.n) + sight.grid.shift
        self._ids, self._members = ids.expand(wide, -1), members.expand(wide, -1)
        # Vectors less their mean over the members, of length 1; those equal to the mean stay 0.
        every, mine = vectors.expand(wide, -1, -1), self._members[..., None].to(vectors)
        centred = (every - (every * mine).sum(1, keepdim=True) / mine.sum(1, keepdim=True).clamp_min(1)) * mine
        self._units = torch.nn.functional.normalize(centred.double(), dim=-1).float()  # [b, m, d]
        self._keys, self._offsets = torch.zeros(1, 1, m), torch.zeros(1, 1, 2 * NEAR + 3)
        self._keys = self._key_means()  # [b or 1, h or 1, m]
        self._offsets = self._offset_means()  # [b or 1, h or 1, 2·NEAR + 3]
        largest, self._uniform, choices = self._rows()
        self._eligible = (choices >= 2) & (largest > 0)
        count = self._eligible.sum(-1, keepdim=True).clamp_min(1)
        self._scale = (largest * self._eligible).sum(-1, keepdim=True) / count
        self._eligible &= self._scale > FLAT

    def tally(self, amap: AttentionMap) -> Tally:
        """The excess of the tokens attended to, over a head that always attends to the most similar token in sight."""

        def of_tile(tile: Tile) -> Tensor:  # Σ p_ij excess_ij over the keys of a tile, [b, h, r]
            excess, _ = self._counted(self._positions[slice(*tile.rows)], slice(*tile.cols))
            return (tile.weights * excess.to(tile.weights)).sum(-1)

        found = amap.measure(row_measure("semantic", of_tile), rows=True).rows["semantic"]
        scale = self._scale.clamp_min(FLAT)
        return tally(found / scale.to(found), self._eligible, self._uniform / scale, self._sight.tokens)

    def _counted(self, positions: Tensor, cols: slice) -> tuple[Tensor, Tensor]:
        """The similarity above the means, [b or 1, h or 1, r, c], 0 for pairs that do not count; and which do, boolean
        [b or 1, 1, r, c]: two different tokens with a meaning."""
        at, keys = positions.clamp_min(0), torch.arange(cols.start, cols.stop)
        queries = self._members[:, at] & (positions >= 0)
        pairs = queries[:, :, None] & self._members[:, None, cols]
        pairs = (pairs & (self._ids[:, at, None] != self._ids[:, None, cols]))[:, None]
        cosines = (self._units[:, at] @ self._units[:, cols].mT)[:, None]
        excess = cosines - self._keys[..., None, cols] - self._offsets[..., self._bins(positions, keys)]
        return excess * pairs, pairs

    def _blocks(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Blocks of rows: positions [r]; excess, which pairs count, which keys are in sight, [b or 1, h or 1, r, m]."""
        for allowed, rows in self._sight.blocks():
            positions = self._positions[rows]
            excess, pairs = self._counted(positions, slice(0, self._sight.grid.m))
            yield positions, excess * allowed, pairs & allowed, allowed

    def _key_means(self) -> Tensor:
        found = torch.zeros((), dtype=torch.float64)
        for _, excess, pairs, _ in self._blocks():
            found = found + torch.stack((excess.sum(2), pairs.sum(2)))
        return _means(found)

    def _offset_means(self) -> Tensor:
        found, keys = torch.zeros((), dtype=torch.float64), torch.arange(self._sight.grid.m)
        for positions, excess, pairs, _ in self._blocks():
            bins = self._bins(positions, keys).flatten()
            both = torch.stack((excess, pairs)).flatten(-2).double()
            found = found + both.new_zeros(*both.shape[:-1], 2 * NEAR + 3).index_add(-1, bins, both)
        return _means(found)

    def _bins(self, positions: Tensor, keys: Tensor) -> Tensor:
        """The index of the mean for the distance of each query and key, [r, c]."""
        gap = self._sight.grid.gap
        distances = keys - positions[:, None] - gap.size * (keys < gap.start)
        return distances.clamp(-NEAR - 1, NEAR + 1) + NEAR + 1

    def _rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of each query [b or 1, h or 1, n]: the largest excess, the mean over the keys in sight, their number."""
        parts = [
            (excess.amax(-1).clamp_min(0), excess.sum(-1) / allowed.sum(-1).clamp_min(1), pairs.sum(-1))
            for _, excess, pairs, allowed in self._blocks()
        ]
        largest, uniform, choices = (torch.cat(rows, -1) for rows in zip(*parts, strict=True))
        return largest.double(), uniform.double(), choices


def _means(found: Tensor) -> Tensor:
    """Totals and counts, stacked, as means; 0 of none."""
    return (found[0] / found[1].clamp_min(1)).float()


MATCHES = {"duplicate": 0, "induction": 1}  # positions from the earlier equal token to the key
MEANINGLESS = ("separator", "punctuation")  # classes of tokens that are similar to no others
NEIGHBOURS = {"previous": -1, "self": 0, "next": 1}


@dataclass(frozen=True)
class Inputs:
    """The checked arguments of `roles` about the tokens: as many as keys, or more if a cache has dropped some."""

    ids: Tensor | None  # [b or 1, t]
    vectors: Tensor | None  # embeddings, [b or 1, t, d]
    classes: dict[str, Tensor]  # name → boolean [b or 1, t]
    reach: int
    radius: int

    @property
    def wide(self) -> int:
        """The largest offset from the diagonal at which weights are read."""
        return max(1, self.reach, self.radius)


@dataclass(frozen=True)
class Target:
    """The keys of one role."""

    count: Tensor  # of them in sight of each query, [b or 1, h or 1, n]
    has_first: Tensor  # whether the first key is one of them, boolean
    without: bool = True  # whether the role has a score without it


class Targets:
    """The keys of all roles under one rule."""

    def __init__(self, rule: Rule, inputs: Inputs) -> None:
        grid, n, m = rule.grid, rule.grid.n, rule.grid.m
        self.sight = sight = Sight(rule)
        self.first = sight.first.clamp_max(max(0, m - 1))  # [b or 1]
        self.sees = sight.keys > 0  # whether there is any
        self.sees_first = sight.sees(self.first[:, None, None].expand(-1, n, -1))[..., 0]
        position = torch.arange(n) + grid.first_token
        near = grid.keys_at(position[:, None] + torch.arange(-inputs.wide, inputs.wide + 1))
        self.seen = sight.sees(near[None])  # [b or 1, h or 1, n, 2·wide + 1], which neighbours are in sight
        self.is_first = (near[None] == self.first[:, None, None])[:, None] & self.seen
        self.of = {"first": Target(self.sees_first.long(), self.sees_first, without=False)}  # role → `Target`
        for name, offset in NEIGHBOURS.items():
            at = inputs.wide + offset
            self.of[name] = Target(self.seen[..., at].long(), self.is_first[..., at])
        around = slice(inputs.wide - inputs.radius, inputs.wide + inputs.radius + 1)
        self.of["local"] = Target(self.seen[..., around].sum(-1), self.is_first[..., around].any(-1))
        self.classes = {name: grid.of_keys(members) for name, members in inputs.classes.items()}  # name → [b or 1, m]
        for name, members in self.classes.items():
            wide = max(len(members), len(self.first))
            first_in = members.expand(wide, -1).gather(1, self.first.expand(wide)[:, None])
            self.of[name] = Target(sight.count(members), first_in[:, None] & self.sees_first)
        if inputs.ids is not None:
            wide = max(len(inputs.ids), len(self.first))
            ids, first = inputs.ids.expand(wide, -1), grid.key_tokens()[self.first.expand(wide)][:, None]
            of_query = ids[:, position.clamp_min(0)]
            for name, step in MATCHES.items():
                same = ids.gather(1, (first - step).clamp_min(0)) == of_query
                same &= (first >= step) & (first - step < position)
                self.of[name] = Target(match_counts(inputs.ids, sight, step), same[:, None] & self.sees_first)
        self.similarity = None  # None without embeddings
        if inputs.ids is not None and inputs.vectors is not None:
            marks = [self.classes[name] for name in MEANINGLESS if name in self.classes]
            words = ~torch.stack(marks).any(0) if marks else None
            self.similarity = Similarity(sight, grid.of_keys(inputs.ids), inputs.vectors[:, grid.key_tokens()], words)

    def eligible(self, name: str, *, first: bool = True) -> tuple[Tensor, Tensor]:
        """Which queries have a key of the role in sight, and the weight of a uniform head on such keys; without
        `first`, as if the first key did not exist."""
        target = self.of[name]
        count = target.count if first else target.count - target.has_first.long()
        keys = self.sight.keys if first else self.sight.keys - self.sees_first.long()
        return count > 0, count.double() / keys.clamp_min(1)


@dataclass(frozen=True)
class Collected:
    """Tallies of all roles, [layers, stretches, heads]."""

    roles: dict[str, Tally]  # by name
    without_first: dict[str, Tally]  # the same with weights renormalised without the first key
    hits: Tally  # rows whose largest weight is at an offset, with an axis of offsets
    near: Tally  # the weight there
    rows: Tally  # queries with any key in sight
    mass: Tally  # the sum of their weights, less than 1 each with a learned sink
    entries: Tally | None  # matching pairs for induction, None without tokens
    causal: bool = True  # no query has a later key in sight


def collect(maps: list[AttentionMap], inputs: Inputs) -> Collected:
    """The tallies of one input, a map for each layer."""
    known: list[tuple[AttentionMap, Targets]] = []
    layers = []
    for amap in maps:
        targets = next((t for a, t in known if a.mask == amap.mask and a.rule.grid == amap.rule.grid), None)
        if targets is None:
            targets = Targets(amap.rule, inputs)
            known.append((amap, targets))
        layers.append(_layer(amap, targets, inputs))

    def joined(name: str) -> Tally:
        return stack([getattr(layer, name) for layer in layers])

    def each(name: str) -> dict[str, Tally]:
        return {role: stack([getattr(layer, name)[role] for layer in layers]) for role in getattr(layers[0], name)}

    return Collected(
        each("roles"), each("without_first"), joined("hits"), joined("near"), joined("rows"), joined("mass"),
        joined("entries") if inputs.ids is not None else None,
        not any(targets.sight.ahead() for _, targets in known),
    )  # fmt: skip


@torch.no_grad()
def _layer(amap: AttentionMap, targets: Targets, inputs: Inputs) -> Collected:
    count = partial(tally, tokens=targets.sight.tokens)
    measured = [ClassMass(members, name) for name, members in targets.classes.items()]
    rows = amap.measure("entropy", "max_logit", *measured, rows=True).rows
    first = key_weights(amap, targets.sight, targets.first)
    near, scores, seen = band(amap, targets.sight, inputs.wide)
    at = {name: near[..., inputs.wide + offset] for name, offset in NEIGHBOURS.items()}
    around = near[..., inputs.wide - inputs.radius : inputs.wide + inputs.radius + 1].sum(-1)
    masses = {"first": first, **at, "local": around, **{name: rows[name] for name in inputs.classes}}
    if inputs.ids is not None:
        masses |= dict(zip(MATCHES, match_masses(amap, inputs.ids, targets.sight, list(MATCHES.values())), strict=True))
    found = {name: count(mass, *targets.eligible(name)) for name, mass in masses.items()}

    one = torch.ones(1, 1, 1)
    sees, keys = targets.sees, targets.sight.keys.double()
    most = keys.clamp_min(1).log()
    found["broad"] = count(rows["entropy"], sees, most)
    found["even"] = count(rows["entropy"] / most.clamp_min(1e-9).to(first), keys >= 2, one)
    if targets.similarity is not None:
        found["semantic"] = targets.similarity.tally(amap)

    whole = row_mass(amap.rule, amap.lse)
    rest = whole - first
    kept = rest >= LEFT
    without = {}
    for name, mass in masses.items():
        target = targets.of[name]
        if target.without:
            eligible, uniform = targets.eligible(name, first=False)
            left = (mass - first * target.has_first.to(first)) / rest.clamp_min(LEFT)
            without[name] = count(left.clamp(0.0, 1.0), eligible.to(kept.device) & kept, uniform)

    offsets = slice(inputs.wide - inputs.reach, inputs.wide + inputs.reach + 1)
    seen = seen[..., offsets]
    share = (1.0 / keys.clamp_min(1))[..., None]
    hits = _hits(amap, rows["max_logit"], scores[..., offsets], seen)
    return Collected(
        found, without, count(hits, seen, share), count(near[..., offsets], seen, share),
        count(torch.ones_like(first), sees, one), count(whole, sees, one),
        None if inputs.ids is None else _entries(targets, first),
    )  # fmt: skip


def _hits(amap: AttentionMap, largest: Tensor, scores: Tensor, seen: Tensor) -> Tensor:
    """Rows whose largest weight is at an offset, [b, h, n, offsets] of 0 and 1; a tie of two counts for neither."""
    seen = seen.to(scores.device)
    # Both are sums of d products in different orders, and kernels store the largest with the log-sum-exp of sinks.
    eps = 16 * torch.finfo(scores.dtype).eps
    q, k = compute(amap.q).norm(dim=-1), compute(amap.k).norm(dim=-1)
    longest = torch.where(torch.isfinite(k), k, 0.0).amax(-1, keepdim=True)
    longest = longest.repeat_interleave(q.shape[1] // k.shape[1], 1)
    beside = torch.where(torch.isfinite(amap.lse), amap.lse.abs(), 0.0)
    slack = eps * (q * longest * abs(amap.rule.scale) + largest.abs() + beside)
    top = seen & (scores >= (largest - slack)[..., None])
    return (top & (top.sum(-1, keepdim=True) == 1)).to(scores)


def _entries(targets: Targets, like: Tensor) -> Tally:
    count = targets.of["induction"].count.to(like).expand(like.shape)
    return tally(count, targets.sees, torch.zeros(1, 1, 1), targets.sight.tokens)
