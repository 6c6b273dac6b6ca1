"""The interface of a kernel."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from headwise.kernels.call import Call, Result
from headwise.kernels.reads import Reads

CONTRACT = {
    "name": "its name",
    "gives_delta": "whether gradients() calls call.on_delta",
    "by_autograd": "whether autograd differentiates run()",
    "reads": "the reads of maps that it supports, a kernels.reads.Reads",
    "refuse": "refuse(call): the reason why it does not support the call, or None",
    "run": "run(call): returns output, log-sum-exp and statistics",
    "gradients": "gradients(call, out, lse, grad_out, wanted): the backward pass of run()",
}


class Kernel(Protocol):
    """An implementation of attention. All kernels follow the same interface and pass the same tests."""

    name: str
    gives_delta: bool  # whether `gradients` calls `call.on_delta`; if not, δ is computed outside of it
    by_autograd: bool  # whether autograd differentiates `run`, also twice; if not, `gradients` is its backward pass

    @property
    def reads(self) -> Reads:
        """The reads of maps that it supports."""

    def refuse(self, call: Call) -> str | None:
        """Return the reason why this kernel does not support the call, or None if it does."""

    def run(self, call: Call) -> Result:
        """Run a call that was not refused; may raise Declined."""

    def gradients(
        self, call: Call, out: Tensor, lse: Tensor, grad_out: Tensor, wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        """The backward pass of `run(call)`.

        Args:
            out, lse: the results of `run`.
            grad_out: [b, h, n, d_v], any strides.
            wanted: whether each of the rule's terms (relative, sinks, *biases) needs a gradient.
        Returns:
            The gradients of q, k, v, relative, sinks and each bias.
        """
