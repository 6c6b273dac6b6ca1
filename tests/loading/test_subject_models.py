"""Models in folders: their maps and losses are those of transformers' own code, and what will not do is said."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import CONFIGS, TOKENIZERS, VOCAB, byte_level, model_of, saved, transformers, unigram, word_piece

import headwise as hw
from headwise.corpus import measure_corpus
from headwise.errors import CheckpointError, ConfigError, DTypeError, ShapeError, TextError
from headwise.lm.checkpoint import load_pretrained, save_model
from headwise.lm.loading import LoadedModel, huggingface, load_model
from headwise.lm.loading.base import positions_of
from headwise.map import AttentionMap

CAUSAL = [("GPT2", "LMHeadModel"), ("Llama", "ForCausalLM"), ("Qwen3", "ForCausalLM"), ("Mistral", "ForCausalLM"),
          ("Gemma2", "ForCausalLM"), ("OPT", "ForCausalLM"), ("Bloom", "ForCausalLM"),
          ("Falcon", "ForCausalLM")]  # fmt: skip
ENCODERS = [("Bert", "Model"), ("Bert", "ForMaskedLM"), ("Roberta", "Model"), ("DistilBert", "Model"),
            ("Albert", "Model"), ("DebertaV2", "Model")]  # fmt: skip


def tokens(n: int, b: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCAB, (b, n), generator=torch.Generator().manual_seed(n))


def opened(folder: Path, kind: str, head: str) -> LoadedModel:
    return load_model(saved(folder, kind, head, word_piece() if head == "Model" else byte_level()))


def eager(folder: Path, subject: LoadedModel) -> Any:
    """The same folder by transformers' own attention."""
    return type(subject.model).from_pretrained(str(folder), attn_implementation="eager", dtype=torch.float32).eval()


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "head"), [*CAUSAL, *ENCODERS])
def test_maps_are_the_attentions_of_the_model(tmp_path: Path, kind: str, head: str) -> None:
    subject = opened(tmp_path, kind, head)
    ids = tokens(13)
    maps = subject.maps(ids[0])
    with torch.no_grad():
        theirs = eager(tmp_path, subject)(input_ids=ids, output_attentions=True).attentions
    assert tuple(maps) == subject.layers
    assert subject.heads == tuple(amap.shape[1] for amap in maps.values())
    assert len(maps) == len(theirs)
    for mine, other in zip(maps.values(), theirs, strict=True):
        assert isinstance(mine, AttentionMap)
        torch.testing.assert_close(mine[:], other, atol=2e-6, rtol=1e-4)
    assert subject.causal == ((kind, head) in CAUSAL)


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "head"), [("Llama", "ForCausalLM"), ("Bert", "Model")])
def test_padding_behind_is_seen_by_nobody(tmp_path: Path, kind: str, head: str) -> None:
    subject = opened(tmp_path, kind, head)
    ids, mask = tokens(11, b=3), torch.arange(11) < torch.tensor([[11], [7], [2]])
    together = subject.maps(ids, mask, measures=["entropy"])
    for entry, length in enumerate((11, 7, 2)):
        alone = subject.maps(ids[entry, :length], measures=["entropy"])
        for name, amap in together.items():
            torch.testing.assert_close(amap[entry, :, :length, :length], alone[name][0], atol=2e-6, rtol=1e-4)
            assert not amap[entry, :, length:].any()
            assert amap.measured is not None
            one = alone[name].measured
            assert one is not None
            torch.testing.assert_close(amap.measured["entropy"][entry], one["entropy"][0], atol=1e-5, rtol=1e-4)


@pytest.mark.thorough
def test_padding_of_the_embedded_decoder() -> None:
    subject = load_model()
    ids = subject.read("武松打虎景阳冈").ids.expand(2, -1)
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    together, alone = subject.maps(ids, mask), subject.maps(ids[0, :4])
    for name, amap in together.items():
        torch.testing.assert_close(amap[1, :, :4, :4], alone[name][0], atol=1e-5, rtol=1e-4)
        assert not amap[1, :, 4:].any()


