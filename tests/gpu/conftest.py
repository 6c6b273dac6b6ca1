"""What the tests of the GPU kernels share with those of the core."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))  # samples


@pytest.fixture(scope="session", autouse=True)
def unchecked() -> Iterator[None]:
    """Tests of the kernels need no check of them by themselves, which takes long in the interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADWISE_GPU_CHECK", "0")
        yield
