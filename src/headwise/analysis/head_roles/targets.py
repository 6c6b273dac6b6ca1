"""Which keys each role is about, for every query: what the mask and the tokens alone decide, the same for all layers
with one mask."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.analysis.head_roles.matches import match_counts
from headwise.analysis.head_roles.sight import Sight
from headwise.rule import Rule

MATCHES = {"duplicate": 0, "induction": 1}  # how far behind the earlier equal token the key stands
NEIGHBOURS = {"previous": -1, "self": 0, "next": 1}


@dataclass(frozen=True)
class Told:
    """What the caller told, checked.

    Attributes:
        ids: [b or 1, m] or None; classes: name → boolean [b or 1, m]; reach, radius: in tokens.
    """

    ids: Tensor | None
    classes: dict[str, Tensor]
    reach: int
    radius: int

    @property
    def wide(self) -> int:
        """How far around the diagonal weights are read."""
        return max(1, self.reach, self.radius)


@dataclass(frozen=True)
class Target:
    """The keys of one role.

    Attributes:
        count: how many of them each query may see, [b or 1, h or 1, n].
        has_first: whether the first key is one of those, boolean; without: whether the role has a score without it.
    """

    count: Tensor
    has_first: Tensor
    without: bool = True


class Targets:
    """The keys of all roles under one rule.

    Attributes:
        sight: what each query may see; sees: whether it sees anything; sees_first: whether it sees the first key.
        of: role → `Target`; seen: [b or 1, h or 1, n, 2·wide + 1], which neighbours each query may see.
    """

    def __init__(self, rule: Rule, told: Told) -> None:
        n, m, shift = rule.grid.n, rule.grid.m, rule.grid.shift
        self.sight = sight = Sight(rule)
        self.first = sight.first.clamp_max(max(0, m - 1))  # [b or 1]
        self.sees = sight.keys > 0
        self.sees_first = sight.sees(self.first[:, None, None].expand(-1, n, -1))[..., 0]
        position = torch.arange(n) + shift
        near = position[:, None] + torch.arange(-told.wide, told.wide + 1)
        self.seen = sight.sees(near[None])
        self.is_first = (near[None] == self.first[:, None, None])[:, None] & self.seen
        self.of = {"first": Target(self.sees_first.long(), self.sees_first, without=False)}
        for name, offset in NEIGHBOURS.items():
            at = told.wide + offset
            self.of[name] = Target(self.seen[..., at].long(), self.is_first[..., at])
        around = slice(told.wide - told.radius, told.wide + told.radius + 1)
        self.of["local"] = Target(self.seen[..., around].sum(-1), self.is_first[..., around].any(-1))
        for name, members in told.classes.items():
            wide = max(len(members), len(self.first))
            first_in = members.expand(wide, -1).gather(1, self.first.expand(wide)[:, None])
            self.of[name] = Target(sight.count(members), first_in[:, None] & self.sees_first)
        if told.ids is not None:
            wide = max(len(told.ids), len(self.first))
            ids, first = told.ids.expand(wide, -1), self.first.expand(wide)[:, None]
            of_query = ids[:, position.clamp_min(0)]
            for name, step in MATCHES.items():
                same = ids.gather(1, (first - step).clamp_min(0)) == of_query
                same &= (first >= step) & (first - step < position)
                self.of[name] = Target(match_counts(told.ids, sight, step), same[:, None] & self.sees_first)

    def eligible(self, name: str) -> tuple[Tensor, Tensor]:
        """Which queries may see a key of the role, and the share of it that a uniform head would give."""
        count = self.of[name].count
        return count > 0, count.double() / self.sight.keys.clamp_min(1)

    def eligible_without_first(self, name: str) -> tuple[Tensor, Tensor]:
        """The same if the first key were not there."""
        target = self.of[name]
        count = target.count - target.has_first.long()
        keys = self.sight.keys - self.sees_first.long()
        return count > 0, count.double() / keys.clamp_min(1)
