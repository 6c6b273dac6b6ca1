"""A mask on its way from where transformers makes it to where attention is computed, through the model's own code."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from headwise.adapters.lazy import LazyTensor
from headwise.masks import Mask


class MaskTensor(LazyTensor):
    """A boolean [b, 1, n, m], True = may attend, that takes no memory: it is a headwise `Mask`.

    A model that only passes it on pays nothing; one that computes with it gets the boolean that it expects, which is
    then an ordinary tensor.

    Attributes:
        mask: over the first `keys` of the m keys; None for everything. No query sees those beyond, which a cache of a
            fixed size has not filled yet.
    """

    mask: Mask | None
    keys: int

    @staticmethod
    def __new__(cls: type["MaskTensor"], mask: Mask | None, shape: tuple[int, int, int], keys: int, device: Any) -> Any:
        b, n, m = shape
        return LazyTensor.empty_shell(cls, (b, 1, n, m), torch.bool, torch.device(device))

    def __init__(self, mask: Mask | None, shape: tuple[int, int, int], keys: int, device: Any) -> None:
        self.mask, self.keys = mask, keys

    def make(self) -> Tensor:
        b, _, n, m = self.shape
        if self.mask is None:
            allowed = torch.ones(1, 1, n, self.keys, dtype=torch.bool)
        else:
            allowed = self.mask.to_dense(n, self.keys, batch=b)
        return pad(allowed, (0, m - self.keys)).expand(b, 1, n, m).to(self.device).contiguous()

    @property
    def origin(self) -> str:
        return "everything" if self.mask is None else repr(self.mask)
