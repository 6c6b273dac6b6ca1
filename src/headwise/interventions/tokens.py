"""Sets of tokens, as interventions accept them."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from headwise.errors import ConfigError, DTypeError, ShapeError, whole_number

Tokens: TypeAlias = int | slice | Sequence[int] | Tensor | None


def checked_tokens(name: str, tokens: Tokens) -> Tokens:
    """Return a set of tokens in a form that `selection` reads; raises for anything else.

    Args:
        tokens: a position, a slice or positions, counted from the start of the sequence, or from its end if negative;
            a boolean tensor [tokens], or [b, tokens] for sets that differ between batch entries; None for all.
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
            raise ShapeError(f"{name}: expected boolean [tokens] or [b, tokens], got shape {tuple(tokens.shape)}")
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


def selection(tokens: Tokens, first: int, size: int, length: int) -> Tensor:
    """Return which of the tokens at positions first … first + size − 1 are in the set: boolean [b or 1, size] on the
    CPU.

    Args:
        tokens: of `checked_tokens`. Positions that a call does not have are not in it.
        length: of the sequence, from which negative positions are counted.
    """
    if isinstance(tokens, Tensor):
        given = tokens[None] if tokens.ndim == 1 else tokens
        here = given[:, first : first + size]
        return torch.nn.functional.pad(here, (0, size - here.shape[1]))
    chosen = torch.zeros(1, length, dtype=torch.bool, device="cpu")
    if tokens is None:
        chosen[:] = True
    elif isinstance(tokens, slice):
        chosen[:, range(*tokens.indices(length))] = True
    else:
        assert isinstance(tokens, Sequence)
        inside = [at for at in tokens if -length <= at < length]
        chosen[:, inside] = True
    return chosen[:, first : first + size]
