"""The `Kernel` interface of the compiled kernel for the CPU."""

from collections.abc import Sequence

from torch import Tensor

from headwise.kernels.call import Call, Result
from headwise.kernels.cpu.passes import backward, forward, refusal
from headwise.kernels.cpu.reads import CompiledReads


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
        of_relative, of_sinks, *of_biases = wanted
        *found, d_bias, d_sinks, delta = backward(call, out, lse, grad_out, (of_relative, any(of_biases), of_sinks))
        if call.on_delta is not None and delta is not None:
            call.on_delta(delta)
        d_biases = [
            d_bias.sum_to_size(bias.shape).to(bias.dtype) if want and d_bias is not None else None
            for bias, want in zip(call.rule.terms(lse[..., :0]).biases, of_biases, strict=True)
        ]
        return [*found, d_sinks, *d_biases]
