"""Which axes of a product are batch, heads, queries and keys, and tensors laid out by them, or made of parts."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from headwise.models.recognise.products import Factor, Layout, merged, whole
from headwise.models.recognise.tracked import Followed, Lost, Origin, Product, Tracked

# A part of a dimension: its size, whether it holds heads, and its stride in the layer, 0 if that is unknown.
Part = tuple[int, bool, int]
Dim = list[Factor] | str  # atoms of a dimension, or the letter of one that stays last


def of_product(
    product: Product, queries: int, keys: tuple[Factor, ...], layouts: tuple[Layout, ...]
) -> tuple[Any, ...]:
    """All that `Axes` of these arguments depends on, as a key."""
    inputs = [
        None if x is None or x.origin is None or x.lost else (x.layout, x.origin.shape, x.origin.features)
        for x in product.inputs
    ]
    of = product.of
    return (product.shape, of.a, of.b, of.out, product.heads, *inputs, queries, keys, layouts)


class Axes:
    """The axes of a product [..., n, m] as batch, heads, queries and keys. Each dimension is divided into atoms (size,
    stride), as finely as any layout divides it; heads are parts of a dimension of features of a layer."""

    def __init__(self, product: Product, queries: int, keys: Sequence[Factor], layouts: Iterable[Layout]) -> None:
        one = whole(product.shape)
        letters = product.of.a if queries == 0 else product.of.b
        others = product.of.b if queries == 0 else product.of.a
        self._dims: list[tuple[Factor, ...]] = list(one.dims)
        out = product.of.out
        layouts = list(layouts)
        softmaxed = [
            out[i] for i, dim in enumerate(one.dims)
            if (_within(dim, keys) if keys and dim else not keys and out[i] not in letters)
        ]  # fmt: skip
        traced = {}
        for letter in out:
            of_queries = _heads(letter, letters, product, queries)
            of_keys = _heads(letter, others, product, 1 - queries) if letter not in softmaxed else None
            # As strides of two layers cannot be compared, those of keys are left out.
            of_keys = None if of_keys is None else [(size, head, 0) for size, head, _ in of_keys]
            traced[letter] = of_keys if of_queries is None else of_queries
        if product.heads is not None:
            traced = {one: [(size, one in product.heads, 0)] for one, size in zip(out, product.shape, strict=True)}
        cuts = [{1, size} for size in product.shape]
        for i, dim in enumerate(self._dims):
            for size, stride in dim:
                for f, t in (factor for layout in layouts for d in layout.dims for factor in d):
                    for cut in (t, t * f):
                        if stride < cut < stride * size:
                            if cut % stride:
                                raise Lost("its axes are divided in a way that is not followed")
                            cuts[i].add(cut // stride)
                inner = 1
                for part, _, _ in reversed(traced[out[i]] or []):
                    inner *= part
                    cuts[i].add(inner)
        self.divided = [_divided(dim, cut) for dim, cut in zip(self._dims, cuts, strict=True)]  # atoms of dimensions
        self.groups: list[list[Factor]] = [[], [], [], []]  # the atoms of batch, heads, queries and keys
        lone = [letter for letter in out if letter not in others]
        leading = [letter for letter in out if letter not in softmaxed and letter not in lone]
        # Whether batch and heads are known from a layer
        self.traced = any(traced[letter] is not None for letter in leading)
        strides: dict[Factor, int] = {}  # of heads in the layer that made the queries
        for i, letter in enumerate(out):
            if letter in softmaxed:
                self.groups[3] += self.divided[i]
                continue
            inside = traced[letter]
            if self.traced:
                marks = self._marks(i, inside)
                lead = 2 if letter in lone else 0
                for atom, (head, stride) in zip(self.divided[i], marks, strict=True):
                    self.groups[1 if head else lead].append(atom)
                    strides[atom] = stride
            elif letter in lone:
                self.groups[2 if letter == lone[-1] else 1] += self.divided[i]
            elif len(leading) == 1:
                self.groups[0] += self.divided[i][:1]
                self.groups[1] += self.divided[i][1:]
            else:
                self.groups[1 if letter == leading[-1] else 0] += self.divided[i]
        if all(strides.get(atom) for atom in self.groups[1]):
            self.groups[1].sort(key=lambda atom: -strides[atom])  # heads are numbered as in that layer
        b, h, n, m = (prod(size for size, _ in group) for group in self.groups)
        self.sizes = b, h, n, m
        self._plans: dict[Any, Plan] = {}

    def _marks(self, i: int, inside: list[Part] | None) -> list[tuple[bool, int]]:
        """Which atoms of dimension i are heads, and their strides in the layer that made them, if they are known."""
        marks = []
        base = self._dims[i][0][1] if self._dims[i] else 1
        for _, stride in self.divided[i]:
            inner, mark = 1, (False, 0)
            for size, head, step in reversed(inside or []):
                if inner <= stride // base < inner * size:
                    mark = head, step * (stride // base // inner)
                inner *= size
            marks.append(mark)
        return marks

    def atoms(self, factors: Iterable[Factor]) -> list[Factor]:
        """The atoms that make up these factors."""
        found: list[Factor] = []
        for size, stride in factors:
            here = [
                atom for dim in self.divided for atom in dim if stride <= atom[1] < stride * size
            ] if stride else []  # fmt: skip
            if prod(part for part, _ in here) != size:
                raise Lost("only a part of the scores is used")
            found += here
        return found

    def matrix(self, x: Tensor, layout: Layout) -> Tensor:
        """A tensor that broadcasts to scores of that layout, as [b or 1, h or 1, n or 1, m or 1]."""
        dims: list[Dim] = [
            [] if size == 1 else self.atoms(factors)
            for size, factors in zip(x.shape, layout.dims[len(layout.dims) - x.ndim :], strict=True)
        ]
        return self.arranged(x, dims, self.groups, full=0)

    def arranged(self, x: Tensor, dims: Sequence[Dim], groups: Sequence[list[Factor]], *, full: int) -> Tensor:
        """x with one axis for each group, and those that stay last as one more. full: groups to which x is expanded;
        the others have size 1 where x has none of their atoms."""
        shape = tuple(x.shape)
        key = shape, tuple(dim if isinstance(dim, str) else tuple(dim) for dim in dims), tuple(map(tuple, groups)), full
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self.plan(shape, dims, groups, full=full)
        return plan.arranged(x)

    def plan(
        self, sizes_of_x: Sequence[int], dims: Sequence[Dim], groups: Sequence[list[Factor]], *, full: int
    ) -> "Plan":
        """How `arranged` arranges a tensor of these sizes."""
        shape: list[int] = []
        tags: list[Factor | str] = []
        for size, dim in zip(sizes_of_x, dims, strict=True):
            if isinstance(dim, str):
                shape.append(size)
                tags.append(dim)
            elif size > 1:
                if prod(part for part, _ in dim) != size:
                    raise Lost("its axes do not fit those of the scores")
                shape += [part for part, _ in dim]
                tags += dim
        last = sorted(tag for tag in tags if isinstance(tag, str))
        order = [tags.index(atom) for group in groups for atom in group if atom in tags]
        if len(order) + len(last) != len(tags):
            raise Lost("the values differ from query to query, as in a mixture of experts or a gate")
        tail = [shape[tags.index(letter)] for letter in last]
        there = [[atom in tags for atom in group] for group in groups]
        ones = [atom[0] if here else 1 for group, row in zip(groups, there, strict=True)
                for atom, here in zip(group, row, strict=True)]  # fmt: skip
        wide = [atom[0] if here or any(row) or i < full else 1 for i, (group, row) in enumerate(
            zip(groups, there, strict=True)) for atom, here in zip(group, row, strict=True)]  # fmt: skip
        sizes = [
            prod(atom[0] for atom in group) if any(row) or i < full else 1
            for i, (group, row) in enumerate(zip(groups, there, strict=True))
        ]
        order += [tags.index(letter) for letter in last]
        sizes += [prod(tail)] if last else []
        same = sizes == list(sizes_of_x) and order == sorted(order) and [*ones, *tail] == [*wide, *tail]
        return Plan(tuple(sizes_of_x), tuple(shape), tuple(order), (*ones, *tail), (*wide, *tail), tuple(sizes), same)

    def restored(
        self, x: Tensor, *, shape: Sequence[int], dims: Sequence[Dim], groups: Sequence[list[Factor]]
    ) -> Tensor:
        """The opposite of `arranged`, for a tensor of this shape that has all atoms of the groups."""
        tags: list[Factor | str] = []
        sizes: dict[Factor | str, int] = {}
        for size, dim in zip(shape, dims, strict=True):
            if isinstance(dim, str):
                tags.append(dim)
                sizes[dim] = size
            elif size > 1:
                tags += dim
                sizes.update((atom, atom[0]) for atom in dim)
        last = sorted(tag for tag in tags if isinstance(tag, str))
        order: list[Factor | str] = [atom for group in groups for atom in group if atom in tags]
        order += last
        x = x.reshape([sizes[tag] for tag in order])
        return x.permute([order.index(tag) for tag in tags]).reshape(tuple(shape))


class Plan(NamedTuple):
    """How a tensor is arranged: its shape, the one in atoms, their order, the shapes before, in and after broadcasting,
    and whether that changes nothing."""

    shape: tuple[int, ...]
    divided: tuple[int, ...]
    order: tuple[int, ...]
    ones: tuple[int, ...]
    wide: tuple[int, ...]
    sizes: tuple[int, ...]
    as_it_is: bool

    def arranged(self, x: Tensor) -> Tensor:
        """A tensor of that shape."""
        if self.as_it_is:
            return x
        if self.divided != self.shape:
            x = x.reshape(self.divided)
        x = x.permute(self.order)
        if self.ones != self.wide:
            x = x.reshape(self.ones).expand(self.wide)
        return x if x.shape == self.sizes else x.reshape(self.sizes)


def _divided(dim: Sequence[Factor], cuts: Iterable[int]) -> list[Factor]:
    """The atoms of a dimension, outer first, divided at these numbers of inner entries."""
    if not dim:
        return []
    ((_, stride),) = dim
    points = sorted(cuts)
    atoms = []
    for low, high in pairwise(points):
        if high % low:
            raise Lost("its axes are divided in two ways that do not fit each other")
        atoms.append((high // low, stride * low))
    return atoms[::-1]


def _heads(letter: str, letters: str, product: Product, side: int) -> list[Part] | None:
    """The parts of a dimension of one operand, outer first; None if it cannot be traced back to a layer."""
    x: Followed | None = product.inputs[side]
    if letter not in letters or x is None or x.origin is None or x.lost:
        return None
    origin = x.origin
    places = whole(origin.shape).dims
    summed = {
        dimension(stride, places)
        for i, one in enumerate(letters) if one in product.of.summed for _, stride in x.layout.dims[i]
    }  # fmt: skip
    found: list[Part] = []
    for size, stride in x.layout.dims[letters.index(letter)]:
        if size > 1 and not stride:  # repeated: KV heads for the query heads that read them
            found.append((size, any(head for _, head, _ in found), 0))
            continue
        parts = []
        while size > 1 and (at := dimension(stride, places)) is not None:
            ((extent, step),) = places[at]
            here = min(size, extent * step // stride)  # a factor may reach over several dimensions of the origin
            parts.append((here, at in origin.features or at in summed, stride))
            size, stride = size // here, stride * here
        found += parts[::-1]
    return found


def _within(dim: Sequence[Factor], factors: Sequence[Factor]) -> bool:
    """Whether all of a dimension lies within one of the factors."""
    ((size, stride),) = dim
    return any(t <= stride and stride * size <= t * f for f, t in factors)


def dimension(stride: int, places: Sequence[tuple[Factor, ...]]) -> int | None:
    """The dimension of a contiguous tensor in which a step of this many numbers moves."""
    for i, dim in enumerate(places):
        for size, step in dim:
            if step <= stride < step * size:
                return i
    return None


def own_dims(product: Product, side: int) -> tuple[tuple[Factor, ...], ...]:
    """The dimensions of the product that only one operand has."""
    own, other = (product.of.a, product.of.b)[:: 1 if side == 0 else -1]
    return _own_dims(own, other, product.of.out, product.shape)


@lru_cache(maxsize=1024)
def _own_dims(own: str, other: str, out: str, shape: tuple[int, ...]) -> tuple[tuple[Factor, ...], ...]:
    dims = zip(out, whole(shape).dims, strict=True)
    return tuple(dim for letter, dim in dims if letter in own and letter not in other and dim)


@lru_cache(maxsize=1024)
def are_of(factors: tuple[Factor, ...], dims: tuple[tuple[Factor, ...], ...]) -> bool:
    """Whether these factors are some of these dimensions, all of each."""
    inside = [dim for dim in dims if _within(dim, factors)]
    return bool(factors) and prod(dim[0][0] for dim in inside) == prod(size for size, _ in factors)


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
