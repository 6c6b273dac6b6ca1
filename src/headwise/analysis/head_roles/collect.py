"""From the maps of one input to the tallies of every role.

What the mask and the tokens decide, such as which keys a role is about, is the same for all layers with one mask. The
weights take one pass of the kernel a layer for statistics of whole rows, and a few products a query for the rest.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from headwise.analysis.head_roles.definitions import LEFT
from headwise.analysis.head_roles.semantic import Similarity
from headwise.analysis.head_roles.sight import Sight
from headwise.analysis.head_roles.tally import Tally, stack, tally
from headwise.analysis.head_roles.weights import band, key_weights, match_counts, match_masses
from headwise.map import AttentionMap
from headwise.rule import Rule, compute
from headwise.stats import ClassMass
from headwise.stats.rows import row_mass

MATCHES = {"duplicate": 0, "induction": 1}  # positions from the earlier equal token to the key
MEANINGLESS = ("separator", "punctuation")  # classes of tokens that are similar to no others
NEIGHBOURS = {"previous": -1, "self": 0, "next": 1}


@dataclass(frozen=True)
class Inputs:
    """The checked arguments of `roles` about the tokens.

    Attributes:
        ids: of all tokens, [b or 1, t], or None; vectors: embeddings of these tokens, [b or 1, t, d] or None.
        classes: name → boolean [b or 1, t]; reach, radius: in tokens. There are as many tokens as keys, or more if a
            cache has dropped some.
    """

    ids: Tensor | None
    vectors: Tensor | None
    classes: dict[str, Tensor]
    reach: int
    radius: int

    @property
    def wide(self) -> int:
        """The largest offset from the diagonal at which weights are read."""
        return max(1, self.reach, self.radius)


@dataclass(frozen=True)
class Target:
    """The keys of one role.

    Attributes:
        count: of them in sight of each query, [b or 1, h or 1, n].
        has_first: whether the first key is one of them, boolean; without: whether the role has a score without it.
    """

    count: Tensor
    has_first: Tensor
    without: bool = True


class Targets:
    """The keys of all roles under one rule.

    Attributes:
        sight: the keys in sight of each query; sees: whether there is any; sees_first: whether the first key is one.
        classes: name → boolean [b or 1, m]; of: role → `Target`.
        seen: [b or 1, h or 1, n, 2·wide + 1], which neighbours are in sight.
        similarity: of the tokens; None without their embeddings.
    """

    def __init__(self, rule: Rule, inputs: Inputs) -> None:
        grid, n, m = rule.grid, rule.grid.n, rule.grid.m
        self.sight = sight = Sight(rule)
        self.first = sight.first.clamp_max(max(0, m - 1))  # [b or 1]
        self.sees = sight.keys > 0
        self.sees_first = sight.sees(self.first[:, None, None].expand(-1, n, -1))[..., 0]
        position = torch.arange(n) + grid.first_token
        near = grid.keys_at(position[:, None] + torch.arange(-inputs.wide, inputs.wide + 1))
        self.seen = sight.sees(near[None])
        self.is_first = (near[None] == self.first[:, None, None])[:, None] & self.seen
        self.of = {"first": Target(self.sees_first.long(), self.sees_first, without=False)}
        for name, offset in NEIGHBOURS.items():
            at = inputs.wide + offset
            self.of[name] = Target(self.seen[..., at].long(), self.is_first[..., at])
        around = slice(inputs.wide - inputs.radius, inputs.wide + inputs.radius + 1)
        self.of["local"] = Target(self.seen[..., around].sum(-1), self.is_first[..., around].any(-1))
        self.classes = {name: grid.of_keys(members) for name, members in inputs.classes.items()}
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
        self.similarity = None
        if inputs.ids is not None and inputs.vectors is not None:
            marks = [self.classes[name] for name in MEANINGLESS if name in self.classes]
            words = ~torch.stack(marks).any(0) if marks else None
            self.similarity = Similarity(sight, grid.of_keys(inputs.ids), inputs.vectors[:, grid.key_tokens()], words)

    def eligible(self, name: str) -> tuple[Tensor, Tensor]:
        """Which queries have a key of the role in sight, and the weight of a uniform head on such keys."""
        count = self.of[name].count
        return count > 0, count.double() / self.sight.keys.clamp_min(1)

    def eligible_without_first(self, name: str) -> tuple[Tensor, Tensor]:
        """`eligible` as if the first key did not exist."""
        target = self.of[name]
        count = target.count - target.has_first.long()
        keys = self.sight.keys - self.sees_first.long()
        return count > 0, count.double() / keys.clamp_min(1)


@dataclass(frozen=True)
class Collected:
    """Tallies of all roles, [layers, stretches, heads].

    Attributes:
        roles: by name; without_first: the same with weights renormalised without the first key.
        hits, near: rows whose largest weight is at an offset, and the weight there; each has one more axis, offsets.
        rows: queries with any key in sight; mass: the sum of their weights, less than 1 each with a learned sink.
        entries: matching pairs for induction, None without tokens.
    """

    roles: dict[str, Tally]
    without_first: dict[str, Tally]
    hits: Tally
    near: Tally
    rows: Tally
    mass: Tally
    entries: Tally | None


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
            eligible, uniform = targets.eligible_without_first(name)
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
    """Rows whose largest weight is the one at an offset, [b, h, n, offsets] of 0 and 1. Rows in which two of these keys
    have it count for neither."""
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
