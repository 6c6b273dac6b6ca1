"""Heads and sequences that other libraries have split over two ranks."""

import pytest
import split_cases
import split_model_cases


@pytest.mark.thorough_except(
    "the_head_that_explodes_is_clipped_alone",
    "what_cannot_be_read_is_refused_by_name",
    "heads_that_are_split_without_dtensors_are_not_added_up",
    "edits_of_split_heads_are_refused",
)
@pytest.mark.parametrize("case", split_cases.CASES)
def test_what_pytorch_has_split_is_read_right_or_refused(passed, case):
    passed("split_cases", 2, case)


@pytest.mark.thorough
@pytest.mark.parametrize("case", split_model_cases.CASES)
def test_models_that_their_library_has_split(passed, case):
    pytest.importorskip("transformers")
    if case in split_model_cases.WITH_ACCELERATE:
        pytest.importorskip("accelerate", reason="accelerate is not installed; transformers needs it for its own plan")
    passed("split_model_cases", 2, case)
