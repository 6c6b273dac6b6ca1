"""`Attend` as torch.compile takes it inside torch.func: as one step, which it does not look into.

Imported there alone, since saying so loads PyTorch's compiler.
"""

from typing import Any

import torch

from headwise.kernels.derivative import Attend


@torch.compiler.allow_in_graph
def apply(count: int, plain: tuple[Any, ...], *tensors: Any) -> Any:
    """What `Attend` does."""
    return Attend.apply(count, plain, *tensors)
