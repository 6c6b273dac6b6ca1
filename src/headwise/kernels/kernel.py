"""What a kernel is."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from headwise.kernels.call import Call, Result
from headwise.kernels.reads import Reads

CONTRACT = {
    "name": "what it is called",
    "gives_delta": "whether its gradients call call.on_delta",
    "by_autograd": "whether run is differentiable as it is",
    "reads": "what it reads of a map, a kernels.reads.Reads",
    "refuse": "refuse(call): why it cannot do the call, or None",
    "run": "run(call): the output, the log-sum-exp and the statistics",
    "gradients": "gradients(call, out, lse, grad_out, wanted): the backward pass of a call that run did",
}


class Kernel(Protocol):
    """A way to compute attention. All of them meet the same contract and the same tests."""

    name: str
    gives_delta: bool  # whether its `gradients` call `call.on_delta`; if not, δ is computed around it
    by_autograd: bool  # whether `run` is differentiable as it is, twice too; if not, `gradients` is its backward pass

    @property
    def reads(self) -> Reads:
        """What it reads of a map."""

    def refuse(self, call: Call) -> str | None:
        """Why this kernel cannot do the call, or None if it can."""

    def run(self, call: Call) -> Result:
        """Do a call that was not refused; may raise Declined."""

    def gradients(
        self, call: Call, out: Tensor, lse: Tensor, grad_out: Tensor, wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        """The backward pass of a call that `run` did.

        Args:
            out, lse: what `run` gave.
            grad_out: [b, h, n, d_v], any strides.
            wanted: whether the rule's terms, (relative, sinks, *biases), need theirs.
        Returns:
            The gradients of q, k, v, relative, sinks and each bias.
        """
