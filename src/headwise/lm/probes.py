"""Induction scores of a decoder's heads on repeated random characters, by `probe_induction`."""

import unicodedata
from collections import Counter

import torch
from torch import Tensor

from headwise.analysis.head_roles.repeats import VERSION, HeadScores, RepeatProbe, probe_induction
from headwise.analysis.head_roles.tally import offset_mass
from headwise.errors import ConfigError
from headwise.lm.model import Decoder
from headwise.lm.tokenizer import CharTokenizer

__all__ = ["VERSION", "HeadScores", "RepeatProbe", "frequent_characters", "offset_mass", "probe_repeats"]


def probe_repeats(
    decoder: Decoder,
    tokenizer: CharTokenizer,
    characters: str,
    *,
    length: int = 64,
    sequences: int = 8,
    seed: int = 0,
) -> RepeatProbe:
    """Induction and previous-token scores of every head on `sequences` random sequences of 2·length tokens.

    Args:
        decoder, tokenizer: the model, in eval mode.
        characters: to draw from, such as `frequent_characters(text)`; all in the vocabulary, so that each is one token.
            A copy contains no character twice, so that "the earlier equal token" is a unique position.
        length: T, at least 2, at most half the context and the number of characters.
        sequences: number of sequences. seed: sequence s is drawn with seed + s.
    Raises:
        ConfigError: naming the argument.
    """
    ids = _ids(decoder, tokenizer, characters, length, sequences)
    device = decoder.embedding.weight.device
    return probe_induction(
        lambda drawn: decoder(drawn, return_maps=True),
        ids, length=length, copies=2, sequences=sequences, seed=seed, device=device,
    )  # fmt: skip


def frequent_characters(text: str, tokenizer: CharTokenizer, count: int = 256) -> str:
    """The `count` most frequent letters and ideographs of `text` that have a token of their own, or fewer if the text
    has fewer. Punctuation and white space are excluded because heads treat them differently."""
    known = set(tokenizer.characters)
    found = Counter(c for c in text if c in known and unicodedata.category(c)[0] == "L")
    return "".join(sorted(found, key=lambda c: (-found[c], c))[:count])


def _ids(decoder: Decoder, tokenizer: CharTokenizer, characters: str, length: int, sequences: int) -> Tensor:
    """The tokens of the characters to draw from, after a check of the arguments."""
    if sequences < 1:
        raise ConfigError(f"sequences={sequences}: expected at least 1")
    if not 2 <= length <= decoder.config.context // 2:
        raise ConfigError(
            f"length={length}: expected 2 to {decoder.config.context // 2}, as two copies must fit in the context "
            f"of {decoder.config.context}"
        )
    unknown = set(characters) - set(tokenizer.characters)
    if unknown or len(set(characters)) != len(characters):
        what = f"{sorted(unknown)[0]!r} is not in the vocabulary" if unknown else "one occurs twice"
        raise ConfigError(f"characters: {what}; frequent_characters(text, tokenizer) returns a suitable set")
    if len(characters) < length:
        raise ConfigError(
            f"characters: {len(characters)} of them cannot fill length={length} without repeating; give more "
            f"characters or a smaller length"
        )
    if decoder.training:
        raise ConfigError("decoder: is in training mode; call decoder.eval() first")
    return torch.from_numpy(tokenizer.encode(characters))
