"""What the adapters' tests share."""

import warnings

import pytest


@pytest.fixture(scope="session", autouse=True)
def _transformers_imported():
    """Imported once, before pytest turns warnings to errors: what transformers warns of while it is imported is its
    own; and what it logs of tiny models, too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import PreTrainedModel
        from transformers.utils import logging

    assert PreTrainedModel
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(before)
