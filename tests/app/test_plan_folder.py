"""`headwise plan --config FOLDER`: the sizes of a model of transformers by its config.json, and of a checkpoint."""

import pytest
import safetensors.torch
import torch
from plan_models import BART, DECODERS, LLAMA, folder_of, model_of, parameters

import headwise
from headwise.errors import CheckpointError, ConfigError
from headwise.lm.checkpoint import save_model
from headwise.lm.model import Decoder, DecoderConfig
from headwise.lm.tokenizer import CharTokenizer
from headwise.textbook.plan import plan_from_options


def test_the_cache_has_the_kv_heads_of_the_folder(tmp_path):
    plan = plan_from_options(config=folder_of(tmp_path, "llama", **DECODERS["llama"]), sizes={}, seq=17, batch=1)
    memory = {row[0]: row[1] for row in plan.table("memory").rows}
    assert memory["cache, all tokens"] == 17 * 3 * 2 * (2 * 8) * 2


def test_what_is_not_understood_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"model_type='gpt_neox'.*llama.*--design"):
        plan_from_options(config=folder_of(tmp_path, "gpt_neox"), sizes={})
    with pytest.raises(ConfigError, match="parameters, and one of these sizes"):
        plan_from_options(config=folder_of(tmp_path, "llama", **LLAMA, mlp_bias=True), sizes={})
    windows = {"use_sliding_window": True, "sliding_window": 13, "max_window_layers": 1}
    with pytest.raises(ConfigError, match="has no layers") as none:
        plan_from_options(config=folder_of(tmp_path, "gpt2", n_layer=0), sizes={})
    assert "没有任何层" in none.value.zh
    with pytest.raises(CheckpointError, match=r"the model cannot be built: .*divisible by num_heads"):
        plan_from_options(config=folder_of(tmp_path, "gpt2", n_layer=1, n_embd=24, n_head=7), sizes={})
    with pytest.raises(ConfigError, match="is_decoder=True: not supported for BERT"):
        plan_from_options(config=folder_of(tmp_path, "bert", is_decoder=True), sizes={})
    with pytest.raises(ConfigError, match="attends in windows in some layers"):
        plan_from_options(config=folder_of(tmp_path, "qwen2", **LLAMA, **windows), sizes={})
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        plan_from_options(config=str(tmp_path), sizes={})


def test_the_source_states_no_number_of_a_folder(tmp_path):
    plan = plan_from_options(config=folder_of(tmp_path, "llama", **DECODERS["llama"]), sizes={}, seq=17)
    note = str(plan.table("parameters").note)
    assert "built from the source has" in note
    assert "states" not in note


def test_the_source_of_a_folder_is_its_configuration(tmp_path):
    plan = plan_from_options(config=folder_of(tmp_path, "bart", **BART), sizes={}, seq=17)
    assert dict(plan.facts)["source"] == str(tmp_path / "config.json")


def layers_of(plan):
    return [row[:4] for row in plan.table("layers").rows]


def test_a_pruned_layer_has_a_row_of_its_own(tmp_path):
    model = headwise.edit.prune(model_of("llama", **DECODERS["llama"]), {1: [0, 3]}).model
    headwise.edit.save_pruned(model, tmp_path / "cut")
    plan = plan_from_options(config=str(tmp_path / "cut"), sizes={}, seq=17)
    assert layers_of(plan) == [("0", 6, 2, 8), ("1", 4, 2, 8), ("2", 6, 2, 8)]
    assert "num_heads 4 to 6, num_kv_heads 2, bias qkvo, head_dim 8" in dict(plan.facts)["sizes"]
    assert sum(row[4] for row in plan.table("layers").rows) == plan.table("parameters").rows[1][1]


def test_stacks_of_an_encoder_decoder_have_rows_of_their_own(tmp_path):
    plan = plan_from_options(config=folder_of(tmp_path, "bart", **BART), sizes={}, seq=17)
    assert layers_of(plan) == [("encoder 0–2", 6, 6, 8), ("decoder 0–1", 4, 4, 12), ("decoder 0–1, cross", 4, 4, 12)]
    assert [row[5] for row in plan.table("layers").rows] == [None, 96, 96]


