"""Families of transformers models, tiny and random, that are checked closely: rows of docs/models.md."""

from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

BATCH, LENGTH, VOCAB, WINDOW = 3, 13, 61, 5
PADDING = (0, 4, 7)  # padded tokens of each batch entry


@dataclass(frozen=True, eq=False)
class Family:
    """A family and how to make one of it.

    Attributes:
        name: as people call it. module: in transformers.models. config, model: its classes.
        options: of the configuration; dropout: the names of those that drop attention weights.
        kind: "decoder", "encoder", "both", "speech" or "image": what goes in, and what can be asked of it.
        packed_by: how the model is told of packed sequences, "position_ids" or "cu_seq_lens" (of FlashAttention).
        cross: options and class of one that also attends to an encoder's states, if `model` does not.
    """

    name: str
    module: str
    config: str
    model: str
    options: dict[str, Any]
    kind: str
    dropout: tuple[str, ...] = ("attention_dropout",)
    cross: tuple[str, dict[str, Any]] | None = None
    notes: str = ""
    packed_by: str = "position_ids"


LLAMA = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
BERT = {
    "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3,
    "max_position_embeddings": 64, "pad_token_id": 0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
BART = {
    "vocab_size": VOCAB, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 3,
    "decoder_attention_heads": 3, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None, "decoder_start_token_id": 1, "dropout": 0.0,
}  # fmt: skip
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}

FAMILIES = (
    Family("GPT-2", "gpt2", "GPT2Config", "GPT2LMHeadModel", {
        "vocab_size": VOCAB, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 64, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
    }, "decoder", ("attn_pdrop",), ("GPT2LMHeadModel", {"add_cross_attention": True})),
    Family("BERT", "bert", "BertConfig", "BertModel", BERT, "encoder", ("attention_probs_dropout_prob",),
           ("BertLMHeadModel", {"is_decoder": True, "add_cross_attention": True})),
    Family("RoBERTa", "roberta", "RobertaConfig", "RobertaModel", BERT, "encoder", ("attention_probs_dropout_prob",),
           ("RobertaForCausalLM", {"is_decoder": True, "add_cross_attention": True})),
    Family("Llama", "llama", "LlamaConfig", "LlamaForCausalLM", LLAMA, "decoder", notes="grouped keys"),
    Family("Mistral", "mistral", "MistralConfig", "MistralForCausalLM", {**LLAMA, "sliding_window": WINDOW}, "decoder",
           notes="sliding window"),
    Family("Qwen3", "qwen3", "Qwen3Config", "Qwen3ForCausalLM",
           {**LLAMA, "use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": WINDOW}, "decoder", notes="QK-norm"),
    Family("Gemma 2", "gemma2", "Gemma2Config", "Gemma2ForCausalLM",
           {**LLAMA, **ALTERNATING, "query_pre_attn_scalar": 7, "attn_logit_softcapping": 2.0}, "decoder",
           notes="soft cap, alternating windows"),
    Family("Gemma 3", "gemma3", "Gemma3TextConfig", "Gemma3ForCausalLM",
           {**LLAMA, **ALTERNATING, "query_pre_attn_scalar": 7}, "decoder", notes="QK-norm, alternating windows"),
    Family("gpt-oss", "gpt_oss", "GptOssConfig", "GptOssForCausalLM",
           {**LLAMA, **ALTERNATING, "num_local_experts": 2, "num_experts_per_tok": 1}, "decoder",
           notes="learned sinks, alternating windows", packed_by="cu_seq_lens"),
    Family("T5", "t5", "T5Config", "T5ForConditionalGeneration", {
        "vocab_size": VOCAB, "d_model": 24, "d_kv": 7, "d_ff": 40, "num_layers": 2, "num_heads": 3, "pad_token_id": 0,
        "relative_attention_num_buckets": 8, "relative_attention_max_distance": 11, "decoder_start_token_id": 1,
        "eos_token_id": None, "dropout_rate": 0.0,
    }, "both", ("dropout_rate",), notes="relative bias, scale 1"),
    Family("BART", "bart", "BartConfig", "BartForConditionalGeneration", BART, "both"),
    Family("Whisper", "whisper", "WhisperConfig", "WhisperForConditionalGeneration",
           {**BART, "num_mel_bins": 5, "max_source_positions": 17, "max_target_positions": 64,
            "suppress_tokens": None, "begin_suppress_tokens": None}, "speech"),
    Family("ViT", "vit", "ViTConfig", "ViTModel", {
        "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 12,
        "patch_size": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }, "image", ("attention_probs_dropout_prob",)),
)  # fmt: skip


# --- models and inputs


@lru_cache(maxsize=64)
def make(family: Family, *, dropout: float = 0.0, cross: bool = False) -> Any:
    """A random model with its own attention, in eval mode; weights large enough for heads to differ."""
    theirs = import_module(f"transformers.models.{family.module}")
    model, more = family.cross if cross and family.cross else (family.model, {})
    options = {**family.options, **more, **dict.fromkeys(family.dropout, dropout), "attn_implementation": "eager"}
    torch.manual_seed(5)
    made = getattr(theirs, model)(getattr(theirs, family.config)(**options)).eval()
    for name, parameter in made.named_parameters():
        if parameter.ndim > 1 or name.endswith("sinks"):
            nn.init.normal_(parameter, std=0.25)
    return made


def tokens(length: int = LENGTH, seed: int = 0) -> Tensor:
    """Random tokens [BATCH, length], none of them padding."""
    return torch.randint(2, VOCAB, (BATCH, length), generator=torch.Generator().manual_seed(seed))


def attention_mask(side: str, length: int = LENGTH) -> Tensor:
    """1 where a token stands; PADDING tokens are missing on that side."""
    place = torch.arange(length).flip(0) if side == "right" else torch.arange(length)
    return (place >= torch.tensor(PADDING)[:, None]).long()


def inputs(family: Family, padded: str | None = None) -> tuple[dict[str, Tensor], Tensor]:
    """What the model is called with, and the real places [BATCH, n] of its output."""
    mask = attention_mask(padded or "none") if padded else torch.ones(BATCH, LENGTH, dtype=torch.long)
    given: dict[str, Tensor] = {"attention_mask": mask} if padded else {}
    random = torch.Generator().manual_seed(1)
    match family.kind:
        case "decoder" | "encoder":
            return {"input_ids": tokens(), **given}, mask.bool()
        case "image":
            return {"pixel_values": torch.randn(BATCH, 3, 12, 12, generator=random)}, torch.ones(BATCH, 10).bool()
    short = LENGTH - 2
    targets = attention_mask(padded, short) if padded else torch.ones(BATCH, short, dtype=torch.long)
    decoder = {"decoder_input_ids": tokens(short, 2), **({"decoder_attention_mask": targets} if padded else {})}
    if family.kind == "speech":
        return {"input_features": 10 * torch.randn(BATCH, 5, 34, generator=random), **decoder}, targets.bool()
    return {"input_ids": tokens(), **given, **decoder}, targets.bool()
