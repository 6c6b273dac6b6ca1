"""Parts of one tensor that are put together again, as by rotary positions, and complex numbers."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor

from headwise.models.recognise.axes import dimension
from headwise.models.recognise.followed import Followed, Origin
from headwise.models.recognise.layout import Factor, Layout, merged, whole
from headwise.models.recognise.tracked import Tracked

PUT_TOGETHER = "a part of it is not known any more"


def put_together(seen: Tracked, stacks: bool, tensors: Sequence[Tensor], dim: int, out: Tensor) -> None:
    """What is known of the `cat` or `stack` of tensors along `dim`, if some are parts of a layer's output."""
    given = [x for x in tensors if x.numel() or stacks]
    found = [seen.known(x) for x in given]
    parts = [x for x in found if x is not None and x.stage == "input" and x.origin is not None]
    sources = [x.origin.source for x in parts if x.origin is not None]
    different = len(set(map(id, sources)))
    if different > 1 and len(parts) == len(given):
        shape = tuple(out.shape)
        origin = Origin(shape, (), "cat", seen.together(sources))
        seen.remember(out, parts[0].but(origin=origin, layout=whole(shape), factor=1.0, outer=None, lost=PUT_TOGETHER))
    if different != 1:
        return
    first, layout = parts[0], None
    if len(parts) == len(given) and all(x.origin is first.origin and not x.lost for x in parts):
        layouts = [x.layout for x in parts]
        at = dim % out.ndim
        layout = _stacked(layouts, at) if stacks else _joined(layouts, [x.shape[at] for x in given], at)
    keep_origin(seen, first, out, layout)


def as_complex(x: Followed) -> Layout | None:
    """The layout of `torch.view_as_complex` of x."""
    *dims, last = x.layout.dims
    if len(dims) and dims[-1] and last == ((2, dims[-1][-1][1] // 2),):
        return Layout(tuple(dims), x.layout.offset)
    return None


def as_real(x: Followed) -> Layout | None:
    """The layout of `torch.view_as_real` of x, whose parts `as_complex` has left out."""
    dims = x.layout.dims
    return Layout((*dims, ((2, dims[-1][-1][1] // 2),)), x.layout.offset) if dims and dims[-1] else None


COMPLEX = {"view_as_complex": as_complex, "view_as_real": as_real}


def replaced(x: Followed, out: Tensor, layout: Layout | None) -> Followed:
    """What is known of a tensor made of the input x; without a layout, only what it was made from."""
    if layout is not None:
        return x.but(layout=layout, factor=1.0, outer=None)
    return x.but(layout=whole(tuple(out.shape)), factor=1.0, outer=None, lost=x.lost or PUT_TOGETHER)


def keep_origin(seen: Tracked, x: Followed, out: Tensor, layout: Layout | None = None) -> None:
    """Keep of a tensor made of the input x what x was made from, and where its numbers lie if that is known."""
    if layout is not None or (x.origin is not None and not out.is_nested):
        seen.remember(out, replaced(x, out, layout))


def indexed(x: Followed, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a function chooses heads of the input x, such as KV heads for groups, and leaves tokens as they are."""
    if name == "index_select":
        dim = args[0] if args else kwargs.get("dim")
    else:
        index = args[0] if args and isinstance(args[0], tuple) else args[:1]
        dim = next((i for i, one in enumerate(index) if not isinstance(one, slice)), None)
        if (
            dim is None
            or not isinstance(index[dim], Tensor | list)
            or index[dim + 1 :] != (slice(None),) * len(index[dim + 1 :])
        ):
            return False
    if not isinstance(dim, int) or x.origin is None or x.lost:
        return False
    places = whole(x.origin.shape).dims
    return all(dimension(stride, places) in x.origin.features for _, stride in x.layout.dims[dim])


def _stacked(layouts: Sequence[Layout], at: int) -> Layout | None:
    """The layout of parts that lie one step apart, along a new dimension."""
    first = layouts[0]
    steps = {two.offset - one.offset for one, two in pairwise(layouts)} or {0}
    if len(steps) > 1 or min(steps) < 0 or any(one.dims != first.dims for one in layouts):
        return None
    dim: tuple[Factor, ...] = ((len(layouts), steps.pop()),) if len(layouts) > 1 else ()
    return Layout((*first.dims[:at], dim, *first.dims[at:]), first.offset)


def _joined(layouts: Sequence[Layout], sizes: Sequence[int], at: int) -> Layout | None:
    """The layout of parts along dimension `at`, of these sizes."""
    first = layouts[0]
    stacked = _stacked(layouts, at)
    if stacked is not None:
        both = merged([*stacked.dims[at], *stacked.dims[at + 1]])
        return Layout((*stacked.dims[:at], both, *stacked.dims[at + 2 :]), first.offset)
    strides = {factor[1] for one in layouts for factor in one.dims[at]}
    if len(strides) != 1 or any(len(one.dims[at]) > 1 for one in layouts):
        return None
    (stride,) = strides
    rest = [(*one.dims[:at], *one.dims[at + 1 :]) for one in layouts]
    ends = [one.offset + size * stride for one, size in zip(layouts, sizes, strict=True)]
    if any(one != rest[0] for one in rest) or ends[:-1] != [one.offset for one in layouts[1:]]:
        return None
    return Layout((*first.dims[:at], ((sum(sizes), stride),), *first.dims[at + 1 :]), first.offset)


def dim_of(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The dimension that `cat` and `stack` are given."""
    return args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
