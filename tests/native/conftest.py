"""The compiled kernel's tests run once for each target that this CPU executes."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwise.kernels import quick
from headwise.kernels.cpu.library import library

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))  # samples


def _targets() -> list[object]:
    handle = library().handle
    if handle is None:
        return [pytest.param("none", marks=pytest.mark.skip(reason=str(library().reason)))]
    before = handle.headwise_target_name()
    found = [name for name in library().targets() if handle.headwise_set_target(name.encode()) == 0]
    handle.headwise_set_target(before)
    return [*found]


@pytest.fixture(params=_targets())
def target(request: pytest.FixtureRequest) -> Iterator[str]:
    """Calls within the test run on this target, and know nothing of what was decided on another."""
    handle = library().handle
    assert handle is not None
    before = handle.headwise_target_name()
    assert handle.headwise_set_target(request.param.encode()) == 0
    quick._decided.clear()
    yield request.param
    quick._decided.clear()
    handle.headwise_set_target(before)
