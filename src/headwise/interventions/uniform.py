"""Weights replaced by equal ones."""

from dataclasses import replace

import torch

from headwise.interventions.edit import Arguments, Edit


class Uniform(Edit):
    """Every query attends equally to all keys that the mask allows: scores, biases and learned sinks are left out.

    Args:
        heads: numbers of the query heads; None for all. queries: a set of tokens; None for all.
    """

    own_keys = False

    def changed(self, call: Arguments) -> Arguments:
        return replace(call, q=torch.zeros_like(call.q), scores=())
