"""Transformers' mask functions as headwise masks, recognised by their code objects.

transformers defines masks by closures over (batch, head, query, key) indices, created by a few factories and combined
by `and_masks` and `or_masks`. A closure has the code object of its factory, and its free variables hold the parameters;
so it is recognised exactly, or not at all. Each factory is verified on a small matrix first: one that has changed in
another version is treated like a function of the user's own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import and_, or_
from typing import Any

import torch
from torch import Tensor

from headwise.masks import Causal, Documents, Everything, Grid, Mask, Window
from headwise.models.adapters.huggingface.library import library

MaskFunction = Callable[..., Tensor]


class Unknown(Exception):
    """Raised for a mask function that is not recognised."""


@dataclass(frozen=True)
class Place:
    """The positions of the keys of a call for mask functions: [offset, offset + keys)."""

    offset: int
    keys: int


def read(function: MaskFunction, place: Place) -> Mask:
    """The mask of a function over these keys, for queries aligned to their end.

    Raises:
        Unknown: if the function is not recognised.
    """
    makers = _makers()
    code = getattr(function, "__code__", None)
    reader = makers.get(code)
    if reader is None:
        raise Unknown(f"{getattr(function, '__qualname__', function)!r} is not one of transformers' own")
    return reader(_free(function), place)


def _free(function: Any) -> dict[str, Any]:
    return {
        name: cell.cell_contents
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    }


def _read_and(free: dict[str, Any], place: Place) -> Mask:
    functions = list(free["mask_functions"])
    packed = [f for f in functions if _is(f, "packed_sequence_mask_function")]
    moved = [f for f in functions if _is(f, "remap_positions_for_packed_sequence")]
    if moved:
        # Within a sequence, positions differ as indices do, so for separate sequences indices are sufficient.
        if len(packed) != 1 or len(moved) != 1:
            raise Unknown("positions of packed sequences without the sequences")
        ids, inner = _free(packed[0])["packed_sequence_mask"], _free(moved[0])
        positions = inner["position_ids"].expand(len(ids), -1)
        together = ids[:, 1:] == ids[:, :-1]
        if ids.shape[1] != place.keys or not bool((positions.diff() == 1)[together].all()):
            raise Unknown("positions that jump inside a packed sequence")
        functions = [inner["mask_function"] if f is moved[0] else f for f in functions]
    return reduce(and_, (read(f, place) for f in functions))


def _read_or(free: dict[str, Any], place: Place) -> Mask:
    return reduce(or_, (read(f, place) for f in free["mask_functions"]))


def _read_window(free: dict[str, Any], place: Place) -> Mask:
    return Window(free["sliding_window"], right=place.keys)  # it does not restrict keys after the query


def _read_both_sides(free: dict[str, Any], place: Place) -> Mask:
    return Window(free["sliding_window"] + 1, right=free["sliding_window"])


def _read_packed(free: dict[str, Any], place: Place) -> Mask:
    return _documents(free["packed_sequence_mask"], place)


def _read_blocks(free: dict[str, Any], place: Place) -> Mask:
    return _documents(free["block_sequence_ids"], place)


def _documents(ids: Tensor, place: Place) -> Mask:
    ids = ids[:, place.offset : place.offset + place.keys]
    if ids.shape[1] != place.keys:
        raise Unknown("sequences of fewer tokens than there are keys")
    return Documents(ids)


Reader = Callable[[dict[str, Any], Place], Mask]
# Factory → its arguments for verification, and the reader of its closures. Without arguments: the function itself.
_READERS: dict[str, tuple[Callable[[], tuple[Any, ...]] | None, Reader]] = {
    "causal_mask_function": (None, lambda free, place: Causal()),
    "bidirectional_mask_function": (None, lambda free, place: Everything()),
    "sliding_window_overlay": (lambda: (3,), _read_window),
    "sliding_window_bidirectional_overlay": (lambda: (3,), _read_both_sides),
    "packed_sequence_mask_function": (lambda: (torch.tensor([[0, 0, 1, 1, 1, 2, 2]]),), _read_packed),
    "blockwise_overlay": (lambda: (torch.tensor([[-1, 4, 4, -1, 2, 2, -1]]),), _read_blocks),
}
_JOINS: dict[str, Reader] = {"and_masks": _read_and, "or_masks": _read_or}


@lru_cache(maxsize=1)
def _makers() -> dict[Any, Reader]:
    """Code object → reader of the closures that have it, for verified factories."""
    theirs = library("masking_utils")
    makers: dict[Any, Reader] = {}
    for name, (arguments, reader) in _READERS.items():
        maker = getattr(theirs, name, None)
        function = maker if arguments is None or maker is None else maker(*arguments())
        if function is not None and _agrees(function, reader):
            makers[function.__code__] = reader
    for name, reader in _JOINS.items():
        maker = getattr(theirs, name, None)
        if maker is not None:
            makers[maker(theirs.causal_mask_function).__code__] = reader
    return makers


def _agrees(function: Any, reader: Reader) -> bool:
    """Whether a function and its mask allow the same cells of a small matrix."""
    size = 7
    i = torch.arange(size)
    try:
        mask = reader(_free(function), Place(0, size))
    except (KeyError, Unknown):
        return False
    theirs = function(i[:1, None, None, None], i[None, :1, None, None], i[:, None], i[None, :])
    ours = mask.allowed(i, i, Grid(1, 1, size, size))
    return torch.equal(theirs.expand(1, 1, size, size), ours.expand(1, 1, size, size))


def _is(function: Any, maker: str) -> bool:
    qualified = getattr(function, "__qualname__", "")
    return qualified.startswith(f"{maker}.") and getattr(function, "__module__", "") == "transformers.masking_utils"