@pytest.mark.thorough_except("OPT-ForCausalLM-67108864")
@pytest.mark.parametrize("logits", [1 << 26, 5 * VOCAB, VOCAB])
@pytest.mark.parametrize(("kind", "head"), CAUSAL)
def test_loss_is_that_of_the_model(
    tmp_path: Path, kind: str, head: str, logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface, "LOGITS", logits)  # all at once, or a stretch after the other
    subject = opened(tmp_path, kind, head)
    ids = tokens(23)
    with torch.no_grad():
        told = eager(tmp_path, subject)(input_ids=ids, labels=ids, use_cache=False)
    theirs = told.loss
    assert subject.loss(ids[0]) == pytest.approx(float(theirs), rel=2e-6)
    look = subject.look(ids[0])
    assert look.loss == pytest.approx(float(theirs), rel=2e-6)
    late = torch.nn.functional.cross_entropy(told.logits[0, 8:-1], ids[0, 9:])
    assert subject.look(ids[0], first=9).loss == pytest.approx(float(late), rel=2e-6)
    assert [output.shape[:3] for output in look.outputs] == [(1, h, 23) for h in subject.heads][: len(look.outputs)]
    assert subject.loss_fn is not None
    with torch.no_grad():
        assert float(subject.loss_fn(subject.model, ids)) == pytest.approx(float(theirs), rel=2e-6)
    assert subject.loss(ids[0, :1]) is None


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "head"), ENCODERS)
def test_what_predicts_no_next_token_has_no_loss(tmp_path: Path, kind: str, head: str) -> None:
    subject = opened(tmp_path, kind, head)
    assert subject.loss(tokens(9)) is None
    assert subject.loss_fn is None
    assert any("does not predict the next token" in remark for remark in subject.remarks(9))


@pytest.mark.thorough
def test_a_body_without_its_head_has_no_loss(tmp_path: Path) -> None:
    subject = load_model(saved(tmp_path, "Llama", "Model", byte_level()))
    assert subject.causal
    assert subject.loss_fn is None


@pytest.mark.thorough
def test_a_layer_that_is_called_again_has_a_name_of_its_own(tmp_path: Path) -> None:
    subject = load_model(saved(tmp_path, "Albert", "Model", word_piece()))
    name = subject.layers[0]
    assert subject.layers == (name, f"{name}#2", f"{name}#3")
    assert subject.sites == []


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "head"), [("GPT2", "LMHeadModel"), ("Llama", "ForCausalLM"), ("Bert", "Model")])
def test_sites_stand_in_the_order_of_the_layers(tmp_path: Path, kind: str, head: str) -> None:
    subject = opened(tmp_path, kind, head)
    assert tuple(site.name for site in subject.sites) == subject.layers
    look = subject.look(tokens(5))
    assert [tuple(output.shape[:3]) for output in look.outputs] == [(1, h, 5) for h in subject.heads]


@pytest.mark.thorough_except("OPT-ForCausalLM-48", "Bert-Model-48", "Nystromformer-Model-48")
@pytest.mark.parametrize(
    ("kind", "head", "limit"),
    [("GPT2", "LMHeadModel", 48), ("OPT", "ForCausalLM", 48), ("Bert", "Model", 48), ("Roberta", "Model", 48),
     ("DistilBert", "Model", 48), ("GPTJ", "ForCausalLM", 48), ("Nystromformer", "Model", 48)],
)  # fmt: skip
def test_learned_positions_end(tmp_path: Path, kind: str, head: str, limit: int) -> None:
    subject = opened(tmp_path, kind, head)
    assert subject.limit == subject.context == limit
    assert next(iter(subject.maps(tokens(limit)).values())).shape[2] == limit
    with pytest.raises(TextError, match=f"{limit + 1} tokens.*{limit} positions"):
        subject.maps(tokens(limit + 1))


def test_a_window_beyond_the_positions_is_refused_before_the_weights_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path, "Roberta", "Model", byte_level())
    (folder / "t.txt").write_text("武松打虎")
    monkeypatch.setattr(huggingface, "_load", lambda *_: pytest.fail("weights are loaded"))
    with pytest.raises(ConfigError, match=f"window=51.*: {folder.name} has 48 positions"):
        measure_corpus(folder, folder / "t.txt", folder / "t.csv", window=51)


@pytest.mark.thorough
def test_a_text_that_is_too_long_for_a_model_without_positions(tmp_path: Path) -> None:
    """Its biases are those of so many distances."""
    subject = opened(tmp_path, "Mpt", "ForCausalLM")
    assert (subject.limit, subject.context) == (None, 48)
    with pytest.raises(TextError, match="49 tokens at once are too many for MptForCausalLM, which was trained on 48"):
        subject.maps(tokens(49))


