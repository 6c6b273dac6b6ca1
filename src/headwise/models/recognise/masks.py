"""The shortest mask that allows what a boolean tensor allows."""

import torch
from torch import Tensor

from headwise.mask_tensors import both, of_boolean, of_padding
from headwise.masks import Causal, Mask, Window


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
        shape = torch.ones_like(allowed[:1, 0]) if band is None else band.to_dense(n, m)[0].to(allowed.device)
        if torch.equal(shape & keys[:, None, :], allowed[:, 0]):
            return both(band, of_padding(keys.expand(b, -1), n))
    return of_boolean(allowed)


def _band(allowed: Tensor) -> Mask | None:
    """The mask of all keys that are no farther before and after their query than any that is allowed in [n, m]; None
    if that is all."""
    n, m = allowed.shape
    distance = torch.arange(n, device=allowed.device)[:, None] + (m - n) - torch.arange(m, device=allowed.device)
    seen = distance[allowed]
    left, right = (int(seen.max()), -int(seen.min())) if len(seen) else (-1, -1)
    if left < 0 or right < 0:
        return None
    if left < m - 1:
        return Window(left + 1, right) if right else Causal() & Window(left + 1)
    return Window(m, right) if 0 < right < n - 1 else None if right else Causal()
