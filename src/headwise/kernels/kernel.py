"""The interface of a kernel."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from headwise.kernels.call import Call, Result
from headwise.kernels.reads import Reads
from headwise.rule import Rule
from headwise.stats import Measurements

CONTRACT = {
    "name": "its name",
    "gives_delta": "whether gradients() calls call.on_delta",
    "by_autograd": "whether autograd differentiates run()",
    "reads": "the reads of maps that it supports, a kernels.reads.Reads",
    "refuse": "refuse(call): the reason why it does not support the call, or None",
    "run": "run(call): returns output, log-sum-exp and statistics",
    "gradients": "gradients(call, out, lse, grad_out, wanted): the backward pass of run()",
}


class Mapped(NamedTuple):
    """What a prepared call that returns a map has besides the output; measured: None without measures."""

    lse: Tensor
    rule: Rule
    kernel: str
    refusals: Mapping[str, str]
    measured: Measurements | None


Answer = tuple[Tensor, Mapped | None]  # the output, and None if no map is returned


class Prepared(Protocol):
    """What a kernel has prepared for calls of one kind, of which only the addresses differ; see `prepare.py`."""

    def run(self, q: Tensor, memory: Sequence[Tensor], m: int, gap: tuple[int, int] | None) -> Answer | None:
        """Run a call with m keys, given `quantized.in_memory` of keys and values, and the gap as in `attend`; None if
        its data rule this out: the usual dispatch finds the reason, and another kernel."""


class Kernel(Protocol):
    """An implementation of attention. All kernels follow the same interface and pass the same tests.

    A kernel whose `adds_rows` is True takes `joint.RowGradients` as one more argument of `gradients`: statistics of
    differentiable calls then have gradients in its own backward pass; those of other kernels, tile by tile.

    A kernel may also have `prepared(call, measures, refusals)`. It returns the `Prepared` for small calls like `call`,
    which has run, or None; `measures` are those of a call that returns a map, else None. With `twice = True`, its calls
    without dropout have second derivatives and those of forward mode, in PyTorch from its output and log-sum-exp.
    """

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
