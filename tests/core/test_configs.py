"""The published sizes give the published parameters: by formula, and by modules of torch on the meta device."""

from collections import Counter

import pytest
import torch
from torch import nn

from headwise.costs.configs import CONFIGS, ModelConfig, find
from headwise.costs.model import (
    Load,
    active_parameters,
    cached_numbers,
    decodes,
    model_cache_bytes,
    parameter_parts,
    pass_stages,
    quantized,
    step_stages,
    training_flops,
    weight_bytes,
)  # fmt: skip
from headwise.errors import ConfigError
from headwise.nn.registry import attentions_of

ALL = list(CONFIGS.values())


class Attention(nn.Module):
    """The maps of one attention layer, with their biases and norms."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        size, d = dict(c.sizes), c.d_model
        h = size["num_heads"]
        if c.design == "latent":
            self.q_down, self.q_norm = (
                nn.Linear(d, size["query_latent_dim"], False),
                nn.RMSNorm(size["query_latent_dim"]),
            )
            self.q_up = nn.Linear(size["query_latent_dim"], h * (size["head_dim"] + size["rope_dim"]), False)
            self.kv_down = nn.Linear(d, size["latent_dim"] + size["rope_dim"], False)
            self.kv_norm = nn.RMSNorm(size["latent_dim"])
            self.kv_up = nn.Linear(size["latent_dim"], h * (size["head_dim"] + size["value_dim"]), False)
            self.o = nn.Linear(h * size["value_dim"], d, False)
            return
        d_k, kv, bias = size.get("head_dim", d // h), size.get("num_kv_heads", h), size.get("bias", "")
        self.q, self.k = nn.Linear(d, h * d_k, "q" in bias), nn.Linear(d, kv * d_k, "k" in bias)
        self.v, self.o = nn.Linear(d, kv * d_k, "v" in bias), nn.Linear(h * d_k, d, "o" in bias)
        if size.get("qk_norm"):
            self.q_norm, self.k_norm = nn.RMSNorm(d_k), nn.RMSNorm(d_k)
        if size.get("learned_sinks"):
            self.sinks = nn.Parameter(torch.zeros(h))


class FeedForward(nn.Module):
    """Two matrices, or three where it is gated."""

    def __init__(self, c: ModelConfig, d_ff: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(c.d_model, d_ff, c.ff_bias) for _ in range(1 + c.gated))
        self.down = nn.Linear(d_ff, c.d_model, c.ff_bias)


class Experts(nn.Module):
    """All experts of a layer, the shared ones, and the router."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.experts = nn.ModuleList(FeedForward(c, c.d_ff) for _ in range(c.experts))
        self.shared = nn.ModuleList([FeedForward(c, c.shared_experts * c.d_ff)] if c.shared_experts else [])
        self.router = nn.Linear(c.d_model, c.experts, c.router_bias)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def parts_of_modules(c: ModelConfig) -> dict[str, int]:
    """Parameters by part; a block is built once for each kind and counted as often as the model has it."""
    with torch.device("meta"):
        norm = nn.LayerNorm(c.d_model) if c.norm == "layer" else nn.RMSNorm(c.d_model)
        sums = Counter({"embedding": count(nn.Embedding(c.vocab, c.d_model))})
        for rows in (c.positions, c.segments):
            sums["positions, segments"] += count(nn.Embedding(rows, c.d_model)) if rows else 0
        attention, usual = count(Attention(c)), count(Experts(c) if c.experts else FeedForward(c, c.d_ff))
        for layer in range(c.layers):
            dense = layer < c.dense_layers
            sums["attention"] += attention
            sums["feed-forward"] += count(FeedForward(c, c.dense_d_ff)) if dense else usual
            sums["norms"] += count(norm) * (2 if c.norms is None else c.norms)
        for _ in range(c.decoder_layers):
            sums += Counter({"attention": 2 * attention, "feed-forward": usual, "norms": 3 * count(norm)})
        sums["norms"] += count(norm) * (c.final_norms + c.embedding_norms)
        sums["output"] += count(nn.Linear(c.d_model, c.vocab, False)) if c.output == "own" else 0
        sums["pooler"] += count(nn.Linear(c.d_model, c.d_model)) if c.pooler else 0
        sums["positions, segments"] += c.relative
    sums["not for text"] = c.unread
    return {name: number for name, number in sums.items() if number}


