"""Implementations of attention (kernels), and the choice between them.

A kernel has a `name`, runs a call or returns the reason why it refuses it, and does the same in `reads` for the map
that a call returns. A kernel that the user names runs or raises, for calls and maps alike; only "auto" chooses, in the
order of `AUTOMATIC`.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from headwise.errors import ConfigError, KernelError, check_choice
from headwise.kernels import operators as operators  # declares those of saved programs
from headwise.kernels.call import Call, Declined, Result
from headwise.kernels.cpu.kernel import CPU
from headwise.kernels.cpu.library import library
from headwise.kernels.events import here, within
from headwise.kernels.gradients import WithDelta, run_kernel
from headwise.kernels.kernel import CONTRACT, Kernel
from headwise.kernels.quantized import QuantizedKV
from headwise.kernels.reads import Matrix
from headwise.kernels.reference import Reference
from headwise.kernels.torch_blocks import TorchBlocks, in_blocks
from headwise.kernels.torch_fused import TorchFused
from headwise.kernels.triton_gpu import TritonGPU
from headwise.rule import own_dtypes
from headwise.wording import Message, tr

__all__ = ["KERNELS", "Kernel", "QuantizedKV", "register", "use_kernel"]


KERNELS: dict[str, Kernel] = {}
AUTOMATIC: list[str] = []  # the kernels that "auto" tries, in this order
FORCED = "HEADWISE_KERNEL"


def register(kernel: Kernel, *, before: str | None = None) -> Kernel:
    """Register a kernel under its name, for calls and for reads of maps, and return it.

    Args:
        before: a kernel of `AUTOMATIC` that "auto" tries after this one. None: only used where it is named.
    Raises:
        ConfigError: if the kernel lacks a required attribute, its name is taken, or `before` is unknown.
    """
    name = getattr(kernel, "name", None)
    if missing := [f"{part} ({meaning})" for part, meaning in CONTRACT.items() if not hasattr(kernel, part)]:
        raise ConfigError(f"register({type(kernel).__name__}): a kernel must define {', '.join(missing)}")
    if type(KERNELS.get(kernel.name, kernel)) is not type(kernel):
        raise ConfigError(f"register({type(kernel).__name__}): the name {name!r} is taken; choose another name")
    if before is not None:
        check_choice("before", before, AUTOMATIC)
    if before is not None and kernel.name not in AUTOMATIC:
        AUTOMATIC.insert(AUTOMATIC.index(before), kernel.name)
    KERNELS[kernel.name] = kernel
    return kernel


# Fastest first. "auto" never chooses the reference, which stores the n×m matrix.
for _kernel in (TritonGPU(), CPU(), TorchFused(), TorchBlocks(), Reference()):
    register(_kernel)
AUTOMATIC += [name for name in KERNELS if name != "reference"]


@contextmanager
def use_kernel(name: str) -> Iterator[None]:
    """Context manager in which calls with kernel="auto" use this kernel, as if each of them named it.

    The environment variable HEADWISE_KERNEL does the same for a whole process.
    """
    check_name(name, "use_kernel")
    with within(kernel=name):
        yield


def choose(call: Call, name: str = "auto") -> tuple[Kernel, dict[str, str]]:
    """Return the kernel for a call, and the reason why each kernel before it refused."""
    kernel, refusals = next(_willing(call, name))
    return kernel, dict(refusals)


def run(call: Call, name: str = "auto") -> tuple[Result, Kernel, dict[str, str]]:
    """Run a call. Returns its result, the kernel that ran, and the reason why each kernel before it refused."""
    progress = here().progress
    for kernel, refusals in _willing(call, name):
        try:
            with own_dtypes(call.q):
                result = run_kernel(kernel, call) if progress is None else in_blocks(kernel, call, progress)
            if call.on_delta is not None and not kernel.gives_delta and result.out.requires_grad:
                result = result._replace(out=WithDelta.apply(result.out, call.on_delta))
            return result, kernel, dict(refusals)
        except Declined as reason:
            refusals[kernel.name] = str(reason)
    raise AssertionError("the last kernel never declines")


def read(what: str, of: Matrix, *given: Any, kernel: str = "auto") -> tuple[Any, str]:
    """The result of the method `what` of a kernel's `Reads`, and the kernel's name. kernel: that of the map; with
    "auto", `use_kernel` and HEADWISE_KERNEL apply as they do to calls."""
    name = named(kernel)
    if name != "auto":
        check_name(name, given=kernel)
    refusals: dict[str, str] = {}
    for candidate in candidates(kernel):
        try:
            return getattr(KERNELS[candidate].reads.suited(of), what)(of, *given), candidate
        except Declined as reason:
            refusals[candidate] = str(reason)
    else_ = tr("map.using('auto') returns the same map for any kernel that supports this")
    raise KernelError(
        "kernel={name!r} cannot read this map: {why}; {way_out}",
        name=name,
        why=refusals[name],
        way_out=_way_out(kernel, else_),
    )


def named(name: str) -> str:
    """Return the kernel that kernel=`name` selects after `use_kernel` and HEADWISE_KERNEL, or "auto"."""
    return (here().kernel or os.environ.get(FORCED) or name) if name == "auto" else name


def candidates(name: str) -> tuple[str, ...]:
    """Return the kernels that kernel=`name` selects from: those of "auto" now, in their order, or the one named."""
    name = named(name)
    return tuple(AUTOMATIC) if name == "auto" else (name,)


def _willing(call: Call, name: str) -> Iterator[tuple[Kernel, dict[str, str]]]:
    """Yield each kernel that accepts the call, best first, with the refusals so far; raise if none is left."""
    given, name = name, named(name)
    refusals: dict[str, str] = {}
    if name != "auto":
        check_name(name, given=given)
        kernel = KERNELS[name]
        reason = kernel.refuse(call)
        if not reason:
            yield kernel, refusals
            reason = refusals[name]
        raise KernelError(
            "kernel={name!r} does not support this call: {why}; {way_out}",
            name=name,
            why=reason,
            way_out=_way_out(given, tr("use kernel='auto'")),
        )
    order: Sequence[str] = AUTOMATIC
    if not call.statistics and call.q.device.type == "cpu" and library().target() == "portable":
        *others, last = (name for name in AUTOMATIC if name != "cpu")
        order = *others, "cpu", last  # torch_fused precedes it, unless the call requests statistics
    for candidate in order:
        if reason := KERNELS[candidate].refuse(call):
            refusals[candidate] = reason
        else:
            yield KERNELS[candidate], refusals
    raise KernelError("no kernel supports this call: " + "; ".join(f"{k}: {why}" for k, why in refusals.items()))


def _way_out(given: str, named: Message) -> Message:
    """What a caller can do about a kernel that refuses: `named` if `given` names it."""
    if given != "auto":
        return named
    if (name := here().kernel) is not None:
        return tr("use_kernel({name!r}) is active: leave its block", name=name)
    return tr("it is selected by the environment variable {name}: unset it", name=FORCED)


def check_name(name: str, argument: str = "kernel", given: str | None = None) -> None:
    """ConfigError if there is no kernel `name`; it names `argument`, or the environment variable that forces it."""
    if name not in (*KERNELS, "auto"):
        source = FORCED if given == "auto" and here().kernel is None else argument
        raise ConfigError(f"{source}={name!r}: expected 'auto' or one of {', '.join(map(repr, KERNELS))}")
