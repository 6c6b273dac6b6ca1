"""Pruned decoders write, save and load; the embedded one too."""

from pathlib import Path
from typing import Any

import pytest
import torch
from design_samples import INDEPENDENT
from safetensors import safe_open

import headwise as hw
from headwise.lm.checkpoint import MODEL_FILE, load_checkpoint, load_pretrained, save_model
from headwise.lm.model import Decoder, DecoderConfig, write
from headwise.lm.texts import CharTokenizer
from headwise.lm.train import train
from headwise.models import find_heads, scale_heads
from headwise.nn.registry import design_of, names

TOKENIZER = CharTokenizer("水浒武松打虎，林冲夜奔。")
PRUNED = [name for name in names() if design_of(name) in INDEPENDENT and name not in ("single_head", "convolution")]
CUTS: dict[int | str, list[int]] = {0: [1, 3, 5], "blocks.2.attention": [0, 1, 2]}


def made(name: str, **changes: Any) -> Decoder:
    torch.manual_seed(3)
    sizes: dict[str, Any] = {
        "d_model": 24, "num_layers": 3, "num_heads": 6, "num_kv_heads": 2 if name == "gqa" else None, "d_ff": 22,
        "context": 13, "design": name,
    }  # fmt: skip
    return Decoder(DecoderConfig(TOKENIZER.vocab_size, **(sizes | changes))).eval()


def cuts_of(name: str) -> dict[int | str, list[int]]:
    return {0: [1, 5], 2: [0, 1, 2]} if name == "gqa" else CUTS


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(TOKENIZER.vocab_size, (2, 23), generator=torch.Generator().manual_seed(5))


@pytest.mark.thorough
@pytest.mark.parametrize("name", PRUNED)
def test_a_pruned_decoder_equals_the_masked_one_and_comes_back(name: str, ids: torch.Tensor, tmp_path: Path) -> None:
    decoder, cuts = made(name), cuts_of(name)
    sites = find_heads(decoder)
    gates = torch.ones(3, 6)
    gates[0, cuts[0]] = 0.0
    gates[2, [0, 1, 2]] = 0.0
    with scale_heads(sites, gates):
        expected = decoder(ids)
    pruned = hw.edit.prune(decoder, cuts, copy=True).model
    torch.testing.assert_close(pruned(ids), expected, rtol=1e-4, atol=1e-5)
    assert decoder.config.layers == ()
    assert pruned.config.layers[1] == {}
    assert pruned.config.layers[2]["num_heads"] == 3

    save_model(tmp_path / MODEL_FILE, pruned, TOKENIZER, {"how": "pruned"})
    again, _, info = load_checkpoint(tmp_path)
    assert info == {"how": "pruned"}
    assert again.config == pruned.config
    assert torch.equal(again(ids), pruned(ids))
    caches = [hw.KVCache() for _ in range(3)]
    steps = [again(part, caches=caches) for part in ids.split([11, 1, 1, 10], 1)]
    torch.testing.assert_close(torch.cat(steps, 1), again(ids), rtol=1e-4, atol=1e-5)
    assert len("".join(write(again, TOKENIZER, "武松", 20, seed=2))) == 20


@pytest.mark.thorough
def test_pruned_twice_and_trained_on(ids: torch.Tensor, tmp_path: Path) -> None:
    decoder = made("multi_head")
    once = hw.edit.prune(decoder, {0: [1]}).model
    twice = hw.edit.prune(once, {0: [0, 4], 1: [2]}).model
    assert twice is decoder
    assert [layer.get("num_heads") for layer in decoder.config.layers] == [3, 5, None]
    save_model(tmp_path / "cut" / MODEL_FILE, decoder, TOKENIZER, {})
    file = tmp_path / "text.txt"
    file.write_text("武松打虎，林冲夜奔。" * 90, encoding="utf-8")
    options: dict[str, Any] = {
        "init": tmp_path / "cut", "context": 13, "batch_size": 5, "warmup": 2, "eval_every": 5, "lr": 6e-3,
        "dropout": 0.0, "precision": "float32", "steps": 10,
    }  # fmt: skip
    outcome = train([file], tmp_path / "run", **options)
    trained, _, _ = load_checkpoint(tmp_path / "run")
    assert outcome.finished
    assert trained.config.layers == decoder.config.layers
    assert outcome.log[-1]["heldout_loss"] < outcome.log[0]["heldout_loss"]
    assert train([file], tmp_path / "run", **options).step == 10  # its own state is taken up again


@pytest.mark.thorough
def test_the_embedded_model_is_pruned_and_comes_back(tmp_path: Path) -> None:
    decoder, tokenizer, _ = load_pretrained()
    tokens = torch.from_numpy(tokenizer.encode("武松在景阳冈上打虎。"))[None]
    sites = find_heads(decoder)
    gates = torch.ones(len(sites), sites[0].num_heads)
    gates[1, :3] = 0.0
    with torch.no_grad(), scale_heads(sites, gates):
        expected = decoder(tokens)
    pruned = hw.edit.prune(decoder, {1: [0, 1, 2]}, copy=True)
    save_model(tmp_path / MODEL_FILE, pruned.model, tokenizer, {})
    again, _, _ = load_checkpoint(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(again(tokens), expected, rtol=1e-4, atol=1e-4)
    with safe_open(tmp_path / MODEL_FILE, framework="np") as opened:
        shape = opened.get_slice("blocks.1.attention.q_proj.weight").get_shape()
    assert shape[0] == (sites[0].num_heads - 3) * sites[0].head_dim