@pytest.mark.thorough_except("transformer-base", "transformer-big", "bert-base", "bert-large")
@pytest.mark.parametrize("config", ALL, ids=lambda c: c.name)
def test_parameters_are_those_of_the_modules_and_of_the_source(config: ModelConfig) -> None:
    parts = parameter_parts(config, attentions_of(config))
    assert parts == parts_of_modules(config)
    if config.rounded:
        assert sum(parts.values()) == pytest.approx(config.published, rel=config.rounded)
    else:
        assert sum(parts.values()) == config.published
    assert config.source
    assert {counts.heads for counts in attentions_of(config).every} == {config.size("num_heads")}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt-2-small", 124_439_808), ("bert-base", 109_482_240), ("llama-7b", 6_738_415_616),
        ("llama-3-8b", 8_030_261_248), ("mistral-7b", 7_241_732_096), ("llama-2-70b", 68_976_648_192),
    ],
)  # fmt: skip
def test_totals_that_the_weights_are_known_by(name: str, parameters: int) -> None:
    assert sum(parameter_parts(find(name), attentions_of(find(name))).values()) == parameters


@pytest.mark.parametrize(
    ("name", "billions"),
    [("deepseek-v2", 21), ("mixtral-8x7b", 13), ("llama-7b", 7), ("qwen3-30b-a3b", 3), ("deepseek-v3", 38)],
)
def test_active_parameters_are_those_of_the_paper(name: str, billions: int) -> None:
    assert round(active_parameters(find(name), attentions_of(find(name))) / 1e9) == billions


def matrices(module: nn.Module) -> int:
    """Weights of the linear maps, but for the one that chooses experts."""
    maps = {name: each for name, each in module.named_modules() if isinstance(each, nn.Linear)}
    return sum(each.weight.numel() for name, each in maps.items() if name != "router")


@pytest.mark.thorough_except("bert-base", "t5-base", "gpt-oss-20b", "deepseek-v2")
@pytest.mark.parametrize("c", ALL, ids=lambda c: c.name)
def test_quantized_weights_are_the_matrices_of_the_blocks(c: ModelConfig) -> None:
    with torch.device("meta"):
        attention, ff = matrices(Attention(c)), matrices(Experts(c) if c.experts else FeedForward(c, c.d_ff))
        dense = matrices(FeedForward(c, c.dense_d_ff)) if c.dense_layers else 0
        experts = matrices(Experts(c).experts) * (c.layers - c.dense_layers) if c.experts else 0
    count = c.layers + 2 * c.decoder_layers
    whole = count * attention + (c.layers - c.dense_layers + c.decoder_layers) * ff + c.dense_layers * dense
    assert quantized(c, attentions_of(c), "int8") == quantized(c, attentions_of(c), "int4") == whole
    assert quantized(c, attentions_of(c), "mxfp4") == (experts or whole)


def test_gpt_oss_has_the_bytes_and_active_parameters_that_are_published() -> None:
    """12.8 GiB in MXFP4 and 3.61 G active without the input embedding: OpenAI 2025, 2508.10925, Table 1."""
    c = find("gpt-oss-20b")
    held = attentions_of(c)
    assert weight_bytes(c, held, Load(weights="mxfp4")) == 13_761_264_768
    assert round(13_761_264_768 / 2**30, 1) == 12.8
    assert round((active_parameters(c, held) - c.vocab * c.d_model) / 1e9, 2) == 3.61
    assert weight_bytes(c, held, Load()) == 2 * c.published
    matrices = quantized(c, held, "int4")
    assert weight_bytes(c, held, Load(weights="int4", dtype="float32")) == 4 * (c.published - matrices) + round(
        matrices * (4 + 16 / 128) / 8
    )


def test_deepseek_v2_caches_34560_numbers_a_token() -> None:
    assert cached_numbers(find("deepseek-v2"), attentions_of(find("deepseek-v2"))) == 60 * (512 + 64) == 34_560


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("llama-2-70b", 80 * 2 * 8 * 128),
        ("mistral-7b", 32 * 2 * 8 * 128),
        ("bert-base", 0),
        ("t5-base", 2 * 12 * 2 * 768),
    ],
)
def test_cache_of_a_token(name: str, numbers: int) -> None:
    config = find(name)
    assert cached_numbers(config, attentions_of(config)) == numbers
    assert model_cache_bytes(config, attentions_of(config), Load(1, 1)) == 2 * numbers
    assert model_cache_bytes(config, attentions_of(config), Load(3, 1, cache="float32")) == 3 * 4 * numbers


