"""A tiny model on disk, texts in three forms, and pieces so small that a short text has many."""

import json
import random
import warnings
from pathlib import Path

import pytest
import torch

import headwise.sweep.plan as plan
from headwise.lm.checkpoint import save_model
from headwise.lm.model import Decoder, DecoderConfig
from headwise.lm.tokenizer import CharTokenizer

TEXT = "话说武松打虎。The tiger sleeps, and so do we!\n武松又来打虎，再来？\n"
WINDOW = 13
STEP = 1 << 11  # bytes of a piece here


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
    torch.manual_seed(3)
    tokenizer = CharTokenizer.from_text(TEXT, min_count=1)
    config = DecoderConfig(tokenizer.vocab_size, d_model=15, num_layers=2, num_heads=3, d_ff=11, context=24)
    folder = tmp_path_factory.mktemp("model")
    save_model(folder / "model.safetensors", Decoder(config).eval(), tokenizer, info={"step": 0})
    return folder


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "LEAST", STEP)
    monkeypatch.setattr(plan, "LONGEST", 1)


def said(characters: int, seed: int) -> str:
    """Words of the model's characters, in lines of uneven length."""
    rng = random.Random(seed)
    words = ["武松", "打虎", "The", "tiger", "sleeps", "再来", "话说"]
    return "".join(rng.choice(words) + rng.choice("  ，\n") for _ in range(characters))[:characters]


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: text, "n": i}) + "\n" for i, text in enumerate(texts)), "utf-8")
    return path
