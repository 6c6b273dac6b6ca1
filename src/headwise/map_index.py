"""Indexing of attention maps, as in NumPy."""

from typing import Any

from headwise.errors import ShapeError, whole_number


def parts(index: Any) -> list[Any]:
    """The index of each of the four axes; `...` and omitted indices become full slices."""
    found = list(index) if isinstance(index, tuple) else [index]
    dots = [at for at, part in enumerate(found) if part is Ellipsis]
    if len(dots) > 1 or len(found) - len(dots) > 4:
        raise ShapeError(f"amap[{index}]: expected at most four indices, [batch, head, queries, keys]")
    for at in dots:
        found[at : at + 1] = [slice(None)] * (4 - (len(found) - 1))
    found = [part if (number := whole_number(part)) is None else number for part in found]
    return found + [slice(None)] * (4 - len(found))


def ranges(index: list[Any], shape: tuple[int, ...]) -> list[range]:
    """The range that each index returned by `parts` selects on its axis."""
    found = []
    for name, size, part in zip(("batch", "head", "query", "key"), shape, index, strict=True):
        if isinstance(part, slice):
            found.append(range(*part.indices(size)))
        elif isinstance(part, int) and not isinstance(part, bool):
            if not -size <= part < size:
                raise IndexError(f"amap: {name} {part} is out of range for {size}")
            found.append(range(part % size, part % size + 1))
        else:
            raise ShapeError(f"amap: expected an integer or a slice as {name} index, got {part!r}")
    return found