def test_a_window_bounds_the_cache_and_the_work() -> None:
    config = find("mistral-7b")
    assert model_cache_bytes(config, attentions_of(config), Load(1, 100_000)) == 4095 * 2 * cached_numbers(
        config, attentions_of(config)
    )
    short, long = (step_stages(config, attentions_of(config), Load(1, n)) for n in (4096, 100_000))
    assert short == long


@pytest.mark.parametrize(("name", "window", "whole"), [("gemma-2-9b", 4096, 21), ("gpt-oss-20b", 128, 12)])
def test_layers_with_a_window_keep_no_more_than_it(name: str, window: int, whole: int) -> None:
    config = find(name)
    attentions, tokens = attentions_of(config), 100_000
    one = 2 * cached_numbers(config, attentions) // config.layers
    kept = model_cache_bytes(config, attentions, Load(1, tokens))
    assert kept == one * (whole * tokens + (config.layers - whole) * (window - 1))
    longer = model_cache_bytes(config, attentions, Load(1, tokens + 1))
    assert longer - kept == whole * one


def test_training_gpt_3_takes_what_its_paper_says() -> None:
    """3.14e23 FLOPs for 300 billion tokens (Brown et al. 2020, Table D.1), which leaves out the scores."""
    load = Load(1, 2048, materialised=True)
    matmuls = training_flops(find("gpt-3"), attentions_of(find("gpt-3")), load) / 2048 * 300e9
    assert 3.14e23 < matmuls < 1.04 * 3.14e23


@pytest.mark.parametrize("config", [c for c in ALL if decodes(c)], ids=lambda c: c.name)
def test_a_step_reads_the_weights_a_token_meets(config: ModelConfig) -> None:
    """Bytes of a step are those of the weights and little else; two FLOPs a weight."""
    stages = step_stages(config, attentions_of(config), Load(1, 1))
    parts = parameter_parts(config, attentions_of(config))
    tables = parts["embedding"] + parts.get("positions, segments", 0) if config.output == "own" else 0
    met = active_parameters(config, attentions_of(config)) - tables
    if config.decoder_layers:  # the encoder rests, and the keys of its output are there already
        rest = 12 if config.d_model == 768 else 6
        counts = attentions_of(config).cross[0]
        encoder = rest * counts.parameters + parts["feed-forward"] // 2
        met -= encoder + rest * counts.per_key
    assert sum(stage.bytes for stage in stages) == pytest.approx(2 * met, rel=0.02)
    linear = [stage for stage in stages if stage.name in ("projections", "output", "feed-forward", "vocabulary")]
    assert sum(stage.flops for stage in linear) == pytest.approx(2 * met, rel=0.02)


@pytest.mark.parametrize("config", ALL, ids=lambda c: c.name)
def test_a_pass_of_one_token_does_what_it_reads(config: ModelConfig) -> None:
    for stage in pass_stages(config, attentions_of(config), Load(1, 1, dtype="float32")):
        assert stage.flops >= 0
        assert stage.intensity <= 0.5 + 1e-9 or stage.name in ("scores", "weighted sum"), stage


def test_an_encoder_does_not_decode() -> None:
    with pytest.raises(ConfigError, match="bert-base"):
        step_stages(find("bert-base"), attentions_of(find("bert-base")), Load())


@pytest.mark.parametrize("name", ["Llama-2-70B", "llama_2_70b", " llama 2 70b "])
def test_names_are_found_however_they_are_written(name: str) -> None:
    assert find(name).name == "llama-2-70b"


@pytest.mark.parametrize(("name", "words"), [("lama-2-7", "llama-2-7b"), ("gpt2", "gpt-2-small"), ("§§", "plan list")])
def test_unknown_names_list_close_ones(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match="config=") as caught:
        find(name)
    assert words in str(caught.value)
    assert name in str(caught.value)
