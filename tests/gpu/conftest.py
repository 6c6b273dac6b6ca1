"""Skips this folder where its kernels cannot run: they need Triton, and a GPU or Triton's interpreter."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))  # samples


def _missing() -> str | None:
    try:
        import torch
        import triton  # noqa: F401
    except ImportError as error:
        return f"{error}: install triton to test the GPU kernel"
    if os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available():
        return None
    return "no GPU; TRITON_INTERPRET=1 runs these tests without one"


REASON = _missing()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if REASON and here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=REASON))
