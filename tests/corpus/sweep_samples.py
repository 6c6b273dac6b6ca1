"""Texts, models and small pieces for sweeps; run as a program: `headwise` with small pieces, and with accidents."""

import json
import os
import random
import signal
import time
from pathlib import Path

import torch

import headwise.corpus.sources as plan
from headwise.lm.checkpoint import save_model
from headwise.lm.model import Decoder, DecoderConfig
from headwise.lm.texts import CharTokenizer

TEXT = "话说武松打虎。The tiger sleeps, and so do we!\n武松又来打虎，再来？\n"
WINDOW = 13
STEP = 1 << 11  # bytes of a piece here


def make_small_pieces() -> None:
    """So small that a short text has many."""
    plan.LEAST, plan.LONGEST = STEP, 1


def make_model(folder: Path, seed: int = 3, poison: str = "") -> Path:
    """A tiny decoder on disk; poison: a head, as "layer.head", whose queries become NaN."""
    torch.manual_seed(seed)
    tokenizer = CharTokenizer.from_text(TEXT, min_count=1)
    config = DecoderConfig(tokenizer.vocab_size, d_model=18, num_layers=2, num_heads=3, d_ff=11, context=24)
    decoder = Decoder(config).eval()
    if poison:
        layer, head = map(int, poison.split("."))
        with torch.no_grad():
            decoder.blocks[layer].attention.q_proj.weight[6 * head] = torch.nan
    save_model(folder / "model.safetensors", decoder, tokenizer, info={"step": 0})
    return folder


def said(characters: int, seed: int) -> str:
    """Words of the model's characters, in lines of uneven length."""
    rng = random.Random(seed)
    words = ["武松", "打虎", "The", "tiger", "sleeps", "再来", "话说"]
    return "".join(rng.choice(words) + rng.choice("  ，\n") for _ in range(characters))[:characters]


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: text, "n": i}) + "\n" for i, text in enumerate(texts)), "utf-8")
    return path


def _accident() -> None:
    """HEADWISE_ACCIDENT=kill:RANK:UNITS kills this process, without a word, when it has written so many units;
    error:RANK:UNITS lets it fail there. The others measure one unit each and wait for what comes."""
    from headwise.corpus.units import Units
    from headwise.corpus.work import Ranks
    from headwise.errors import TextError

    what, victim, left = os.environ["HEADWISE_ACCIDENT"].split(":")
    write, take, done, taken = Units.write, Ranks.take, [], []

    def writing(self, *args):
        write(self, *args)
        done.append(1)
        if os.environ.get("RANK", "0") == victim and len(done) == int(left):
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise TextError("an accident")

    def taking(self):
        while os.environ.get("RANK", "0") != victim and taken:
            self.check()
            time.sleep(0.05)
        taken.append(1)
        return take(self)

    Units.write, Ranks.take = writing, taking


if __name__ == "__main__":
    from headwise.cli import main

    make_small_pieces()
    if "HEADWISE_ACCIDENT" in os.environ:
        _accident()
    if limit := int(os.environ.get("HEADWISE_FILES", "0")):  # bytes of the largest file, as on a full disk
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    main()
