"""Where the sequences begin that a mask keeps apart: behind padding, and with each packed document.

A sequence starts at a key that no query has in sight together with an earlier key.
"""

import torch
from torch import Tensor

ROWS = 256  # of a boolean n×m in memory at once


def of_spans(spans: Tensor, m: int) -> Tensor:
    """Return the start of each key's sequence, int64 [b or 1, m], from spans; m for keys before all sequences."""
    spans = spans.long()
    ends = spans.flatten(1, 2)
    some = (spans[:, :, 0, 1] > spans[:, :, 0, 0]).long()
    change = torch.zeros(len(spans), m + 1, dtype=torch.long, device="cpu")
    one = torch.ones((), dtype=torch.long, device="cpu").expand(ends.shape[:2])
    change.scatter_add_(1, ends[..., 0], one).scatter_add_(1, ends[..., 1], -one)
    first = torch.zeros_like(change).scatter_add_(1, spans[:, :, 0, 0], some)
    return _of_counts(change.cumsum(1)[:, :m], first[:, :m])


def of_boolean(allowed: Tensor) -> Tensor:
    """Return the same from a boolean tensor [b, h, n, m]."""
    b, _, n, m = allowed.shape
    seen = torch.zeros(b, m, dtype=torch.long, device=allowed.device)
    first = torch.zeros_like(seen)
    for start in range(0, n if m else 0, ROWS):
        rows = allowed[:, :, start : start + ROWS]
        seen += rows.sum((1, 2))
        first.scatter_add_(1, rows.to(torch.uint8).argmax(-1).flatten(1), rows.any(-1).long().flatten(1))
    return _of_counts(seen.cpu(), first.cpu())


def _of_counts(seen: Tensor, first: Tensor) -> Tensor:
    """Return the starts from the number of rows that see each key, and of those whose first key it is."""
    m = seen.shape[1]
    key = torch.arange(m, device="cpu")
    latest = torch.where((seen > 0) & (seen == first), key, -1).cummax(1).values
    return torch.where(latest < 0, m, latest)
