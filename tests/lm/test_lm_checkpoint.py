"""Checkpoints are whole or not there, and tell what is wrong with them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from headwise.base.read import write_tensors
from headwise.errors import CheckpointError, ConfigError
from headwise.lm.checkpoint import MODEL_FILE, header_of, load_checkpoint, read, save_model
from headwise.lm.model import Decoder, DecoderConfig
from headwise.lm.texts import CharTokenizer
from headwise.nn.head_mixing import TalkingHeadsAttention
from processes import files_no_larger_than

TOKENIZER = CharTokenizer("水浒武松")


def made(seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(DecoderConfig(260, d_model=14, num_layers=2, num_heads=7, d_ff=22, context=13, dropout=0.1))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_model(tmp_path / MODEL_FILE, made(), TOKENIZER, {"step": 5, "说明": "试"})
    return tmp_path / MODEL_FILE


@pytest.mark.thorough
@pytest.mark.parametrize("by_folder", [False, True])
def test_a_model_comes_back_as_it_went(file: Path, by_folder: bool) -> None:
    decoder, tokenizer, info = load_checkpoint(file.parent if by_folder else file)
    assert decoder.config == made().config
    assert tokenizer.characters == TOKENIZER.characters
    assert info == {"step": 5, "说明": "试"}
    assert not decoder.training
    assert all(torch.equal(x, made().state_dict()[name]) for name, x in decoder.state_dict().items())


def test_the_bytes_of_float16_come_back(tmp_path: Path) -> None:
    halves = {name: x.half() for name, x in made().state_dict().items()}
    weights = {name: torch.stack([x.view(torch.uint8)[..., k::2] for k in (0, 1)]) for name, x in halves.items()}
    write_tensors(tmp_path / MODEL_FILE, weights, header_of(made().config, TOKENIZER, {}))
    found = read(tmp_path / MODEL_FILE)[0]
    assert all(x.dtype == torch.float16 and torch.equal(x, halves[name]) for name, x in found.items())
    sizes = (2,), (2, 1), (2, 0), (2, 3, 0), (2, 1, 1, 5)
    of_sizes = {str(size[1:]): torch.zeros(size, dtype=torch.uint8) for size in sizes}
    write_tensors(tmp_path / "sizes", of_sizes, header_of(made().config, TOKENIZER, {}))
    assert all(name == str(tuple(x.shape)) for name, x in read(tmp_path / "sizes")[0].items())
    assert found.keys() == halves.keys() == load_checkpoint(tmp_path)[0].state_dict().keys()
    other = {name: torch.zeros(3, dtype=torch.uint8) for name in halves}
    write_tensors(tmp_path / MODEL_FILE, other, header_of(made().config, TOKENIZER, {}))
    with pytest.raises(CheckpointError, match="the sizes require"):
        load_checkpoint(tmp_path)


def test_layers_with_sizes_of_their_own_come_back(tmp_path: Path) -> None:
    torch.manual_seed(2)
    layers = [{"num_heads": 3, "head_dim": 2}, {}]
    decoder = Decoder(DecoderConfig(260, d_model=14, num_layers=2, num_heads=7, d_ff=22, context=13, layers=layers))
    save_model(tmp_path / MODEL_FILE, decoder, TOKENIZER, {})
    again, _, _ = load_checkpoint(tmp_path)
    assert again.config == decoder.config
    assert all(torch.equal(x, decoder.state_dict()[name]) for name, x in again.state_dict().items())


def test_a_file_without_layers_is_read_as_before(file: Path) -> None:
    with safe_open(file, framework="np") as opened:
        config = json.loads(opened.metadata()["config"])
    assert "layers" not in config
    assert load_checkpoint(file)[0].config.layers == ()


def test_a_layer_of_another_design_is_refused(tmp_path: Path) -> None:
    decoder = made()
    decoder.get_submodule("blocks.1").attention = TalkingHeadsAttention(14, 7, rotary=True)
    with pytest.raises(ConfigError, match=r"blocks\.1\.attention is not of the design 'multi_head'"):
        save_model(tmp_path / MODEL_FILE, decoder, TOKENIZER, {})


@pytest.mark.thorough
def test_half_precision_is_half_the_size_and_loads_as_float32(file: Path) -> None:
    small = file.with_name("small.safetensors")
    save_model(small, made(), TOKENIZER, {}, dtype=torch.float16)
    decoder, _, _ = load_checkpoint(small)
    assert {x.dtype for x in decoder.state_dict().values()} == {torch.float32}
    assert all(torch.equal(x, made().state_dict()[n].half().float()) for n, x in decoder.state_dict().items())
    assert file.stat().st_size - small.stat().st_size == pytest.approx(2 * made().num_parameters, abs=300)


def test_the_header_is_json_that_others_can_read(file: Path) -> None:
    with safe_open(file, framework="np") as opened:
        header = opened.metadata()
    assert json.loads(header["config"])["num_heads"] == 7
    assert json.loads(header["tokenizer"]) == {"characters": "水浒武松"}


def test_a_missing_checkpoint_tells_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*headwise train"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.999])
def test_a_truncated_checkpoint_is_told(file: Path, share: float) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*truncated"):
        load_checkpoint(file)


def test_files_of_others_are_refused(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    save_file({"weight": torch.zeros(3)}, other)
    with pytest.raises(CheckpointError, match="not of the format headwise-decoder-2"):
        load_checkpoint(other)
    other.write_text("#!/bin/sh\necho this is no checkpoint at all\n")
    with pytest.raises(CheckpointError, match=r"other\.safetensors"):
        load_checkpoint(other)


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("config", "{", "not JSON"),
        ("config", '{"vocab_size": 260, "wings": 2}', "unknown key 'wings'"),
        ("config", '{"vocab_size": 260, "layers": [{"wings": 2}, {}, {}, {}]}', "'wings' is not an option of"),
        ("config", '{"vocab_size": 260, "layers": 3}', "layers=3: expected a list"),
        ("config", '{"vocab_size": true}', "vocab_size=True"),
        ("config", '{"vocab_size": 260, "dropout": "much"}', "dropout='much'"),
        ("config", '{"vocab_size": 260, "num_kv_heads": "2"}', "num_kv_heads='2'"),
        ("config", '{"vocab_size": 260, "design": ["latent"]}', r"design=\['latent'\]"),
        ("config", '{"vocab_size": 260, "options": 3}', "options=3"),
        ("config", '{"vocab_size": 260, "num_layers": 1000000}', "1000000 layers"),
        ("config", '{"vocab_size": 9223372036854775807}', "vocab_size=9223372036854775807: expected"),
        ("config", '{"vocab_size": 16777216, "d_model": 16777216}', "invalid sizes|the sizes require"),
        ("config", '{"vocab_size": 260, "num_layers": 2, "options": {"head_dim": 99999999}}', "expected at most"),
        ("config", '{"vocab_size": 259}', "260 tokens, but embeddings for 259"),
        ("config", "[" * 100000, "not JSON"),
        ("tokenizer", "{}", "tokenizer.characters is missing"),
        ("tokenizer", '{"characters": "\\ud800"}', "half of a surrogate pair"),
        ("info", "oh", "not JSON"),
        ("info", "[]", "info: expected an object"),
    ],
)
def test_a_broken_header_is_told(file: Path, key: str, value: str, words: str) -> None:
    tensors, header = read(file)
    write_tensors(file, {name: x.clone() for name, x in tensors.items()}, header | {key: value})
    with pytest.raises(CheckpointError, match=words) as caught:
        load_checkpoint(file)
    assert "model.safetensors" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.thorough
def test_every_byte_that_has_changed_is_told(file: Path) -> None:
    whole = file.read_bytes()
    for at in range(0, len(whole), len(whole) // 50):
        file.write_bytes(whole[:at] + bytes((whole[at] ^ 1 << at % 8,)) + whole[at + 1 :])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            load_checkpoint(file)


def test_a_tied_and_a_negated_weight_are_written(tmp_path: Path) -> None:
    decoder = made()
    first, second = (decoder.get_submodule(f"blocks.{i}") for i in range(2))
    second.ff_out = first.ff_out
    assert isinstance(first.ff_in, torch.nn.Linear)
    turned = torch.complex(torch.zeros_like(first.ff_in.weight), first.ff_in.weight).detach().conj().imag
    first.ff_in.weight = torch.nn.Parameter(turned)
    assert first.ff_in.weight.is_neg()
    save_model(tmp_path / MODEL_FILE, decoder, TOKENIZER, {})
    again = load_checkpoint(tmp_path)[0].state_dict()
    assert all(torch.equal(x, again[name]) for name, x in decoder.state_dict().items())


def test_weights_that_do_not_fit_the_sizes_are_told(file: Path) -> None:
    tensors, header = read(file)
    write_tensors(file, {"embedding.weight": torch.zeros(3, 2)}, header)
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*2 layers.* 1 tensors"):
        load_checkpoint(file)
    write_tensors(file, tensors | {"embedding.weight": torch.zeros(3, 2)}, header)
    with pytest.raises(CheckpointError, match=r"embedding\.weight is \(3, 2\); the sizes require \(260, 14\)"):
        load_checkpoint(file)
    write_tensors(file, tensors | {"more": torch.zeros(3, 2)}, header)
    with pytest.raises(CheckpointError, match="more is not a weight"):
        load_checkpoint(file)


@pytest.mark.parametrize("room", [0, 100, 9000])
def test_when_the_disk_fills_the_old_checkpoint_stays(file: Path, room: int) -> None:
    before = file.read_bytes()
    assert len(before) > 9000
    with files_no_larger_than(room), pytest.raises(CheckpointError, match=r"model\.safetensors.*untouched"):
        save_model(file, made(1), TOKENIZER, {})
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]  # no temporary file is left
