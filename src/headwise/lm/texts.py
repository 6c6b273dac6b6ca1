"""Texts for the character model: read from files, as tokens, as training and held-out parts."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headwise.base.files import check_regular
from headwise.base.read import Entry, parsed
from headwise.base.run import step_seed
from headwise.errors import ConfigError, TextError
from headwise.wording import tr

MARK = b"\xef\xbb\xbf"  # a byte order mark, which some editors write


def read_text(path: str | os.PathLike[str]) -> str:
    """Read a whole file. TextError if it is empty, not UTF-8, or binary, naming the byte; or no regular file."""
    check_regular(path)
    data = Path(path).read_bytes()
    text = decoded(data, path)
    if not text:
        raise TextError("{path!r} is empty", path=os.fspath(path))
    return text


def decoded(data: bytes, path: str | os.PathLike[str], first: int = 0) -> str:
    """Decode contents from byte `first` on; TextError naming a byte that is not UTF-8, or NUL, and its offset."""
    if first == 0 and data.startswith(MARK):
        data, first = data[len(MARK) :], len(MARK)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise not_utf8(path, data[error.start], first + error.start) from None
    if "\0" in text:
        raise nul(path, first + data.index(0))
    return text.replace("\r\n", "\n").replace("\r", "\n")


def not_utf8(path: str | os.PathLike[str], byte: int, offset: int) -> TextError:
    """The error for a byte that is not UTF-8, at an offset of the file."""
    encoding = "UTF-16" if offset == 0 and byte in (0xFE, 0xFF) else "GB18030"  # these begin a byte order mark
    return TextError(
        "{path!r} is not UTF-8: byte 0x{byte:02x} at offset {offset}; convert it, for example with iconv -f "
        "{encoding} -t UTF-8",
        path=os.fspath(path), byte=byte, offset=offset, encoding=encoding,
    )  # fmt: skip


def nul(path: str | os.PathLike[str], offset: int) -> TextError:
    """The error for a NUL byte, which UTF-16 and binary files contain, at an offset of the file."""
    return TextError(
        "{path!r} is not text: NUL byte at offset {offset}; expected UTF-8", path=os.fspath(path), offset=offset
    )


def not_text(text: str, error: UnicodeEncodeError) -> TextError:
    """The error for half of a surrogate pair, which cannot be encoded."""
    return TextError(
        "text: character {start} is half of a surrogate pair (U+{sign:04X}), which is not valid text",
        start=error.start,
        sign=ord(text[error.start]),
    )


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


HELD_OUT = 0.05  # share at the end of each file


@dataclass(frozen=True)
class Corpus:
    """Token streams, one tensor per file. The last 5 % of *each* file is held out, so that editions of one book in two
    scripts hold out the same passages."""

    names: list[str]
    train: list[Tensor]
    heldout: list[Tensor]
    tokenizer: CharTokenizer

    @classmethod
    def read(
        cls,
        files: Sequence[str | os.PathLike[str]],
        *,
        context: int,
        tokenizer: CharTokenizer | None = None,
        byte_rate: float = 0.003,
        seed: int = 0,
    ) -> "Corpus":
        """Read the files; without a tokenizer, the vocabulary is made from the training parts. A share `byte_rate` of
        the characters is encoded as bytes, whose tokens would otherwise never be trained."""
        if not files:
            raise ConfigError(tr("train: no files given"))
        texts = [read_text(file) for file in files]
        cuts = [len(text) - int(len(text) * HELD_OUT) for text in texts]
        for file, text, cut in zip(files, texts, cuts, strict=True):
            if min(cut, len(text) - cut) <= context:
                raise TextError(
                    "{file!r} has {count} characters; holding out 5 %, a context of {context} needs at least "
                    "{least}: give a longer text or a smaller --context",
                    file=os.fspath(file),
                    count=len(text),
                    context=context,
                    least=(context + 1) * 20,
                )
        if tokenizer is None:
            tokenizer = CharTokenizer.from_text("".join(t[:cut] for t, cut in zip(texts, cuts, strict=True)))
        train = [
            torch.from_numpy(tokenizer.encode(t[:cut], byte_rate=byte_rate, seed=seed))
            for t, cut in zip(texts, cuts, strict=True)
        ]
        heldout = [torch.from_numpy(tokenizer.encode(t[cut:])) for t, cut in zip(texts, cuts, strict=True)]
        return cls([Path(file).name for file in files], train, heldout, tokenizer)

    @cached_property
    def sha256(self) -> str:
        """Checksum of all tokens, including those held out."""
        digest = hashlib.sha256()
        for stream in (*self.train, *self.heldout):
            digest.update(str(len(stream)).encode())
            digest.update(stream.numpy().tobytes())
        return digest.hexdigest()

    def batch(self, size: int, context: int, *, seed: int, step: int, repeat_share: float = 0.0) -> Tensor:
        """[size, context + 1] windows of the training parts, each within one file, by seed and step alone, so that a
        resumed run continues exactly. A share `repeat_share` of them repeats its own beginning at a random period."""
        generator = torch.Generator().manual_seed(step_seed(seed, step))
        rooms = torch.tensor([len(stream) - context for stream in self.train])
        at = torch.randint(int(rooms.sum()), (size,), generator=generator)
        file = torch.bucketize(at, rooms.cumsum(0), right=True)
        start = at - (rooms.cumsum(0) - rooms)[file]
        windows = torch.stack(
            [self.train[f][s : s + context + 1] for f, s in zip(file.tolist(), start.tolist(), strict=True)]
        )
        periods = torch.randint(min(16, context), max(17, context // 2 + 1), (size,), generator=generator)
        periods[torch.rand(size, generator=generator) >= repeat_share] = context + 1
        return windows.gather(1, torch.arange(context + 1) % periods[:, None])

    def heldout_windows(self, context: int, most: int | None = None) -> list[Tensor]:
        """For each file, [windows, context + 1]: the held-out part in order, or `most` evenly spaced windows."""
        found = []
        for stream in self.heldout:
            starts = torch.arange(0, len(stream) - context, context)
            if most is not None and len(starts) > most:
                starts = starts[torch.linspace(0, len(starts) - 1, most).long()]
            found.append(torch.stack([stream[s : s + context + 1] for s in starts.tolist()]))
        return found
