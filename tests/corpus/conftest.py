"""A tiny model on disk."""

import warnings
from pathlib import Path

import pytest
from sweep_samples import STEP, make_model

import headwise.corpus.sources as plan


@pytest.fixture(scope="session", autouse=True)
def _transformers_imported():
    """Imported once, before pytest turns warnings to errors: what it warns of while it is imported is its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from transformers import PreTrainedModel
        except ImportError:
            return
    assert PreTrainedModel


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "LEAST", STEP)
    monkeypatch.setattr(plan, "LONGEST", 1)
