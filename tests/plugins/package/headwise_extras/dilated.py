"""A mask: every nth key."""

from torch import Tensor

from headwise.errors import ConfigError
from headwise.fields import Whole
from headwise.masks import Grid, Mask, Span, State, register


@register
class Dilated(Mask):
    """A query sees the keys whose distance is a multiple of `step` (Beltagy et al. 2020, 2004.05150 §3.1)."""

    holds = {"step": Whole()}

    def __init__(self, step: int) -> None:
        if step < 1:
            raise ConfigError(f"Dilated(step={step}): expected step >= 1")
        self.step = step

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        """As in `Mask`."""
        return ((rows[:, None] + grid.shift - cols) % self.step == 0)[None, None]

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        """As in `Mask`."""
        return State.FULL if self.step == 1 else State.MIXED