@pytest.mark.thorough
def test_positions_of_images_do_not_count() -> None:
    text = {**CONFIGS["Llama"], "model_type": "llama"}
    vision = {"hidden_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    config = transformers.LlavaConfig(vision_config={**vision, "model_type": "clip_vision_model"}, text_config=text)
    with torch.device("meta"):
        assert positions_of(transformers.LlavaModel(config)) is None
        beside = transformers.GitConfig(**CONFIGS["Llama"], vision_config=vision)
        assert positions_of(transformers.GitModel(beside)) == 48


@pytest.mark.thorough
def test_rotary_positions_go_on_with_a_remark(tmp_path: Path) -> None:
    subject = opened(tmp_path, "Llama", "ForCausalLM")
    assert (subject.limit, subject.context) == (None, 48)
    assert next(iter(subject.maps(tokens(61)).values())).shape[2] == 61
    assert subject.remarks(48) == []
    assert "48 tokens at a time" in subject.remarks(49)[0]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("ids", "error", "words"),
    [
        (torch.zeros(3), DTypeError, "whole numbers"),
        (torch.zeros(0, dtype=torch.long), ShapeError, "at least one"),
        (torch.zeros(1, 2, 3, dtype=torch.long), ShapeError, r"\[n\] or \[b, n\]"),
        (torch.tensor([VOCAB]), ShapeError, "embeddings"),
        (torch.tensor([-1]), ShapeError, "embeddings"),
    ],
)
def test_ids_that_are_none_are_refused(tmp_path: Path, ids: torch.Tensor, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        opened(tmp_path, "Llama", "ForCausalLM").maps(ids)


@pytest.mark.thorough
@pytest.mark.parametrize("mask", [[[False, True, True]], [[True, False, True]], [[True, True]], [[1, 1, 1]]])
def test_masks_that_are_no_padding_behind_are_refused(tmp_path: Path, mask: list[list[int]]) -> None:
    with pytest.raises(ShapeError, match="mask"):
        load_model().maps(torch.tensor([[1, 2, 3]]), torch.tensor(mask))


@pytest.mark.thorough
def test_nothing_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("a connection was tried")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for name, make in TOKENIZERS.items():
        subject = load_model(saved(tmp_path / name, "Llama", "ForCausalLM", make()))
        subject.maps(subject.read("hello").ids)


def _edit(path: Path, **changes: Any) -> None:
    values = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**values, **changes}), encoding="utf-8")


