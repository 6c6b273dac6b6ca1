"""Checks of parts of your own: call the one of its kind in a test of your package.

    from headwise import testing

    def test_dilated():
        testing.check_mask(Dilated(3))

Each takes seconds, compares with formulas in float64 that are written apart from the library, and raises `CheckFailed`,
an `AssertionError` that names the part and what it does not hold.
"""

from headwise.testing.layers import check_design, check_kind
from headwise.testing.parts import check_kernel, check_mask, check_measure, check_score
from headwise.testing.truth import CheckFailed
from headwise.testing.views import check_view

__all__ = [
    "CheckFailed", "check_design", "check_kernel", "check_kind", "check_mask", "check_measure", "check_score",
    "check_view",
]  # fmt: skip
