"""The tokens of watched maps, from ids with a tokenizer, or from their text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.analysis.head_roles.tokens import is_marker
from headwise.errors import DTypeError, ShapeError
from headwise.lm.loading.characters import decoded_tokens
from headwise.lm.loading.tokenized import units_of
from headwise.reports.see.passages import Side
from headwise.reports.see.tokenizers import decoded


@dataclass(frozen=True, eq=False)
class Text:
    """The tokens of a batch.

    Attributes:
        ids: [b or 1, m], None if only their text is known.
        pieces: the text of the tokens of each entry, with the blanks between words; None without text.
        special: of each entry, which tokens are not part of the text.
    """

    ids: Tensor | None
    pieces: list[list[str]] | None
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
        if self.pieces is None:
            assert self.ids is not None
            names = [str(int(self.ids[at, i])) for i in tokens]
            return Side(names, units_of(names), [True] * len(names))
        words = [self.pieces[at][i] for i in tokens]
        return Side(words, units_of(words), special)


def numbered(tokens: Sequence[int]) -> Side:
    """Positions without known tokens, shown as numbers."""
    names = [str(i) for i in tokens]
    return Side(names, units_of(names), [True] * len(names))


def text_of(name: str, tokens: Any, pieces: Any, tokenizer: Any, written: str = "text") -> Text | None:
    """The tokens given by the arguments `tokens` and `pieces`; None if both are None.

    Args:
        name: "" or "decoder_", the prefix of the arguments' names in messages.
        tokenizer: converts tokens to pieces; see `headwise.reports.see.tokenizers`. written: how pieces are written, as
            in `decoded_tokens`.
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
        shown = [decoded_tokens(row, written) for row in raw]
        return Text(ids, shown, [[is_marker(piece) for piece in row] for row in raw])
    assert ids is not None
    if tokenizer is None:
        return Text(ids, None, [[False] * ids.shape[1]] * len(ids))
    rows = [decoded(tokenizer, row) for row in ids.tolist()]
    return Text(ids, [row.texts for row in rows], [row.special for row in rows])


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
