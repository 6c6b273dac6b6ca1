"""The tokens of an input as the caller gives them: checked, and grouped into classes of keys."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.errors import ConfigError, DTypeError, ShapeError
from headwise.stats import ClassMass

# [CLS], [SEP], <s>, </s>, <pad>, <|endoftext|>, <extra_id_0>
MARKER = re.compile(r"\[[A-Z]+\]|<\|[^|]+\|>|</?[A-Za-z_]+\d*>")


def token_ids(tokens: Any, b: int, m: int) -> Tensor:
    """Check the integers of m tokens; return them as [b or 1, m]."""
    ids = torch.as_tensor(tokens)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise DTypeError(f"tokens: expected integers [{m}] or [{b}, {m}], got {ids.dtype}")
    ids = torch.atleast_2d(ids)
    if ids.ndim != 2 or ids.shape[1] != m or len(ids) not in (1, b):
        raise ShapeError(f"tokens: shape {tuple(ids.shape)} does not fit; expected ({m},) or ({b}, {m}), one a token")
    return ids.cpu().long()


def token_vectors(embeddings: Any, ids: Tensor) -> Tensor:
    """Check a table of embeddings [vocabulary, d]; return the row of each token, [b or 1, m, d]."""
    if not isinstance(embeddings, Tensor) or not embeddings.is_floating_point():
        came = str(embeddings.dtype) if isinstance(embeddings, Tensor) else type(embeddings).__name__
        raise DTypeError(f"embeddings: expected a floating-point tensor [vocabulary, d], got {came}")
    if embeddings.ndim != 2 or 0 in embeddings.shape:
        raise ShapeError(f"embeddings: shape {tuple(embeddings.shape)}, expected [vocabulary, d]")
    kinds, at = ids.unique(return_inverse=True)
    if int(kinds[0]) < 0 or int(kinds[-1]) >= len(embeddings):
        raise ShapeError(
            f"embeddings: {len(embeddings)} rows, but tokens holds {int(kinds[0])} to {int(kinds[-1])}; give the input "
            f"embedding of the model that read these tokens"
        )
    rows = embeddings.detach()[kinds.to(embeddings.device)].float().cpu()
    wrong = ~rows.isfinite().all(-1)
    if bool(wrong.any()):
        raise ConfigError(f"embeddings: row {int(kinds[wrong][0])} has non-finite values; expected finite ones")
    return rows[at]


def texts(pieces: Any, b: int, m: int) -> list[list[str]]:
    """Check the texts of the tokens; return one list, or one for each batch entry."""
    rows = [pieces] if all(isinstance(piece, str) for piece in pieces) else list(pieces)
    for row in rows:
        if not isinstance(row, Sequence) or not all(isinstance(piece, str) for piece in row):
            raise DTypeError("pieces: expected the text of each token, a list of strings or one list a batch entry")
        if len(row) != m:
            raise ShapeError(f'pieces: {len(row)} of them for {m} tokens; give the text of each token ("" for none)')
    if len(rows) not in (1, b):
        raise ShapeError(f"pieces: {len(rows)} lists for a batch of {b}")
    return [list(row) for row in rows]


def is_marker(piece: str) -> bool:
    """Whether the piece is a marker outside the text, such as [SEP] or <|endoftext|>."""
    return MARKER.fullmatch(piece) is not None


def classes_of(pieces: Sequence[Sequence[str]]) -> dict[str, Tensor]:
    """Boolean [b or 1, m] for separators (white space and markers) and for punctuation."""
    found: dict[str, list[Tensor]] = {"separator": [], "punctuation": []}
    for row in pieces:
        marker = torch.tensor([is_marker(piece) for piece in row])
        blank = ClassMass.of_tokens(row, "separator").members[0]
        marks = ClassMass.of_tokens(row, "punctuation").members[0]
        found["separator"].append(blank | marker)
        found["punctuation"].append(marks & ~marker)
    return {name: torch.stack(rows) for name, rows in found.items()}


def rare_keys(ids: Tensor, seen: Tensor, frequencies: Mapping[int, float] | Tensor, share: float) -> Tensor:
    """The keys of the least frequent tokens, boolean [b or 1, m].

    Of the keys in sight of any query (`seen`, [b or 1, m]), the rarest tokens are taken until they make up `share`, at
    least one. In a sentence of 20 or fewer tokens, at 0.05, that is the rarest token (Voita et al. 2019)."""
    if not 0.0 < share < 1.0:
        raise ConfigError(f"rare={share}: expected a share of the keys, more than 0 and less than 1")
    wide = max(len(ids), len(seen))
    ids, seen = ids.expand(wide, -1), seen.expand(wide, -1)
    found = torch.zeros(ids.shape, dtype=torch.bool)
    for row, real, members in zip(ids, seen, found, strict=True):
        kinds, place, counts = torch.unique(row[real], return_inverse=True, return_counts=True)
        often = torch.tensor([_frequency(frequencies, int(kind)) for kind in kinds], dtype=torch.float64)
        order = often.argsort(stable=True)
        before = counts[order].cumsum(0) - counts[order]
        taken = torch.zeros(len(kinds), dtype=torch.bool)
        taken[order[before < share * len(place)]] = True
        members[real] = taken[place]
    return found


def _frequency(frequencies: Mapping[int, float] | Tensor, token: int) -> float:
    if isinstance(frequencies, Mapping):
        return float(frequencies.get(token, 0))
    if not 0 <= token < len(frequencies):
        raise ShapeError(f"frequencies: {len(frequencies)} of them, but tokens holds {token}; give one for each token")
    return float(frequencies[token])
