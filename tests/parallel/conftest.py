import os
import sys
from pathlib import Path

import pytest
import torch
from spawned import BESIDE, outcomes

sys.path.extend(map(str, BESIDE))


@pytest.fixture(scope="session")
def passed(tmp_path_factory):
    """passed(module, ranks, case): fails with what went wrong, on whichever rank."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base

    def check(module: str, ranks: int, case: str) -> None:
        if not torch.distributed.is_available():
            pytest.skip("PyTorch without torch.distributed")
        found = outcomes(module, ranks, Path(shared))
        assert "" not in found, found[""]
        assert not found[case], found[case]

    return check
