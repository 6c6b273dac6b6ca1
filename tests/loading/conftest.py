"""What the tests of models in folders share."""

import sys
import warnings
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # folders


@pytest.fixture(scope="session", autouse=True)
def _transformers_imported():
    """Imported once, before pytest turns warnings to errors: what transformers warns of while it is imported is its
    own; and what it logs of tiny models, too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers", reason="transformers is not installed (the hf extra)")
    logging = transformers.utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    yield
    logging.set_verbosity(before)
    logging.enable_progress_bar()
