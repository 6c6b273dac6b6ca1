"""A tokenized text: its tokens and their positions in the text."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from headwise.wording import Message


@dataclass(frozen=True, eq=False)
class TokenizedText:
    """A text and its tokens.

    Attributes:
        text: the original text.
        ids: [n] int64 token ids, including the special tokens that the tokenizer adds.
        pieces: the readable form of each token, such as "武", " world" or "[SEP]". A token that ends inside a character
            has "", and the last token of that character has the whole character.
        spans: (start, end) of each token in the text, in characters; empty for tokens that are not in the text.
        special: whether each token was added by the tokenizer, such as [CLS] and <s>.
        remarks: notes on the tokenization, such as how much of the text is not in the vocabulary.
    """

    text: str
    ids: Tensor
    pieces: list[str]
    spans: list[tuple[int, int]]
    special: list[bool]
    remarks: tuple[Message, ...] = ()

    def __len__(self) -> int:
        return len(self.pieces)

    @property
    def words(self) -> list[str]:
        """The text divided at its tokens; joined without the special ones, they are the whole text. Characters that the
        tokenizer drops, such as blanks between words, belong to the token after them."""
        found: list[str] = []
        at, last = 0, -1
        for i, (piece, (start, end), special) in enumerate(zip(self.pieces, self.spans, self.special, strict=True)):
            if special or start == end:
                found.append(piece)
                continue
            found.append(self.text[at:end])
            at, last = end, i
        if last >= 0:
            found[last] += self.text[at:]
        return found

    @property
    def units(self) -> list[tuple[int, int]]:
        """Token ranges that can be shown: a token, or all tokens of one character."""
        return units_of(self.pieces)

    def __repr__(self) -> str:
        start = " ".join(self.text.split())
        return f"TokenizedText({start[:24] + '…' if len(start) > 24 else start!r}, {len(self)} tokens)"


def units_of(pieces: Sequence[str]) -> list[tuple[int, int]]:
    """Token ranges that each end with a nonempty piece; empty pieces at the end belong to the last range."""
    ends = [i + 1 for i, piece in enumerate(pieces) if piece]
    if not ends or ends[-1] < len(pieces):
        ends[-1:] = [len(pieces)]
    return list(zip([0, *ends[:-1]], ends, strict=True))
