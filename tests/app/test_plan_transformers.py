"""`headwise plan model FOLDER` against the models of transformers: their parameters, their caches, their FLOPs."""

import re
from pathlib import Path
from typing import Any

import pytest
from plan_models import (
    BART,
    BOTH,
    DECODERS,
    ENCODERS,
    EVERY,
    HYBRIDS,
    WHOLE,
    WIDE,
    attended,
    cached,
    decoded,
    flops,
    folder_of,
    ids,
    model_of,
    parameters,
    plan_of,
    prefix,
    source_of,
    states,
    transformers,
)

import headwise as hw
from headwise.models.configuration.sizes import FAMILIES, PARTS, WITH_IMAGES
from headwise.plan import Plan

B, N, SOURCE = 2, 17, 23
UNFOLDED = {
    "deepseek_v2",
    "deepseek_v3",
    "youtu",
    "minicpm3",
}  # a step computes keys and values of all heads from the latent vectors
CUTS: dict[str, tuple[dict[str, Any], dict[int, list[int]]]] = {
    "llama": ({**DECODERS["llama"], "num_key_value_heads": 6}, {1: [2, 3]}),
    "groups": (DECODERS["llama"], {0: [0, 1, 2], 2: [0, 4]}),
    "mistral": (DECODERS["mistral"], {0: [0, 3], 1: [1, 5]}),
    "qwen3": (DECODERS["qwen3"], {2: [3, 4, 5]}),
    "gemma3_text": (DECODERS["gemma3_text"], {1: [0, 1, 2], 2: [3, 4, 5]}),
    "gpt2": (DECODERS["gpt2"], {0: [0], 2: [1, 2, 5]}),
    "gpt2 alike": (DECODERS["gpt2"], {0: [0, 1], 1: [2, 3], 2: [0, 5]}),
    "bert": (ENCODERS["bert"], {0: [0, 2, 3, 4, 5]}),
    "bert alike": (ENCODERS["bert"], {0: [0], 1: [1], 2: [5]}),
    "bart": (BART, {0: [0], 3: [1, 2], 4: [3]}),  # the encoder's first layer, self and cross attention of the decoder's
    "whisper": (BOTH["whisper"], {2: [5], 6: [0, 1]}),
}  # fmt: skip


def total(plan: Plan, key: str) -> Any:
    return plan.table(key).rows[-1][1]


def of_states(plan: Plan, key: str) -> Any:
    """FLOPs of the states of recurrent layers."""
    return next((row[1] for row in plan.table(key).rows if row[0] == "states"), 0) or 0


def exponentials(folder: Any) -> Any:
    """Exponentials of the softmax in a pass: pairs that the masks allow, summed over heads and layers."""
    plan = plan_of(folder, B, tokens=N, dtype="float32")
    return next(row[2] for row in plan.table("pass").rows if row[0] == "softmax")


def computed_for_nothing(c: Any) -> int:
    """FLOPs per token of experts that are not chosen: Llama 4 computes all, and multiplies them by zero."""
    c = c.get_text_config()
    if c.model_type != "llama4_text":
        return 0
    idle = c.num_local_experts - c.num_experts_per_tok
    return len(c.moe_layers) * idle * 2 * 3 * c.hidden_size * c.intermediate_size


