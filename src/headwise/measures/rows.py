"""What a rule alone says of the rows and keys of a matrix, without its weights: counts that measures divide by.

All are O(n) from the spans of the mask. A mask that also holds a boolean n×m has no such form; `ranges` is then None,
and the measures that need it read the tiles.
"""

import torch
from torch import Tensor

from headwise.lowering import lowered
from headwise.rule import Rule


def ranges(rule: Rule) -> Tensor | None:
    """Half-open ranges of keys that each query may see, int32 [b or 1, n, K, 2], or None."""
    found = lowered(rule)
    return None if isinstance(found, str) or found.dense is not None else found.spans


def allowed_keys(rule: Rule, like: Tensor) -> Tensor:
    """How many keys each query may see, [b or 1, 1, n]."""
    spans = _known(rule)
    return (spans[..., 1] - spans[..., 0]).sum(-1)[:, None].to(like)


def sees_offset(rule: Rule, offset: int, like: Tensor) -> Tensor:
    """Whether each query may see the key at its position + offset, boolean [b or 1, 1, n]."""
    key = torch.arange(rule.grid.n) + rule.grid.shift + offset
    spans = _known(rule)
    inside = ((key[:, None] >= spans[..., 0]) & (key[:, None] < spans[..., 1])).any(-1)[:, None]
    return inside.to(like.device)


def queries_of_keys(rule: Rule, like: Tensor) -> Tensor:
    """How many queries may see each key, [b, h, m] in float64."""
    b, h, _, m = rule.grid
    spans = _known(rule).long()
    change = torch.zeros(len(spans), m + 1, dtype=torch.float64)
    one = torch.ones((), dtype=torch.float64)
    change.scatter_add_(1, spans[..., 0].flatten(1), one.expand(len(spans), spans[..., 0][0].numel()))
    change.scatter_add_(1, spans[..., 1].flatten(1), -one.expand(len(spans), spans[..., 1][0].numel()))
    return change.cumsum(1)[:, None, :m].to(like.device).expand(b, h, m)


def row_mass(rule: Rule, lse: Tensor) -> Tensor:
    """Σ_j p_ij, [b, h, n]: 1, or what a learned sink leaves; 0 for a query that sees nothing."""
    sees = (lse != -torch.inf).to(lse.dtype)
    sinks = rule.terms(lse).sinks
    return sees if sinks is None else sees * (1.0 - torch.exp(sinks.detach()[:, None] - lse)).clamp_min(0.0)


def _known(rule: Rule) -> Tensor:
    spans = ranges(rule)
    assert spans is not None  # whoever asks has asked for `ranges` before
    return spans
