"""Modules whose code takes the width of all heads from its input, as in `B, T, C = x.size()` and `y.view(B, T, C)`.

With fewer heads, the input has more channels than the heads. The code then gets the first of these channels, so that it
reads the right size, and the linear maps that make queries, keys and values get the whole input.
"""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

WIDTH = "_headwise_width"  # attribute of a module: the width that its code shall read
_INPUTS = "_headwise_inputs"  # and the one that its inputs have
_WHOLE = "_headwise_whole"  # attribute of an input that was narrowed


def narrow(module: nn.Module, maps: Collection[nn.Module], inputs: int) -> None:
    """Give the code of a module the first `WIDTH` channels of tensors that have `inputs` channels, and these maps all
    of them. Calling it again changes nothing."""
    vars(module)[_INPUTS] = inputs
    if _narrowed not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_narrowed, with_kwargs=True)
    for one in maps:
        if _whole not in one._forward_pre_hooks.values():
            one.register_forward_pre_hook(_whole)


def whole(x: Any) -> Any:
    """The tensor of which a tensor is the first channels, if the code of a module got it in its place."""
    return getattr(x, _WHOLE, x)


def _narrowed(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    inputs, width = vars(module)[_INPUTS], vars(module)[WIDTH]

    def first(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.ndim or x.shape[-1] != inputs or width >= inputs:
            return x
        part = x.narrow(-1, 0, width)
        setattr(part, _WHOLE, x)
        return part

    changed: tuple[Any, Any] = tree_map(first, (args, kwargs))
    return changed


def _whole(module: nn.Module, args: Any) -> Any:
    return tuple(map(whole, args))