def check(model: Any, folder: Any) -> None:
    """All that a plan of the folder claims, against the model."""
    c, kind = model.config.get_text_config(), model.config.model_type
    both = model.config.is_encoder_decoder
    source = None if not both else getattr(model.config, "max_source_positions", SOURCE)
    given = None if model.config.model_type == "whisper" else source
    plan = plan_of(folder, B, source=given, tokens=N, dtype="float32", materialised=True)
    assert total(plan, "parameters") == parameters(model)
    if kind in ENCODERS or (getattr(c, "use_bidirectional_attention", False) and not prefix(model, B, N)):
        last = {} if kind in ENCODERS else {"logits_to_keep": 1}
        assert total(plan, "pass") == flops(model, input_ids=ids(B, N), **last)
        assert exponentials(folder) == attended(model, input_ids=ids(B, N))
        assert [table.key for table in plan.tables if table.key == "step"] == []
        return
    idle = 0
    if both:
        inputs = source_of(model, B, source) | {"decoder_input_ids": ids(B, N)}
        last = 2 * B * (N - 1) * model.config.d_model * 101  # the logits of all other positions
        assert total(plan, "pass") == flops(model, **inputs, use_cache=False) - last
    else:
        idle = computed_for_nothing(c)
        inputs = {"input_ids": ids(B, N), "use_cache": False, **prefix(model, B, N)}
        found = flops(model, **inputs, logits_to_keep=1)
        assert total(plan, "pass") - of_states(plan, "pass") == found - B * N * idle
        assert exponentials(folder) == attended(model, **inputs)
    for prefill, steps in ((11, 5), (1, 3)):
        cache, following = decoded(model, B, prefill, steps, source or 0)
        found = flops(model, **following)  # of one more step, after which the cache holds its token too
        plan = plan_of(folder, B, source=given, tokens=prefill + steps + 1, dtype="float32", materialised=True)
        if kind not in UNFOLDED:
            assert total(plan, "step") - of_states(plan, "step") == found - B * idle
        memory = dict(plan.table("memory").rows)
        assert memory["cache, all tokens"] == cached(cache)
        assert sum(size for name, size in memory.items() if name.startswith("states")) == states(cache)


@pytest.mark.thorough
def test_the_families_are_all_tested() -> None:
    assert set(EVERY) == {*FAMILIES, *WITH_IMAGES}
    kinds = {kind: transformers.AutoConfig.for_model(kind, **sizes).get_text_config() for kind, sizes in WHOLE.items()}
    assert {config.model_type for config in kinds.values()} - set(FAMILIES) == set(PARTS)


@pytest.mark.thorough_except("t5")
@pytest.mark.parametrize("kind", EVERY)
def test_a_plan_is_that_of_the_model(kind: str, tmp_path: Path) -> None:
    check(model_of(kind), folder_of(tmp_path, kind, **EVERY[kind]))


@pytest.mark.thorough_except("qwen3_next")
@pytest.mark.parametrize("kind", HYBRIDS)
def test_states_are_those_of_the_cache(kind: str, tmp_path: Path) -> None:
    """Of a model in bfloat16, whose states are float32; each number is updated and read by one product, or two."""
    folder, model = folder_of(tmp_path, kind, **EVERY[kind]), model_of(kind).bfloat16()
    cache, _ = decoded(model, B, 11, 2, 0)
    memory = dict(plan_of(folder, B, tokens=13, dtype="bfloat16").table("memory").rows)
    assert memory["cache, all tokens"] == cached(cache)
    assert sum(size for name, size in memory.items() if name.startswith("states")) == states(cache)
    held = [x for layer in cache.layers for x in (getattr(layer, "recurrent_states", None) or {}).values()]
    numbers = sum(x.numel() for x in held if x is not None)
    each = 6 if "linear_num_key_heads" in EVERY[kind] else 4
    plan = plan_of(folder, B, tokens=N)
    assert of_states(plan, "step") == each * numbers
    assert of_states(plan, "pass") == N * each * numbers


def test_a_plan_tells_layers_with_attention_and_with_a_state_apart(tmp_path: Path) -> None:
    plan = plan_of(folder_of(tmp_path, "jamba", **EVERY["jamba"]), B, tokens=N)
    assert "3 layers, 1 with attention, 2 recurrent" in dict(plan.facts)["sizes"]
    assert [row[0] for row in plan.table("layers").rows] == ["1"]
    longer = plan_of(folder_of(tmp_path, "jamba", **EVERY["jamba"]), B, tokens=2 * N)
    first, second = (dict(one.table("memory").rows) for one in (plan, longer))
    assert second["cache, all tokens"] == 2 * first["cache, all tokens"] > 0
    assert second["states of 2 recurrent layers"] == first["states of 2 recurrent layers"] > 0


