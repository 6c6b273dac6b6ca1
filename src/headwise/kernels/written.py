"""A mask as plain numbers and tensors, and back: all that an operator in a graph of PyTorch's can be given.

Masks stand in prefix order: `Causal() & Window(5)` is [AND, CAUSAL, WINDOW, 5, 0], each name its place in `KINDS`.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from headwise.masks import And, Causal, Dense, Documents, Everything, Lengths, Mask, Or, Sinks, Window

KINDS: tuple[type[Mask], ...] = (Everything, Causal, Window, Sinks, Lengths, Documents, Dense, And, Or)


def write(mask: Mask) -> tuple[list[int], list[Tensor]] | None:
    """The mask's numbers and tensors; None for a mask of somebody's own class."""
    numbers: list[int] = []
    tensors: list[Tensor] = []
    return (numbers, tensors) if _write(mask, numbers, tensors) else None


def read(numbers: Sequence[int], tensors: Sequence[Tensor]) -> Mask:
    """The mask that `write` was given."""
    return _read(iter(numbers), iter(tensors))


def _write(mask: Mask, numbers: list[int], tensors: list[Tensor]) -> bool:
    if type(mask) not in KINDS:
        return False
    numbers.append(KINDS.index(type(mask)))
    if isinstance(mask, And | Or):
        return _write(mask.left, numbers, tensors) and _write(mask.right, numbers, tensors)
    if isinstance(mask, Window):
        numbers.extend((mask.left, mask.right))
    elif isinstance(mask, Sinks):
        numbers.append(mask.count)
    elif isinstance(mask, Lengths):
        given = [x for x in (mask.keys, mask.queries) if x is not None]
        numbers.extend((int(mask.side == "right"), len(given)))
        tensors.extend(given)
    elif isinstance(mask, Documents):
        tensors.append(mask.ids)
    elif isinstance(mask, Dense):
        tensors.append(mask.mask)
    return True


def _read(numbers: Iterator[int], tensors: Iterator[Tensor]) -> Mask:
    kind = KINDS[next(numbers)]
    if kind in (And, Or):
        left = _read(numbers, tensors)
        right = _read(numbers, tensors)
        return left & right if kind is And else left | right
    if kind is Window:
        return Window(next(numbers), next(numbers))
    if kind is Sinks:
        return Sinks(next(numbers))
    if kind is Lengths:
        side, given = next(numbers), next(numbers)
        return Lengths(next(tensors), next(tensors) if given > 1 else None, side="right" if side else "left")
    if kind is Documents:
        return Documents(next(tensors))
    if kind is Dense:
        return Dense(next(tensors))
    return Everything() if kind is Everything else Causal()
