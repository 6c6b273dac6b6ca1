"""A small trained-shaped model on disk, and the command line in this process."""

from pathlib import Path

import pytest
import torch

from commands import headwise  # noqa: F401
from headwise.lm.checkpoint import save_model
from headwise.lm.model import Decoder, DecoderConfig
from headwise.lm.texts import CharTokenizer

TEXT = "话说武松打虎。The tiger sleeps!\n武松又来打虎，再来？"


@pytest.fixture(scope="session")
def model() -> tuple[Decoder, CharTokenizer]:
    torch.manual_seed(3)
    tokenizer = CharTokenizer.from_text(TEXT, min_count=1)
    config = DecoderConfig(tokenizer.vocab_size, d_model=20, num_layers=2, num_heads=5, d_ff=31, context=24)
    return Decoder(config).eval(), tokenizer


@pytest.fixture(scope="session")
def model_folder(model: tuple[Decoder, CharTokenizer], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder / "model.safetensors", *model, info={"step": 0})
    return folder
