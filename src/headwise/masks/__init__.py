"""Attention masks that compose; no n×m mask is ever stored.

    >>> from headwise import Causal, Sinks, Window
    >>> mask = Causal() & (Window(2) | Sinks(1))          # a sliding window that keeps the first key
    >>> print(mask.to_dense(5, 5)[0, 0].int())
    tensor([[1, 0, 0, 0, 0],
            [1, 1, 0, 0, 0],
            [1, 1, 1, 0, 0],
            [1, 0, 1, 1, 0],
            [1, 0, 0, 1, 1]], dtype=torch.int32)

True (1) means *may attend*. Queries are aligned to the *end* of the keys (bottom-right): query i of n has the
position i + m - n on the key axis. The same mask therefore works for a full pass, a chunk and a decoding step
(FlashAttention's convention; PyTorch's `is_causal` is aligned top-left).

    Causal(), n=2, m=4:   1 1 1 0
                          1 1 1 1

Kernels read the `state` of each tile (EMPTY, FULL or MIXED), which depends on the edges of the tile only, and call
`allowed` only for MIXED tiles. Compiled kernels read `spans`: the ranges of keys visible to each query.

To define your own mask, subclass `Mask` and call `register(Mine)`, which lets files and graphs contain it.
"""

from headwise.fields import register
from headwise.masks.base import (
    And,
    Mask,
    Or,
    Part,
    WithGap,
)
from headwise.masks.given import Dense, Documents, Lengths, conjuncts, real_tokens, sequences
from headwise.masks.grid import Grid, Span, State
from headwise.masks.positional import (
    Causal,
    Everything,
    Forbidden,
    HeadWindows,
    Sinks,
    Window,
)

__all__ = [
    "MASKS",
    "And",
    "Causal",
    "Dense",
    "Documents",
    "Everything",
    "Forbidden",
    "Grid",
    "HeadWindows",
    "Lengths",
    "Mask",
    "Or",
    "Part",
    "Sinks",
    "Span",
    "State",
    "Window",
    "WithGap",
    "conjuncts",
    "is_causal",
    "real_tokens",
    "register",
    "sequences",
    "shows_whole_past",
]

for _kind in (And, Or, Everything, Causal, Window, Sinks, Lengths, Documents, Dense, HeadWindows, Forbidden, WithGap):
    register(_kind)
MASKS = Mask.known  # by name, for files and graphs


def is_causal(mask: Mask | None) -> bool:
    """Whether the mask is known to hide all keys after each query."""
    return mask is not None and mask.causal


def shows_whole_past(mask: Mask | None) -> bool:
    """Whether the mask is known to show each query all keys up to its own position, however many there are."""
    if isinstance(mask, And):
        return shows_whole_past(mask.left) and shows_whole_past(mask.right)
    return mask is None or vars(type(mask)).get("whole_past", False)  # not what its base class says
