"""`headwise plan model FOLDER`: the sizes of a model of transformers by its config.json, and of a checkpoint."""

import re
from typing import Any

import pytest
import safetensors.torch
import torch
from plan_models import BART, DECODERS, EVERY, LLAMA, WHOLE, folder_of, model_of, parameters, plan_of

import headwise
from headwise.costs import Machine, Work
from headwise.errors import CheckpointError, ConfigError
from headwise.lm.checkpoint import save_model
from headwise.lm.model import Decoder, DecoderConfig
from headwise.lm.texts import CharTokenizer
from headwise.models.configuration.sizes import FAMILIES, WITH_IMAGES
from headwise.plan import listing, plan_design

FULL, SLIDING = "full_attention", "sliding_attention"


def test_the_cache_has_the_kv_heads_of_the_folder(tmp_path):
    plan = plan_of(folder_of(tmp_path, "llama", **DECODERS["llama"]), tokens=17, batch=1)
    memory = {row[0]: row[1] for row in plan.table("memory").rows}
    assert memory["cache, all tokens"] == 17 * 3 * 2 * (2 * 8) * 2


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown": ("xglm", {}, "model_type=.xglm.: not supported; `headwise plan list` lists those.*plan layer`"),
    "hybrid": ("kimi_linear", {}, r"model_type='kimi_linear' \(layer_types: linear_attention.*\): not supported"),
    "sharing": ("gemma4_text", {"num_kv_shared_layers": 2}, "num_kv_shared_layers=2: not supported"),
    "all to both sides": ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'"),
    "widths": ("gemma3n_text", {"intermediate_size": [77, 77, 77, 77, 78]}, "expected the same in all layers"),
    "no types": ("lfm2_moe", {"layer_types": None}, "layer_types: 0 of 3 layers"),
    "no attention": ("granitemoehybrid", {"layer_types": 3 * ["linear_attention"]}, "no layer of model_type="),
    "parts": ("florence2", {}, "model_type='florence2': not supported"),
    "both sides": ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True: not supported"),
    "one channel": ("stablelm", {"hidden_size": 24}, "partial_rotary_factor=0.25: rotates 1 of 4 channels of a head"),
    "odd channels": ("phi", {"hidden_size": 36}, "partial_rotary_factor=0.5: rotates 3 of 6 channels of a head"),
    "no layers": ("gpt2", {"n_layer": 0}, "has no layers"),
    "decoder": ("bert", {"is_decoder": True}, "is_decoder=True: not supported for model_type='bert'"),
    "cross": ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True: not supported"),
    "window": ("llama", {"sliding_window": 13}, "sliding_window=13: not supported for model_type='llama'"),
    "chunks": ("llama", {"attention_chunk_size": 13}, "attention_chunk_size=13: not supported"),
    "types": ("granite", {"layer_types": 3 * [SLIDING]}, "layer_types=sliding_attention: not supported"),
    "type": ("gemma2", {"layer_types": [FULL, "linear_attention", FULL]}, "layer_types=linear_attention: not supp"),
    "no window": ("gemma2", {"sliding_window": None}, "sliding_window=None: expected at least 1, as layer_types has"),
    "no chunk": ("llama4_text", {"attention_chunk_size": None}, "attention_chunk_size=None: expected at least 1"),
    "layers": ("granite", {"per_layer_config": {"1": {"num_key_value_heads": 3}}}, "per_layer_config: not supported"),
    "biases": ("deepseek_v3", {"attention_bias": True}, "attention_bias=True: not supported"),
    "new Falcon": ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn=False: not"),
    "shared keys": ("gemma3n_text", {"num_kv_shared_layers": 4}, "num_kv_shared_layers=4: of 5 layers, expected one"),
    "projected": ("opt", {"word_embed_proj_dim": 24}, "word_embed_proj_dim=24: not supported"),
    "norms": ("phi", {"qk_layernorm": True}, "qk_layernorm=True: not supported"),
    "two experts": ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok=3: not supported"),
    "one direction": ("bart", {"is_encoder_decoder": False}, "is_encoder_decoder=False: not supported"),
}  # fmt: skip


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_understood_is_refused(case, tmp_path):
    kind, sizes, said = REFUSED[case]
    with pytest.raises(ConfigError, match=said) as none:
        plan_of(folder_of(tmp_path, kind, **{**EVERY.get(kind, LLAMA), **sizes}))
    assert re.search("[一-鿿]", none.value.zh)


def test_a_model_with_other_parameters_than_its_sizes_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="parameters, and one of these sizes"):
        plan_of(folder_of(tmp_path, "helium", **LLAMA, head_dim=16))


def test_a_configuration_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"the model cannot be built: .*divisible by num_heads"):
        plan_of(folder_of(tmp_path, "gpt2", n_layer=1, n_embd=24, n_head=7))
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        plan_of(str(tmp_path))


@pytest.mark.thorough_except("gpt_oss")
@pytest.mark.parametrize("kind", ["gpt_oss", "llama4"])
def test_quantized_weights_are_counted_in_the_dtype_of_the_plan(kind, tmp_path):
    sizes = {**EVERY[kind], "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    plan = plan_of(folder_of(tmp_path, kind, **sizes), tokens=17, dtype="float32")
    assert dict(plan.facts)["warning"] == "the weights are quantized (mxfp4); here all of them are counted in float32"
    count = parameters(model_of(kind))
    assert plan.table("parameters").rows[-1][1] == count
    assert dict(plan.table("memory").rows)["weights"] == 4 * count


def test_entries_that_run_code_are_refused_beside_quantized_weights(tmp_path):
    quantized = {"quantization_config": {"quant_method": "mxfp4"}}
    with pytest.raises(CheckpointError, match="use_kernels=True"):
        plan_of(folder_of(tmp_path, "llama", **LLAMA, **quantized, use_kernels=True))


def test_a_listing_has_the_model_types_of_folders():
    (note,) = listing().notes
    assert note.endswith(f"of one of these types: {', '.join(sorted({*FAMILIES, *WITH_IMAGES}))}.")


def test_layers_with_the_same_window_share_a_row(tmp_path):
    sizes = {**DECODERS["gemma3_text"], "num_hidden_layers": 13}
    plan = plan_of(folder_of(tmp_path, "gemma3_text", **sizes), tokens=17, dtype="float32")
    rows = [(row[0], *row[-2:]) for row in plan.table("layers").rows]
    assert rows == [("0, 2, 4, …, 12", 13, 7), ("1, 3, 5, …, 11", None, 6)]
    assert "window 13 in 7 of 13 layers" in dict(plan.facts)["sizes"]
    memory = dict(plan.table("memory").rows)
    assert memory["cache, one token"] == 13 * 2 * 2 * 16 * 4
    assert memory["cache, each token after 12"] == 6 * 2 * 2 * 16 * 4


def test_chunks_are_named(tmp_path):
    plan = plan_of(folder_of(tmp_path, "llama4_text", **DECODERS["llama4_text"]), tokens=17)
    assert "chunks of 7 in 2 of 3 layers" in dict(plan.facts)["sizes"]
    assert "A window of w tokens is a chunk of the text" in plan.table("layers").note


@pytest.mark.parametrize("tokens", [13, 14, 15, 20, 21])
def test_a_step_in_chunks_attends_within_its_own(tokens, tmp_path):
    plan = plan_of(folder_of(tmp_path, "llama4_text", **DECODERS["llama4_text"]), tokens=tokens)
    step = {row[0]: row[2] for row in plan.table("step").rows}
    assert step["softmax"] == 6 * (tokens + 2 * ((tokens - 1) % 7 + 1))


@pytest.mark.thorough
def test_parts_that_are_not_for_text_are_counted_apart(tmp_path):
    folder = folder_of(tmp_path, "gemma3", **WHOLE["gemma3"])
    plan, model = plan_of(folder, tokens=17), model_of("gemma3")
    parts = {row[0]: row[1] for row in plan.table("parameters").rows}
    assert parts["not for text"] == parameters(model) - parameters(model.model.language_model)
    assert parts["all"] == parameters(model)


def test_the_source_states_no_number_of_a_folder(tmp_path):
    plan = plan_of(folder_of(tmp_path, "llama", **DECODERS["llama"]), tokens=17)
    note = str(plan.table("parameters").note)
    assert "built from the source has" in note
    assert "states" not in note


@pytest.mark.thorough
def test_the_source_of_a_folder_is_its_configuration(tmp_path):
    plan = plan_of(folder_of(tmp_path, "bart", **BART), tokens=17)
    assert dict(plan.facts)["source"] == str(tmp_path / "config.json")


def layers_of(plan):
    return [row[:4] for row in plan.table("layers").rows]


def test_a_pruned_layer_has_a_row_of_its_own(tmp_path):
    model = headwise.edit.prune(model_of("llama", **DECODERS["llama"]), {1: [0, 3]}).model
    headwise.edit.save_pruned(model, tmp_path / "cut")
    plan = plan_of(str(tmp_path / "cut"), tokens=17)
    assert layers_of(plan) == [("0", 6, 2, 8), ("1", 4, 2, 8), ("2", 6, 2, 8)]
    assert "num_heads 4 to 6, num_kv_heads 2, bias qkvo, head_dim 8" in dict(plan.facts)["sizes"]
    assert sum(row[4] for row in plan.table("layers").rows) == plan.table("parameters").rows[1][1]


def test_stacks_of_an_encoder_decoder_have_rows_of_their_own(tmp_path):
    plan = plan_of(folder_of(tmp_path, "bart", **BART), tokens=17)
    assert layers_of(plan) == [("encoder 0–2", 6, 6, 8), ("decoder 0–1", 4, 4, 12), ("decoder 0–1, cross", 4, 4, 12)]
    assert [row[5] for row in plan.table("layers").rows] == [None, 96, 96]


@pytest.mark.thorough
def test_layers_that_are_alike_have_no_table(tmp_path):
    model = headwise.edit.prune(model_of("gpt2", **DECODERS["gpt2"]), {0: [0, 1], 1: [2, 3], 2: [0, 5]}).model
    headwise.edit.save_pruned(model, tmp_path / "cut")
    plan = plan_of(str(tmp_path / "cut"), tokens=17)
    assert "layers" not in [table.key for table in plan.tables]
    assert "num_heads 4, bias qkvo, head_dim 8" in dict(plan.facts)["sizes"]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_weights_of_other_shapes_than_config_json_gives_are_refused(kind, tmp_path):
    """As `save_pretrained` writes a pruned model whose configuration cannot express its heads."""
    model = headwise.edit.prune(model_of(kind), {0: [0, 1], 1: [2, 3], 2: [0, 5]}).model
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"another shape than config\.json gives.*save_pruned"):
        plan_of(str(tmp_path))
    safetensors.torch.save_file(
        {"wte.weight": torch.zeros(3, dtype=torch.uint8)}, tmp_path / "model-of-4-bits.safetensors"
    )
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    assert plan_of(str(tmp_path)).table("parameters").rows[-1][1] > parameters(model)


@pytest.mark.thorough
def test_what_devices_send_is_the_sum_over_layers_that_differ(tmp_path):
    """Of a pruned model, and of one with windows, each layer planned alone."""
    pruned = headwise.edit.prune(model_of("gpt2"), {1: [0, 1]}).model
    headwise.edit.save_pruned(pruned, tmp_path / "cut")
    layers = [{"num_heads": heads, "head_dim": 8} for heads in (6, 4, 6)]
    check_devices(str(tmp_path / "cut"), layers, [None] * 3, bias={"bias": "qkvo"})
    sizes = DECODERS["gemma3_text"]
    layers = [{"num_heads": 6, "num_kv_heads": 2, "head_dim": 16}] * 3
    check_devices(folder_of(tmp_path, "gemma3_text", **sizes), layers, [13, None, 13], bias={"qk_norm": True})


def check_devices(config, layers, windows, bias):
    options = {"devices": 2, "link": 1e9, "machine": Machine(1e12, 1e11)}
    table = plan_of(config, tokens=64, **options).table("devices")
    alone = [
        plan_design("multi_head", {"d_model": 48, **layer, **bias}, Work(1, 64, 64, window=window), **options).table(
            "devices"
        )
        for layer, window in zip(layers, windows, strict=True)
    ]
    assert f"The attention of {len(layers)} layers" in table.title
    assert len(table.rows) == 3
    for row in table.rows:
        each = [next(one[1:] for one in other.rows if one[0] == row[0]) for other in alone]
        sums = [sum(0 if value == "nothing" else value for value in column) for column in zip(*each, strict=True)]
        assert [0 if value == "nothing" else value for value in row[1:]] == pytest.approx(sums)


@pytest.mark.thorough
def test_a_way_that_one_layer_does_not_support_is_left_out(tmp_path):
    headwise.edit.save_pruned(headwise.edit.prune(model_of("gpt2"), {1: [0]}).model, tmp_path / "cut")
    table = plan_of(str(tmp_path / "cut"), tokens=64, devices=2).table("devices")
    assert {row[0] for row in table.rows if row[1] is not None} == {"ring", "Ulysses"}
    assert "num_heads=5 cannot be divided evenly between 2 devices" in table.note


def test_the_source_of_an_encoder_decoder_has_its_own_length(tmp_path):
    folder = folder_of(tmp_path, "whisper", **BART, max_source_positions=37, num_mel_bins=11)
    assert "37 source and 17 target tokens" in dict(plan_of(folder, tokens=17).facts)["input"]
    with pytest.raises(ConfigError, match=r"source=5: the encoder of .* always has 37 positions"):
        plan_of(folder, source=5)
    with pytest.raises(ConfigError, match="source=5: gpt-3 is not an encoder-decoder"):
        plan_of("gpt-3", source=5)
    with pytest.raises(ConfigError, match="source=0: expected at least 1"):
        plan_of("t5-base", source=0)


@pytest.mark.thorough
def test_texts_beyond_the_positions_of_a_model_are_warned_of(tmp_path):
    folder = folder_of(tmp_path, "bart", **BART)
    for sizes, warned in (({"tokens": 211}, False), ({"tokens": 212}, True), ({"tokens": 17, "source": 212}, True)):
        facts = dict(plan_of(folder, **sizes).facts)
        assert ("warning" in facts) == warned


@pytest.mark.parametrize(
    ("design", "options", "order"),
    [("multi_head", {}, "pre"), ("multi_head", {"head_dim": 6}, "post"), ("sparse_mixture", {"top_k": 2}, "pre")],
)
def test_a_checkpoint_of_headwise_is_planned(design, options, order, tmp_path):
    tokenizer = CharTokenizer("一百单八将")
    config = DecoderConfig(tokenizer.vocab_size, 24, 2, 4, d_ff=40, design=design, options=options, order=order)
    decoder = Decoder(config)
    save_model(tmp_path / "model.safetensors", decoder, tokenizer, {})
    for path in (tmp_path, tmp_path / "model.safetensors"):
        plan = plan_of(str(path), tokens=17)
        assert plan.table("parameters").rows[-1][1] == sum(p.numel() for p in decoder.parameters())


def test_a_checkpoint_with_different_layers_is_planned(tmp_path):
    tokenizer = CharTokenizer("一百单八将")
    decoder = Decoder(DecoderConfig(tokenizer.vocab_size, 24, 3, 4, d_ff=40))
    headwise.edit.prune(decoder, {1: [0]})
    save_model(tmp_path / "model.safetensors", decoder, tokenizer, {})
    plan = plan_of(str(tmp_path), tokens=17, batch=2, dtype="float32")
    assert plan.table("parameters").rows[-1][1] == parameters(decoder)
    assert layers_of(plan) == [("0", 4, 4, 6), ("1", 3, 3, 6), ("2", 4, 4, 6)]
    caches = decoder.eval().new_caches()
    decoder(torch.zeros(2, 17, dtype=torch.long), caches=caches)
    assert dict(plan.table("memory").rows)["cache, all tokens"] == sum(cache.nbytes for cache in caches)


def test_an_encoder_has_no_cache():
    with pytest.raises(ConfigError, match=r"cache='int8': bert-base is an encoder"):
        plan_of("bert-base", cache="int8")


def test_experts_that_tokens_share_are_read_once():
    def feed_forward(batch):
        plan = plan_of("mixtral-8x7b", tokens=64, batch=batch)
        assert "chosen equally often" in str(plan.notes[-1])
        return {row[0]: row[3] for row in plan.table("step").rows}["feed-forward"]

    one, width = 3 * 4096 * 14336, 2 * (4096 + 2 * 14336) * 2
    for batch in (1, 2, 8):
        experts = 8 * (1 - (6 / 8) ** batch)
        assert feed_forward(batch) == pytest.approx(32 * (2 * (experts * one + 8 * 4096) + batch * width), rel=1e-6)
