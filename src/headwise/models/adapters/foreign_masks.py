"""Masks of other libraries as ours: booleans, numbers that are added to scores, padding. No n×m copy is made of them.

Functions take `before`: how many keys were put before those that the mask speaks of; every query may see them. Masks
are looked through for what has a shorter name, but not where PyTorch records a graph, which has to hold for any mask.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from headwise.kernels.graph import in_graph
from headwise.masks import Causal, Dense, Lengths, Mask, Sinks
from headwise.scores import Bias, Score


def both(*masks: Mask | None) -> Mask | None:
    """What all of them allow; None stands for everything."""
    given = [mask for mask in masks if mask is not None]
    if not given:
        return None
    result = given[0]
    for mask in given[1:]:
        result = result & mask
    return result


def of_padding(real: Tensor, n: int, before: int = 0) -> Mask | None:
    """Real keys [b, m], True where a token stands, for n queries: `Lengths` if they stand in one piece, as padding on
    either side leaves them, else a `Dense` whose rows share their memory."""
    if in_graph():
        return Dense(pad(real, (before, 0), value=True)[:, None, None, :].expand(-1, 1, n, -1))
    if bool(real.all()):
        return None
    real = pad(real, (before, 0), value=True)
    m = real.shape[1]
    count = real.sum(-1)
    ahead = real.int().argmax(-1)  # padding before the first real key; 0 if there is none
    behind = real.flip(-1).int().argmax(-1)
    ahead, behind = ahead.where(count > 0, 0), behind.where(count > 0, m)
    if not torch.equal(ahead + count + behind, torch.full_like(count, m)):
        return Dense(real[:, None, None, :].expand(-1, 1, n, -1))
    left = Lengths(m - behind) if bool(behind.any()) else None
    right = Lengths(m - ahead, side="right") if bool(ahead.any()) else None
    return both(left, right)


def of_boolean(allowed: Tensor, before: int = 0) -> Mask | None:
    """A boolean [b or 1, h or 1, n, m], True = may attend; it is looked through for what has a shorter name."""
    if in_graph():
        return Dense(pad(allowed, (before, 0), value=True))
    if bool(allowed.all()):
        return None
    n, m = allowed.shape[2:]
    if n <= m:
        causal = torch.ones(n, m, dtype=torch.bool, device=allowed.device).tril_(m - n)
        if all(torch.equal(one, causal) for one in allowed.flatten(0, 1)):
            return Causal() | Sinks(before) if before else Causal()
    return Dense(pad(allowed, (before, 0), value=True) if before else allowed)


def of_additive(
    values: Tensor, n: int, before: int = 0, lowest: float = -torch.inf
) -> tuple[Mask | None, tuple[Score, ...]]:
    """Numbers [b or 1, h or 1, n or 1, m] that are added to scores: what is `lowest` or less hides a key, and what is
    left of the others is a bias, which keeps their graph. NaN stays, to be seen in the output."""
    hidden = values.detach() <= lowest
    mask = None
    compiling = in_graph()
    if compiling or bool(hidden.any()):
        rows = hidden.shape[2]
        mask = (
            of_padding(~hidden[:, 0, 0], n, before)
            if rows < n and hidden.shape[1] == 1
            else of_boolean(~hidden.expand(-1, -1, n, -1), before)
        )
    rest = values.masked_fill(hidden, 0.0)
    if not compiling and not rest.requires_grad and bool((rest == 0.0).all()):
        return mask, ()
    return mask, (Bias(pad(rest, (before, 0)) if before else rest),)
