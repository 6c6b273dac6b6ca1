"""What the rules of registry_models.py do not find by themselves: fields and classes of stubborn model types."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# A small ResNet in the place of backbones that need the package timm.
BACKBONE = {
    "model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1],
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}  # fmt: skip

BACKBONE_3 = {**BACKBONE, "out_features": ["stage2", "stage3", "stage4"]}

DINO_4 = {
    "model_type": "dinov2", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8, "out_features": ["stage1", "stage2", "stage3", "stage4"], "reshape_hidden_states": False,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}

# Model type → fields of its configuration.
EXTRAS: dict[str, dict[str, Any]] = {
    "autoformer": {"prediction_length": 5, "context_length": 12},
    "informer": {"prediction_length": 5, "context_length": 12},
    "time_series_transformer": {"prediction_length": 5, "context_length": 12},
    "blt": {"encoder_hash_byte_group_vocab": 99},
    "dots3_note_text": {"per_layer_config": None},
    "dots3_note_vision_encoder": {"per_layer_config": None},
    "dots3_note_audio_encoder": {"adapter_input_size": 64},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64},
    "esm": {"vocab_size": 99, "mask_token_id": 98, "pad_token_id": 0},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    "glm5_next_text": {"index_topk": 4, "index_kpool": 2, "qk_rope_head_dim": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 5},
    "granite_speech5_encoder": {"context_size": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": {"rope_parameters": PLAIN, "head_dim": 16},
    "hunyuan_v1_moe": {"rope_parameters": PLAIN, "head_dim": 16},
    "janus_vqgan": {"num_patches": 2},
    "laguna": {"num_attention_heads_per_layer": [4, 4]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4_vision_model": {
        "intermediate_size": 256,
        "vision_output_dim": 64,
        "projector_input_dim": 64,
        "projector_output_dim": 64,
    },
    "longcat_flash": {"head_dim": 8},
    "align": {"projection_dim": 640},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "emu3": {"vocabulary_map": {"<|extra_200|>": 97, "<image>": 98, "<|visual token 000001|>": 60}},
    "d_fine": {"backbone_config": BACKBONE_3, "encoder_in_channels": [16, 32, 32]},
    "deimv2": {"backbone_config": BACKBONE_3, "encoder_in_channels": [16, 32, 32]},
    "instructblip": {"image_token_index": 90},
    "instructblipvideo": {"video_token_index": 91},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "perceiver": {"d_latents": 64, "num_latents": 16, "d_model": 64},
    "nemotron_h": {"n_groups": 2, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {**PLAIN, "mrope_section": [4, 2, 2]},
            "sliding_attention": {**PLAIN, "mrope_section": [4, 2, 2]},
        }
    },
    "hunyuan_vl_text": {"rope_parameters": {**PLAIN, "mrope_section": [2, 2, 2, 2]}, "head_dim": 16},
    "depth_anything": {"backbone_config": DINO_4, "neck_hidden_sizes": [16, 16, 32, 32], "reassemble_hidden_size": 64},
    "granite4_vision": {"deepstack_layer_map": [[1, 0]]},
    "sam2_hiera_det_model": {
        "window_size_per_stage": [8, 4, 4, 4],
        "global_attention_blocks": [2],
        "window_positional_embedding_background_size": [2, 2],
        "hidden_size": 16,
    },
    "sam2_vision_model": {
        "backbone_channel_list": [128, 64, 32, 16],
        "fpn_hidden_size": 32,
        "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
    },
    "step3p5": {"sliding_window": 5},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "xmod": {"default_language": "en_XX"},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 64},
    "rt_detr": {"backbone_config": BACKBONE_3, "encoder_in_channels": [16, 32, 32]},
    "rt_detr_v2": {"backbone_config": BACKBONE_3, "encoder_in_channels": [16, 32, 32]},
    "radio": {"summary_idxs": [0]},
    "prompt_depth_anything": {
        "backbone_config": DINO_4,
        "neck_hidden_sizes": [16, 16, 32, 32],
        "reassemble_hidden_size": 64,
    },
    "qwen2_moe": {"use_sliding_window": True},
    "bamba": {"attn_layer_indices": [1]},
    "chameleon": {"vocabulary_map": {"<image>": 98, **{f"IMGIMG{chr(65 + i)}Z": 60 + i for i in range(8)}}},
}

# Model type → name of the class in its modelling file.
CLASSES: dict[str, str] = {
    "kosmos_2_5_vision_model": "Kosmos2_5VisionModel",
    "musicgen": "MusicgenForConditionalGeneration",
    "musicgen_melody": "MusicgenMelodyForConditionalGeneration",
}

# Model type → what its forward is called with.
INPUTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "idefics": lambda config: {"input_ids": _ids(), "pixel_values": _noise(2, 1, 3, 32, 32),
                               "image_attention_mask": torch.ones(2, 11, 1, dtype=torch.long)},
    "instructblip": lambda config: {**_queries(config), "pixel_values": _noise(2, 3, 32, 32)},
    "instructblipvideo": lambda config: {**_queries(config), "pixel_values": _noise(2, 2, 3, 32, 32)},
    "kosmos_2_5_vision_model": lambda config: {"flattened_patches": _flat_patches(config),
                                               "attention_mask": torch.ones(2, 12)},
    "pix2struct_vision_model": lambda config: {"flattened_patches": _flat_patches(config),
                                               "attention_mask": torch.ones(2, 12)},
    "pix2struct": lambda config: {"flattened_patches": _flat_patches(config.vision_config),
                                  "attention_mask": torch.ones(2, 12), "decoder_input_ids": _ids(7)},
    "decision_transformer": lambda config: {
        "states": _noise(2, 7, config.state_dim), "actions": _noise(2, 7, config.act_dim),
        "returns_to_go": _noise(2, 7, 1), "timesteps": torch.arange(7).expand(2, -1)},
    "clap": lambda config: {"input_ids": _ids(), "input_features": _noise(2, 1, 64, 64)},
    "gemma3n_audio": lambda config: {"audio_mel": _noise(2, 32, config.input_feat_size),
                                     "audio_mel_mask": torch.zeros(2, 32, dtype=torch.bool)},
    "dia": lambda config: {"input_ids": _ids(), "decoder_input_ids": _ids(9)[:, :, None].expand(-1, -1, 9) % 20},
    "lxmert": lambda config: {"input_ids": _ids(), "visual_feats": _noise(2, 5, config.visual_feat_dim),
                              "visual_pos": _noise(2, 5, 4)},
    "mllama_vision_model": lambda config: {
        "pixel_values": _noise(2, 1, 4, 3, 32, 32), "aspect_ratio_ids": torch.ones(2, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(2, 1, 4, dtype=torch.long)},
    "paddleocr_vl_vision": lambda config: {"pixel_values": _noise(1, 32, 3, config.patch_size, config.patch_size),
                                           "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]])},
    "blip_2_qformer": lambda config: {"query_embeds": _noise(2, 5, 64), "encoder_hidden_states": _noise(2, 13, 64)},
    "phi4_multimodal_audio": lambda config: {"hidden_states": _noise(2, 32, 80),
                                             "mask": torch.ones(2, 32, dtype=torch.bool)},
    "qwen2_5_omni_audio_encoder": lambda config: {
        "input_features": _noise(config.num_mel_bins, 40), "feature_lens": torch.tensor([40]),
        "aftercnn_lens": torch.tensor([20])},
    "xcodec": lambda config: {"input_values": _noise(2, 1, 3200)},
    "minicpm_ocr_vision": lambda config: _mini(config),
    "minicpmv4_6_vision": lambda config: _mini(config),
    "minicpmv4_7_vision": lambda config: _mini(config),
}  # fmt: skip


def _random() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_random())


def _ids(length: int = 11) -> Tensor:
    return torch.randint(3, 60, (2, length), generator=_random())


def _queries(config: Any) -> dict[str, Any]:
    """Places of the queries' features in a text, and what the queries read."""
    frames = 4 if "video" in config.model_type else 1
    token = config.video_token_index if frames == 4 else config.image_token_index
    ids = torch.cat([torch.full((2, config.num_query_tokens * frames), token), _ids()], 1)
    return {"input_ids": ids, "qformer_input_ids": _ids()}


