"""The keys in sight of each query, counted from the rule alone: for eligible rows and uniform baselines.

If the mask is a few ranges of keys for each query, all counts are O(n); a boolean n×m mask is read in blocks of rows.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from headwise.masks import spans
from headwise.publishing.tokens import token_queries
from headwise.rule import TILE_ELEMENTS, Rule


class Sight:
    """Counts of the keys in sight of queries.

    Attributes:
        spans: ranges of keys [b or 1, n, K, 2] on the CPU, or None if the mask is not made of ranges.
        keys: [b or 1, h or 1, n], the number of keys in sight of each query.
        first: [b or 1], the first key in sight of any query of the batch entry; m if there is none.
        tokens: [b or 1, t], the queries that are no padding, and then some others if there are more in another batch
            entry; None if all are.
    All are int64, on the CPU.
    """

    def __init__(self, rule: Rule) -> None:
        self.grid, self._mask = rule.grid, rule.mask
        found = rule.mask.spans(rule.grid)
        self.spans = None if found is None else found.long()
        real = token_queries(rule.mask, rule.grid)
        most = 0 if real is None else max(1, int(real.sum(-1).max()))
        self.tokens = None if real is None else (~real).byte().argsort(dim=-1, stable=True)[:, :most]
        self.keys = self.count(torch.ones(1, self.grid.m, dtype=torch.bool))
        seen = self.seen()
        self.first = torch.where(seen.any(-1), seen.int().argmax(-1), self.grid.m)

    def count(self, members: Tensor) -> Tensor:
        """The number of `members` (boolean [b or 1, m]) in sight of each query, [b or 1, h or 1, n]."""
        members = members.cpu()
        if self.spans is None:
            return self.by_rows(lambda allowed, _: (allowed & members[:, None, None]).sum(-1))
        upto = pad(members.long().cumsum(1), (1, 0))  # [b or 1, m + 1]
        b = max(len(upto), len(self.spans))
        ends = self.spans.expand(b, -1, -1, -1)
        counts = upto.expand(b, -1).gather(1, ends.reshape(b, -1)).view(ends.shape)
        return (counts[..., 1] - counts[..., 0]).sum(-1)[:, None]

    def sees(self, keys: Tensor) -> Tensor:
        """Whether each of a query's `keys` [b or 1, n, w] is in sight, boolean [b or 1, h or 1, n, w]; False for keys
        out of range."""
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
        """Which keys are in sight of any query, boolean [b or 1, m]."""
        if self.spans is None:
            return self.by_rows(lambda allowed, _: allowed.any(2, keepdim=True), axis=2).any(2).any(1)
        ends = self.spans.flatten(1, 2)  # [b or 1, n · K, 2]
        change = torch.zeros(len(ends), self.grid.m + 1, dtype=torch.long)
        one = torch.ones((), dtype=torch.long).expand(ends.shape[:2])
        change.scatter_add_(1, ends[..., 0], one).scatter_add_(1, ends[..., 1], -one)
        return change.cumsum(1)[:, : self.grid.m] > 0

    def by_rows(self, read: Callable[[Tensor, slice], Tensor], axis: int = -1) -> Tensor:
        """Apply `read` to the mask [b or 1, h or 1, r, m] in blocks of rows, and join the results along `axis`."""
        return torch.cat([read(allowed, rows) for allowed, rows in self.blocks()], axis)

    def blocks(self) -> Iterator[tuple[Tensor, slice]]:
        """The mask [b or 1, h or 1, r, m] in blocks of rows, and the rows of each."""
        b, h, n, m = self.grid
        height, cols = max(1, TILE_ELEMENTS // max(1, b * h * m)), torch.arange(m)
        for start in range(0, n, height):
            rows = slice(start, min(start + height, n))
            yield self._mask.allowed(torch.arange(rows.start, rows.stop), cols, self.grid).cpu(), rows


def ranges(start: Tensor, stop: Tensor, m: int) -> Tensor:
    """Half-open ranges [b, n, K] as spans of a mask over m keys: sorted, the empty ones last."""
    empty = start >= stop
    ends = torch.stack((start, stop), -1).masked_fill(empty[..., None], 0).int()
    everything = spans.one(torch.zeros(1, start.shape[1], dtype=torch.long), torch.tensor(m), m)
    return spans.intersect(ends, everything)
