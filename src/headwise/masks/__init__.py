"""What each query may look at, as a small algebra: no n×m mask is ever stored.

    >>> from headwise import Causal, Sinks, Window
    >>> mask = Causal() & (Window(2) | Sinks(1))          # a sliding window that keeps the first key
    >>> print(mask.to_dense(5, 5)[0, 0].int())
    tensor([[1, 0, 0, 0, 0],
            [1, 1, 0, 0, 0],
            [1, 1, 1, 0, 0],
            [1, 0, 1, 1, 0],
            [1, 0, 0, 1, 1]], dtype=torch.int32)

True (1) means *may attend*. When there are fewer queries than keys, the queries stand at the *end* of the
keys: query i of n has the position i + m - n on the key axis. So one mask serves a full pass, a chunk and a
single decoding step alike (FlashAttention's bottom-right convention; PyTorch's `is_causal` is top-left).

    Causal(), n=2, m=4:   1 1 1 0
                          1 1 1 1

A kernel asks a mask for the `state` of a tile (EMPTY, FULL or MIXED), answered from the edges of the tile
alone, and calls `allowed` only for MIXED ones. A compiled kernel asks for its `spans`: the ranges of keys that
each query may see.

A mask of your own is a class below `Mask` in a file of its own, and `register(Mine)`, which lets files and graphs have
it.
"""

from headwise.fields import register as register
from headwise.masks.base import (
    And as And,
    Mask as Mask,
    Or as Or,
    Part as Part,
    conjuncts as conjuncts,
)
from headwise.masks.given import Dense as Dense, Documents as Documents, Lengths as Lengths
from headwise.masks.grid import Grid as Grid, Span as Span, State as State
from headwise.masks.head_windows import HeadWindows as HeadWindows
from headwise.masks.positional import (
    Causal as Causal,
    Everything as Everything,
    Sinks as Sinks,
    Window as Window,
)

for _kind in (And, Or, Everything, Causal, Window, Sinks, Lengths, Documents, Dense, HeadWindows):
    register(_kind)
MASKS = Mask.known  # by name: what files and graphs may hold


def is_causal(mask: Mask | None) -> bool:
    """Whether no query sees a key after it, as far as the mask knows."""
    return mask is not None and mask.causal
