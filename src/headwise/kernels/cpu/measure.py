"""Times the compiled targets on this machine, to check that the selected one is the fastest."""

from dataclasses import dataclass
from time import perf_counter

import torch

from headwise.kernels.call import Call
from headwise.kernels.cpu import passes
from headwise.kernels.cpu.library import library
from headwise.masks import Everything, Grid
from headwise.rule import Rule

SHAPE = (1, 8, 1024, 64)
ROUNDS = 7
TOLERANCE = 1.10  # the selected target is wrong if it takes more than this times as long as the fastest


@dataclass(frozen=True)
class Timing:
    """Milliseconds of a forward call with q, k and v of `SHAPE` and no mask, by target: the minimum of `ROUNDS`."""

    dtype: str
    milliseconds: dict[str, float]
    selected: str

    @property
    def fastest(self) -> str:
        """The fastest target."""
        return min(self.milliseconds, key=self.milliseconds.__getitem__)

    @property
    def wrong(self) -> bool:
        """Whether another target is faster than the selected one by more than `TOLERANCE`."""
        return self.milliseconds[self.selected] > TOLERANCE * self.milliseconds[self.fastest]


def measure_targets() -> list[Timing]:
    """Time every target that runs on this CPU, alternately, in float32 and bfloat16; takes a few seconds. Other threads
    must not call attention meanwhile. Returns [] if no library is loaded."""
    found = library()
    if found.handle is None:
        return []
    names = found.runnable()
    timings = []
    for dtype in (torch.float32, torch.bfloat16):
        q = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype)
        call = Call(q, q, q, Rule(Everything(), SHAPE[-1] ** -0.5, Grid(*SHAPE[:3], SHAPE[2])))
        shortest = dict.fromkeys(names, float("inf"))
        for _ in range(ROUNDS):
            for name in names:
                with found.using(name):
                    began = perf_counter()
                    passes.forward(call)
                    shortest[name] = min(shortest[name], 1e3 * (perf_counter() - began))
        timings.append(Timing(str(dtype).removeprefix("torch."), shortest, str(found.target())))
    return timings
