"""`headwise plan model FOLDER` for every causal language model of transformers: exact, or refused by name."""

from pathlib import Path
from typing import Any

import pytest
from plan_models import plan_of, transformers
from test_plan_transformers import check

from headwise.errors import ConfigError
from headwise.models.configuration.sizes import FAMILIES, WITH_IMAGES, model_config

TYPES = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "decoder_ffn_dim", "n_inner"), 84),
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 101, "word_embed_proj_dim": 64, "rotary_dim": 4,
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 211), "sliding_window": 13, "attention_chunk_size": 7,
    "max_window_layers": 2, "use_sliding_window": True, "moe_intermediate_size": 26, "intermediate_size_mlp": 90,
    "shared_expert_intermediate_size": 34, "num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "kv_lora_rank": 10, "q_lora_rank": 14, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6,
}  # fmt: skip
LATENT = {"head_dim": 4, "num_key_value_heads": 4}  # the rotary part of a head, and of all heads
OF_LAYERS = {"num_hidden_layers": 4, "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 10}
ATTENDED: dict[str, dict[str, Any]] = {  # of types whose other defaults do not fit four layers
    "bamba": {"attn_layer_indices": [1]},
    "gemma3n_text": {**OF_LAYERS, "num_kv_shared_layers": 1, "activation_sparsity_pattern": [0.0] * 4},
    "gemma4_text": {**OF_LAYERS, "global_head_dim": 24},
    "granitemoehybrid": {"num_hidden_layers": 4, "layer_types": [*3 * ["linear_attention"], "full_attention"]},
    "jamba": {"attn_layer_offset": 2},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"]},
}
NAMES = {"gpt-sw3"}  # other names of types that are read


def small(kind: str) -> Any:
    """A configuration with those of SIZES that the type knows and lets be set."""
    default = transformers.AutoConfig.for_model(kind)
    given = {**SIZES, **(LATENT if hasattr(default, "kv_lora_rank") else {})}
    own = {name: size for name, size in given.items() if _has(default, name)}
    own |= ATTENDED.get(kind, {})
    if isinstance(getattr(type(default), "head_dim", None), property):
        own.pop("head_dim", None)
    config = transformers.AutoConfig.for_model(kind, **own, pad_token_id=1, bos_token_id=0, eos_token_id=2)
    config._experts_implementation = "eager"
    return config


def _has(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name)
    except RuntimeError:  # each layer has its own
        return True


@pytest.mark.thorough
def test_every_type_is_read_or_refused_by_its_name() -> None:
    """By its default configuration, which all but one type have."""
    read, unnamed, without = set(), set(), set()
    for kind in TYPES:
        try:
            config = transformers.AutoConfig.for_model(kind, **ATTENDED.get(kind, {}))
        except Exception:  # their validation
            without.add(kind)
            continue
        try:
            assert model_config(config, kind, "").layers > 0
        except ConfigError as error:
            unnamed |= set() if kind in str(error) else {kind}
        else:
            read.add(kind)
    assert not unnamed
    assert without <= {"gemma4_assistant"}
    assert read == {kind for kind in TYPES if kind in {*FAMILIES, *WITH_IMAGES, *NAMES}}


@pytest.mark.thorough
def test_every_type_is_exact_or_refused(tmp_path: Path) -> None:
    """With sizes that are chosen for no type in particular."""
    found: dict[str, list[str]] = {"exact": [], "refused": [], "no such sizes": []}
    for kind in TYPES:
        family = FAMILIES.get(kind)
        if kind in WITH_IMAGES or (family is not None and family.auto != "AutoModelForCausalLM"):
            continue  # another class reads their folders
        try:
            config = small(kind)
        except Exception:  # their validation
            found["no such sizes"].append(kind)
            continue
        folder = tmp_path / kind
        folder.mkdir()
        (folder / "config.json").write_text(config.to_json_string(use_diff=False), encoding="utf-8")
        try:
            plan_of(folder)
        except ConfigError:
            found["refused"].append(kind)
            continue
        check(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval(), folder)
        found["exact"].append(kind)
    known = {kind for kind, family in FAMILIES.items() if family.auto == "AutoModelForCausalLM"}
    assert set(found["exact"]) == known | NAMES, found
