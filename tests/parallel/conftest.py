import os
import sys
from pathlib import Path

import pytest
import torch
from spawned import BESIDE, outcomes

sys.path.extend(map(str, BESIDE))


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Path:
    """A folder that all workers of a test run have in common."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base


@pytest.fixture(scope="session")
def passed(shared):
    """passed(module, ranks, case): fails with what went wrong, on whichever rank."""

    def check(module: str, ranks: int, case: str) -> None:
        if not torch.distributed.is_available():
            pytest.skip("PyTorch without torch.distributed")
        found = outcomes(module, ranks, shared)
        assert "" not in found, found[""]
        assert not found[case], found[case]

    return check
