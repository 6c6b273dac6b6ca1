"""What the tests of telemetry share."""

import warnings

import pytest


@pytest.fixture(scope="session", autouse=True)
def _transformers_imported():
    """Imported once, before pytest turns warnings to errors: what transformers warns of while it is imported is its
    own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from transformers import PreTrainedModel
        except ImportError:
            return
    assert PreTrainedModel
