"""What each query may see, counted from the rule alone: who is eligible, and what a uniform head would give.

Where the mask is a few ranges of keys for each query, all counts are O(n); a mask that holds a boolean n×m is read a
block of rows at a time.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from headwise.masks import spans
from headwise.rule import TILE_ELEMENTS, Rule


class Sight:
    """Counts of the keys that queries may see.

    Attributes:
        spans: ranges of keys [b or 1, n, K, 2] on the CPU, or None if the mask has no such form.
        keys: [b or 1, h or 1, n], how many keys each query may see.
        first: [b or 1], the first key that any query of that batch entry may see; m if there is none.
    All are int64, on the CPU.
    """

    def __init__(self, rule: Rule) -> None:
        self.grid, self._mask = rule.grid, rule.mask
        found = rule.mask.spans(rule.grid)
        self.spans = None if found is None else found.long()
        self.keys = self.count(torch.ones(1, self.grid.m, dtype=torch.bool))
        seen = self.seen()
        self.first = torch.where(seen.any(-1), seen.int().argmax(-1), self.grid.m)

    def count(self, members: Tensor) -> Tensor:
        """How many of the `members` (boolean [b or 1, m]) each query may see, [b or 1, h or 1, n]."""
        members = members.cpu()
        if self.spans is None:
            return self.by_rows(lambda allowed, _: (allowed & members[:, None, None]).sum(-1))
        upto = pad(members.long().cumsum(1), (1, 0))  # [b or 1, m + 1]
        b = max(len(upto), len(self.spans))
        ends = self.spans.expand(b, -1, -1, -1)
        counts = upto.expand(b, -1).gather(1, ends.reshape(b, -1)).view(ends.shape)
        return (counts[..., 1] - counts[..., 0]).sum(-1)[:, None]

    def sees(self, keys: Tensor) -> Tensor:
        """Whether each query may see each of its `keys` [b or 1, n, w]: boolean [b or 1, h or 1, n, w]. A key that is
        not there is not seen."""
        keys = keys.cpu()
        there = ((keys >= 0) & (keys < self.grid.m))[:, None]
        if self.spans is not None:
            at = keys[..., None]
            inside = (at >= self.spans[:, :, None, :, 0]) & (at < self.spans[:, :, None, :, 1])
            return inside.any(-1)[:, None] & there
        at = keys.clamp(0, max(0, self.grid.m - 1))[:, None]

        def pick(allowed: Tensor, rows: slice) -> Tensor:
            b, h = max(len(allowed), len(at)), allowed.shape[1]
            return allowed.expand(b, -1, -1, -1).gather(-1, at[:, :, rows].expand(b, h, -1, -1))

        return self.by_rows(pick, axis=2) & there

    def seen(self) -> Tensor:
        """Which keys any query may see, boolean [b or 1, m]."""
        if self.spans is None:
            return self.by_rows(lambda allowed, _: allowed.any(2, keepdim=True), axis=2).any(2).any(1)
        ends = self.spans.flatten(1, 2)  # [b or 1, n · K, 2]
        change = torch.zeros(len(ends), self.grid.m + 1, dtype=torch.long)
        one = torch.ones((), dtype=torch.long).expand(ends.shape[:2])
        change.scatter_add_(1, ends[..., 0], one).scatter_add_(1, ends[..., 1], -one)
        return change.cumsum(1)[:, : self.grid.m] > 0

    def by_rows(self, read: Callable[[Tensor, slice], Tensor], axis: int = -1) -> Tensor:
        """What `read` makes of the mask [b or 1, h or 1, r, m], a block of rows at a time, joined along `axis`."""
        b, h, n, m = self.grid
        height, cols = max(1, TILE_ELEMENTS // max(1, b * h * m)), torch.arange(m)
        parts = []
        for start in range(0, n, height):
            rows = slice(start, min(start + height, n))
            parts.append(read(self._mask.allowed(torch.arange(rows.start, rows.stop), cols, self.grid).cpu(), rows))
        return torch.cat(parts, axis)


def ranges(start: Tensor, stop: Tensor, m: int) -> Tensor:
    """Half-open ranges [b, n, K] as spans of a mask over m keys: sorted, the empty ones last."""
    empty = start >= stop
    ends = torch.stack((start, stop), -1).masked_fill(empty[..., None], 0).int()
    everything = spans.one(torch.zeros(1, start.shape[1], dtype=torch.long), torch.tensor(m), m)
    return spans.intersect(ends, everything)
