"""Masks of transformers as masks of headwise."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from operator import and_, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from headwise.kernels.graph import recording
from headwise.map.arguments import of_boolean, of_padding
from headwise.masks import Causal, Documents, Everything, Grid, Mask, Span, Window, is_causal
from headwise.masks.given import both, shortest
from headwise.models.adapters.huggingface.library import Position, library
from headwise.models.adapters.weights import LazyTensor


class MaskTensor(LazyTensor):
    """The floating [b, 1, n, m] that attn_implementation="eager" adds to scores, 0 = may attend, as a headwise `Mask`:
    no n×m memory unless a model computes with it; every result is an ordinary tensor."""

    mask: Mask | None  # over the first `position.keys` of the m keys
    sizes: tuple[int, int, int]  # b, n, m; `shape` takes longer, as every question to a tensor of a subclass
    position: Position  # where the queries and these keys are

    @staticmethod
    def __new__(
        cls: type["MaskTensor"], mask: Any, shape: Any, position: Any, device: Any, dtype: Any, eager: Any
    ) -> Any:
        b, n, m = shape
        return LazyTensor.empty_shell(cls, (b, 1, n, m), dtype, torch.device(device))

    def __init__(
        self, mask: Mask | None, shape: tuple[int, int, int], position: Position, device: Any, dtype: torch.dtype,
        eager: Callable[[], Tensor],
    ) -> None:  # fmt: skip
        """shape: b, n, m. eager: computes the dense tensor."""
        self.mask, self.sizes, self.position, self._eager = mask, shape, position, eager

    def make(self) -> Tensor:
        with torch.inference_mode(False):  # tensors of inference mode have no version counter
            return self._eager()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.to and isinstance(args[0], MaskTensor):  # called by code that moves all inputs of a model
            small = torch.empty(0, dtype=args[0].dtype, device=args[0].device)
            if small.to(*args[1:], **(kwargs or {})) is small:
                return args[0]
        if func is Tensor.contiguous and isinstance(args[0], MaskTensor) and not args[0].made:
            return args[0]  # called by generation with caches of a fixed size
        return super().__torch_function__(func, types, args, kwargs)

    @property
    def origin(self) -> str:
        return "everything" if self.mask is None else repr(self.mask)


class RecordedMask(NamedTuple):
    """What `MaskTensor` has, of the mask of a graph, whose values are unknown: the attribute `headwise` of a tensor,
    which no result of an operation on that tensor has."""

    mask: Mask | None
    sizes: tuple[int, int, int]
    position: Position


def own_mask(given: Tensor | None) -> MaskTensor | RecordedMask | None:
    """The mask of `make_mask` where a model passes it on as it is; None for any other."""
    if isinstance(given, MaskTensor):
        return None if given.changed else given
    own: RecordedMask | None = getattr(given, "headwise", None)
    if own is None or own.mask is None or recording():
        return own
    return own._replace(mask=shortest(own.mask))  # after a graph break its values are known


MaskFunction = Callable[..., Tensor]


class Unknown(Exception):
    """Raised for a mask function that is not recognised."""


@dataclass(frozen=True)
class Place:
    """The positions of the keys of a call for mask functions: [offset, offset + keys)."""

    offset: int
    keys: int


def read(function: MaskFunction, place: Place) -> Mask:
    """The mask of a function over these keys, for queries aligned to their end; Unknown if it is not recognised."""
    reader = _makers().get(getattr(function, "__code__", None))
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
    # It does not restrict keys after the query.
    "sliding_window_overlay": (lambda: (3,), lambda free, place: Window(free["sliding_window"], right=place.keys)),
    "sliding_window_bidirectional_overlay": (
        lambda: (3,), lambda free, place: Window(free["sliding_window"] + 1, right=free["sliding_window"]),
    ),
    "packed_sequence_mask_function": (
        lambda: (torch.tensor([[0, 0, 1, 1, 1, 2, 2]]),),
        lambda free, place: _documents(free["packed_sequence_mask"], place),
    ),
    "blockwise_overlay": (
        lambda: (torch.tensor([[-1, 4, 4, -1, 2, 2, -1]]),),
        lambda free, place: _documents(free["block_sequence_ids"], place),
    ),
}  # fmt: skip
_JOINS: dict[str, Reader] = {
    "and_masks": _read_and,
    "or_masks": lambda free, place: reduce(or_, (read(f, place) for f in free["mask_functions"])),
}


@lru_cache(maxsize=1)
def _makers() -> dict[Any, Reader]:
    """Code object → reader of the closures that have it, for verified factories."""
    theirs = library("masking_utils")
    makers: dict[Any, Reader] = {}
    for name, (arguments, reader) in _READERS.items():
        maker = getattr(theirs, name, None)
        function = maker if arguments is None or maker is None else maker(*arguments())
        if function is None:
            continue
        size = 7  # of a matrix of which both must allow the same cells
        i = torch.arange(size)
        try:
            ours = reader(_free(function), Place(0, size)).allowed(i, i, Grid(1, 1, size, size))
        except (KeyError, Unknown):
            continue
        cells = function(i[:1, None, None, None], i[None, :1, None, None], i[:, None], i[None, :])
        if torch.equal(cells.expand(1, 1, size, size), ours.expand(1, 1, size, size)):
            makers[function.__code__] = reader
    for name, reader in _JOINS.items():
        maker = getattr(theirs, name, None)
        if maker is not None:
            makers[maker(theirs.causal_mask_function).__code__] = reader
    return makers


def _is(function: Any, maker: str) -> bool:
    qualified = getattr(function, "__qualname__", "")
    return qualified.startswith(f"{maker}.") and getattr(function, "__module__", "") == "transformers.masking_utils"


def make_mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,  # (batch, head, query, key) indices to booleans
    attention_mask: Tensor | None = None,  # [batch, all keys so far], True for tokens, or None
    device: Any = "cpu",
    dtype: torch.dtype = torch.float32,  # of the mask that the model gets
    cache_position: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask of a call, by transformers' `AttentionMaskInterface`; None where eager attention has none. A function
    that is not one of transformers' own is evaluated to a boolean [batch, 1, q_length, kv_length]."""
    theirs = library("masking_utils")
    function = theirs.causal_mask_function if mask_function is None else mask_function
    if cache_position is None:
        assert q_length is not None
        q_offset = q_offset if recording() else int(q_offset)
        places: dict[str, Any] = {"q_length": q_length, "q_offset": q_offset, "device": device}
    else:
        q_length, device, places = len(cache_position), cache_position.device, {"cache_position": cache_position}
        q_offset = int(cache_position[0]) if q_length else 0
    eager = partial(
        theirs.eager_mask, batch_size=batch_size, kv_length=kv_length, kv_offset=kv_offset,
        attention_mask=attention_mask, dtype=dtype, **places, **kwargs,
    )  # fmt: skip

    if recording():
        recorded = eager(mask_function=function)
        if recorded is not None:
            sizes = batch_size, q_length, kv_length
            recorded.headwise = _recorded(recorded, sizes, q_offset, kv_offset, function, attention_mask)
        return recorded

    def read_it(*index: Tensor) -> Tensor:
        raise _Read

    if kwargs.get("allow_is_bidirectional_skip"):
        with suppress(_Read):  # transformers decides whether it omits the mask before it calls any mask function
            if eager(mask_function=read_it) is None:
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
        index = [
            torch.arange(size, device=device) + offset
            for size, offset in ((batch_size, 0), (1, 0), (q_length, int(q_offset)), (kv_length, kv_offset))
        ]
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


