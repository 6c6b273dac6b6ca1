"""Every model type that transformers knows, tiny and random: its class, a small configuration, weights.

A configuration is made from the type's own default one: each field that is a size becomes small by its name, the same
width everywhere, so that towers fit each other. What does not fit is tried again with fewer changes.
"""

import copy
import math
import re
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from inspect import isabstract, isclass, signature
from pathlib import Path
from typing import Any

import torch
from registry_overrides import BACKBONE, CLASSES, EXTRAS
from torch import nn

VOCAB, HEADS, KV_HEADS, LAYERS = 99, 4, 2, 2
IMAGE, PATCH = 32, 8
HEAD_WIDTH = {"tiny": 16, "tiny, default layer types": 16, "wide heads": 128}
LARGEST = 60_000_000  # parameters of a model that is made at all

# --- which class


def model_types() -> list[str]:
    """The names of all configurations, parts of models included."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return sorted(CONFIG_MAPPING_NAMES)


def model_class(model_type: str) -> Any:
    """The class to try: one that generates where there is one, else the base model, else any with that configuration.

    Raises:
        LookupError: if no model has this configuration.
    """
    from transformers.models.auto import modeling_auto as auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type]
    if model_type in CLASSES:
        return getattr(import_module(config.__module__.replace(".configuration_", ".modeling_")), CLASSES[model_type])
    first = ["MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING"]
    if model_type not in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        first += ["MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "MODEL_FOR_CAUSAL_LM_MAPPING"]
    others = [name for name in dir(auto) if re.fullmatch(r"MODEL_\w*MAPPING", name)]
    for name in (*first, "MODEL_MAPPING", *others):
        mapping = getattr(auto, name)
        if config in mapping:
            found = mapping[config]
            return found[0] if isinstance(found, tuple) else found
    return _class_in_module(config)


def _class_in_module(config: Any) -> Any:
    from transformers import PreTrainedModel

    name = config.__module__
    folder = Path(import_module(name).__file__ or "").parent
    modules = [import_module(f"{name.rpartition('.')[0]}.{path.stem}") for path in sorted(folder.glob("modeling_*.py"))]
    found = [
        one
        for module in modules
        for one in vars(module).values()
        if isclass(one)
        and issubclass(one, PreTrainedModel)
        and one.__module__ == module.__name__
        and _configuration_of(one) is config
        and "forward" in vars(one)
        and not isabstract(one)
    ]
    if not found:
        raise LookupError(f"no model of transformers has {config.__name__}")
    return found[0]


def _configuration_of(model: Any) -> Any:
    annotation = vars(model).get("config_class") or vars(model).get("__annotations__", {}).get("config")
    return annotation or getattr(model, "config_class", None)


# --- a small configuration

_LAYERS = re.compile(
    r"(num_\w*layers|n_layers?|\w*_layers|layers|depth|num_blocks|resampler_depth|num_decoder_layers|num_encoder_blocks)"
)
_HEADS = re.compile(r"(\w*_?num_\w*heads|n_heads?|\w*attention_heads|num_heads|\w+_n_heads|resampler_heads)")
_HEAD_WIDTH = re.compile(
    r"(\w*head_dim|d_kv|\w*dim_head|\w*head_size|kv_channels|d_head|index_head_dim|mamba_d_head|mamba_headdim)"
)
_WIDTH = re.compile(
    r"(\w*hidden_size\w*|\w*hidden_dim|\w*hidden_dimension|d_model|n_embd|\w*embed_dim|dim|emb_dim|\w*embedding_size"
    r"|\w*embedding_dim|\w*projection_dim|\w*proj_dim|\w*_dim|\w*dims|model_dim|n_ctx_dim|\w*_width|out_hidden_size"
    r"|\w*output_size|output_dim|\w*channels|\w*units|hidden_channels|\w*feature_size|proj_size|\w*_proj_size)"
)
_INNER = re.compile(
    r"(\w*intermediate_size\w*|\w*ffn_dim|\w*ffn_hidden_size|\w*mlp_dim|n_inner|d_ff|d_inner|\w*feedforward\w*|ffn_dim"
    r"|moe_intermediate_size|\w*feed_forward_size|intermediate_dim|mlp_hidden_size)"
)
_LENGTHS = re.compile(
    r"(\w*max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length|\w*max_positions)"
)
_EXPERTS = re.compile(r"(num_\w*experts|n_routed_experts|moe_num_experts|num_experts|num_local_experts)")
_CHOSEN = re.compile(r"(num_experts_per_tok\w*|moe_topk|moe_k|top_k|moe_top_k|num_selected_experts|moe_router_topk)")
_TOKEN = re.compile(r"\w*(token_id|token_index|token_ids|_index|_id)s?")
_EXACT: dict[str, Any] = {
    "sliding_window": 5, "window_size": 2, "local_attention": 6, "attention_window": 4, "attention_window_size": 5,
    "q_lora_rank": 16, "kv_lora_rank": 16, "o_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_group": 1, "topk_group": 1, "num_expert_group": 1, "first_k_dense_replace": 1,
    "num_dense_layers": 1, "n_shared_experts": 1, "num_shared_experts": 1, "index_topk": 4, "attention_chunk_size": 5,
    "num_kv_shared_layers": 0, "max_window_layers": 1, "num_nextn_predict_layers": 0, "num_mtp_layers": 0,
    "image_size": IMAGE, "patch_size": PATCH, "image_seq_length": (IMAGE // PATCH) ** 2,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 11, "type_vocab_size": 2,
    "num_queries": 7, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "router_jitter_noise": 0.0,
    "mask_time_prob": 0.0, "mask_feature_prob": 0.0, "apply_spec_augment": False, "rotary_dim": 8, "num_mel_bins": 16,
    "max_source_positions": 24, "mamba_d_state": 8, "state_size": 8, "mamba_n_heads": 8, "mamba_d_head": 16,
    "mamba_chunk_size": 8, "chunk_size": 8, "time_step_rank": 8, "mamba_dt_rank": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_cls_tokens": 1,
    "deepstack_visual_indexes": [0, 1], "fullatt_block_indexes": [1], "global_attn_indexes": [1],
    "rope_scaling": None, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
    "expert_layer_offset": 1, "num_position_embeddings": 64, "max_2d_position_embeddings": 64, "block_size": 4,
    "vision_feature_layer": -1, "num_codebooks": 3, "codebook_size": 32, "num_quantizers": 4,
    "hidden_size_per_layer_input": 8, "moe_layer_start_index": 1, "moe_layer_end_index": 1,
    "pruned_vocab_size": VOCAB, "boundary_token_id": 1, "image_grid_pinpoints": [[IMAGE, IMAGE]],
    "coordinate_size": 11, "shape_size": 10, "qk_head_dim": 16,
}  # fmt: skip
_KEPT = {
    "query_dim", "num_channels", "in_channels", "in_chans", "audio_channels", "num_labels", "linear_conv_kernel_dim",
    "hidden_expansion", "channels", "out_channels", "input_channels", "num_feature_levels", "output_channels_stem",
    "num_channels_out", "cardinality", "embedding_dimension", "feature_size", "chunk_size_feed_forward", "n_channels",
    "conv_dim", "time_step_min", "time_step_max", "axial_pos_embds_dim", "mlp_only_layers", "hidden_act", "label2id",
    "id2label", "dtype", "keypoint_decoder_dim", "_out_indices", "_out_features", "lang_id", "rope_theta",
}  # fmt: skip
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def configurations(model_type: str) -> Iterator[tuple[str, Any]]:
    """Configurations to try, each with how much it was changed: "tiny", …, "default"."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type]
    for how in (*HEAD_WIDTH, "few layers", "default"):
        try:
            yield how, _smaller(config, config(), how, {}, model_type)
        except GeneratorExit:
            raise
        except Exception as error:
            yield how, error


