"""Where the queries of a call are among its keys, and which token its first key is."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.kernels.graph import has_no_numbers, in_graph


class Position(NamedTuple):
    """Where the queries and keys of a call are.

    Attributes:
        at_end: whether the queries are the last of the keys' tokens; False if that is not known; None if nothing shows
            where they are, as in cross attention.
        keys: how many keys there are; later ones are unfilled entries of a cache of fixed size.
        first: the token of the first key, as a cache with a window drops tokens; None if it is not known.
    """

    at_end: bool | None
    keys: int
    first: int | None = 0


def position_of(module: nn.Module, allowed: Tensor | None, n: int, m: int, window: int | None, given: Any) -> Position:
    """The position of a call whose mask is not transformers' own, or that has none.

    Args:
        allowed: boolean [b or 1, h or 1, n or 1, m], which keys each query may attend to; None for all.
        window: of the attention, and so of its cache; None without one.
        given: the other arguments of the attention function.
    """
    if n >= m or crosses(module) or (allowed is not None and (in_graph() or has_no_numbers(allowed))):
        return Position(None, m)
    if allowed is None:
        at_end, keys = (True if n == 1 and getattr(module, "is_causal", False) else None), m
    else:
        at_end, keys = _placed(allowed, n, m)
    return Position(at_end, keys, 0 if at_end is None else _first(module, n, keys, window, given))


def crosses(module: nn.Module) -> bool:
    """Whether a module attends to another sequence, as far as its class and attributes show."""
    return getattr(module, "is_cross_attention", False) or "cross" in type(module).__name__.lower()


def _placed(allowed: Tensor, n: int, m: int) -> tuple[bool | None, int]:
    """`Position.at_end` and `Position.keys` of queries that each may attend to one key more than the one before."""
    if n > 1 and (allowed.shape[2] == 1 or bool((allowed == allowed[:, :, :1]).all())):
        return None, m  # only padding
    seen = allowed.flatten(0, 1).any(0)
    last = (seen * torch.arange(1, m + 1, device=seen.device)).amax(-1)  # keys up to the last one that is allowed
    stop = int(last[-1])
    if stop < n or not torch.equal(last, torch.arange(stop - n + 1, stop + 1, device=seen.device)):
        return False, m
    return True, stop


def _first(module: nn.Module, n: int, keys: int, window: int | None, given: Any) -> int | None:
    """The token of the first key: a cache keeps at least window − 1 tokens before the queries."""
    window = getattr(getattr(module, "config", None), "attention_chunk_size", None) if window is None else window
    if window is None or keys - n < window - 1:
        return 0
    at = given.get("cache_position")
    return None if at is None else int(at[-1]) + 1 - keys
