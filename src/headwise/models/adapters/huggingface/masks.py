"""The mask function that transformers calls for attn_implementation="headwise": a `MaskTensor` in O(n) memory."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from headwise.mask_tensors import both, of_boolean, of_padding
from headwise.masks import Everything, Grid, Mask, Span, is_causal
from headwise.models.adapters.huggingface.library import library
from headwise.models.adapters.huggingface.mask_tensor import MaskTensor
from headwise.models.adapters.huggingface.patterns import MaskFunction, Place, Unknown, read
from headwise.models.adapters.huggingface.positions import Position


def make_mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: Tensor | None = None,
    device: Any = "cpu",
    dtype: torch.dtype = torch.float32,
    cache_position: Tensor | None = None,
    **kwargs: Any,
) -> MaskTensor | None:
    """The mask of a call, by transformers' `AttentionMaskInterface`.

    Args:
        q_offset, kv_offset: the positions of the first query and the first key for mask_function.
        mask_function: (batch, head, query, key) indices to booleans.
        attention_mask: [batch, all keys so far], True for tokens, or None.
        dtype: of the mask that the model gets.
        cache_position: [q_length], the positions of the queries, consecutive; transformers before 5.4 passes them
            instead of q_length, q_offset and device.
        kwargs: further arguments of the interface, such as when a mask may be omitted.
    Returns:
        [batch, 1, q_length, kv_length], for the model the mask of attn_implementation="eager"; None where that is None.
        A function that is not one of transformers' own is evaluated to a boolean of that size, as transformers does
        with every function.
    """
    theirs = library("masking_utils")
    function = theirs.causal_mask_function if mask_function is None else mask_function
    if cache_position is None:
        assert q_length is not None
        places: dict[str, Any] = {"q_length": q_length, "q_offset": int(q_offset), "device": device}
    else:
        q_length, device, places = len(cache_position), cache_position.device, {"cache_position": cache_position}
        q_offset = int(cache_position[0]) if q_length else 0
    eager = partial(
        theirs.eager_mask, batch_size=batch_size, kv_length=kv_length, kv_offset=kv_offset,
        attention_mask=attention_mask, dtype=dtype, **places, **kwargs,
    )  # fmt: skip
    if kwargs.get("allow_is_bidirectional_skip") and _leaves_out(eager):
        return None
    # Queries are aligned to the end of the keys: keys beyond are unfilled entries of a fixed cache.
    keys = q_length + int(q_offset) - kv_offset
    at_end: bool | None = True
    shape = batch_size, q_length, kv_length
    real = None
    if attention_mask is not None:
        # Keys beyond the end of the mask are unfilled.
        missing = max(0, kv_offset + kv_length - attention_mask.shape[-1])
        real = pad(attention_mask.bool(), (0, missing)).expand(batch_size, -1)
    try:
        mask: Mask | None = read(function, Place(kv_offset, min(keys, kv_length)))
        if mask == Everything():
            at_end = True if int(q_offset) and keys == kv_length else None
            mask, keys = None, kv_length  # for any alignment of the queries
        elif keys > kv_length or (keys < kv_length and not is_causal(mask)):
            raise Unknown("queries that are not aligned to the end of the keys")
    except Unknown:
        # Padding is a separate mask, so that the user's function stays one boolean for the whole batch.
        index = _indices(batch_size, q_length, kv_length, int(q_offset), kv_offset, device)
        cells = _evaluate(function, index, theirs, bool(kwargs.get("use_vmap")))
        at_end = keys == kv_length or (q_length <= keys < kv_length and not bool(cells[..., keys:].any()))
        keys = keys if at_end else kv_length
        mask = of_boolean(cells[..., :keys])
    if real is not None:
        padding = of_padding(real[:, : kv_offset + keys], q_length)
        if padding is not None and kv_offset:
            padding = padding.with_gap(Span(0, kv_offset), Grid(batch_size, 1, q_length, keys))
        mask = both(mask, padding)
    position = Position(at_end, keys, kv_offset)
    return MaskTensor(mask, shape, position, device, dtype, partial(eager, mask_function=function))


class _Read(Exception):
    """A mask function was called."""


def _leaves_out(eager: Callable[..., Tensor | None]) -> bool:
    """Whether eager attention omits the mask: transformers decides that before it calls any mask function."""

    def read(*index: Tensor) -> Tensor:
        raise _Read

    try:
        return eager(mask_function=read) is None
    except _Read:
        return False


def _indices(b: int, n: int, m: int, q_offset: int, kv_offset: int, device: Any) -> tuple[Tensor, ...]:
    return (
        torch.arange(b, device=device),
        torch.arange(1, device=device),
        torch.arange(n, device=device) + q_offset,
        torch.arange(m, device=device) + kv_offset,
    )


def _evaluate(function: MaskFunction, index: tuple[Tensor, ...], theirs: Any, one_by_one: bool) -> Tensor:
    """The boolean [b, 1, n, m] of a function; `one_by_one` for functions that may not support broadcasting."""
    if not one_by_one:
        cells = function(*(i[(None,) * at + (slice(None),) + (None,) * (3 - at)] for at, i in enumerate(index)))
        return cells.expand(len(index[0]), 1, len(index[2]), len(index[3]))
    for axis in reversed(range(4)):
        places = [None] * 4
        places[axis] = 0  # type: ignore[call-overload]
        function = torch.vmap(function, in_dims=tuple(places), out_dims=0)
    with theirs.TransformGetItemToIndex():
        return function(*index)
