"""One text in three parts: for planning, for predicting the loss, and for evaluation."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headwise.compress.words import term
from headwise.errors import ConfigError, TextError
from headwise.lm.texts import HELD_OUT, CharTokenizer, Corpus

TOGETHER = 2  # windows in a batch: the unit of standard errors of differences
HEAL_BATCH = 8


@dataclass(frozen=True)
class Texts:
    """Batches [up to 2, context + 1] of token ids.

    decide: of the first 95 % of the text, drawn at random. foretell, judge: alternating windows of the last 5 %, which
    `headwise train` holds out too.
    """

    name: str
    context: int
    decide: tuple[Tensor, ...]
    foretell: tuple[Tensor, ...]
    judge: tuple[Tensor, ...]
    corpus: Corpus

    def described(self, *, decided: bool) -> str:
        """A description of the parts; decided: whether the first one is used."""
        decide, foretell, judge = (sum(map(len, part)) for part in (self.decide, self.foretell, self.judge))
        held: dict[str, int | float | str] = {"name": self.name, "context": self.context, "share": HELD_OUT}
        held |= {"foretell": foretell, "judge": judge}
        return term("texts", decide=decide, **held) if decided else term("held_texts", **held)

    def healing(self, steps: int, seed: int = 0) -> Iterator[Tensor]:
        """Batches [8, context + 1] to train on, of the first 95 %."""
        return (self.corpus.batch(HEAL_BATCH, self.context, seed=seed + 1, step=step) for step in range(steps))


def check_windows(context: int | None, windows: int) -> None:
    """Raise ConfigError for sizes that are out of range. context: None for that of the model."""
    for name, value, least in (("--context", context, 2), ("--windows", windows, 1)):
        if value is not None and value < least:
            raise ConfigError(f"{name} {value}: expected at least {least}", f"{name} {value}：应不小于 {least}")


def split_text(
    file: str | os.PathLike[str], tokenizer: CharTokenizer, *, context: int, windows: int = 16
) -> Texts:  # fmt: skip
    """The parts of a UTF-8 file: `windows` for planning, at most as many for prediction, and at most four times as many
    for evaluation. TextError if the text is too short for that; the same file gives the same parts."""
    check_windows(context, windows)
    corpus = Corpus.read([file], context=context, tokenizer=tokenizer, byte_rate=0.0)
    held = corpus.heldout_windows(context)[0]
    if len(held) < 2:
        raise TextError(
            f"{os.fspath(file)!r}: its last {HELD_OUT:.0%} hold {len(held)} window of {context} tokens; "
            f"expected at least 2, one to predict and one to evaluate: give a longer text, or a smaller --context",
            f"{os.fspath(file)!r}：末尾 {HELD_OUT:.0%} 只有 {len(held)} 个 {context} 词元的窗口；至少需要 2 个，"
            "分别用于预测与评估：请给更长的文本，或减小 --context",
        )
    decide = corpus.batch(windows, context, seed=0, step=0)
    parts = [decide, _evenly(held[0::2], windows), _evenly(held[1::2], 4 * windows)]
    batches = [tuple(part.split(TOGETHER)) for part in parts]
    return Texts(Path(file).name, context, batches[0], batches[1], batches[2], corpus)


def _evenly(windows: Tensor, most: int) -> Tensor:
    if len(windows) <= most:
        return windows
    return windows[torch.linspace(0, len(windows) - 1, most).long()]