def _no_tokenizer(folder: Path) -> None:
    for path in folder.glob("token*"):
        path.unlink()


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _sharded(folder: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _truncated(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def _own_code(folder: Path) -> None:
    (folder / "trap.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\nclass Trap: pass\n", encoding="utf-8")
    auto = {"AutoConfig": "trap.Trap", "AutoModelForCausalLM": "trap.Trap"}
    _edit(folder / "config.json", model_type="trap", auto_map=auto)


SPOILED: dict[str, tuple[Any, str]] = {
    "no tokenizer": (_no_tokenizer, r"no tokenizer found, such as tokenizer\.json.*hw\.show\(model, text=ids\)"),
    "broken tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_text("{"), "it has no tokenizer that can be read: ",
    ),
    "pickled": (_pickled, "pytorch_model.bin.*pickled"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
    "a part is missing": (lambda folder: _sharded(folder, "model-1-of-2.safetensors"), "1-of-2.*missing"),
    "a part lies elsewhere": (lambda folder: _sharded(folder, "../model.safetensors"), "not a safetensors file"),
    "broken index": (
        lambda folder: (_sharded(folder, "x"), (folder / "model.safetensors.index.json").write_text("{")),
        "cannot be read",
    ),
    "truncated": (_truncated, "cannot be loaded"),
    "unknown architecture": (lambda folder: _edit(folder / "config.json", model_type="nobody"), "unknown to this"),
    "code of its own": (_own_code, "refers to custom code.*does not run code from model folders"),
    "broken config": (lambda folder: (folder / "config.json").write_text("{"), "cannot be read"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "other sizes": (lambda folder: _edit(folder / "config.json", hidden_size=32), "another shape"),
    "more layers": (lambda folder: _edit(folder / "config.json", num_hidden_layers=5), "missing"),
}  # fmt: skip


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize("what", SPOILED)
def test_a_folder_that_will_not_do_says_why(tmp_path: Path, what: str) -> None:
    folder = saved(tmp_path / "model", "Llama", "ForCausalLM", byte_level())
    spoil, words = SPOILED[what]
    spoil(folder)
    with pytest.raises(CheckpointError, match=words) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)
    assert not (folder / "ran").exists()


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "head"), [("Llama", "ForCausalLM"), ("Bert", "ForMaskedLM")])
def test_a_pruned_model_is_read(tmp_path: Path, kind: str, head: str) -> None:
    folder = saved(tmp_path / "model", kind, head, byte_level())
    auto = transformers.AutoModelForCausalLM if head == "ForCausalLM" else transformers.AutoModelForMaskedLM
    pruned = hw.edit.prune(auto.from_pretrained(folder), {1: [0, 1]}).model
    hw.edit.save_pruned(pruned, tmp_path / "pruned")
    byte_level().save_pretrained(tmp_path / "pruned")
    subject, whole = load_model(tmp_path / "pruned"), load_model(folder)
    assert subject.heads[0] == whole.heads[0]
    assert subject.heads[1] == whole.heads[1] - 2
    assert (subject.loss_fn is None) == (head != "ForCausalLM")


@pytest.mark.thorough_except(
    "Bart-ForConditionalGeneration-encoder-decoder model",
    "BigBird-ForMaskedLM-in other ways for texts of other lengths",
)
@pytest.mark.parametrize(
    ("kind", "head", "words"),
    [
        ("Bart", "ForConditionalGeneration", "encoder-decoder model"),
        ("Mamba", "ForCausalLM", "no attention in Mamba"),
        ("BigBird", "ForMaskedLM", "in other ways for texts of other lengths"),
    ],
)
def test_a_model_that_will_not_do_says_why(tmp_path: Path, kind: str, head: str, words: str) -> None:
    saved(tmp_path, kind, head, byte_level())
    with pytest.raises(CheckpointError, match=words):
        load_model(tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["Bloom", "Falcon"])
def test_attention_that_is_recognised_gives_maps_in_every_call(tmp_path: Path, kind: str) -> None:
    """Of one token, with padding, again, and with the outputs of the heads."""
    subject = opened(tmp_path, kind, "ForCausalLM")
    for ids in (tokens(1), tokens(2), tokens(1), tokens(9)):
        assert tuple(subject.maps(ids)) == subject.layers
    look = subject.look(tokens(9))
    assert [out.shape[:3] for out in look.outputs] == [(1, 5, 9)] * len(subject.layers)
    assert subject.heads == (5,) * len(subject.layers)


@pytest.mark.thorough
def test_a_length_of_minus_one_is_none(tmp_path: Path) -> None:
    """XLNet's max_position_embeddings."""
    subject = opened(tmp_path, "XLNet", "LMHeadModel")
    assert subject.context is None
    assert tuple(subject.maps(tokens(9))) == subject.layers


@pytest.mark.thorough
def test_parts_of_weights_are_read(tmp_path: Path) -> None:
    model_of("Llama", "ForCausalLM").save_pretrained(tmp_path, max_shard_size="20KB")
    byte_level().save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ids = tokens(7)
    whole = opened(tmp_path / "whole", "Llama", "ForCausalLM")
    assert load_model(tmp_path).loss(ids) == whole.loss(ids)


@pytest.mark.thorough
def test_weights_in_bfloat16_are_read_in_float32(tmp_path: Path) -> None:
    model_of("Llama", "ForCausalLM").to(torch.bfloat16).save_pretrained(tmp_path)
    unigram().save_pretrained(tmp_path)
    assert {p.dtype for p in load_model(tmp_path).model.parameters()} == {torch.float32}


@pytest.mark.thorough
def test_a_tokenizer_that_is_not_fast(tmp_path: Path) -> None:
    saved(tmp_path, "Bert", "Model")
    words = ["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO.-", "<null_1>", "<mask>"]
    (tmp_path / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    transformers.EsmTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    reading = load_model(tmp_path).read("LAG VS")
    assert reading.pieces == ["<cls>", "L", "A", "G", "V", "S", "<eos>"]
    assert reading.spans == [(0, 0), (0, 1), (1, 2), (2, 3), (4, 5), (5, 6), (6, 6)]
    assert "".join(reading.words[1:-1]) == "LAG VS"


@pytest.mark.thorough
def test_checkpoints_of_headwise_are_opened(tmp_path: Path) -> None:
    decoder, tokenizer, info = load_pretrained()
    save_model(tmp_path / "model.safetensors", decoder, tokenizer, info)
    ids = load_model().read("武松打虎").ids
    for path in (tmp_path, tmp_path / "model.safetensors"):
        subject = load_model(path)
        assert subject.kind == "headwise"
        assert subject.loss(ids) == pytest.approx(load_model().loss(ids), rel=1e-6)
    assert "4 layers × 8 heads" in repr(load_model())


def test_an_empty_folder_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="it is empty"):
        load_model(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        load_model(tmp_path / "nowhere")