@pytest.mark.thorough
def test_a_plan_says_which_layers_have_no_cache_of_their_own(tmp_path: Path) -> None:
    table = plan_of(folder_of(tmp_path, "gemma3n_text", **EVERY["gemma3n_text"]), B, tokens=N).table("layers")
    assert [(row[0], row[5]) for row in table.rows] == [("0, 2", 64), ("1", 64), ("3", 0), ("4", 0)]
    assert "cache 0: the layer attends to the keys and values of an earlier one" in table.note


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "to both sides": ("gemma3_text", {"use_bidirectional_attention": True}),
    "other types": ("gemma3_text", {"layer_types": 2 * ["full_attention"] + ["sliding_attention"]}),
    "no windows": ("qwen2", {"use_sliding_window": False}),
    "no window": ("mistral", {"sliding_window": None}),
    "no chunks": ("llama4_text", {"layer_types": 3 * ["full_attention"]}),
    "experts everywhere": ("llama4_text", {"interleave_moe_layer_step": 1}),
    "dense": ("deepseek_v3", {"first_k_dense_replace": 9}),
    "queries by a latent": ("deepseek_v2", {"q_lora_rank": 13}),
    "biases of all": ("llama", {"mlp_bias": True}),
    "no biases": ("gpt_neox", {"attention_bias": False}),
    "no norms of queries": ("cohere", {"use_qk_norm": False}),
    "parallel": ("stablelm", {"use_parallel_residual": True}),
    "old Falcon": ("falcon", {"multi_query": False, "parallel_attn": False, "alibi": True, "bias": True}),
    "new Falcon": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "new Falcon, one norm": (
        "falcon", {"new_decoder_architecture": True, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1},
    ),
    "new Falcon, all heads": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 6}),
    "first PaliGemma": ("paligemma", {"text_config": {"model_type": "gemma", **WIDE}}),
    "biases of state spaces": ("bamba", {"mamba_proj_bias": True, "mamba_conv_bias": False, "attention_bias": True}),
    "a norm of state spaces": (
        "falcon_h1", {"mamba_rms_norm": True, "projectors_bias": True, "mamba_d_ssm": None, "mlp_bias": True},
    ),
    "Granite without experts": ("granitemoehybrid", {"num_local_experts": 0, "mamba_proj_bias": True}),
    "Jamba without experts": ("jamba", {"num_experts": 1, "mamba_proj_bias": True, "mamba_conv_bias": False}),
    "Jamba's own rank": ("jamba", {"mamba_dt_rank": "auto", "attn_layer_period": 2, "expert_layer_offset": 0}),
    "biases of gates": ("qwen3_next", {"attention_bias": True, "mlp_only_layers": [1], "decoder_sparse_step": 1}),
    "a width as given": ("lfm2", {"block_auto_adjust_ff_dim": False, "conv_bias": True, "conv_L_cache": 5}),
    "nothing is shared": ("gemma3n_text", {"num_kv_shared_layers": 0}),
    "biases of what is shared": ("gemma3n_text", {"attention_bias": True, "num_key_value_heads": 6}),
    "Gemma 4 without embeddings of layers": (
        "gemma4_text", {"hidden_size_per_layer_input": 0, "attention_k_eq_v": False, "attention_bias": True},
    ),
    "Gemma 4 with experts": ("gemma4_text", {
        "enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 29,
    }),
    "norm after": ("opt", {"do_layer_norm_before": False, "enable_bias": False}),
    "all heads": ("gpt_bigcode", {"multi_query": False}),
    "no expansion ratio": ("mpt", {"expansion_ratio": 3}),
    "tied": ("gpt_oss", {"tie_word_embeddings": True}),
    "untied": ("gemma3", {"tie_word_embeddings": False}),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("case", VARIANTS)
def test_a_plan_heeds_the_keys_of_a_configuration(case: str, tmp_path: Path) -> None:
    kind, more = VARIANTS[case]
    sizes = {**EVERY[kind], **more}
    check(model_of(kind, **sizes), folder_of(tmp_path, kind, **sizes))


def test_the_documentation_lists_what_is_read() -> None:
    text = (Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")
    rows = text.partition("| decoders |")[2].partition("\n\n")[0]
    assert sorted(re.findall("`([^`]+)`", rows)) == sorted({*FAMILIES, *WITH_IMAGES})


@pytest.mark.thorough
@pytest.mark.parametrize("case", CUTS)
def test_a_plan_of_a_pruned_model_is_that_of_the_model(case: str, tmp_path: Path) -> None:
    sizes, heads = CUTS[case]
    kind = "llama" if case == "groups" else case.partition(" ")[0]
    model = hw.edit.prune(model_of(kind, **sizes), heads).model
    hw.edit.save_pruned(model, tmp_path / "cut")
    check(model, tmp_path / "cut")
