"""Which modules of a model compute attention by their own code: those that call softmax or PyTorch's attention."""

from collections import Counter
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

# Called attention, or in it, but no weights of keys for queries: sampled places, mixed streams, gates.
_OTHERS = "deformableattention", "hyperconnection", "gatedattention", "router"


class Softmaxes(TorchDispatchMode):
    """Within it: the modules whose own code computes attention weights or calls PyTorch's attention, by name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {module: name for name, module in model.named_modules()}
        self.stack: list[nn.Module] = []
        self.found: dict[str, nn.Module] = {}
        self.calls: Counter[str] = Counter()
        self.handles = ExitStack()
        for module in model.modules():
            before = module.register_forward_pre_hook(lambda module, _: self.stack.append(module))
            after = module.register_forward_hook(lambda *_: self.stack.pop() and None, always_call=True)
            self.handles.callback(before.remove)
            self.handles.callback(after.remove)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name()
        if "softmax" in name and "log_softmax" not in name and "backward" not in name:
            self._see(out, "scores")
        elif "scaled_dot_product" in name and "backward" not in name:
            self._see(out[0] if isinstance(out, tuple) else out, "fused")
        return out

    def _see(self, out: Tensor, how: str) -> None:
        inside = [m for m in self.stack if type(m) is not nn.Softmax and type(m) is not nn.Dropout]
        if not inside or out.ndim < 3:
            return
        module = inside[-1]
        names = [".".join(self.names.get(m, "").split(".")[-2:]) for m in inside[-2:]]
        called = " ".join([*names, *(type(m).__name__ for m in inside[-2:])]).lower()
        attends = "attention" in called or "attn" in called
        if any(name in called for name in _OTHERS) or (how == "scores" and not attends):
            return
        if out.shape[-1] == 1:
            return
        name = self.names.get(module, type(module).__name__)
        self.found[name] = module
        self.calls[name] += 1
