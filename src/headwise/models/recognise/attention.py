"""A recognised call: its queries, keys, values and rule, and the comparison of its result with the code's own."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from math import inf, log, prod
from operator import eq
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.fields import bits
from headwise.map import AttentionMap
from headwise.map.attention import attend
from headwise.masks import Mask
from headwise.models.difference import Difference, difference, relative
from headwise.models.recognise.axes import Axes, Dim, Plan, dimension, of_product
from headwise.models.recognise.products import Contraction, whole
from headwise.models.recognise.scores import Changes
from headwise.models.recognise.tracked import (
    UNEXPECTED,
    Followed,
    Lost,
    NotFinite,
    Product,
    Values,
    learned,
    unexpected,
)
from headwise.scores import Score, SinkLogits, SoftCap

KEPT = 512  # forms of calls
# Beside the rounding of scores: twice what the accuracy contract allows, as two implementations are compared.
FLOOR = {torch.float64: 1e-12, torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


@dataclass(frozen=True, eq=False)
class Call:
    """A call of `attend` that computes what the code of a model computes. `Recognised` explains its fields."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    mask: Mask | None
    scores: tuple[Score, ...]
    dropout_p: float
    traced: bool

    @property
    def shared(self) -> dict[str, Any]:
        """These fields."""
        return {one.name: getattr(self, one.name) for one in fields(Call)}


