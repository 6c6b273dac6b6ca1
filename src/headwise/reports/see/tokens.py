"""The tokens of watched maps, from ids with a tokenizer, or from their text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.analysis.head_roles.tokens import is_marker
from headwise.errors import DTypeError, ShapeError
from headwise.lm.loading.characters import readable
from headwise.lm.loading.tokenized import units_of
from headwise.lm.tokenizer import CharTokenizer
from headwise.reports.see.passages import Side
from headwise.reports.see.tokenizers import decoded


@dataclass(frozen=True, eq=False)
class Text:
    """The tokens of a batch.

    Attributes:
        ids: [b or 1, m], None if only their text is known.
        pieces: the text of the tokens of each entry. words: the same with blanks between words. None without text.
        special: of each entry, which tokens are not part of the text.
    """

    ids: Tensor | None
    pieces: list[list[str]] | None
    words: list[list[str]] | None
    special: list[list[bool]]

    @property
    def length(self) -> int:
        """The number of tokens of an entry."""
        return len(self.special[0])

    @property
    def entries(self) -> int:
        """The number of entries; one may apply to the whole batch."""
        return len(self.special)

    def side(self, entry: int, tokens: Sequence[int]) -> Side:
        """Tokens of an entry as a side of a map."""
        at = entry if self.entries > 1 else 0
        special = [self.special[at][i] for i in tokens]
        if self.words is None or self.pieces is None:
            assert self.ids is not None
            names = [str(int(self.ids[at, i])) for i in tokens]
            return Side(names, units_of(names), [True] * len(names))
        return Side([self.words[at][i] for i in tokens], units_of([self.pieces[at][i] for i in tokens]), special)


def numbered(tokens: Sequence[int]) -> Side:
    """Positions without known tokens, shown as numbers."""
    names = [str(i) for i in tokens]
    return Side(names, units_of(names), [True] * len(names))


def text_of(name: str, tokens: Any, pieces: Any, tokenizer: Any) -> Text | None:
    """The tokens given by the arguments `tokens` and `pieces`; None if both are None.

    Args:
        name: "" or "decoder_", the prefix of the arguments' names in messages.
        tokenizer: converts tokens to pieces; see `headwise.reports.see.tokenizers`.
    """
    if tokens is None and pieces is None:
        return None
    ids = None if tokens is None else _ids(f"{name}tokens", tokens)
    if pieces is not None:
        raw = _texts(f"{name}pieces", pieces)
        if ids is not None and (len(raw) != len(ids) or len(raw[0]) != ids.shape[1]):
            raise ShapeError(
                f"{name}pieces: {len(raw)} × {len(raw[0])} of them for {name}tokens of {tuple(ids.shape)}; expected "
                f"one for each token"
            )
        marked = [[is_marker(piece) for piece in row] for row in raw]
        return _written(ids, raw, marked)
    assert ids is not None
    if tokenizer is None:
        return Text(ids, None, None, [[False] * ids.shape[1]] * len(ids))
    if isinstance(tokenizer, CharTokenizer):
        return _written(ids, [tokenizer.pieces(row) for row in ids.tolist()], [[False] * ids.shape[1]] * len(ids))
    rows = [decoded(tokenizer, row) for row in ids.tolist()]
    raw = [pieces for pieces, _ in rows]
    if not rows[0][1]:
        return Text(ids, raw, raw, [[is_marker(piece) for piece in row] for row in raw])
    known = getattr(tokenizer, "all_special_ids", None)
    marks = [
        [is_marker(piece) if known is None else i in known for i, piece in zip(row, pieces, strict=True)]
        for row, pieces in zip(ids.tolist(), raw, strict=True)
    ]
    decoder = repr(getattr(getattr(tokenizer, "backend_tokenizer", tokenizer), "decoder", None))
    return _written(ids, raw, marks, blanks=decoder.startswith("WordPiece"))


def _written(ids: Tensor | None, raw: list[list[str]], special: list[list[bool]], blanks: bool = False) -> Text:
    """blanks: whether blanks separate words although no token contains them, as with WordPiece."""
    blanks = blanks or any(token.startswith("##") for row in raw for token in row)
    pieces = [readable(row, marks) for row, marks in zip(raw, special, strict=True)]
    words = [_spaced(*rows) for rows in zip(raw, pieces, special, strict=True)] if blanks else pieces
    return Text(ids, pieces, words, special)


def _spaced(raw: Sequence[str], pieces: Sequence[str], special: Sequence[bool]) -> list[str]:
    """Pieces with blanks between words, which WordPiece omits."""
    words = []
    for i, (token, piece) in enumerate(zip(raw, pieces, strict=True)):
        begins = i == 0 or special[i - 1] or special[i] or token.startswith("##") or not piece[:1].isalnum()
        words.append(piece if begins else f" {piece}")
    return words


def _ids(name: str, tokens: Any) -> Tensor:
    ids = torch.as_tensor(tokens)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise DTypeError(f"{name}: expected integers [m] or [b, m], got {ids.dtype}")
    ids = torch.atleast_2d(ids).cpu().long()
    if ids.ndim != 2 or 0 in ids.shape:
        raise ShapeError(f"{name}: shape {tuple(ids.shape)}, expected [m] or [b, m]")
    return ids


def _texts(name: str, pieces: Any) -> list[list[str]]:
    flat = not isinstance(pieces, str) and all(isinstance(piece, str) for piece in pieces)
    rows = [list(pieces)] if flat else [list(row) for row in pieces if not isinstance(row, str)]
    if isinstance(pieces, str) or not rows or not all(isinstance(piece, str) for row in rows for piece in row):
        raise DTypeError(f"{name}: expected the text of each token, a list of strings or one list per batch entry")
    if not rows[0] or len({len(row) for row in rows}) > 1:
        raise ShapeError(
            f"{name}: lists of {[len(row) for row in rows][:6]}; all entries of a batch must have the same "
            f"number of tokens"
        )
    return rows
