"""From the maps of one input to the tallies of every role: one pass of the kernel a layer for what needs all of a row,
and a few products a query for the rest."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.analysis.head_roles.definitions import LEFT
from headwise.analysis.head_roles.matches import match_masses
from headwise.analysis.head_roles.pairs import band, key_weights
from headwise.analysis.head_roles.tally import Tally, stack, tally
from headwise.analysis.head_roles.targets import MATCHES, NEIGHBOURS, Targets, Told
from headwise.map import AttentionMap
from headwise.rule import compute
from headwise.stats import ClassMass
from headwise.stats.rows import row_mass


@dataclass(frozen=True)
class Collected:
    """Tallies of all roles, [layers, stretches, heads].

    Attributes:
        roles: by name; without_first: the same with weights renormalised without the first key.
        hits, near: rows whose largest weight is at an offset, and the weight there; each has one more axis, offsets.
        rows: queries that see something; mass: what their weights sum to, less than 1 each with a learned sink.
        entries: pairs that match for induction, None without tokens.
    """

    roles: dict[str, Tally]
    without_first: dict[str, Tally]
    hits: Tally
    near: Tally
    rows: Tally
    mass: Tally
    entries: Tally | None


def collect(maps: list[AttentionMap], told: Told) -> Collected:
    """The tallies of one input, a map for each layer."""
    known: list[tuple[AttentionMap, Targets]] = []
    layers = []
    for amap in maps:
        targets = next((t for a, t in known if a.mask == amap.mask and a.rule.grid == amap.rule.grid), None)
        if targets is None:
            targets = Targets(amap.rule, told)
            known.append((amap, targets))
        layers.append(_layer(amap, targets, told))

    def joined(name: str) -> Tally:
        return stack([getattr(layer, name) for layer in layers])

    def each(name: str) -> dict[str, Tally]:
        return {role: stack([getattr(layer, name)[role] for layer in layers]) for role in getattr(layers[0], name)}

    return Collected(
        each("roles"), each("without_first"), joined("hits"), joined("near"), joined("rows"), joined("mass"),
        joined("entries") if told.ids is not None else None,
    )  # fmt: skip


@torch.no_grad()
def _layer(amap: AttentionMap, targets: Targets, told: Told) -> Collected:
    measured = [ClassMass(members, name) for name, members in told.classes.items()]
    rows = amap.measure("entropy", "max_logit", *measured, rows=True).rows
    first = key_weights(amap, targets.sight, targets.first)
    near, scores, seen = band(amap, targets.sight, told.wide)
    at = {name: near[..., told.wide + offset] for name, offset in NEIGHBOURS.items()}
    around = near[..., told.wide - told.radius : told.wide + told.radius + 1].sum(-1)
    masses = {"first": first, **at, "local": around, **{name: rows[name] for name in told.classes}}
    if told.ids is not None:
        masses |= dict(zip(MATCHES, match_masses(amap, told.ids, targets.sight, list(MATCHES.values())), strict=True))
    found = {name: tally(mass, *targets.eligible(name)) for name, mass in masses.items()}

    one = torch.ones(1, 1, 1)
    sees, keys = targets.sees, targets.sight.keys.double()
    most = keys.clamp_min(1).log()
    found["broad"] = tally(rows["entropy"], sees, most)
    found["even"] = tally(rows["entropy"] / most.clamp_min(1e-9).to(first), keys >= 2, one)

    whole = row_mass(amap.rule, amap.lse)
    rest = whole - first
    kept = rest >= LEFT
    without = {}
    for name, mass in masses.items():
        target = targets.of[name]
        if target.without:
            eligible, uniform = targets.eligible_without_first(name)
            left = (mass - first * target.has_first.to(first)) / rest.clamp_min(LEFT)
            without[name] = tally(left.clamp(0.0, 1.0), eligible.to(kept.device) & kept, uniform)

    offsets = slice(told.wide - told.reach, told.wide + told.reach + 1)
    seen = seen[..., offsets]
    share = (1.0 / keys.clamp_min(1))[..., None]
    hits = _hits(amap, rows["max_logit"], scores[..., offsets], seen)
    return Collected(
        found, without, tally(hits, seen, share), tally(near[..., offsets], seen, share),
        tally(torch.ones_like(first), sees, one), tally(whole, sees, one),
        None if told.ids is None else _entries(targets, first),
    )  # fmt: skip


def _hits(amap: AttentionMap, largest: Tensor, scores: Tensor, seen: Tensor) -> Tensor:
    """Rows whose largest weight is the one at an offset, [b, h, n, offsets] of 0 and 1. None counts where two of these
    keys have it: no offset can be told then."""
    seen = seen.to(scores.device)
    # Both are sums of d products, in two orders, and kernels keep the largest beside the log-sum-exp, sinks included.
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
    return tally(count, targets.sees, torch.zeros(1, 1, 1))
