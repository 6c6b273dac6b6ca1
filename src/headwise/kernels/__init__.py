"""Ways to compute attention, and the choice between them.

A kernel has a `name`, says why it refuses a call (or None), and runs it; its `reads` do the same for the map that a
call returns. A kernel that the user names runs or raises, for calls and maps alike; only "auto" chooses, in the order
of `KERNELS`.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from headwise.errors import ConfigError, KernelError
from headwise.events import here, within
from headwise.kernels.autograd import done_by
from headwise.kernels.call import Call, Declined, Result
from headwise.kernels.cpu.kernel import CPU
from headwise.kernels.cpu.library import library
from headwise.kernels.gates import with_delta
from headwise.kernels.kernel import CONTRACT, Kernel
from headwise.kernels.pauses import in_blocks
from headwise.kernels.quantized import QuantizedKV
from headwise.kernels.reads import Matrix
from headwise.kernels.reference import Reference
from headwise.kernels.torch_blocks import TorchBlocks
from headwise.kernels.torch_fused import TorchFused
from headwise.kernels.triton_gpu import TritonGPU
from headwise.rule import own_dtypes

__all__ = ["KERNELS", "Kernel", "QuantizedKV", "register", "use_kernel"]

KERNELS: dict[str, Kernel] = {}
AUTOMATIC: list[str] = []  # those that "auto" chooses among, in this order
FORCED = "HEADWISE_KERNEL"


def register(kernel: Kernel, *, before: str | None = None) -> Kernel:
    """Make a kernel known by its name, to calls and to reads of maps; returns it.

    Args:
        before: a kernel of `AUTOMATIC`; "auto" then considers this one first. None: it is used by name alone.
    Raises:
        ConfigError: naming what the kernel does not define, another kernel of its name, or an unknown `before`.
    """
    name = getattr(kernel, "name", None)
    if missing := [f"{part} ({says})" for part, says in CONTRACT.items() if not hasattr(kernel, part)]:
        raise ConfigError(f"register({type(kernel).__name__}): a kernel defines {', '.join(missing)}")
    if type(KERNELS.get(kernel.name, kernel)) is not type(kernel):
        raise ConfigError(f"register({type(kernel).__name__}): there is another kernel {name!r}; give it another name")
    if before is not None and before not in AUTOMATIC:
        raise ConfigError(f"before={before!r}: expected one of {', '.join(map(repr, AUTOMATIC))}")
    if before is not None and kernel.name not in AUTOMATIC:
        AUTOMATIC.insert(AUTOMATIC.index(before), kernel.name)
    KERNELS[kernel.name] = kernel
    return kernel


# Fastest first. The reference is never chosen, only named: it stores the n×m matrix.
for _kernel in (TritonGPU(), CPU(), TorchFused(), TorchBlocks(), Reference()):
    register(_kernel)
AUTOMATIC += [name for name in KERNELS if name != "reference"]


@contextmanager
def use_kernel(name: str) -> Iterator[None]:
    """Within it, calls with kernel="auto" use this kernel, as if it were named in each of them.

    HEADWISE_KERNEL in the environment does the same for a whole process.
    """
    _known(name, "use_kernel", name)
    with within(kernel=name):
        yield


def choose(call: Call, name: str = "auto") -> tuple[Kernel, dict[str, str]]:
    """The kernel for a call, and why each one before it refused."""
    kernel, refusals = next(_willing(call, name))
    return kernel, dict(refusals)


def run(call: Call, name: str = "auto") -> tuple[Result, Kernel, dict[str, str]]:
    """Do a call: what came out, the kernel that did it, and why each one before it refused."""
    progress = here().progress
    for kernel, refusals in _willing(call, name):
        try:
            with own_dtypes(call.q):
                result = done_by(kernel, call) if progress is None else in_blocks(kernel, call, progress)
            if call.on_delta is not None and not kernel.gives_delta and result.out.requires_grad:
                result = result._replace(out=with_delta(result.out, call.on_delta))
            return result, kernel, dict(refusals)
        except Declined as reason:
            refusals[kernel.name] = str(reason)
    raise AssertionError("the last kernel declines nothing")


def read(what: str, of: Matrix, *given: Any, kernel: str = "auto") -> tuple[Any, str]:
    """Read a map: what the method `what` of a kernel's `Reads` returns, and the kernel whose it was.

    Args:
        kernel: that of the map; with "auto", `use_kernel` and HEADWISE_KERNEL apply as they do to calls.
    """
    name = named(kernel)
    if name != "auto":
        _known(name, "kernel", kernel)
    refusals: dict[str, str] = {}
    for candidate in AUTOMATIC if name == "auto" else (name,):
        try:
            return getattr(KERNELS[candidate].reads, what)(of, *given), candidate
        except Declined as reason:
            refusals[candidate] = str(reason)
    raise KernelError(
        f"kernel={name!r} cannot read this map: {refusals[name]}; map.using('auto') is the same map, read by any "
        f"kernel that can"
    )


def named(name: str) -> str:
    """The kernel that a call with kernel=`name` is to have, or "auto"."""
    return (here().kernel or os.environ.get(FORCED) or name) if name == "auto" else name


def _willing(call: Call, name: str) -> Iterator[tuple[Kernel, dict[str, str]]]:
    """The kernels that do not refuse, best first, and the refusals so far; raises where there are none left."""
    given, name = name, named(name)
    refusals: dict[str, str] = {}
    if name != "auto":
        _known(name, "kernel", given)
        kernel = KERNELS[name]
        if reason := kernel.refuse(call):
            raise KernelError(f"kernel={name!r} cannot do this call: {reason}; kernel='auto' picks one that can")
        yield kernel, refusals
        raise KernelError(f"kernel={name!r} cannot do this call: {refusals[name]}; kernel='auto' picks one that can")
    for candidate in _order(call):
        if reason := KERNELS[candidate].refuse(call):
            refusals[candidate] = reason
        else:
            yield KERNELS[candidate], refusals
    raise KernelError("no kernel can do this call: " + "; ".join(f"{k}: {why}" for k, why in refusals.items()))


def _order(call: Call) -> Sequence[str]:
    """AUTOMATIC; but without wide vectors PyTorch's own kernel comes first, unless statistics are wanted too."""
    if call.statistics or call.q.device.type != "cpu" or library().target() != "portable":
        return AUTOMATIC
    *others, last = (name for name in AUTOMATIC if name != "cpu")
    return *others, "cpu", last


def check_name(name: str) -> None:
    """Raise if there is no such kernel."""
    _known(name, "kernel", name)


def _known(name: str, argument: str, given: str) -> None:
    """Raise if there is no kernel `name`, which `argument` named, or the environment where it was given "auto"."""
    if name not in (*KERNELS, "auto"):
        source = FORCED if given == "auto" and here().kernel is None else argument
        raise ConfigError(f"{source}={name!r}: expected 'auto' or one of {', '.join(map(repr, KERNELS))}")