def _recorded(
    cells: Tensor, sizes: tuple[int, int, int], q_offset: int | Tensor, kv_offset: int, function: MaskFunction,
    attention_mask: Tensor | None,
) -> RecordedMask:  # fmt: skip
    """The mask of a graph, where neither values nor closures can be read. cells: that of eager attention, [b, 1, n, m],
    which no operation of the graph computes unless it is used."""
    theirs, (b, n, m) = library("masking_utils"), sizes
    # Caches of a fixed size have a tensor as offset, and unfilled entries.
    at_end: bool | None = False if isinstance(q_offset, Tensor) else n + q_offset - kv_offset == m
    everything = function is theirs.bidirectional_mask_function
    if not everything and not (at_end and function is theirs.causal_mask_function):
        return RecordedMask(of_boolean(cells == 0), sizes, Position(at_end, m, kv_offset))
    mask: Mask | None = None if everything else Causal()
    if attention_mask is not None:
        real = theirs.prepare_padding_mask(attention_mask.bool(), m, kv_offset)[:, kv_offset : kv_offset + m]
        mask = both(mask, of_padding(real.expand(b, -1), n))
    if everything and not (at_end and q_offset):
        at_end = None  # for any alignment of the queries
    return RecordedMask(mask, sizes, Position(at_end, m, kv_offset))


class _Read(Exception):
    """A mask function was called."""


def _evaluate(function: MaskFunction, index: list[Tensor], theirs: Any, one_by_one: bool) -> Tensor:
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
