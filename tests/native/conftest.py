"""The compiled kernel's tests run once for each target that this CPU executes: the first and the last always, those
between them in `make test-all`, but tests with `every_target`; HEADWISE_TEST_TARGETS=avx2,portable limits them."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwise.kernels import prepare
from headwise.kernels.cpu.library import library

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))  # samples


def _targets() -> list[object]:
    handle = library().handle
    if handle is None:
        return [pytest.param("none", marks=pytest.mark.skip(reason=str(library().reason)))]
    found = library().runnable()
    chosen = os.environ.get("HEADWISE_TEST_TARGETS", ",".join(found)).split(",")
    return [name for name in found if name in chosen]


TARGETS = _targets()


def pytest_itemcollected(item: pytest.Item) -> None:
    """All targets are made of the same source; the first and the last differ most."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    if params.get("target") in TARGETS[1:-1] and item.get_closest_marker("every_target") is None:
        item.add_marker(pytest.mark.thorough)


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> Iterator[str]:
    """Calls within the test run on this target, and know nothing of what was decided on another."""
    with library().using(request.param):
        prepare._prepared.clear()
        yield request.param
        prepare._prepared.clear()
