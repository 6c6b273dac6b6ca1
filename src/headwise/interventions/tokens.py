"""Sets of tokens, as interventions accept them."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from headwise.errors import ConfigError, DTypeError, ShapeError, whole_number

Tokens: TypeAlias = int | slice | Sequence[int] | Tensor | None


def checked_tokens(name: str, tokens: Tokens) -> Tokens:
    """Return a set of tokens in a form that `selection` reads; raises for anything else.

    Args:
        tokens: a position, a slice or positions, counted from the first token of each sequence of the batch, or from
            its last one if negative; a boolean tensor [tokens] of positions; a boolean tensor [b, columns] of the
            columns of the batch, padding included, for sets that differ between batch entries; None for all.
    Raises:
        ConfigError, DTypeError, ShapeError: naming the argument.
    """
    if tokens is None or isinstance(tokens, slice):
        return tokens
    if isinstance(tokens, bool | str):
        raise ConfigError(f"{name}={tokens!r}: expected positions of tokens, a slice or a boolean tensor")
    if (one := whole_number(tokens)) is not None:
        return [one]
    if isinstance(tokens, np.ndarray):
        tokens = torch.as_tensor(tokens)
    if isinstance(tokens, Tensor) and tokens.dtype == torch.bool:
        if tokens.ndim not in (1, 2):
            raise ShapeError(f"{name}: expected boolean [tokens] or [b, columns], got shape {tuple(tokens.shape)}")
        return tokens.detach().cpu()
    if isinstance(tokens, Tensor):
        if tokens.is_floating_point() or tokens.ndim != 1:
            raise DTypeError(
                f"{name}: expected positions [k] or a boolean tensor, got {tokens.dtype} {tuple(tokens.shape)}"
            )
        return [int(at) for at in tokens.tolist()]
    places = [whole_number(at) for at in tokens] if isinstance(tokens, Sequence) else [None]
    found = [at for at in places if at is not None]
    if len(found) < len(places):
        raise ConfigError(f"{name}={tokens!r}: expected positions of tokens, a slice or a boolean tensor")
    return found


class Columns(NamedTuple):
    """The columns of some queries or keys of a batch.

    Attributes:
        position: int64 [b or 1, size], of each in the sequence of its batch entry; −1 for padding.
        lengths: [b or 1], tokens of each sequence. first: number of the first column.
    """

    position: Tensor
    lengths: Tensor
    first: int

    @classmethod
    def of(cls, real: Tensor | None, size: int) -> "Columns":
        """All columns of a batch, of which `real`, boolean [b or 1, size], are no padding; all if None."""
        real = torch.ones(1, size, dtype=torch.bool, device="cpu") if real is None else real
        return cls((real.cumsum(-1) - 1).masked_fill(~real, -1), real.sum(-1), 0)

    def part(self, first: int, size: int) -> "Columns":
        """Return the columns first … first + size − 1."""
        return Columns(self.position[:, first : first + size], self.lengths, first)


def selection(tokens: Tokens, columns: Columns) -> Tensor:
    """Return which of the columns are in the set: boolean [b or 1, size] on the CPU.

    Args:
        tokens: of `checked_tokens`. Positions that a sequence does not have are not in it.
    """
    size = columns.position.shape[1]
    if tokens is None:
        return torch.ones(1, size, dtype=torch.bool, device="cpu")
    if isinstance(tokens, Tensor) and tokens.ndim == 2:
        here = tokens[:, columns.first : columns.first + size]
        return torch.nn.functional.pad(here, (0, size - here.shape[1]))
    lengths = columns.lengths.tolist()
    chosen = torch.zeros(len(lengths), max(lengths) + 1, dtype=torch.bool, device="cpu")  # the last one for padding
    for row, length in zip(chosen, lengths, strict=True):
        if isinstance(tokens, Tensor):
            row[: len(tokens)] = tokens[: len(row)]
            row[length:] = False
        elif isinstance(tokens, slice):
            row[range(*tokens.indices(length))] = True
        else:
            assert isinstance(tokens, Sequence)
            row[[at % length for at in tokens if -length <= at < length]] = True
    wide = max(len(chosen), len(columns.position))
    at = columns.position % chosen.shape[1]
    return chosen.expand(wide, -1).gather(1, at.expand(wide, -1))
