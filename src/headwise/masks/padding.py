"""Which tokens of a batch are padding, by its mask. All that counts positions counts them by this: measures, edits and
roles."""

from typing import NamedTuple

import torch
from torch import Tensor

from headwise.masks.base import And, Mask, kept
from headwise.masks.given import Documents
from headwise.masks.grid import Grid


def conjuncts(mask: Mask) -> list[Mask]:
    """Return the operands of `&` in a mask, or the mask alone."""
    return [*conjuncts(mask.left), *conjuncts(mask.right)] if isinstance(mask, And) else [mask]


def real_tokens(mask: Mask, grid: Grid) -> Tensor | None:
    """Return which tokens of the keys' sequence are no padding, boolean [b or 1, tokens] on the CPU, those too that a
    cache has dropped; None if all are, as far as the mask is known to show it. Computed once for each mask and size."""
    found: Tensor | None = kept("_real_tokens", lambda: _real(mask, grid), mask, (grid.n, grid.m, grid.gap, grid.extra))
    return found


class Sequences(NamedTuple):
    """The sequences in a row of the batch that a mask of self attention keeps apart.

    Attributes:
        number: of them, the most in a row; 1 if the mask does not depend on the data. alone: how many at one end of a
            row have one token each. given: whether the mask was given as one of documents.
    """

    number: int
    alone: int
    given: bool


def sequences(mask: Mask, grid: Grid) -> Sequences:
    """Return the sequences of a mask. Computed once for each mask and size."""
    found: Sequences = kept("_sequences", lambda: _sequences(mask, grid), mask, (grid.n, grid.m))
    return found


def _sequences(mask: Mask, grid: Grid) -> Sequences:
    given = any(isinstance(part, Documents) for part in conjuncts(mask))
    apart = given or any(part.boolean is not None for part in conjuncts(mask))
    start, key = mask.starts(grid) if apart and grid.m else None, torch.arange(grid.m, device="cpu")
    if start is None:
        return Sequences(1, 0, given)
    sizes = torch.zeros(len(start), grid.m + 1, dtype=torch.long, device="cpu")
    sizes.scatter_add_(1, start, torch.ones_like(start))
    alone = ((start == key) & (sizes[:, :-1] == 1)).long()
    ends = torch.stack((alone.cumprod(1), alone.flip(1).cumprod(1))).sum(-1)
    return Sequences(int((sizes[:, :-1] > 0).sum(-1).max()), int(ends.max()), given)


def _real(mask: Mask, grid: Grid) -> Tensor | None:
    real: Tensor | None = None
    for part in conjuncts(mask):
        here = part.real_tokens(grid)
        if here is not None:
            real = here.cpu() if real is None else real & here.cpu()
    return None if real is None or bool(real.all()) else real
