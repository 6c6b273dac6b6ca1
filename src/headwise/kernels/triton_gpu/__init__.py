"""The Triton kernel for GPUs: forward with row statistics, backward and decoding, for masks of a few key ranges.

Without a GPU it runs in Triton's interpreter, slowly and on CPU tensors, for testing: set TRITON_INTERPRET=1 before the
first call. The other modules are imported at the first supported call, so Triton need not be installed.
"""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from headwise.base.run import Progress
from headwise.errors import KernelError
from headwise.kernels.call import Call, Declined, Result
from headwise.kernels.compiling import eager
from headwise.kernels.gradients import learns
from headwise.kernels.joint import RowGradients
from headwise.kernels.kernel import Prepared
from headwise.kernels.quantized import in_memory
from headwise.kernels.reads import Matrix, Reads, TileReads
from headwise.kernels.triton_gpu.check import refusal
from headwise.rule.lowering import Lowered, requested
from headwise.rule.tiles import COMPUTING
from headwise.stats import COLUMN_MASS, Measure, Statistic

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_HEAD = 256


class TritonGPU:
    """Any mask of a few key ranges or a boolean, any score, dropout and gradients, on an NVIDIA GPU."""

    name = "triton_gpu"
    gives_delta = False
    by_autograd = False
    adds_rows = True

    @property
    def reads(self) -> Reads:
        """All reads: the forward pass computes `statistics`, `times` and `received`, PyTorch the others from tiles."""
        return _ForwardReads()

    def refuse(self, call: Call) -> str | None:
        """Check device, dtype, sizes and rule; and what the kernels compute, at the first such call on a device."""
        q, grid = call.q, call.rule.grid
        if reason := _absent(q):
            return reason
        if q.dtype not in DTYPES:
            return f"it computes in float32, got {q.dtype}"
        if 0 in (grid.b, grid.n, grid.m):
            return "there are no queries or no keys"
        for size, what in ((q.shape[-1], "head"), (call.v.shape[-1], "value")):
            if not 1 <= size <= LARGEST_HEAD:
                return f"it supports {what} sizes from 1 to {LARGEST_HEAD}, got {size}"
        return call.lowered if isinstance(call.lowered, str) else _checked(call)

    @eager
    def run(self, call: Call) -> Result:
        # Imported here because Triton is optional.
        from headwise.kernels.triton_gpu.launch import attend

        return attend(call)

    def prepared(self, call: Call, wanted: Sequence[Measure] | None, refusals: Mapping[str, str]) -> Prepared | None:
        """Launches whose arguments are kept; none for maps, and for a subclass, which may run calls in another way."""
        if wanted is not None or type(self) is not TritonGPU or len(in_memory(call.keys, call.values)) > 2:
            return None
        from headwise.kernels.triton_gpu.launch import again

        return again(self, call, refusal)

    def gradients(
        self, call: Call, out: Tensor, lse: Tensor, grad_out: Tensor, wanted: Sequence[bool],
        more: RowGradients | None = None,
    ) -> list[Tensor | None]:  # fmt: skip
        """Computed by the Triton backward kernels."""
        from headwise.kernels.triton_gpu.launch import gradients

        # Within a graph the forward pass does not show whether gradients will be computed.
        if reason := refusal(call, requested(call.rule.terms(lse[..., :0]), wanted)):
            raise KernelError(f"kernel='triton_gpu' cannot compute these gradients: {reason}; or use another kernel")
        return gradients(call, out, lse, grad_out, wanted, more)


class _ForwardReads(TileReads):
    def suited(self, of: Matrix) -> Reads:
        if reason := _absent(of.q):
            raise Declined(reason)
        return self

    def statistics(
        self, of: Matrix, wanted: tuple[Statistic, ...], progress: Progress | None = None
    ) -> dict[Statistic, Tensor]:
        found = dict(_done(of, of.k[..., :1], wanted).statistics)
        if progress is not None:
            progress(COMPUTING, of.rule.grid.n, of.rule.grid.n)
        return found

    def times(self, of: Matrix, x: Tensor) -> Tensor:
        """Attention with the values x."""
        return _done(of.with_keys_of(x), x).out

    def received(self, of: Matrix) -> Tensor:
        return self.statistics(of, (COLUMN_MASS,))[COLUMN_MASS]


def _done(of: Matrix, values: Tensor, wanted: tuple[Statistic, ...] = ()) -> Result:
    """Run the matrix as a call with these values."""
    if torch.compiler.is_compiling():
        raise Declined("torch.compile cannot trace its kernels")
    call, kernel = Call(of.q, of.k, values, of.rule, statistics=wanted), TritonGPU()
    if reason := kernel.refuse(call):
        raise Declined(reason)
    return kernel.run(call)


@eager
def _checked(call: Call) -> str | None:
    """Why the kernels are not used for this kind of calls on this device, or None if they are."""
    assert isinstance(call.lowered, Lowered)
    given = call.lowered.relative, call.lowered.bias, call.lowered.sinks
    relative, bias, sinks = (x is not None and x.requires_grad for x in given)
    return refusal(call, (relative, bias, sinks) if learns(call) else None)


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def _absent(q: Tensor) -> str | None:
    """Why no kernel can run on the device of q, or None."""
    if not _installed():
        return "Triton is not installed"
    if q.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if q.device.type != "cuda":
        return f"it requires an NVIDIA GPU (or TRITON_INTERPRET=1, for tests), got {q.device.type}"
    if torch.version.hip:
        return "it requires an NVIDIA GPU, got an AMD GPU"
    if (capability := torch.cuda.get_device_capability(q.device)) < (8, 0):
        return f"it requires compute capability 8.0 or newer; this GPU has {capability[0]}.{capability[1]}"
    return None
