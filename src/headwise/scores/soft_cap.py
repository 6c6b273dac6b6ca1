"""Soft caps."""

import math
from dataclasses import dataclass

from torch import Tensor

from headwise.errors import ConfigError
from headwise.fields import Number
from headwise.masks import Grid
from headwise.scores.base import Score
from headwise.scores.terms import Terms


@dataclass(frozen=True)
class SoftCap(Score):
    """cap · tanh(scale·q·k / cap): scores stay within ±cap (Gemma 2, 2408.00118 §2)."""

    cap: float
    placed = False
    holds = {"cap": Number()}

    def __post_init__(self) -> None:
        if not isinstance(self.cap, (int, float)) or not (self.cap > 0 and math.isfinite(self.cap)):
            raise ConfigError(f"SoftCap({self.cap!r}): the cap must be a finite number > 0")

    def terms(self, grid: Grid, like: Tensor) -> Terms:
        return Terms(grid.n, soft_cap=self.cap)
