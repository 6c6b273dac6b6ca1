"""The shortest mask that allows what a boolean tensor allows."""

import torch
from torch import Tensor

from headwise.mask_tensors import both, of_boolean, of_padding
from headwise.masks import Causal, Grid, Mask, Span, Window

ROWS = 1024  # compared at once


def named_mask(allowed: Tensor, sizes: tuple[int, int, int, int]) -> Mask | None:
    """`Causal`, `Window`, `Lengths` or a combination if it allows exactly the same, else `Dense`; None if all is
    allowed.

    Args:
        allowed: boolean [b or 1, h or 1, n or 1, m or 1], True where a query may attend.
        sizes: b, h, n, m.
    """
    b, _, n, m = sizes
    allowed = allowed.expand(-1, -1, n, m)
    if bool(allowed.all()):
        return None
    if allowed.shape[1] > 1 and bool((allowed == allowed[:, :1]).all()):
        allowed = allowed[:, :1]
    if allowed.shape[1] == 1:
        keys = allowed[:, 0].any(1)  # [b or 1, m]
        band = _band(allowed[:, 0].any(0)) if n <= m else None
        every = torch.ones_like(keys)
        for mask, seen in ((None, keys), (band, every), (band, keys)):
            if all(_same(mask, seen, allowed[:, 0], Span(i, min(i + ROWS, n))) for i in range(0, n, ROWS)):
                return both(mask, of_padding(seen.expand(b, -1), n))
    return of_boolean(allowed)


def _same(band: Mask | None, keys: Tensor, allowed: Tensor, rows: Span) -> bool:
    """Whether some rows of `allowed` [b or 1, n, m] allow the keys of both the band and `keys` [b or 1, m]."""
    _, n, m = allowed.shape
    expected = keys[:, None, :]
    if band is not None:
        i, j = (torch.arange(*span, device=allowed.device) for span in (rows, (0, m)))
        expected = expected & band.allowed(i, j, Grid(1, 1, n, m))[0]
    part = allowed[:, rows.start : rows.stop]
    return torch.equal(expected.expand_as(part), part)


def _band(allowed: Tensor) -> Mask | None:
    """The mask of all keys that are no farther before and after their query than any that is allowed in [n, m]; None
    if that is all."""
    n, m = allowed.shape
    seen = allowed.any(1)
    if not bool(seen.any()):
        return None
    bits = allowed.to(torch.uint8)
    first, last = bits.argmax(1), m - 1 - bits.flip(1).argmax(1)
    position = torch.arange(n, device=allowed.device) + m - n
    left, right = int((position - first)[seen].max()), int((last - position)[seen].max())
    if left < 0 or right < 0:
        return None
    if left < m - 1:
        return Window(left + 1, right) if right else Causal() & Window(left + 1)
    return Window(m, right) if 0 < right < n - 1 else None if right else Causal()
