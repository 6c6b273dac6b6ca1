"""Statistics requested in a differentiable call have their gradients in the backward pass of each target."""

import pytest
import torch
from samples import MASKS
from test_joint_gradients import check, no_tiles  # noqa: F401


@pytest.mark.usefixtures("no_tiles", "target")
@pytest.mark.parametrize(
    ("mask", "score", "dtype", "bound"),
    [
        ("causal", "", torch.float32, 2e-6),
        ("dense", "soft cap", torch.float32, 2e-6),
        ("nothing for some", "all", torch.float32, 2e-6),
        ("window and sinks", "", torch.bfloat16, 1e-2),
        ("documents", "sinks", torch.float16, 2e-3),
    ],
)
def test_statistics_of_rows(mask: str, score: str, dtype: torch.dtype, bound: float) -> None:
    check("cpu", MASKS[mask](2, 37, 53), score, dtype, bound=bound)
