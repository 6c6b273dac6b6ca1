"""A tokenizer with one token per character; characters outside the vocabulary are encoded as UTF-8 bytes."""

import json
from collections import Counter
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from headwise.contents import Entry, parsed
from headwise.errors import ConfigError, TextError
from headwise.lm.text_files import not_text

BYTES = 256  # ids 0..255 are the bytes


class CharTokenizer:
    """One token per character, with ids from 256 on in the order of `characters`; UTF-8 bytes for all others.

    >>> tokenizer = CharTokenizer.from_text("水浒水浒")
    >>> tokenizer.encode("水!")                       # "!" is not in the vocabulary: its byte, 0x21
    array([256,  33])
    >>> tokenizer.decode([256, 0x21])
    '水!'
    """

    def __init__(self, characters: str) -> None:
        if len(set(characters)) != len(characters):
            raise ConfigError("CharTokenizer(characters): a character occurs twice")
        self.characters = characters

    @classmethod
    def from_text(cls, text: str, min_count: int = 2) -> "CharTokenizer":
        """A tokenizer of all characters that occur at least `min_count` times, sorted by code point."""
        counts = Counter(text)
        return cls("".join(sorted(c for c in counts if counts[c] >= min_count)))

    @property
    def vocab_size(self) -> int:
        """Number of token ids: bytes and characters."""
        return BYTES + len(self.characters)

    def encode(self, text: str, *, byte_rate: float = 0.0, seed: int = 0) -> np.ndarray:
        """Encode a text as token ids, int64.

        Args:
            byte_rate: share of the known characters to encode as bytes, so that byte tokens occur in training.
            seed: of the choice of these characters.
        """
        points = self._points(text)
        ids = self._ids[points]
        if byte_rate > 0:
            ids[np.random.default_rng(seed).random(len(ids)) < byte_rate] = -1
        unknown = np.flatnonzero(ids < 0)
        if not len(unknown):
            return ids
        pieces, last = [], 0
        for at in unknown.tolist():
            pieces.append(ids[last:at])
            pieces.append(np.frombuffer(text[at].encode(), np.uint8).astype(np.int64))
            last = at + 1
        return np.concatenate([*pieces, ids[last:]])

    def spans(self, text: str) -> list[tuple[int, int]]:
        """The token range of each character of `text`."""
        points = self._points(text)
        # UTF-8 has 1 byte below 0x80, 2 below 0x800, 3 below 0x10000, else 4.
        lengths = 1 + (points >= 0x80) + (points >= 0x800).astype(int) + (points >= 0x10000)
        lengths[self._ids[points] >= 0] = 1
        ends = np.cumsum(lengths)
        return list(zip((ends - lengths).tolist(), ends.tolist(), strict=True))

    def decode(self, ids: list[int] | np.ndarray) -> str:
        """Decode token ids; bytes that are not UTF-8 become U+FFFD."""
        out = bytearray()
        for i in map(int, ids):
            if not 0 <= i < self.vocab_size:
                raise TextError(f"token id {i} is outside the vocabulary of {self.vocab_size}")
            out += bytes((i,)) if i < BYTES else self.characters[i - BYTES].encode()
        return out.decode("utf-8", errors="replace")

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of single tokens; a byte as <0xE4>."""
        return [f"<0x{i:02X}>" if i < BYTES else self.decode([i]) for i in ids]

    def to_json(self) -> str:
        """For a checkpoint's header."""
        return json.dumps({"characters": self.characters}, ensure_ascii=False)

    @classmethod
    def from_json(cls, code: str) -> "CharTokenizer":
        """The inverse of `to_json`. CheckpointError for anything else."""
        return cls(Entry(parsed(code), "tokenizer").word("characters"))

    @cached_property
    def _ids(self) -> np.ndarray:
        table = np.full(0x110000, -1, np.int64)
        table[self._points(self.characters)] = np.arange(BYTES, self.vocab_size)
        return table

    @staticmethod
    def _points(text: str) -> np.ndarray:
        try:
            return np.frombuffer(text.encode("utf-32-le"), np.uint32)
        except UnicodeEncodeError as error:
            raise not_text(text, error) from None
