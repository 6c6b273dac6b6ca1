"""The projection that receives the outputs of all heads, in their order."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from headwise.models.recognise.tracked import Lost
from headwise.models.traced.slices import DIGITS


@dataclass(eq=False)
class Result:
    """The result of one attention call, on its way to the output projection.

    Attributes:
        leaf: the result, a leaf of the graph of what follows. arrange: a tensor of its shape, as [b, h, n, d_v].
        shape: that shape. output: the projection, once it is found. unheard: why it cannot be found.
        weight: its weight, and the axis of its inputs. batch_first: whether it receives [b, n, h·d_v].
    """

    leaf: Tensor
    arrange: Callable[[Tensor], Tensor]
    shape: tuple[int, ...]
    output: nn.Module | None = None
    weight: tuple[Tensor, int] | None = None
    batch_first: bool = True
    unheard: str = "no linear map receives the outputs of its heads"
    arrived: bool = field(default=False)

    def arrives(self, x: Any, module: nn.Module | None, weight: Tensor, axis: int) -> None:
        """Take note of an input of a linear map.

        Args:
            x: the input of the module that is the map, or else of the function.
            module: the module whose parameter `weight` is, if it is being called. axis: of the weight, that of inputs.
        """
        if not isinstance(x, Tensor) or not x.requires_grad or self._grad(x, torch.ones_like(x)) is None:
            return
        self.arrived = True
        try:
            self.batch_first = self._order(x)
        except Lost as reason:
            self.unheard = str(reason)
            return
        if module is None:
            self.unheard = "its output projection is a function, not a module that is called"
            return
        self.output, self.weight, self.unheard = module, (weight, axis), ""

    def _order(self, x: Tensor) -> bool:
        """Whether x is [b, n, h·d_v], not [n, b, h·d_v]; Lost if it is not Concat(head_1 … head_h)."""
        b, h, n, d = self.shape
        width = x.shape[-1]
        labels = torch.arange(width, device=x.device)
        if width != h * d:
            raise Lost(f"its heads have {h * d} outputs, and the next map has {width} inputs")
        for digit in (labels % DIGITS, labels // DIGITS):
            grad = self._grad(x, digit.to(x.dtype).expand_as(x))
            assert grad is not None
            expected = digit.to(x.dtype).view(h, 1, d).expand(b, h, n, d)
            if not torch.equal(self.arrange(grad), expected):
                raise Lost("its heads are changed, or reordered, before the next linear map")
        if x.ndim == 2:
            if b > 1:
                raise Lost("its output projection receives batch and queries as one axis")
            return True
        rows = (torch.arange(x.shape[0], device=x.device) % DIGITS).to(x.dtype)
        grad = self._grad(x, rows.view(-1, *[1] * (x.ndim - 1)).expand_as(x))
        assert grad is not None
        at = self.arrange(grad)[:, 0, :, 0]  # [b, n]
        if x.shape[0] == b and torch.equal(at, rows[:, None].expand(b, n)):
            return True
        if x.ndim == 3 and x.shape[0] == n and torch.equal(at, rows.expand(b, n)):
            return False
        raise Lost("its output projection receives queries in an order that is not known")

    def _grad(self, x: Tensor, weights: Tensor) -> Tensor | None:
        (grad,) = torch.autograd.grad(x, self.leaf, weights, retain_graph=True, allow_unused=True)
        return grad
