"""A small character model with its training, and any model with its tokenizer."""

from headwise.lm.checkpoint import load_checkpoint, load_pretrained, save_model
from headwise.lm.loading import LoadedModel, TokenizedText, load_model
from headwise.lm.model import Decoder, DecoderConfig
from headwise.lm.texts import CharTokenizer, read_text

__all__ = [
    "CharTokenizer",
    "Decoder",
    "DecoderConfig",
    "LoadedModel",
    "TokenizedText",
    "load_checkpoint",
    "load_model",
    "load_pretrained",
    "read_text",
    "save_model",
]
