"""A score: a bias that falls with the logarithm of the distance."""

import torch
from torch import Tensor

from headwise.fields import Array
from headwise.scores import register
from headwise.scores.kinds import Relative


@register
class Kerple(Relative):
    """−a · ln(1 + r·|i − j|), a and r one number a head (Chi et al. 2022, 2205.09921, eq. 5)."""

    holds = {"a": Array("h"), "r": Array("h")}

    def __init__(self, a: Tensor, r: Tensor) -> None:
        self.a, self.r = a, r

    def at(self, offset: Tensor, dtype: torch.dtype) -> Tensor:
        """As in `Relative`."""
        a, r = (x.to(offset.device, dtype)[:, None] for x in (self.a, self.r))
        return -a * torch.log1p(r * offset.abs().to(dtype))