@dataclass(frozen=True, eq=False)
class Attention(Call):
    """What `attend` has to compute, and what the model's code computed. Equal heads of keys and values that need no
    gradient are one head."""

    dtype: torch.dtype  # the coarsest that the code computed in
    to_itself: bool  # whether queries and keys were made from one tensor
    at_end: bool  # whether the queries are taken to be at the end of the keys; not if it is known to be cross attention
    cut: int  # how many keys are left out at the end
    # Whether nothing shows where its queries are on the key axis, and it is not known to be cross attention
    unplaced: bool
    out: Tensor  # the code's result, [b, h, n, d_v]
    weights: Callable[[], Tensor] | None  # returns its weights [b, h, n, m]; None if it had none
    arrange: Callable[[Tensor], Tensor]  # any tensor of the shape of the code's result, as [b, h, n, d_v]
    restore: Callable[[Tensor], Tensor]  # the opposite

    def attended(self) -> tuple[Tensor, AttentionMap]:
        """What `attend` computes, and its map."""
        return attend(self.q, self.k, self.v, mask=self.mask, scale=self.scale, score=self.scores, return_map=True)

    def check(self, out: Tensor, amap: AttentionMap, *, every: bool, rows: int | None = None) -> Difference:
        """`compared`; raises `Lost` if the difference is more than rounding explains, or nothing could be compared."""
        if not every and not self.dropout_p and out.numel():
            least, (mine, theirs) = self._allowed(0.0), self._rows(out, rows)
            if (worst := float(relative(mine, theirs).max())) <= least:  # not NaN, as of fully masked queries
                return Difference(worst, 0, 1)
        found, allowed = self.compared(out, amap, every=every, rows=rows)
        if reason := found.reason("its result", "that of attention", allowed):
            raise Lost(reason) if found.worst < inf else NotFinite(reason, found.worst != found.worst)
        return found

    def compared(
        self, out: Tensor, amap: AttentionMap, *, every: bool, rows: int | None = None
    ) -> tuple[Difference, float]:
        """The difference of rows of the output, without dropout, and of the weights (`every`: of all rows, else with
        dropout of some), and the largest that rounding explains; about `rows` rows, none that is fully masked."""
        seen: Tensor | None = None
        largest = float(torch.linalg.vector_norm(amap.lse, inf)) if amap.lse.numel() else inf
        if not largest < inf:  # no queries, fully masked ones, or NaN
            seen = amap.lse != -torch.inf
            finite = amap.lse[amap.lse.isfinite()].abs()
            largest = float(finite.max()) if finite.numel() else -inf
        allowed, found = self._allowed(largest + log(max(1, amap.shape[3]))), Difference()
        if not self.dropout_p or self.weights is None:
            mine, theirs = self._rows(out, rows)
            found = _difference(mine, theirs, None if seen is None else self._rows(seen, rows)[0])
        if self.weights is not None and (every or self.dropout_p):
            b, h, n, m = amap.shape
            weights = self.weights()
            step = max(1, (1 << 20) // max(1, b * h * m))
            for start in range(0, n, step) if every else (0,):
                part = slice(start, start + step)
                mine, theirs = amap[:, :, part], weights[:, :, part].to(amap.lse.dtype)
                if self.dropout_p:
                    mine, theirs = mine * (theirs != 0), theirs * (1 - self.dropout_p)
                found = found.joined(_difference(mine, theirs, None if seen is None else seen[:, :, part]))
        return found, allowed

    def _allowed(self, size: float) -> float:
        """The difference that rounding explains of scores of that size."""
        unit = torch.finfo(self.dtype).eps / 2
        return FLOOR[self.dtype] + unit * (1 + max(0.0, size)) * (16 if self.dtype.itemsize > 2 else 4)

    def _rows(self, out: Tensor, rows: int | None) -> tuple[Tensor, Tensor]:
        """About so many rows of a tensor [b, h, n, …] and of the code's result, evenly spaced; None for all."""
        step = max(1, out.shape[2] // rows) if rows else 1
        return out[:, :, ::step], self.out[:, :, ::step]


def assembled(given: Values) -> Attention:
    """The attention of a product of weights and values, as `_assembled`, whose unexpected errors are reasons too."""
    try:
        return _assembled(given)
    except UNEXPECTED as error:
        raise Lost(unexpected(error)) from error


def _assembled(given: Values) -> Attention:
    """The attention of a product of weights and values; Lost, with the reason, if it is none."""
    pv, x, at, side, out = given
    product, softmax, queries = given.product, given.record, 1 - side
    operands = (product.of.left, product.of.right)
    weights, values = (pv.left, pv.right)[:: 1 if at == 0 else -1]
    own, other = (pv.a, pv.b)[:: 1 if at == 0 else -1]
    if learned(operands[side]):
        raise Lost("its keys are a parameter, as in a mixture of experts or a layer with softmax as its activation")
    form = _form(product, x, queries, pv, (own, other), (operands[queries], operands[side], values, out))
    axes = form.axes
    q, k, v = form.q.arranged(operands[queries]), form.k.arranged(operands[side]), form.v.arranged(values)
    changes = Changes(named=softmax.kept.setdefault("masks", []))
    for step in x.steps:
        changes.take(step, axes)
    changes.check()
    dtype = torch.promote_types(product.dtype, torch.float16) if product.dtype.itemsize < 2 else product.dtype
    if changes.q_factor is not None:
        q = q * changes.q_factor.to(q.dtype)
    if changes.k_factor is not None:
        k = k * changes.k_factor.to(k.dtype)
    scale = changes.scale
    inputs = [(product.inputs[i].factor if product.inputs[i] is not None else 1.0) for i in (queries, side)]  # type: ignore[union-attr]
    if inputs[0] > 0 and inputs[0] != 1:
        q, scale = q / inputs[0], scale * inputs[0]
    if inputs[1] > 0 and inputs[1] != 1:
        k, scale = k / inputs[1], scale * inputs[1]
    n, m = q.shape[2], k.shape[2]
    crosses = n != m and _two_sources(product)
    placed = changes.mask(axes, cut=n > 1 or not crosses)
    keys = placed.keys
    if keys < m:
        k, v = k[:, :, :keys], v[:, :, :keys]
    scores: list[Score] = []
    if changes.cap is not None:
        scores.append(SoftCap(changes.cap))
        scale *= changes.cap
    scores += [*changes.scores, *changes.added(n, keys)]
    if x.sink is not None:
        scores.append(SinkLogits(_sink(x.sink[0], x, axes)))
    if not q.dtype == k.dtype == v.dtype == dtype:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if not (k.requires_grad or v.requires_grad):  # else the first of each group would get the gradients of all
        k, v = _grouped(k, v)
    layout = x.layout
    matrix = None if weights.is_meta else lambda: axes.matrix(weights, layout)[..., :keys]
    return Attention(
        q,
        k,
        v,
        float(scale),
        placed.mask,
        tuple(scores),
        x.dropout_p,
        axes.traced,
        min(dtype, softmax.dtype, key=lambda one: one.itemsize),
        _one_source(product) and (n == m or (placed.known and _at_end(product, queries, keys - n))),
        placed.known or not crosses,
        m - keys,
        not (n == 1 or placed.known or crosses),
        form.out.arranged(out),
        matrix,
        form.out.arranged,
        partial(axes.restored, shape=tuple(out.shape), dims=form.dims_out, groups=axes.groups[:3]),
    )


class _Form(NamedTuple):
    """How the tensors of a call are arranged, which is the same for all calls of one form."""

    axes: Axes
    q: Plan
    k: Plan
    v: Plan
    out: Plan
    dims_out: list[Dim]


_forms: dict[Any, _Form] = {}


def _form(
    product: Product, x: Followed, queries: int, pv: Contraction, letters_pv: tuple[str, str],
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],  # queries, keys, values and output
) -> _Form:  # fmt: skip
    """The form of a call: letters of weights and values; shapes of queries, keys, values and output."""
    assert x.softmax is not None
    of, layouts = product.of, (x.layout, *(step.layout for step in x.steps))
    key = (of_product(product, queries, x.softmax.keys, layouts), letters_pv, pv.out, *(one.shape for one in tensors))
    found = _forms.get(key)
    if found is None:
        axes = Axes(product, queries, x.softmax.keys, layouts)
        b, h, n, m = axes.groups
        of_weights, of_values = letters_pv
        of_q, of_k = (of.a, of.b)[:: 1 if queries == 0 else -1]
        of_letter = {one: axes.atoms(dim) for one, dim in zip(of_weights, x.layout.dims, strict=True) if one != "1"}
        dims_out = [_dim(letter, of_letter) for letter in pv.out]
        if len(_forms) >= KEPT:
            _forms.clear()
        found = _forms[key] = _Form(
            axes,
            axes.plan(tensors[0].shape, _dims(of_q, of, axes), [b, h, n], full=3),
            axes.plan(tensors[1].shape, _dims(of_k, of, axes), [b, h, m], full=3),
            axes.plan(tensors[2].shape, [_dim(letter, of_letter) for letter in of_values], [b, h, m], full=3),
            axes.plan(tensors[3].shape, dims_out, [b, h, n], full=3),
            dims_out,
        )
    return found


def _dims(letters: str, of: Contraction, axes: Axes) -> list[Dim]:
    """The atoms of an operand of the first product."""
    return [
        axes.divided[of.out.index(one)] if one in of.out else [] if one == "1" else one for one in letters
    ]  # fmt: skip


def _dim(letter: str, of_letter: dict[str, list[tuple[int, int]]]) -> Dim:
    return [] if letter == "1" else of_letter.get(letter, letter)


def _difference(mine: Tensor, theirs: Tensor, rows: Tensor | None) -> Difference:
    """The difference of the rows [b, h, n] that count, all if None."""
    if rows is None and mine.numel():
        worst = float(relative(mine, theirs).max())
        if worst == worst:
            return Difference(worst, 0, mine.shape[:-1].numel())
    return difference(mine, theirs, rows)


def _grouped(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [b, h, m, d] without repeated heads, if consecutive ones are equal."""
    h = k.shape[1]
    if h == 1 or not k.shape[2] or not k.shape[0]:
        return k, v
    copies = bits(k), bits(v)
    first = copies[0][0, :, 0, 0].tolist() if k.shape[3] else []
    if first and not any(map(eq, first, first[1:])):  # no two neighbours begin alike
        return k, v
    for group in range(h, 1, -1):
        if h % group == 0 and all(
            bool((x.unflatten(1, (-1, group)) == x[:, ::group].unsqueeze(2)).all()) for x in copies
        ):
            return k[:, ::group], v[:, ::group]
    return k, v


def _sink(column: Tensor, x: Followed, axes: Axes) -> Tensor:
    """The logits [h] of a column that is the same for every query and batch entry."""
    assert x.sink is not None
    shape = column.shape[:-1]
    layout = x.sink[1]
    dims: list[Dim] = [axes.atoms(dim) for dim in layout.dims[:-1]]
    values = axes.arranged(column.reshape(shape), dims, axes.groups[:3], full=3)
    first = values[:1, :, :1]
    if not bool(torch.isclose(values, first, rtol=1e-5, atol=1e-5, equal_nan=True).all()):  # beside rounding
        raise Lost(
            "the column that is joined to the scores, or the number that is added to the sum of the exponentials, "
            "differs between queries"
        )
    return values.mean((0, 2))


def _one_source(product: Product) -> bool:
    """Whether queries and keys are layers of one and the same tensor, which may have been freed, or that tensor."""
    one, two = (None if x is None or x.origin is None else x.origin.source for x in product.inputs)
    if one is not None and one is two:
        return True
    left, right = (
        operand if source is None else source()
        for operand, source in zip((product.of.left, product.of.right), (one, two), strict=True)
    )
    return left is not None and right is not None and _place(left) == _place(right)


def _place(x: Tensor) -> tuple[int, int, int]:
    """Where in memory a tensor is, in whatever order of axes."""
    return x.untyped_storage()._cdata, int(x.storage_offset()), x.numel()


def _at_end(product: Product, queries: int, start: int) -> bool:
    """Whether nothing shows that the first query is not at key `start`: keys from a cache have no place in a layer, and
    queries of a step are all that its layer made."""
    q, k = product.inputs[queries], product.inputs[1 - queries]
    if q is None or q.origin is None or q.lost:
        return False
    letters = (product.of.a, product.of.b)[:: 1 if queries == 0 else -1]
    own = [q.layout.dims[i] for i, one in enumerate(letters[0]) if one in product.of.out and one not in letters[1]]
    if k is None or k.origin is None or k.lost:
        sizes = [size for i, size in enumerate(q.origin.shape) if i not in q.origin.features]
        return prod(size for dim in own for size, _ in dim) in sizes
    places = whole(q.origin.shape).dims, whole(k.origin.shape).dims
    found = [
        dimension(stride, places[1])
        for i, one in enumerate(letters[1]) if one in product.of.out and one not in letters[0]
        for _, stride in k.layout.dims[i]
    ]  # fmt: skip
    if len(found) != 1 or found[0] is None or len(places[0]) != len(places[1]):
        return True
    first, last = (
        x.layout.offset // place[found[0]][0][1] % place[found[0]][0][0] if place[found[0]] else 0
        for x, place in zip((q, k), places, strict=True)
    )
    return first - last == start


def _two_sources(product: Product) -> bool:
    """Whether queries and keys are layers of two tensors, neither of which is a part of the other."""
    one, two = (None if x is None or x.origin is None else x.origin.source() for x in product.inputs)
    if one is None or two is None:
        return False
    return one.untyped_storage()._cdata != two.untyped_storage()._cdata
