"""Random numbers that repeat: torch's default generators at a seed, and afterwards where they were before."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def seeded(seed: int, devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """While open, the default generators of the CPU and of `devices` start from `seed`; then they are as they were.

    What draws from them inside (dropout, the weights of new modules) draws the same numbers each time, and the numbers
    that the caller draws later do not depend on it.
    """
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


def devices_of(model: nn.Module) -> set[torch.device]:
    """The devices that a model's weights are on."""
    return {weight.device for weight in model.parameters()}


def step_seed(seed: int, step: int) -> int:
    """A seed of its own for each step of each run. torch's CPU generator reads 32 bits of it, so seed and step must
    share them; runs of two seeds do not meet within a million steps."""
    return (seed * 1_000_003 + step) % (1 << 32)


def _access(device: torch.device) -> tuple[Callable[[], Tensor], Callable[[Tensor], None]]:
    """Functions that get and set the state of a device's default generator."""
    if device.type == "cpu":
        return torch.get_rng_state, torch.set_rng_state
    module = torch.get_device_module(device)
    if device.type == "mps":  # there is one device, and no argument for it
        return module.get_rng_state, module.set_rng_state
    return (lambda: module.get_rng_state(device)), (lambda state: module.set_rng_state(state, device))
