"""Training texts: a part is held out, the rest is sampled as random windows."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from headwise.errors import ConfigError, TextError
from headwise.lm.text_files import read_text
from headwise.lm.tokenizer import CharTokenizer
from headwise.seeds import step_seed

HELD_OUT = 0.05  # share at the end of each file


@dataclass(frozen=True)
class Corpus:
    """Token streams for training and evaluation, one tensor per file.

    The last 5 % of *each* file is held out, so that editions of one book in two scripts hold out the same passages.
    """

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
        """Read the files; the vocabulary is made from the training parts unless a tokenizer is given.

        A share `byte_rate` of the training characters is encoded as bytes. Every frequent character has a token of its
        own, so the byte tokens would otherwise never be trained.
        """
        if not files:
            raise ConfigError("train: no files given", "train：没有给出文件")
        texts = [read_text(file) for file in files]
        cuts = [len(text) - int(len(text) * HELD_OUT) for text in texts]
        for file, text, cut in zip(files, texts, cuts, strict=True):
            if min(cut, len(text) - cut) <= context:
                raise TextError(
                    f"{os.fspath(file)!r} has {len(text)} characters; holding out 5 %, a context of {context} needs "
                    f"at least {(context + 1) * 20}: give a longer text or a smaller --context",
                    f"{os.fspath(file)!r} 有 {len(text)} 个字符；留出 5 % 后，{context} 的上下文至少需要 "
                    f"{(context + 1) * 20} 个字符：请给更长的文本，或减小 --context",
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
        """Return [size, context + 1] windows of the training parts, each within one file. They depend only on seed and
        step, so that a resumed run continues exactly.

        A share `repeat_share` of the windows repeats its own beginning at a random period: text that can only be
        predicted from earlier text.
        """
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
