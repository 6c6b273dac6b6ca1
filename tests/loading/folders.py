"""Folders as people have them: small tokenizers trained on a few lines, small random models, both saved."""

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the hf extra)")
tokenizers = pytest.importorskip("tokenizers")
from tokenizers import (  # noqa: E402
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

LINES = [
    "The quick brown fox jumps over the lazy dog.", "话说武松打虎，再来？武松又来打虎。", "hello world  two spaces",
    "new\nline", "naïve café, it wasn't unbelievable!",
]  # fmt: skip
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def byte_level(*, prefix: bool = False, trim: bool = True) -> Any:
    """GPT-2's kind: Ġ for a blank, a character that it does not know as bytes."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=trim)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    made.train_from_iterator(LINES, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|endoftext|>")


def word_piece() -> Any:
    """BERT's kind: ## inside of a word, blanks left out, [CLS] and [SEP] around."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.train_from_iterator(
        LINES, trainers.WordPieceTrainer(vocab_size=140, special_tokens=SPECIAL, show_progress=False)
    )
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)


def unigram() -> Any:
    """SentencePiece's kind: ▁ for a blank, <s> in front."""
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator(LINES, trainer)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>")


def byte_fallback() -> Any:
    """Llama 2's kind: ▁ for a blank, also in front of the text, and <0xE6> for a byte of what it does not know."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz武"]
    vocabulary = {word: i for i, word in enumerate([*words, "he", "▁w"])}
    made = Tokenizer(models.BPE(vocabulary, [("h", "e"), ("▁", "w")], unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>")


TOKENIZERS = {
    "byte level": byte_level, "byte level, blank in front": lambda: byte_level(prefix=True),
    "byte level, whole offsets": lambda: byte_level(trim=False), "word piece": word_piece, "unigram": unigram,
    "byte fallback": byte_fallback,
}  # fmt: skip

VOCAB = 340
_LIKE_LLAMA = {
    "vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 6, "intermediate_size": 29, "max_position_embeddings": 48, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_LIKE_BERT = {
    "vocab_size": VOCAB, "hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 5, "intermediate_size": 29,
    "max_position_embeddings": 48, "pad_token_id": 0,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "GPT2": {"vocab_size": VOCAB, "n_embd": 20, "n_layer": 3, "n_head": 5, "n_positions": 48, "bos_token_id": 0,
             "eos_token_id": 0},
    "Llama": _LIKE_LLAMA,
    "Qwen3": _LIKE_LLAMA,
    "Mistral": {**_LIKE_LLAMA, "sliding_window": 7},
    "Gemma2": {**_LIKE_LLAMA, "sliding_window": 7, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0,
               "query_pre_attn_scalar": 6},
    "OPT": {"vocab_size": VOCAB, "hidden_size": 20, "ffn_dim": 29, "num_hidden_layers": 2, "num_attention_heads": 5,
            "max_position_embeddings": 48, "word_embed_proj_dim": 20, "pad_token_id": 1},
    "Bert": _LIKE_BERT,
    "Roberta": {**_LIKE_BERT, "pad_token_id": 1, "max_position_embeddings": 50},
    "DistilBert": {"vocab_size": VOCAB, "dim": 20, "n_layers": 2, "n_heads": 5, "hidden_dim": 29,
                   "max_position_embeddings": 48},
    "Albert": {**_LIKE_BERT, "embedding_size": 8, "num_hidden_layers": 3},
    "Bart": {"vocab_size": VOCAB, "d_model": 20, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
             "decoder_attention_heads": 2, "encoder_ffn_dim": 20, "decoder_ffn_dim": 20, "pad_token_id": 0,
             "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": 2},
    "Bloom": {"vocab_size": VOCAB, "hidden_size": 20, "n_layer": 2, "n_head": 5},
    "Falcon": {"vocab_size": VOCAB, "hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 5,
               "bos_token_id": 1, "eos_token_id": 2},
    "Mpt": {"vocab_size": VOCAB, "d_model": 20, "n_layers": 2, "n_heads": 5, "max_seq_len": 48},
    "GPTJ": {"vocab_size": VOCAB, "n_embd": 20, "n_layer": 2, "n_head": 5, "n_positions": 48, "rotary_dim": 4},
    "Nystromformer": {**_LIKE_BERT, "num_landmarks": 48, "segment_means_seq_len": 48},
    "DebertaV2": {**_LIKE_BERT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 4},
    "BigBird": {**_LIKE_BERT, "block_size": 2},
    "XLNet": {"vocab_size": VOCAB, "d_model": 20, "n_layer": 2, "n_head": 5, "d_inner": 29},
    "Mamba": {"vocab_size": VOCAB, "hidden_size": 20, "num_hidden_layers": 2, "state_size": 4},
}  # fmt: skip


def model_of(kind: str, head: str) -> Any:
    """A random model whose heads differ; `head` is the end of its class's name."""
    name = f"{kind}{head}"
    torch.manual_seed(11)
    config = getattr(transformers, f"{kind}Config")(**CONFIGS[kind])
    made = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for weight in made.parameters():
            weight.add_(torch.randn_like(weight) * 0.15)
    return made


def saved(folder: Path, kind: str, head: str, tokenizer: Any = None) -> Path:
    """A folder with such a model, and a tokenizer if there is one."""
    model_of(kind, head).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder
