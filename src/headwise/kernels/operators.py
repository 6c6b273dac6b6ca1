"""The operators `headwise::attend`, `headwise::attend_backward` and `headwise::second_derivative` of PyTorch.

They are declared as soon as headwise and PyTorch are imported, so that a program saved by `torch.export` or
`torch.jit.save` can be loaded. The code that they run, `headwise.kernels.graph`, is imported by the first call:
all kernels take a hundred times as long to import as these declarations.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

# Arguments of the first two: q, k, v, the biases and the mask's tensors; the number of biases; the rule's other tensors
# and numbers (`Rule.terms`, and `graph.write` of its mask); dropout and its seed; `learned`: whether relative or a
# bias requires a gradient; the split of relative. There is one list, which is never empty: AOTInductor passes None for
# an empty one, vmap ignores the tensors of a `Tensor[]?`, and torch.jit.trace does not support `Tensor?[]`.
_RULE = (
    "Tensor[] tensors, int biases, Tensor? relative, Tensor? sinks, Tensor? seed, SymInt[] mask, float scale, "
    "float soft_cap, float dropout_p, bool learned, SymInt split"
)
_FORWARD = f"({_RULE}, str kernel) -> (Tensor, Tensor, Tensor)"
_BACKWARD = f"({_RULE}, Tensor out, Tensor lse, Tensor ran, Tensor grad_out, bool[] wanted) -> Tensor[]"


def _code(name: str) -> Callable[..., Any]:
    """A function of `headwise.kernels.graph`."""

    def call(*given: Any, **named: Any) -> Any:
        return getattr(import_module("headwise.kernels.graph"), name)(*given, **named)

    return call


attend = torch.library.custom_op("headwise::attend", _code("attend"), mutates_args=(), schema=_FORWARD)
attend.register_fake(_code("attend_fake"))
attend.register_autograd(_code("backward"), setup_context=_code("setup"))
attend.register_vmap(_code("attend_vmap"))

# `ExportedProgram.run_decompositions` decomposes the operators that have a kernel for this key, in Python: a kernel of
# `torch.library.impl` could not leave the operator whole elsewhere.
torch.ops.headwise.attend.default.py_impl(torch._C.DispatchKey.CompositeImplicitAutograd)(_code("decomposed"))

attend_backward = torch.library.custom_op(
    "headwise::attend_backward", _code("attend_backward"), mutates_args=(), schema=_BACKWARD
)
attend_backward.register_fake(_code("attend_backward_fake"))
attend_backward.register_vmap(_code("attend_backward_vmap"))

# The first for a module, by its key in `events.recorded`, that may have subscribers when the graph runs; a CUDA graph
# would ask once. facts: as `publishing` gives and reads them.
_PUBLISHED = f"({_RULE}, str kernel, int module, SymInt[] facts) -> (Tensor, Tensor, Tensor)"
attend_published = torch.library.custom_op(
    "headwise::attend_published", _code("attend_published"), mutates_args=(), schema=_PUBLISHED,
    tags=torch.Tag.cudagraph_unsafe,
)  # fmt: skip
attend_published.register_fake(_code("attend_fake"))
attend_published.register_autograd(_code("backward_published"), setup_context=_code("setup_published"))

# torch.compile records derivatives that may never be computed, so the error for a missing one must be an operator too.
# Its own derivative is never needed: hence no custom_op.
torch.library.define("headwise::second_derivative", "(Tensor x, Tensor grad) -> Tensor")
torch.library.impl("headwise::second_derivative", "CompositeExplicitAutograd", _code("second_derivative"))
torch.library.register_fake("headwise::second_derivative", lambda x, grad: torch.empty_like(x))
second_derivative = torch.ops.headwise.second_derivative.default

# The first operator within torch.func, whose transforms do not support `register_autograd`.
differentiable = _code("differentiable")