def _smaller(config: Any, default: Any, how: str, tokens: dict[str, int], model_type: str) -> Any:
    """A configuration of that class, like the default one with smaller sizes."""
    names = {field.name for field in fields(config)}
    given: dict[str, Any] = {}
    fresh = vars(config()) if type(default) is config else {}
    sections = "mrope_section" in _modelling(config)
    for name, value in vars(default).items():
        if name not in names or name in config.sub_configs:
            continue
        if name in fresh and value != fresh[name] and not name.startswith("_"):
            given[name] = value
        if name in _KEPT or name.startswith("_"):
            continue
        changed = _size(name, value, vars(default), how, tokens, sections)
        if changed is not None and changed != value:
            given[name] = changed
    for name in config.sub_configs:
        part = getattr(default, name, None)
        if getattr(part, "model_type", "") == "timm_backbone" and how != "default":
            given |= {name: BACKBONE, "use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False}
            given = {name: x for name, x in given.items() if name in names}
        elif part is not None and hasattr(part, "sub_configs"):
            given[name] = _smaller(type(part), part, how, tokens, part.model_type)
    if how != "default":
        given |= EXTRAS.get(model_type, {}) if how != "few layers" else {}
    return config(**given)


def _size(name: str, value: Any, all_of_them: dict[str, Any], how: str, tokens: dict[str, int], sections: bool) -> Any:
    """What a field becomes; None to leave it."""
    if re.search(r"drop(?!_path_rate_list)", name) and isinstance(value, float | int) and not isinstance(value, bool):
        return 0.0
    if name in ("mask_time_prob", "mask_feature_prob", "router_jitter_noise", "drop_path_rate"):
        return 0.0 if isinstance(value, int | float) else None
    if name == "apply_spec_augment":
        return False
    if how == "default" or isinstance(value, bool):
        return None
    if value is None:
        return {"head_dim": HEAD_WIDTH[how], "num_key_value_heads": KV_HEADS}.get(name) if how in HEAD_WIDTH else None
    if isinstance(value, int) and re.fullmatch(r"\w*vocab_size\w*|vocab_size", name):
        return VOCAB if value > VOCAB else None
    if _TOKEN.fullmatch(name):
        return _token(name, value, tokens)
    if isinstance(value, int) and _LAYERS.fullmatch(name) and name not in _EXACT:
        kinds = (
            _kinds(all_of_them)
            if how in ("tiny", "wide heads") and name in ("num_hidden_layers", "n_layer", "n_layers")
            else []
        )
        return max(LAYERS, len(kinds)) if value > LAYERS else None
    if how in ("tiny", "wide heads") and (kinds := _kinds({name: value})):
        return (kinds * LAYERS)[: max(LAYERS, len(kinds))]
    if how == "few layers":
        return None
    if name in ("image_size", "patch_size") and _in_stages(all_of_them):
        whole = 2 * IMAGE if isinstance(value, int) else type(value)(2 * IMAGE for _ in value)
        return whole if name == "image_size" else None
    if name == "window_size" and "spatial_merge_size" in all_of_them:
        return 2 * PATCH * all_of_them["spatial_merge_size"]  # in pixels
    if name in _EXACT and isinstance(value, list | tuple) == isinstance(_EXACT[name], list):
        return type(value)(_EXACT[name]) if isinstance(value, list | tuple) else _EXACT[name]
    if isinstance(value, list | tuple):
        return _list(name, value)
    if name == "rope_parameters" and isinstance(value, dict):
        return _rope(value, HEAD_WIDTH[how], sections)
    return _whole(name, value, all_of_them, HEAD_WIDTH[how]) if isinstance(value, int) else None


def _in_stages(all_of_them: dict[str, Any]) -> bool:
    """Whether an image becomes smaller from stage to stage."""
    names = "depths", "hidden_sizes", "embed_dims", "num_block_repeats", "embed_dim_per_stage"
    return any(isinstance(x := all_of_them.get(name), list | tuple) and len(x) > 2 for name in names)


def _whole(name: str, value: int, all_of_them: dict[str, Any], head_width: int) -> int | None:
    width = HEADS * head_width
    if _CHOSEN.fullmatch(name):
        return min(value, 2)
    if _EXPERTS.fullmatch(name):
        return min(value, 4)
    if _HEADS.fullmatch(name):
        if re.search(r"(key_value|kv)", name):
            others = [x for other, x in all_of_them.items() if _HEADS.fullmatch(other) and other != name]
            return value if value <= 1 else HEADS if value in others else KV_HEADS
        return min(value, HEADS)
    if _HEAD_WIDTH.fullmatch(name):
        return head_width if value > head_width else None
    if _LENGTHS.fullmatch(name):
        return 64 if value > 64 else None
    if _INNER.fullmatch(name):
        return width + 32 if value > width else None
    if _WIDTH.fullmatch(name):
        return width if value > width else None
    return None


def _list(name: str, value: list[Any] | tuple[Any, ...]) -> Any:
    if not value or not all(isinstance(x, int) and not isinstance(x, bool) for x in value):
        return None
    if re.fullmatch(r"depths?|\w*num_blocks|blocks_per_stage|layer_depths|num_block_repeats", name):
        return type(value)(1 for _ in value)
    if re.search(r"heads", name):
        smallest = min(value)
        return type(value)(max(1, x // smallest) for x in value)
    if re.fullmatch(r"image_size|input_size|pretrain_image_size", name):
        return type(value)(IMAGE for _ in value)
    if re.fullmatch(r"hidden_sizes|embed_dims|neck_hidden_sizes|embed_dim|embed_dim_per_stage|\w*_hidden_sizes", name):
        smallest = min(value)
        return type(value)(max(16, 16 * round(x / smallest)) for x in value)
    return None


def _kinds(all_of_them: dict[str, Any]) -> list[Any]:
    for name in ("layer_types", "layers_block_type", "block_types"):
        found = all_of_them.get(name)
        if isinstance(found, list | tuple) and all(isinstance(kind, str) for kind in found):
            return list(dict.fromkeys(found))
    return []


def _rope(value: dict[str, Any], head_width: int, sections: bool) -> dict[str, Any]:
    """Sections of multimodal positions, which must add up to half of the turned part of a head."""
    small = copy.deepcopy(value)
    parts = [x for x in small.values() if isinstance(x, dict)] or [small]
    for part in parts:
        if sections or "mrope_section" in part:
            half = int(head_width * part.get("partial_rotary_factor", 1.0)) // 2
            part["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    return small


def _modelling(config: Any) -> str:
    """The source of the modelling files beside a configuration's."""
    folder = Path(import_module(config.__module__).__file__ or "").parent
    return "".join(path.read_text(encoding="utf-8") for path in folder.glob("modeling_*.py"))


def _token(name: str, value: Any, tokens: dict[str, int]) -> Any:
    if isinstance(value, list | tuple):
        many = all(isinstance(x, int) for x in value) and any(x >= VOCAB for x in value)
        return type(value)([tokens.setdefault(name, VOCAB - 1 - len(tokens))] * len(value)) if many else None
    if not isinstance(value, int) or value < 20 or name.endswith(("lang_id", "padding_index")):
        return None
    if name in _SPECIAL:
        return _SPECIAL[name]
    return tokens.setdefault(name, VOCAB - 1 - len(tokens))


# --- the model


def make_model(model: Any, config: Any) -> Any:
    """A random model with its own attention, in float32 and eval mode.

    Raises:
        MemoryError: if it has more parameters than this run makes.
    """
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"
    build = model._from_config if "config" in signature(model.__init__).parameters else model
    with torch.device("meta"):
        size = sum(x.numel() for x in build(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise MemoryError(f"{size:,} parameters")
    torch.manual_seed(5)
    made = build(config).float().eval()
    randomize(made)
    return made


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Weights that keep the size of what goes through them, large enough for heads to differ; no bias stays 0."""
    generator = torch.Generator().manual_seed(7)
    for module in model.modules():
        for name, x in module.named_parameters(recurse=False):
            if not x.is_floating_point() or not x.numel():
                continue
            noise = torch.randn(x.shape, generator=generator)
            if isinstance(module, nn.Embedding):
                x.copy_(noise)
            elif x.ndim > 1:
                convolves = isinstance(module, nn.modules.conv._ConvNd)
                inputs = math.prod(x.shape[1:]) if convolves else x.shape[-1] if x.ndim == 2 else min(x.shape[-2:])
                x.copy_(noise * 1.3 / math.sqrt(max(1, inputs)))
            else:
                x.add_((1.0 if name.endswith("sinks") else 0.1) * noise)
