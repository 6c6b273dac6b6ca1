"""Weight on keys that match the query's token: repeats, and what followed them."""

import torch
from torch import Tensor

from headwise.errors import ShapeError
from headwise.masks import Grid
from headwise.measures.base import RowMeasure
from headwise.tiles import Tile


class _Match(RowMeasure):
    """Σ p_ij over the earlier keys j with token[j − shift] = token[i], per eligible query (one that has such keys).

    Args:
        ids: integer tokens of the keys, [m] or [b, m].
        uniform: instead of the head's weight, that of a head looking at all allowed keys alike: the baseline.
    """

    shift: int
    unit, range = "mass", "0 to 1"

    def __init__(self, ids: Tensor, *, uniform: bool = False) -> None:
        self.ids = torch.atleast_2d(torch.as_tensor(ids))
        self.uniform = uniform
        if uniform:
            self.name = f"{self.name}_uniform"

    def start(self, grid: Grid, like: Tensor, keep_rows: bool = False):  # type: ignore[no-untyped-def]
        b, m = self.ids.shape
        if m != grid.m or b not in (1, grid.b):
            raise ShapeError(
                f"{type(self).__name__}(ids): shape {(b, m)} does not fit {grid.m} keys of {grid.b} batch entries"
            )
        return super().start(grid, like, keep_rows)

    def partial(self, tile: Tile) -> Tensor:
        ids = self.ids.to(tile.lse.device)
        of_query = ids[:, tile.positions]
        before = tile.keys - self.shift
        of_key = ids[:, before.clamp_min(0)]
        match = (of_query[:, :, None] == of_key[:, None, :]) & (before >= 0) & (before < tile.positions[:, None])
        match = match[:, None]
        if tile.allowed is not None:
            match = match & tile.allowed
        found = match.sum(-1).to(tile.lse).expand(tile.lse.shape)
        if self.uniform:
            return torch.stack((found, found, tile.allowed_keys), -1)
        mass = (tile.weights * match).sum(-1) if bool(match.any()) else torch.zeros_like(tile.lse)
        return torch.stack((mass, found), -1)

    def value(self, total: Tensor, lse: Tensor) -> Tensor:
        return total[..., 0] / total[..., 2].clamp_min(1) if self.uniform else total[..., 0]

    def counted(self, total: Tensor, lse: Tensor) -> Tensor:
        return total[..., 1] > 0


class DuplicateMass(_Match):
    """Weight on earlier places of the query's own token, per query that has one (duplicate-token heads)."""

    name, shift = "duplicate_mass", 0
    source = "Wang et al. 2022, 2211.00593 (duplicate token heads)"


class InductionMass(_Match):
    """Weight on the tokens that followed earlier places of the query's token, per query that has one.

    On repeated random tokens this is the induction score per eligible query: a perfect head gets 1.
    Source: Olsson et al. 2022, 2209.11895 (prefix matching).
    """

    name, shift = "induction_mass", 1
    source = "Olsson et al. 2022, 2209.11895 (prefix matching)"
