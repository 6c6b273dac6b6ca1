"""How much a computation holds at once, and how much less an n×m matrix would have to be."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Largest(TorchDispatchMode):
    """Within it, `.numel` is the size of the largest tensor that any operator made memory for."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.device.type != "meta":
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return out
