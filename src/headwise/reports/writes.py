"""What the heads write at each position of a passage, as plain data."""

from dataclasses import dataclass, field

import numpy as np

from headwise.errors import ShapeError


@dataclass(frozen=True)
class Writes:
    """What is known of the outputs and scores of all heads on a passage with exact weights; NaN where it is not.

    Attributes:
        norms: [layers, heads, Q] float32: the norm of each key's value after the output projection, ‖v_j W_O‖. Times a
            weight, it is the length ‖Δ‖ of what the key adds at a query. None if unknown.
        next_token: [layers, heads, P]: the direct effect on the logit of the token that follows. None if unknown.
        effects, tokens: [layers, heads, P, T]: the largest direct effects, and indices into `words` of their tokens.
            None if unknown.
        words: the texts of these tokens.
        queries, keys: [layers, heads, P or Q, C]: the C strongest channels of each head, with products that add up to
            scale · q·k over all channels. None if unknown.
        channels: [layers, heads, C]: the numbers of these channels. widths: [layers]: how many channels there are.
    """

    norms: np.ndarray | None = None
    next_token: np.ndarray | None = None
    effects: np.ndarray | None = None
    tokens: np.ndarray | None = None
    words: list[str] = field(default_factory=list)
    queries: np.ndarray | None = None
    keys: np.ndarray | None = None
    channels: np.ndarray | None = None
    widths: list[int] = field(default_factory=list)

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise ShapeError unless the arrays fit maps of this shape, [layers, heads, P, Q]."""
        layers, heads, rows, columns = shape
        sizes = {
            "norms": columns,
            "next_token": rows,
            "effects": rows,
            "tokens": rows,
            "queries": rows,
            "keys": columns,
        }
        for name, size in sizes.items():
            found = getattr(self, name)
            if found is not None and found.shape[:3] != (layers, heads, size):
                raise ShapeError(f"Writes({name}): shape {found.shape}, expected [{layers}, {heads}, {size}, …]")