def test_layers_that_are_alike_have_no_table(tmp_path):
    model = headwise.edit.prune(model_of("gpt2", **DECODERS["gpt2"]), {0: [0, 1], 1: [2, 3], 2: [0, 5]}).model
    headwise.edit.save_pruned(model, tmp_path / "cut")
    plan = plan_from_options(config=str(tmp_path / "cut"), sizes={}, seq=17)
    assert "layers" not in [table.key for table in plan.tables]
    assert "num_heads 4, bias qkvo, head_dim 8" in dict(plan.facts)["sizes"]


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_weights_of_other_shapes_than_config_json_gives_are_refused(kind, tmp_path):
    """As `save_pretrained` writes a pruned model whose configuration cannot express its heads."""
    model = headwise.edit.prune(model_of(kind), {0: [0, 1], 1: [2, 3], 2: [0, 5]}).model
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"another shape than config\.json gives.*save_pruned"):
        plan_from_options(config=str(tmp_path), sizes={})
    safetensors.torch.save_file(
        {"wte.weight": torch.zeros(3, dtype=torch.uint8)}, tmp_path / "model-of-4-bits.safetensors"
    )
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    assert plan_from_options(config=str(tmp_path), sizes={}).table("parameters").rows[-1][1] > parameters(model)


def test_devices_require_equal_layers(tmp_path):
    headwise.edit.save_pruned(headwise.edit.prune(model_of("gpt2"), {1: [0]}).model, tmp_path / "cut")
    with pytest.raises(ConfigError, match="--devices: the layers of cut have different sizes"):
        plan_from_options(config=str(tmp_path / "cut"), sizes={}, devices=2)


def test_the_source_of_an_encoder_decoder_has_its_own_length(tmp_path):
    folder = folder_of(tmp_path, "whisper", **BART, max_source_positions=37, num_mel_bins=11)
    assert "37 source and 17 target tokens" in dict(plan_from_options(config=folder, sizes={}, seq=17).facts)["input"]
    with pytest.raises(ConfigError, match=r"source=5: the encoder of .* always has 37 positions"):
        plan_from_options(config=folder, sizes={}, source=5)
    with pytest.raises(ConfigError, match="source=5: gpt-3 is not an encoder-decoder"):
        plan_from_options(config="gpt-3", sizes={}, source=5)
    with pytest.raises(ConfigError, match="--source is for the plan of an encoder-decoder"):
        plan_from_options(sizes={"d_model": 8, "num_heads": 2}, source=5)
    with pytest.raises(ConfigError, match="source=0: expected at least 1"):
        plan_from_options(config="t5-base", sizes={}, source=0)


def test_texts_beyond_the_positions_of_a_model_are_warned_of(tmp_path):
    folder = folder_of(tmp_path, "bart", **BART)
    for sizes, warned in (({"seq": 211}, False), ({"seq": 212}, True), ({"seq": 17, "source": 212}, True)):
        facts = dict(plan_from_options(config=folder, sizes={}, **sizes).facts)
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
        plan = plan_from_options(config=str(path), sizes={}, seq=17)
        assert plan.table("parameters").rows[-1][1] == sum(p.numel() for p in decoder.parameters())


def test_a_checkpoint_with_different_layers_is_planned(tmp_path):
    tokenizer = CharTokenizer("一百单八将")
    decoder = Decoder(DecoderConfig(tokenizer.vocab_size, 24, 3, 4, d_ff=40))
    headwise.edit.prune(decoder, {1: [0]})
    save_model(tmp_path / "model.safetensors", decoder, tokenizer, {})
    plan = plan_from_options(config=str(tmp_path), sizes={}, seq=17, batch=2, dtype="float32")
    assert plan.table("parameters").rows[-1][1] == parameters(decoder)
    assert layers_of(plan) == [("0", 4, 4, 6), ("1", 3, 3, 6), ("2", 4, 4, 6)]
    caches = decoder.eval().new_caches()
    decoder(torch.zeros(2, 17, dtype=torch.long), caches=caches)
    assert dict(plan.table("memory").rows)["cache, all tokens"] == sum(cache.nbytes for cache in caches)


def test_an_encoder_has_no_cache():
    with pytest.raises(ConfigError, match=r"--cache: bert-base is an encoder"):
        plan_from_options(config="bert-base", sizes={}, cache="int8")


def test_experts_that_tokens_share_are_read_once():
    def feed_forward(batch):
        plan = plan_from_options(config="mixtral-8x7b", sizes={}, seq=64, batch=batch)
        assert "chosen equally often" in str(plan.notes[-1])
        return {row[0]: row[3] for row in plan.table("step").rows}["feed-forward"]

    one, width = 3 * 4096 * 14336, 2 * (4096 + 2 * 14336) * 2
    for batch in (1, 2, 8):
        experts = 8 * (1 - (6 / 8) ** batch)
        assert feed_forward(batch) == pytest.approx(32 * (2 * (experts * one + 8 * 4096) + batch * width), rel=1e-6)
