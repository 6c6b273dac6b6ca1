"""The mode that sees every function of PyTorch while a model runs."""

import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from headwise.models.recognise.chains import chosen, joined, pointwise, softmaxed, viewed, written
from headwise.models.recognise.followed import UNEXPECTED, Followed, Origin, unexpected
from headwise.models.recognise.functions import ARITHMETIC, IGNORED, LAYERS, RETURN_OTHERS, SAME, SOFTMAX, VIEWS
from headwise.models.recognise.layout import whole
from headwise.models.recognise.multiplied import fused, multiplied
from headwise.models.recognise.products import NAMES as PRODUCTS, is_outer
from headwise.models.recognise.tracked import Tracked, weak

# PyTorch's function without its first lines, which would hand the whole of it to the mode again.
_mha = F.multi_head_attention_forward
_OPENED = types.FunctionType(
    _mha.__code__, {**_mha.__globals__, "has_torch_function": lambda tensors: False}, _mha.__name__, _mha.__defaults__
)


class Following(TorchFunctionMode):
    """Follows tensors while it is open. PyTorch does not take its fused paths of whole layers within it."""

    def __init__(self, seen: Tracked) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__
            if name not in VIEWS and name not in SAME:
                return func(*args, **kwargs)
        if func is _mha:
            with self:
                return _OPENED(*args, **kwargs)
        out = func(*args, **kwargs)
        if name not in IGNORED and (isinstance(out, Tensor) or name in RETURN_OTHERS):
            seen = self.seen
            try:
                _see(seen, func, name, args, kwargs, out)
            except UNEXPECTED as error:
                seen.record(out, f"{name}: {unexpected(error)}")
            while seen.ready:  # what subscribers raise is raised through the model
                seen.on_values(*seen.ready.pop())
        return out


@contextmanager
def following(seen: Tracked) -> Iterator[None]:
    """Within it, tensors are followed. Compiled models run uncompiled, so that their functions are seen."""
    compiles = "torch._dynamo" in sys.modules
    try:
        with torch.compiler.set_stance("force_eager") if compiles else nullcontext(), Following(seen):
            yield
    finally:
        seen.forget()


def _see(seen: Tracked, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    """Take note of one call."""
    if name in PRODUCTS:
        multiplied(seen, name, args, kwargs, out)
        return
    if name == "scaled_dot_product_attention":
        fused(seen, args, kwargs, out)
        return
    if name in LAYERS:
        origin = Origin(tuple(out.shape), (LAYERS[name] % out.ndim,), name, weak(args[0] if args else None))
        seen.remember(out, Followed("input", whole(origin.shape), origin))
        return
    if name in ("cat", "concat"):
        joined(seen, args, kwargs, out)
        return
    if name == "__setitem__":
        written(seen, *args)
        return
    first: Any = args[0] if args else kwargs.get("input")
    x = seen.known(first)
    if name == "where" and len(args) == 3:
        chosen(seen, args, out)
    elif x is None:
        if len(args) > 1 and (y := seen.known(args[1])) is not None and isinstance(out, Tensor):
            pointwise(seen, name, y, args[1], first, kwargs, out, swapped=True)
        elif name in SOFTMAX and out.ndim > 1:
            softmaxed(seen, name, None, first, args, kwargs, out)
        elif ARITHMETIC.get(name) == "mul" and len(args) > 1 and is_outer("mul", first, args[1], out):
            seen.remember(out, Followed("input", whole(tuple(out.shape)), outer=(first, args[1])))
    elif name in VIEWS:
        viewed(seen, func, x, first, args[1:], kwargs, out)
    elif name in SAME:
        seen.remember(out, x)
    elif name in SOFTMAX:
        softmaxed(seen, name, x, first, args, kwargs, out)
    else:
        other = args[1] if len(args) > 1 else kwargs.get("other", kwargs.get("mask"))
        pointwise(seen, name, x, first, other, kwargs, out, args=args)
