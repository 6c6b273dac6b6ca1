"""The `Kernel` interface of the compiled kernel for the CPU."""

from collections.abc import Sequence

from torch import Tensor

from headwise.kernels.call import Call, Result
from headwise.kernels.cpu.passes import backward, forward, refusal
from headwise.kernels.cpu.reads import CompiledReads
from headwise.lowering import of_terms, requested


class CPU:
    """Masks of a few key ranges or a boolean, all scores, float32, bfloat16 and float16."""

    name = "cpu"
    gives_delta = True
    by_autograd = False
    reads = CompiledReads()

    def refuse(self, call: Call) -> str | None:
        """Check device, dtype, sizes, library and rule."""
        return refusal(call)

    def run(self, call: Call) -> Result:
        return Result(*forward(call))

    def gradients(
        self, call: Call, out: Tensor, lse: Tensor, grad_out: Tensor, wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        """Computed by the compiled backward pass."""
        terms = call.rule.terms(lse[..., :0])
        *found, d_relative, d_bias, d_sinks, delta = backward(call, out, lse, grad_out, requested(terms, wanted))
        if call.on_delta is not None and delta is not None:
            call.on_delta(delta)
        d_relative, d_biases = of_terms(terms, wanted, d_relative, d_bias)
        return [*found, d_relative, d_sinks, *d_biases]
