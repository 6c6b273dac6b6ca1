"""Weights multiplied by a factor."""

import math
from collections.abc import Sequence
from dataclasses import replace
from numbers import Real

import torch

from headwise.errors import ConfigError
from headwise.interventions.edit import Arguments, Edit
from headwise.interventions.tokens import Tokens, checked_tokens


class Scale(Edit):
    """The weights of the queries on the keys are multiplied by a factor after the softmax. A row is not normalised
    again, so it sums to 1 no longer; for weights that are, see `Forbid`.

    Maps have the weights before it, as they have those before dropout.

    Args:
        factor: 0 removes what the keys contribute, 1 changes nothing; it may be negative or above 1.
        queries, keys: the two sets of tokens; None for all. heads: numbers of the query heads; None for all.
    """

    def __init__(
        self, factor: float, queries: Tokens = None, keys: Tokens = None, *, heads: Sequence[int] | int | None = None
    ) -> None:
        super().__init__(heads, queries)
        if isinstance(factor, bool) or not isinstance(factor, Real) or not math.isfinite(factor):
            raise ConfigError(f"Scale(factor={factor!r}): expected a finite number")
        self.factor: float = float(factor)
        self.tokens = {**self.tokens, "keys": checked_tokens("Scale(keys)", keys)}

    def changed(self, call: Arguments) -> Arguments:
        # The factor of a column belongs to its value as well: Σ_j (c_j p_ij) v_j = Σ_j p_ij (c_j v_j).
        keys = call.keys(self.tokens["keys"])[:, None, :, None].to(call.v.device)
        scaled = call.v * self.factor if self.factor else torch.zeros_like(call.v)  # 0 · NaN would be NaN
        return replace(call, v=torch.where(keys, scaled, call.v))

    def applies(self, call: Arguments) -> bool:
        return super().applies(call) and bool(call.keys(self.tokens["keys"]).any())

    def __repr__(self) -> str:
        return super().__repr__().replace("(", f"({self.factor:g}, ", 1)
