"""Heads of models with an encoder and a decoder, or of images: BART, Whisper, T5, UMT5, CLIP, ViT."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import VOCAB, draw, ids, transformers
from torch import Tensor

import headwise as hw
from headwise.edit import load_pruned, prune, save_pruned
from headwise.errors import ConfigError
from headwise.models import find_heads, record_heads, scale_heads

TOKENS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
STACKS = {
    "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 3,
    "encoder_ffn_dim": 29, "decoder_ffn_dim": 31,
}  # fmt: skip
T5_SIZES = {
    "vocab_size": VOCAB, "d_model": 20, "d_kv": 6, "d_ff": 29, "num_layers": 2, "num_heads": 4, "pad_token_id": 0,
    "decoder_start_token_id": 1, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16,
}  # fmt: skip
VISION = {
    "hidden_size": 24, "intermediate_size": 29, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 12,
    "patch_size": 4,
}  # fmt: skip


def bart() -> tuple[Any, dict[str, Any]]:
    return transformers.BartConfig(**TOKENS, **STACKS, max_position_embeddings=40), {"input_ids": ids(11)}


def whisper() -> tuple[Any, dict[str, Any]]:
    audio = {"num_mel_bins": 5, "max_source_positions": 7, "max_target_positions": 20}
    sound = torch.randn(2, 5, 14, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return transformers.WhisperConfig(**TOKENS, **STACKS, **audio), {"input_features": sound}


def t5() -> tuple[Any, dict[str, Any]]:
    return transformers.T5Config(**T5_SIZES), {"input_ids": ids(11)}


def umt5() -> tuple[Any, dict[str, Any]]:
    return transformers.UMT5Config(**T5_SIZES), {"input_ids": ids(11)}


def clip() -> tuple[Any, dict[str, Any]]:
    pictures = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return transformers.CLIPVisionConfig(**VISION), {"pixel_values": pictures}


def vit() -> tuple[Any, dict[str, Any]]:
    return transformers.ViTConfig(**VISION), clip()[1]


KINDS: dict[str, tuple[Callable[[], tuple[Any, dict[str, Any]]], str, list[int]]] = {
    "bart": (bart, "bart", [4, 4, 3, 3, 3, 3]),
    "whisper": (whisper, "bart", [4, 4, 3, 3, 3, 3]),
    "t5": (t5, "t5", [4] * 6),
    "umt5": (umt5, "t5", [4] * 6),
    "clip": (clip, "bart", [4, 4]),
    "vit": (vit, "vit", [4, 4]),
}
CUT = [name for name in KINDS if name != "t5"]


def made(name: str, how: str = "sdpa") -> tuple[Any, dict[str, Any]]:
    """A model in float64, every parameter drawn, and what it is called with."""
    torch.manual_seed(7)
    config, given = KINDS[name][0]()
    model = transformers.AutoModel.from_config(config, attn_implementation=how).eval().double()
    draw(model)
    if config.is_encoder_decoder:
        given["decoder_input_ids"] = ids(5, seed=4)
    return model, given


def run(model: Any, given: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(**given)[0]
    return found


def removed(model: Any) -> dict[int, list[int]]:
    """Other heads, and another number of them, in neighbouring modules."""
    return {i: [[1], [0, 2], []][i % 3] for i in range(len(find_heads(model)))}


@pytest.mark.thorough_except("bart", "clip", "vit")
@pytest.mark.parametrize("name", KINDS)
def test_heads_are_found_read_recorded_and_scaled(name: str) -> None:
    model, given = made(name)
    _, kind, counts = KINDS[name]
    sites = find_heads(model)
    assert [(site.kind, site.num_heads, site.num_kv_heads) for site in sites] == [(kind, h, h) for h in counts]
    assert all(model.get_submodule(site.name) is site.module for site in sites)
    plain = run(model, given)
    generator = torch.Generator().manual_seed(4)
    gates = [torch.randn(h, generator=generator, dtype=torch.float64) for h in counts]
    values: list[Tensor] = []
    first = sites[0].module.get_submodule("v" if kind == "t5" else "v_proj")
    with record_heads(sites) as heads, first.register_forward_hook(lambda *call: values.append(call[2])):
        torch.testing.assert_close(run(model, given), plain)
    d = sites[0].value_dim
    assert [x.shape[1] for x in heads] == counts
    # Every head's outputs are means of its values, which lie in its slice of the projection.
    own = values[0].unflatten(-1, (counts[0], d)).transpose(1, 2)
    assert bool((heads[0] <= own.amax(2, keepdim=True) + 1e-9).all())
    assert bool((heads[0] >= own.amin(2, keepdim=True) - 1e-9).all())
    with scale_heads(sites, gates):
        scaled = run(model, given)
    assert torch.equal(run(model, given), plain)
    assert not torch.allclose(scaled, plain, atol=1e-3)
    width = sites[0].weights()["q"].shape[1]
    for site, gate in zip(sites, gates, strict=True):
        weights = site.weights()
        assert weights["q"].shape == weights["v"].shape == (site.num_heads, width, site.head_dim)
        with torch.no_grad():
            weights["o"].mul_(gate[:, None, None])  # a view of the model's own
    torch.testing.assert_close(run(model, given), scaled)


@pytest.mark.thorough_except("umt5-eager", "clip-sdpa", "vit-eager")
@pytest.mark.parametrize("how", ["eager", "sdpa"])
@pytest.mark.parametrize("name", CUT)
def test_a_pruned_model_equals_the_masked_one_and_comes_back(name: str, how: str, tmp_path: Path) -> None:
    model, given = made(name, how)
    gone, sites = removed(model), find_heads(model)
    gates = [torch.ones(site.num_heads).double() for site in sites]
    for i, heads in gone.items():
        gates[i][heads] = 0.0
    with scale_heads(sites, gates):
        masked = run(model, given)
    pruned = prune(model, gone, copy=True).model
    assert [site.num_heads for site in find_heads(pruned)] == [int(gate.sum()) for gate in gates]
    torch.testing.assert_close(run(pruned, given), masked)
    assert not torch.allclose(masked, run(model, given), atol=1e-3)
    if how == "sdpa":
        save_pruned(pruned, tmp_path / "cut")
        torch.testing.assert_close(run(load_pruned(tmp_path / "cut"), given), run(pruned, given))


@pytest.mark.thorough_except("clip", "vit")
@pytest.mark.parametrize("name", CUT)
def test_headwise_computes_what_is_left(name: str) -> None:
    model, given = made(name)
    pruned = prune(model, removed(model), copy=True).model
    expected = run(pruned, given)
    with hw.watch(pruned, measures=["entropy"], maps="lazy") as record:
        torch.testing.assert_close(run(pruned, given), expected)
    assert [amap.shape[1] for amap in record.maps.values()] == [site.num_heads for site in find_heads(pruned)]


@pytest.mark.thorough
def test_layers_of_t5_share_a_bias_and_lose_no_head() -> None:
    model, _ = made("t5")
    for i in range(6):
        with pytest.raises(ConfigError, match=r"layers of T5Attention share one relative bias.*scale_heads"):
            prune(model, {i: [0]})
    assert {part.name for part in find_heads(model)[0].parts() if part.letter == "bias"} == {"weight"}


@pytest.mark.thorough_except("whisper", "clip", "vit")
@pytest.mark.parametrize("name", KINDS)
def test_queries_and_keys_are_clipped(name: str) -> None:
    """To τ; with T5's bias, which clipping leaves, nearer to it."""
    model, given = made(name)
    with hw.watch(model, measures=["max_logit"], layers=[0]) as record:
        run(model, given)
        before = record.latest["max_logit"][0].double()
        tau = float(before[before > 0].mean() / 2)
        clipped = hw.telemetry.qk_clip(model, record, tau=tau)
        run(model, given)
    after, over = record.latest["max_logit"][0].double(), before > tau
    assert over.any()
    assert len(clipped.heads) == int(over.sum())
    torch.testing.assert_close(after[~over], before[~over], rtol=1e-5, atol=1e-6)
    if KINDS[name][1] == "t5":
        assert bool((after[over] < before[over]).all())
    else:
        torch.testing.assert_close(after[over], torch.full_like(after[over], tau), rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_importance_is_asked_of_an_encoder_and_a_decoder() -> None:
    model, given = made("whisper")
    found = hw.analysis.ablation_importance(model, [given], lambda model, batch: run(model, batch).square().mean())
    assert [len(layer) for layer in found.column] == KINDS["whisper"][2]
    sites = find_heads(model)
    gates = [torch.ones(site.num_heads).double() for site in sites]
    gates[3][1] = 0.0
    whole = run(model, given).square().mean()
    with scale_heads(sites, gates):
        assert float(run(model, given).square().mean() - whole) == pytest.approx(float(found.column[3][1]), rel=1e-6)
