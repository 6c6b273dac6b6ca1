"""Ranges of keys for each query: a form of most masks in O(n) memory.

Spans are int32 [b or 1, n, K, 2]: for each query K half-open ranges [start, stop) of keys, sorted, disjoint and
not adjacent, with the same K ≥ 1 for all rows. A row with fewer ranges ends in empty ones, (0, 0).
"""

import torch
from torch import Tensor

FAR = 1 << 62  # a distance beyond all keys, which added to a position does not exceed 64 bits


def one(start: Tensor | int, stop: Tensor | int, m: int) -> Tensor:
    """Spans with one range [start, stop) for each query, integers broadcasting to [b or 1, n], clipped to the keys."""
    start, stop = (torch.as_tensor(end, device="cpu").clamp(0, m) for end in (start, stop))
    ends = torch.stack(torch.broadcast_tensors(start, stop), -1)
    return ends.masked_fill((start >= stop)[..., None], 0).int()[..., None, :]


def intersect(left: Tensor, right: Tensor) -> Tensor:
    """Return the spans of keys in both."""
    start = torch.maximum(left[..., :, None, 0], right[..., None, :, 0])  # [b or 1, n, K left, K right]
    stop = torch.minimum(left[..., :, None, 1], right[..., None, :, 1])
    return tidy(start.flatten(-2), stop.flatten(-2))


def unite(left: Tensor, right: Tensor) -> Tensor:
    """Return the spans of keys in either."""
    (b,) = torch.broadcast_shapes(left.shape[:1], right.shape[:1])
    both = torch.cat((left.expand(b, -1, -1, -1), right.expand(b, -1, -1, -1)), -2)
    return tidy(both[..., 0], both[..., 1])


def to_dense(spans: Tensor, m: int) -> Tensor:
    """Return boolean [b or 1, n, m]: which keys lie in a range; for small sizes."""
    keys = torch.arange(m, device=spans.device)
    inside = (keys >= spans[..., :1]) & (keys < spans[..., 1:])  # [b or 1, n, K, m]
    return inside.any(-2)


def tidy(start: Tensor, stop: Tensor) -> Tensor:
    """Return any ranges [b or 1, n, K] as spans: sorted, overlapping and adjacent ones merged, with the smallest K."""
    if start.numel() == 0:
        return torch.stack((start, stop), -1)[..., :1, :]
    beyond = torch.iinfo(start.dtype).max
    empty = start >= stop
    start, order = start.masked_fill(empty, beyond).sort(-1)
    stop = stop.masked_fill(empty, beyond).gather(-1, order)
    reach = stop.cummax(-1).values
    opens = torch.ones_like(empty)
    opens[..., 1:] = start[..., 1:] > reach[..., :-1]
    place = opens.cumsum(-1) - 1  # which merged range each one belongs to
    starts = torch.full_like(start, beyond).scatter_reduce(-1, place, start, "amin")
    stops = torch.zeros_like(stop).scatter_reduce(-1, place, stop, "amax")
    merged = torch.stack((starts, stops), -1).masked_fill((starts == beyond)[..., None], 0)
    used = int((starts != beyond).sum(-1).max())
    return merged[..., : max(1, used), :].contiguous()
