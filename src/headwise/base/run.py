"""What long calls share: reproducible random numbers, the progress callback that every `progress=` takes, and the
memory that results hold.

>>> from headwise.base.run import Progress, part
>>> def show(what: str, done: int, of: int) -> None: ...        # such as updating a bar; raising ends the call
>>> second: Progress | None = part(show, "scoring", 1, 3)       # the second of three equal parts of a longer work
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


@contextmanager
def seeded(seed: int, devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Seed the default generators of the CPU and of `devices` in the block, and restore their states afterwards."""
    places = {torch.device("cpu"), *(device for device in devices if device.type not in ("cpu", "meta"))}
    before = [(_access(device), torch.Generator(device).manual_seed(seed).get_state()) for device in places]
    states = [get() for (get, _), _ in before]
    for (_, put), state in before:
        put(state)
    try:
        yield
    finally:
        for ((_, put), _), state in zip(before, states, strict=True):
            put(state)


class _Undrawn(TorchFunctionMode):
    """Leaves out the values of new parameters: to draw them without memory, PyTorch would load its compiler."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.normal_, Tensor.uniform_) or getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


@contextmanager
def without_memory() -> Iterator[None]:
    """Models built in the block have shapes and dtypes, and no values: they are on the meta device."""
    with torch.device("meta"), _Undrawn():
        yield


def devices_of(model: nn.Module) -> set[torch.device]:
    """The devices of a model's parameters."""
    return {weight.device for weight in model.parameters()}


def step_seed(seed: int, step: int) -> int:
    """A seed for each step of each run, in the 32 bits of PyTorch's CPU generator; none twice in a million steps."""
    return (seed * 1_000_003 + step) % (1 << 32)


def _access(device: torch.device) -> tuple[Callable[[], Tensor], Callable[[Tensor], None]]:
    """Functions that get and set the state of a device's default generator."""
    if device.type == "cpu":
        return torch.get_rng_state, torch.set_rng_state
    module = torch.get_device_module(device)
    if device.type == "mps":  # only one device, and no argument
        return module.get_rng_state, module.set_rng_state
    return (lambda: module.get_rng_state(device)), (lambda state: module.set_rng_state(state, device))


Progress = Callable[[str, int, int], None]
"""`progress(what, done, of)`: what is being done, such as "computing rows", how much of it is done, and of how much.

It is called in the thread of the call. An exception that it raises ends the call and reaches the caller.
"""


def part(progress: Progress | None, what: str, index: int = 0, count: int = 1) -> Progress | None:
    """The callback for part `index` of `count` equally long ones, all reported as `what`; None for None."""
    if progress is None:
        return None
    return lambda _, done, of: progress(what, index * of + done, count * of)


def held_bytes(thing: Any) -> int:
    """Bytes of memory of all tensors in an object, modules aside; of a view, all of its memory; shared memory once."""
    left, seen, sizes = [thing], {}, {}
    while left:
        x = left.pop()
        if id(x) in seen or isinstance(x, (nn.Module, type)):
            continue
        seen[id(x)] = x  # kept, so that no other one takes its address meanwhile
        if isinstance(x, Tensor):
            try:
                memory = x.untyped_storage()
                sizes[memory._cdata] = memory.nbytes()
            except NotImplementedError:  # wrapped by torch.func
                sizes[id(x)] = x.nbytes
        elif isinstance(x, Mapping):
            left += x.values()
        elif isinstance(x, (list, tuple, set, frozenset, deque)):
            left += x
        else:
            left += getattr(x, "__dict__", {}).values()
    return sum(sizes.values())


def ignored(what: str, done: int, of: int) -> None:
    """The callback that does nothing."""
