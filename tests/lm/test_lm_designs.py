"""A decoder of any head design that can be causal: trained, saved, loaded, written with, seen."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from headwise.base.read import write_tensors
from headwise.cache import KVCache
from headwise.errors import CheckpointError, HeadwiseError
from headwise.lm.checkpoint import MODEL_FILE, load_checkpoint, load_pretrained, read, save_model
from headwise.lm.loading import DecoderModel
from headwise.lm.model import Decoder, DecoderConfig, write
from headwise.lm.texts import CharTokenizer
from headwise.lm.train import TRAINING_FILE, train
from headwise.nn.registry import design_of, names
from headwise.reports.see import see

TOKENIZER = CharTokenizer("水浒武松打虎，林冲夜奔。")
CAUSAL = [name for name in names() if design_of(name).takes_mask]
MORE: list[tuple[str, dict[str, Any]]] = [
    ("sparse_mixture", {"top_k": 2, "shared_heads": 1, "qk_norm": True}),
    ("latent", {"latent_dim": 9, "rope_dim": 0, "latent_norm": True}),
    ("single_head", {"head_dim": 4, "value_dim": 5}),
    ("multi_head", {"order": "post", "bias": True}),
    ("gated_output", {"order": "post", "gate": "channel"}),
]
CASES: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in CAUSAL] + MORE
every = pytest.mark.parametrize(("name", "options"), CASES, ids=lambda value: str(value))


def config(name: str, options: dict[str, Any] | None = None, **changes: Any) -> DecoderConfig:
    options = dict(options or {})
    sizes: dict[str, Any] = {
        "d_model": 24, "num_layers": 2, "num_heads": 6, "num_kv_heads": 2 if name == "gqa" else None, "d_ff": 22,
        "context": 13, "design": name, "order": options.pop("order", "pre"), "options": options,
    }  # fmt: skip
    return DecoderConfig(TOKENIZER.vocab_size, **(sizes | changes))


def made(name: str, options: dict[str, Any] | None = None, **sizes: Any) -> Decoder:
    torch.manual_seed(3)
    return Decoder(config(name, options, **sizes)).eval()


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(TOKENIZER.vocab_size, (2, 23), generator=torch.Generator().manual_seed(5))


@pytest.mark.thorough_beyond(6)
@every
def test_later_tokens_change_nothing_before_them(name: str, options: dict[str, Any], ids: torch.Tensor) -> None:
    decoder, changed = made(name, options), ids.clone()
    changed[:, 13:] = (ids[:, 13:] + 1) % TOKENIZER.vocab_size
    one, other = decoder(ids), decoder(changed)
    assert torch.allclose(one[:, :13], other[:, :13], atol=1e-5)
    assert not torch.allclose(one[:, 13:], other[:, 13:], atol=1e-2)


@pytest.mark.thorough_beyond(4)
@every
def test_steps_with_a_cache_equal_one_pass(name: str, options: dict[str, Any], ids: torch.Tensor) -> None:
    decoder = made(name, options)
    caches = [KVCache() for _ in range(2)]
    steps = [decoder(part, caches=caches) for part in ids.split([11, 1, 1, 10], 1)]
    torch.testing.assert_close(torch.cat(steps, 1), decoder(ids), rtol=1e-4, atol=1e-5)


@pytest.mark.thorough_beyond(4)
@every
def test_a_model_comes_back_as_it_went(name: str, options: dict[str, Any], ids: torch.Tensor, tmp_path: Path) -> None:
    decoder = made(name, options)
    save_model(tmp_path / MODEL_FILE, decoder, TOKENIZER, {})
    again, _, _ = load_checkpoint(tmp_path)
    assert again.config == decoder.config
    assert type(again.get_submodule("blocks.0.attention")) is design_of(name)
    assert torch.equal(again(ids), decoder(ids))


@pytest.mark.thorough
@every
def test_it_writes_and_is_seen(name: str, options: dict[str, Any]) -> None:
    decoder = made(name, options)
    text = "".join(write(decoder, TOKENIZER, "武松", 30, seed=2))
    assert len(text) == 30
    assert text == "".join(write(decoder, TOKENIZER, "武松", 30, seed=2))
    report = see("武松打虎，林冲夜奔。水浒", DecoderModel(decoder, TOKENIZER))
    heads = 1 if name == "single_head" else 6
    assert report.passages[0].maps.shape == (2, heads, 12, 12)
    facts = dict(report.facts)
    assert (name in facts["model"]) == (name != "multi_head")
    assert f"2 layers × {heads} head" in facts["model"]
    remark = design_of(name).notes.map
    assert [note for note in report.notes[1:] if "head" in note] == ([] if remark is None else [remark])


@pytest.mark.thorough_beyond(4)
@every
def test_branches_start_small_and_alike(name: str, options: dict[str, Any]) -> None:
    """Whatever the design calls its matrices, the map onto the residual stream starts 1/√(2·layers) times smaller."""
    few, many = made(name, options, num_layers=1), made(name, options, num_layers=16)
    shared = {n: p for n, p in few.get_submodule("blocks.0.attention").named_parameters() if p.numel() > 60}
    smaller = 0
    for key, one in shared.items():
        other = many.get_submodule("blocks.0.attention").get_parameter(key)
        ratio = (other.std() / one.std()).item()
        smaller += ratio < 0.5
        assert ratio == pytest.approx(0.25 if ratio < 0.5 else 1.0, rel=0.3), key
    assert smaller == (6 if name == "per_head" else 1)


def test_forms_of_one_function_start_with_one_spread() -> None:
    for name in ("per_head", "contraction"):
        attention = made(name).get_submodule("blocks.0.attention")
        expected = made("multi_head").get_submodule("blocks.0.attention").per_head_weights()  # type: ignore[operator]
        for letter, matrices in attention.matrices().items():  # type: ignore[operator]
            assert torch.stack(list(matrices)).std().item() == pytest.approx(expected[letter].std().item(), rel=0.1)


def test_a_map_over_heads_starts_as_the_identity() -> None:
    attention = made("talking_heads").get_submodule("blocks.1.attention")
    assert torch.equal(attention.get_parameter("logits_mix"), torch.eye(6))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gqa", "latent", "mixture_of_heads", "head_mixing", "per_head"])
def test_a_run_is_trained_kept_and_gone_on_with(name: str, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("武松打虎，林冲夜奔。" * 90, encoding="utf-8")
    sizes: dict[str, Any] = {
        "d_model": 24, "num_layers": 1, "num_heads": 6, "d_ff": 22, "context": 13, "batch_size": 5, "warmup": 2,
        "eval_every": 5, "lr": 6e-3, "dropout": 0.0, "num_kv_heads": 2 if name == "gqa" else None, "design": name,
    }  # fmt: skip
    losses: list[float] = []
    outcome = train([file], tmp_path / "out", steps=40, watch=lambda p: losses.append(p.loss), **sizes)
    assert outcome.finished
    assert losses[-1] < 0.5 * losses[0]
    decoder, _, _ = load_checkpoint(tmp_path / "out")
    assert decoder.config.design == name
    with safe_open(tmp_path / "out" / TRAINING_FILE, framework="pt") as opened:
        assert json.loads(opened.metadata()["config"])["design"] == name
    again = train([file], tmp_path / "out", steps=40, **sizes)
    assert again.step == 40
    with pytest.raises(CheckpointError, match="different settings"):
        train([file], tmp_path / "out", steps=40, **(sizes | {"design": "multi_head", "num_kv_heads": None}))


@pytest.mark.thorough
def test_a_model_of_before_loads_as_what_it_was(tmp_path: Path, ids: torch.Tensor) -> None:
    """Headers without a design, such as those of models that were saved before there was a choice."""
    decoder, path = made("multi_head"), tmp_path / MODEL_FILE
    save_model(path, decoder, TOKENIZER, {})
    _with_config(path, lambda values: {k: v for k, v in values.items() if k not in ("design", "options", "order")})
    assert torch.equal(load_checkpoint(path)[0](ids), decoder(ids))
    packaged, _, info = load_pretrained()
    assert (packaged.config.design, packaged.config.order, dict(packaged.config.options)) == ("multi_head", "pre", {})
    assert info["heldout"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"wings": 2}, r"model\.safetensors.*unknown key 'wings'"),
        ({"design": "convolution"}, r"model\.safetensors.*convolution.*causal"),
        ({"design": "wings"}, r"model\.safetensors.*design='wings'"),
        ({"options": {"wings": 2}}, r"model\.safetensors.*'wings'.*option of multi_head"),
        ({"num_kv_heads": 4}, r"model\.safetensors.*num_kv_heads=4"),
        ({"num_kv_heads": "2"}, r"model\.safetensors.*num_kv_heads='2'.*whole number"),
    ],
)
def test_headers_that_cannot_be_are_told(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    save_model(tmp_path / MODEL_FILE, made("multi_head"), TOKENIZER, {})
    _with_config(tmp_path / MODEL_FILE, lambda values: values | changes)
    with pytest.raises(CheckpointError, match=words):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "sizes", "words"),
    [
        ("convolution", {}, "design='convolution': a decoder requires a causal mask"),
        ("multi_haed", {}, "did you mean 'multi_head'"),
        ("gqa", {"num_kv_heads": None}, "num_kv_heads: gqa requires it"),
        ("mqa", {"num_kv_heads": 3}, "num_kv_heads=3: mqa has 1"),
        ("latent", {"num_kv_heads": 2}, "num_kv_heads=2: .*latent supports"),
        ("block_diagonal", {"num_kv_heads": 2}, "num_kv_heads=2"),
        ("sparse_mixture", {"options": {"per": "sequence"}}, "per='sequence' lets the gate read later tokens"),
        ("sparse_mixture", {"options": {"top_k": 7}}, "top_k=7"),
        ("multi_head", {"options": {"rotary": False}}, "options: 'rotary' is not an option of"),
        ("multi_head", {"options": {"head_dim": [3]}}, r"options: head_dim=\[3\]"),
        ("multi_head", {"options": {"head_dim": 3}}, "head_dim=3.*even"),
        ("multi_head", {"order": "sandwich"}, "order='sandwich'"),
    ],
)
def test_what_cannot_be_is_named(name: str, sizes: dict[str, Any], words: str) -> None:
    with pytest.raises(HeadwiseError, match=words):
        made(name, **sizes)


def test_the_order_of_the_blocks_is_kept_and_heard() -> None:
    ids = torch.arange(9)[None]
    pre, post = made("multi_head"), made("multi_head", {"order": "post"})
    assert not torch.allclose(pre(ids), post(ids), atol=1e-2)
    post_state = {k: v for k, v in pre.state_dict().items() if k != "norm.weight"}
    post.load_state_dict(post_state)  # a post-norm stack has no norm after the last block


def _with_config(path: Path, change: Any) -> None:
    tensors, header = read(path)
    write_tensors(path, tensors, header | {"config": json.dumps(change(json.loads(header["config"])))})
