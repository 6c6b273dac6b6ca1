"""How far apart two results are, where NaN and infinity are never "no difference"."""

from typing import NamedTuple

import torch
from torch import Tensor


class Difference(NamedTuple):
    """The largest difference of the rows of two tensors."""

    worst: float = 0.0  # relative to the size of the row
    uncompared: int = 0  # rows in which both are NaN or infinite somewhere
    rows: int = 0  # how many there are

    def joined(self, other: "Difference") -> "Difference":
        """That of both."""
        known = [one.worst for one in (self, other) if one.worst == one.worst and one.rows]
        nothing = torch.nan if self.rows or other.rows else 0.0
        return Difference(max(known, default=nothing), self.uncompared + other.uncompared, self.rows + other.rows)

    def reason(self, what: str, of: str, allowed: float) -> str:
        """Why `what` differs from `of` by more than rounding explains (`allowed`); "" if it does not."""
        if self.worst <= allowed:
            return ""
        if self.worst != self.worst:
            return f"{what} is NaN or infinite everywhere, so that it could not be compared with {of}"
        if self.worst == torch.inf:
            return f"{what} differs from {of}: one of both is NaN, infinite or 0 where the other is not"
        return f"{what} differs from {of} by {self.worst:.2g}, more than {allowed:.2g}"

    @property
    def remark(self) -> str:
        """What there is to say of rows that could not be compared; "" if all were."""
        if not self.uncompared:
            return ""
        return f"{self.uncompared} of {self.rows} rows are NaN or infinite in both results, and were not compared"


def relative(mine: Tensor, theirs: Tensor) -> Tensor:
    """The differences of rows [..., d] relative to their size, in the Frobenius norm; NaN where both are 0, or one of
    both is not finite."""
    if mine.dtype != theirs.dtype or mine.dtype.itemsize < 4:
        theirs = theirs.to(torch.promote_types(mine.dtype, torch.float32))
        mine = mine.to(theirs.dtype)
    return torch.linalg.vector_norm(mine - theirs, dim=-1) / torch.linalg.vector_norm(theirs, dim=-1)


def difference(
    mine: Tensor, theirs: Tensor, rows: Tensor | None = None, *, order: float = 2, noise: float = 0.0
) -> Difference:
    """The difference of rows [..., d], of those that count (`rows`, boolean [...]), in a norm of order 2 or ∞. noise:
    the size that a row is taken to have at least."""
    mine, theirs = mine.detach().double(), theirs.detach().double()
    if rows is not None:
        mine, theirs = (x[rows.to(x.device).expand(x.shape[:-1])] for x in (mine, theirs))
    mine, theirs = mine.flatten(0, -2), theirs.flatten(0, -2)
    neither = ~(mine.isfinite() | theirs.isfinite())
    mine, theirs = mine.masked_fill(neither, 0.0), theirs.masked_fill(neither, 0.0)
    apart, size = (torch.linalg.vector_norm(x, order, -1) for x in (mine - theirs, theirs))
    found = torch.where(apart == 0, 0.0, apart / size.clamp_min(noise))
    found.masked_fill_(found.isnan(), torch.inf)
    uncompared = int(neither.any(-1).sum())
    if not len(found) or (uncompared and bool(neither.all())):
        return Difference(torch.nan if len(found) else 0.0, uncompared, len(found))
    return Difference(float(found.max()), uncompared, len(found))