def _flat_patches(config: Any) -> Tensor:
    """Row, column and pixels of each patch."""
    size = config.patch_embed_hidden_size
    at = torch.cartesian_prod(torch.arange(1, 4), torch.arange(1, 5)).expand(2, -1, -1)
    return torch.cat([at, _noise(2, 12, size)], -1)


def _mini(config: Any) -> dict[str, Any]:
    size = config.patch_size
    return {"pixel_values": _noise(1, 3, size, 32 * size), "target_sizes": torch.tensor([[4, 4], [4, 4]])}


# Model types that the tests run: each unlike the others in its attention, its masks or its inputs.
FAST = (
    "afmoe", "albert", "bamba", "bart", "bert", "bigbird_pegasus", "bloom", "clip", "cohere2", "deberta-v2",
    "deepseek_v2", "deepseek_v3", "deepseek_v4", "detr", "dinov2", "distilbert", "electra", "esm", "falcon",
    "florence2", "gemma", "gemma2", "gemma3_text", "gemma4_audio", "git", "glm4", "gpt2", "gpt_neo", "gpt_neox",
    "gpt_oss", "granite", "granite_swa", "informer", "jetmoe", "lfm2", "llama", "llama4_text", "llava", "longt5",
    "marian", "mistral", "mixtral", "mllama_text_model", "modernbert", "mpt", "nemotron", "olmo2", "opt", "pegasus",
    "phi3", "qwen2", "qwen2_5_vl_vision", "qwen2_vl", "qwen3", "qwen3_moe", "qwen3_next", "roberta",
    "sam_vision_model", "siglip_vision_model", "smollm3", "stablelm", "starcoder2", "swin", "switch_transformers",
    "t5", "umt5", "videomae", "vit", "wav2vec2", "whisper",
)  # fmt: skip
