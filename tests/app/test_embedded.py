"""The model in the package is there, small, and does what docs/model.md says of it."""

from importlib.resources import files

import pytest
import torch

from headwise.lm.checkpoint import load_pretrained
from headwise.lm.loading import DecoderModel
from headwise.lm.model import write
from headwise.lm.watch_heads import frequent_characters, probe_repeats
from headwise.reports.see import SAMPLE, see


def test_it_is_small() -> None:
    size = len((files("headwise.lm") / "pretrained" / "model.safetensors").read_bytes())
    assert 1_000_000 < size <= 8_000_000


@pytest.mark.thorough
def test_its_heads_look_back() -> None:
    decoder, tokenizer, _ = load_pretrained()
    assert decoder.config.num_layers >= 3
    assert decoder.config.num_heads >= 8
    probe = probe_repeats(decoder, tokenizer, frequent_characters(SAMPLE.zh, tokenizer), length=64, sequences=8)
    assert probe.previous.mass.max() > 0.8
    assert probe.induction.mass.max() > 8 * probe.induction.uniform
    assert probe.second_loss.mean() < probe.first_loss.mean() - 1


@pytest.mark.thorough
def test_it_foretells_the_novel_better_than_chance_and_writes_it() -> None:
    decoder, tokenizer, _ = load_pretrained()
    report = see(SAMPLE.zh, DecoderModel(decoder, tokenizer))
    loss = float(dict(report.facts)["loss"].split()[0])
    assert loss < 5.0  # a unigram model of the same characters stands at 7.2
    assert report.shape == (decoder.config.num_layers, decoder.config.num_heads)
    text = "".join(write(decoder, tokenizer, "武松道：“", 60, seed=1))
    assert len(text) == 60
    known = torch.tensor([c in tokenizer.characters for c in text])
    assert known.float().mean() > 0.95
