"""Ways to compute attention, and the choice between them.

A kernel has a `name`, says why it refuses a call (or None), and runs it. A kernel that the user names runs or
raises; only "auto" chooses, in the order of `KERNELS`.
"""

from headwise.errors import ConfigError, KernelError
from headwise.kernels.call import Call, Kernel
from headwise.kernels.reference import Reference
from headwise.kernels.torch_blocks import TorchBlocks
from headwise.kernels.torch_fused import TorchFused

# Fastest first. The reference is never chosen, only named: it stores the n×m matrix.
KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (TorchFused(), TorchBlocks(), Reference())}
AUTOMATIC = ("torch_fused", "torch_blocks")


def choose(call: Call, name: str = "auto") -> tuple[Kernel, dict[str, str]]:
    """The kernel for a call, and why each one before it refused."""
    if name != "auto":
        if name not in KERNELS:
            raise ConfigError(f"kernel={name!r}: expected 'auto' or one of {', '.join(map(repr, KERNELS))}")
        if reason := KERNELS[name].refuse(call):
            raise KernelError(f"kernel={name!r} cannot do this call: {reason}; kernel='auto' picks one that can")
        return KERNELS[name], {}
    refusals: dict[str, str] = {}
    for candidate in AUTOMATIC:
        reason = KERNELS[candidate].refuse(call)
        if reason is None:
            return KERNELS[candidate], refusals
        refusals[candidate] = reason
    raise KernelError("no kernel can do this call: " + "; ".join(f"{k}: {why}" for k, why in refusals.items()))
