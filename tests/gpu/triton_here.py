"""Where the kernels run in these tests: on a GPU, or in Triton's interpreter on the CPU. Test files that import this
are skipped where there is neither.

In the interpreter all tests together take many minutes, so each feature has a few that always run; the rest is `slow`.
"""

import os
from collections.abc import Iterable
from copy import copy
from typing import Any

import pytest
import torch

from headwise.scores import Score

pytest.importorskip("triton", reason="the GPU kernel is written in Triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("no GPU; TRITON_INTERPRET=1 runs these tests without one", allow_module_level=True)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def slow(*values: Any) -> Any:
    """A set of parameters that runs only where slow tests do."""
    return pytest.param(*values, marks=pytest.mark.slow)


def mostly_slow(names: Iterable[str], *quick: str) -> list[Any]:
    """Parameters of which only the `quick` ones always run."""
    found = list(names)
    assert set(quick) <= set(found)
    return [name if name in quick else slow(name) for name in found]


def moved(score: tuple[Score, ...]) -> tuple[Score, ...]:
    """Copies of the scores with tensors of their own on the device."""
    copies = tuple(copy(part) for part in score)
    for part in copies:
        for name, x in vars(part).items():
            if isinstance(x, torch.Tensor):
                object.__setattr__(part, name, x.detach().to(DEVICE).requires_grad_(x.requires_grad))
    return copies


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two ways to compute one thing agree: in each bit in the interpreter; on a GPU sums of other kernels have
    another order."""
    if DEVICE == "cpu":
        return torch.equal(a, b)
    return torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def _patch_once() -> None:
    """Triton's interpreter looks through its whole language at every call of a function by a kernel, to replace what it
    replaced at the first: half of all the time."""
    from triton.runtime.interpreter import InterpretedFunction

    patching = InterpretedFunction.__call__
    patched: set[int] = set()

    def call(function: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        module = id(function.fn.__globals__)
        if module in patched:
            return function.rewrite()(*args, **kwargs)
        patched.add(module)
        return patching(function, *args, **kwargs)

    InterpretedFunction.__call__ = call


if INTERPRETED:
    _patch_once()
