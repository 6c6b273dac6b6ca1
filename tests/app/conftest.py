"""A small trained-shaped model on disk, and the command line in this process: commands take no second."""

import io
import sys
from pathlib import Path

import pytest
import torch
from commands import Command, Done

from headwise.cli import main
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


@pytest.fixture
def headwise(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command line, in this process."""

    def run(*args: object, answer: str | bytes | None = "") -> Done:
        monkeypatch.setenv("COLUMNS", "120")
        monkeypatch.setattr(sys, "argv", ["headwise", *map(str, args)])
        given = answer.encode() if isinstance(answer, str) else answer
        monkeypatch.setattr(sys, "stdin", None if given is None else io.TextIOWrapper(io.BytesIO(given)))
        code = 0
        try:
            main()
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        return Done(code, *capsys.readouterr())

    return run
