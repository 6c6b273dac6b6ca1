"""Which tokens of a batch are padding, by its mask. All that counts positions counts them by this: measures, edits and
roles."""

from torch import Tensor

from headwise.masks.base import And, Mask
from headwise.masks.grid import Grid
from headwise.masks.kept import kept


def conjuncts(mask: Mask) -> list[Mask]:
    """Return the operands of `&` in a mask, or the mask alone."""
    return [*conjuncts(mask.left), *conjuncts(mask.right)] if isinstance(mask, And) else [mask]


def real_tokens(mask: Mask, grid: Grid) -> Tensor | None:
    """Return which tokens of the keys' sequence are no padding, boolean [b or 1, tokens] on the CPU, those too that a
    cache has dropped; None if all are, as far as the mask is known to show it. Computed once for each mask and size."""
    found: Tensor | None = kept("_real_tokens", lambda: _real(mask, grid), mask, (grid.n, grid.m, grid.gap, grid.extra))
    return found


def _real(mask: Mask, grid: Grid) -> Tensor | None:
    real: Tensor | None = None
    for part in conjuncts(mask):
        here = part.real_tokens(grid)
        if here is not None:
            real = here.cpu() if real is None else real & here.cpu()
    return None if real is None or bool(real.all()) else real
