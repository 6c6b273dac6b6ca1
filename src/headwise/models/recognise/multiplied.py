"""Products: of queries and keys, and of weights and values; einsum of several operands as one of two."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from headwise.models.frames import modules_in_call, user_line
from headwise.models.recognise.axes import are_of, own_dims
from headwise.models.recognise.products import (
    Contraction,
    Factor,
    Layout,
    contraction,
    merged,
    outer,
    pair,
    terms,
    whole,
)
from headwise.models.recognise.tracked import INPUT, Followed, Origin, Product, Step, Tracked, Values, learned

Operand = tuple[Tensor, str]  # a tensor and the letters of its dimensions


def of_weights(args: Sequence[Any], at: int) -> tuple[Contraction, Tensor] | None:
    """The product of weights, operand `at`, with the one operand that has the dimensions of the keys, and its result,
    computed here; None if there is no such product."""
    found = terms(args)
    if found is None:
        return None
    operands, letters, out = found
    places = {one: [i for i, term in enumerate(letters) if one in term and i != at] for one in letters[at]}
    values = {found[0] for one, found in places.items() if one not in out and len(found) == 1}
    if len(values) != 1:
        return None
    (v,) = values
    rest = set(out).union(*(letters[i] for i in range(len(operands)) if i not in (at, v)))
    kept = "".join(dict.fromkeys(one for one in letters[at] + letters[v] if one in rest))
    product = pair(operands[at], operands[v], letters[at], letters[v], kept)
    if product is None:
        return None
    with torch.no_grad():
        return product, torch.einsum(f"{letters[at]},{letters[v]}->{kept}", operands[at], operands[v])


def of_inputs(seen: Tracked, args: Sequence[Any]) -> tuple[Contraction, list[Operand]] | None:
    """The product of two operands, into which others that are summed over are multiplied first, and the factors of its
    result; None if more than two are left."""
    found = terms(args)
    if found is None:
        return None
    operands, letters, out = found
    every = [*zip(operands, letters, strict=True)]
    factors = [one for one in every if set(one[1]) <= set(out)]
    summing = [one for one in every if not set(one[1]) <= set(out)]
    first = 0
    while len(summing) > 2:
        # A parameter, or a factor of a summed dimension, goes into the operand that shares a summed letter with it.
        at = next((i for i, (x, t) in enumerate(summing) if i != first and (learned(x) or len(t) == 1)), None)
        if at is None:
            return None
        folded = summing.pop(at)
        into = next((i for i, (_, t) in enumerate(summing) if (set(t) & set(folded[1])) - set(out)), None)
        if into is None:
            return None
        rest = set(out).union(*(t for i, (_, t) in enumerate(summing) if i != into))
        summing[into] = _folded(seen, summing[into], folded, rest)
        first = into
    if len(summing) != 2:
        return None
    (left, a), (right, b) = summing
    product = pair(left, right, a, b, "".join(one for one in out if one in a + b))
    return None if product is None or len(product.out) != len(out) else (Contraction(left, right, a, b, out), factors)


def broadcast(factor: Operand, out: str) -> Tensor:
    """A factor with the dimensions of the result, of size 1 where it has none."""
    x, letters = factor
    x = x.permute([letters.index(one) for one in out if one in letters])
    shape = iter(x.shape)
    return x.reshape([next(shape) if one in letters else 1 for one in out])


def _folded(seen: Tracked, x: Operand, by: Operand, rest: set[str]) -> Operand:
    """The product of two operands, as the output of a layer if the second is a parameter."""
    kept = "".join(dict.fromkeys(one for one in x[1] + by[1] if one in rest))
    with torch.no_grad():
        made = torch.einsum(f"{x[1]},{by[1]}->{kept}", x[0], by[0])
    features = tuple(i for i, one in enumerate(kept) if one in by[1] and one not in x[1])
    if features:
        origin = Origin(tuple(made.shape), features, "einsum", seen.root(x[0]))
        seen.remember(made, INPUT.but(layout=whole(origin.shape), origin=origin))
    return made, kept


def multiplied(seen: Tracked, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> None:
    """A product of tensors."""
    found = contraction(name, args, kwargs)
    if found is not None:
        combined(seen, found, out, name)
        return
    operands = [x for arg in args for x in (arg if isinstance(arg, list | tuple) else [arg]) if isinstance(x, Tensor)]
    known = [seen.known(x) for x in operands]
    at = next((i for i, x in enumerate(known) if x is not None and x.stage in ("weights", "exp")), None)
    if name == "einsum" and at is not None and (of := of_weights(args, at)) is not None:
        x = known[at]
        assert x is not None
        _with_values(seen, of[0], x, 0, of[1], name)
    elif name == "einsum" and at is None and len(operands) > 2 and (inputs := of_inputs(seen, args)) is not None:
        combined(seen, inputs[0], out, name, [broadcast(one, inputs[0].out) for one in inputs[1]])
    else:
        for x in known:
            if x is not None and x.stage != "input":
                seen.lose(x, f"{name} at {user_line()}, which is not a product of two tensors", out)
                return


def summed(seen: Tracked, x: Followed, dim: Any, keepdim: bool, out: Tensor) -> bool:
    """The sum of a product of each number, x, over `dim`, as a product of tensors; whether it is one."""
    assert x.outer is not None
    left, right = x.outer
    ndim = max(left.ndim, right.ndim)
    dims = [one % ndim for one in (dim if isinstance(dim, tuple | list) else [dim])]
    found = outer(left, right, dims, ndim)
    if found is None:
        return False
    whole_of = out.squeeze(dims) if keepdim else out
    combined(seen, found, whole_of, "sum")
    made = seen.known(whole_of)
    if keepdim and made is not None and made.stage == "scores":
        layout = list(made.layout.dims)
        for one in sorted(dims):
            layout.insert(one, ())
        seen.remember(out, made.but(layout=Layout(tuple(layout))))
    return True


def combined(seen: Tracked, found: Contraction, out: Tensor, name: str, factors: Sequence[Tensor] = ()) -> None:
    """A product of two tensors; `factors` broadcast to the result, which they multiply."""
    both = seen.known(found.left), seen.known(found.right)
    for at, x in enumerate(both):
        if x is not None and x.stage in ("weights", "exp"):
            _with_values(seen, found, x, at, out, name)
            return
    for at, x in enumerate(both):
        if x is not None and x.stage in ("scores", "other") and x.product is not None and not x.product.learned:
            over = summed_factors(found, x, at)
            if any(are_of(over, own_dims(x.product, side)) for side in (0, 1)):
                what = f"{x.note} attention: {x.note} takes the place of softmax" if x.stage == "other" else (
                    "two products without a softmax between them, as in linear attention"
                )  # fmt: skip
                seen.record(out, what, near=True)
            break
    fixed = [learned(operand) for operand in (found.left, found.right)]
    a, b = set(found.a) - {"1"}, set(found.b) - {"1"}
    if all(fixed) or (a <= set(found.b) and b <= set(found.a)):  # a product of each number sums over none
        return
    origin = None
    if any(fixed):
        own, other = (found.a, found.b)[:: 1 if fixed[0] else -1]
        features = tuple(i for i, one in enumerate(found.out) if one in own and one not in other)
        origin = Origin(tuple(out.shape), features, name, seen.root((found.left, found.right)[fixed[0]]))
    product = Product(found, tuple(out.shape), out.dtype, modules_in_call(seen.modules), user_line(), both, any(fixed))
    if not any(fixed):
        seen.products += 1
    here = whole(product.shape)
    steps = (Step("mul", found.alpha, here),) if found.alpha != 1 else ()
    if found.added is not None:
        steps = (*steps, Step("add", found.added, here, found.beta))
    steps = (*steps, *(Step("times", factor, here) for factor in factors))
    seen.remember(out, INPUT.but(stage="scores", layout=here, origin=origin, product=product, steps=steps))


def _with_values(seen: Tracked, found: Contraction, x: Followed, at: int, out: Tensor, name: str) -> None:
    """A product of weights: an attention if it sums over the keys."""
    if x.softmax is None:
        x = x.but(softmax=seen.record(out))
    assert x.softmax is not None
    if x.softmax.done:
        return
    side = _side_of_keys(found, x, at, name)
    if side is not None:
        seen.ready.append(Values(found, x, at, side, out))
    elif seen.on_refused is not None:
        seen.on_refused(found, x, at, out)


def _side_of_keys(found: Contraction, x: Followed, at: int, name: str) -> int | None:
    """The operand of the first product that holds the keys; None, with the reason in the record, if it is none."""
    record = x.softmax
    assert record is not None
    if x.lost or x.product is None:
        record.reason = x.lost or record.reason
        return None
    summed = summed_factors(found, x, at)
    if x.stage == "exp":
        record.keys = summed
    if record.keys:
        sides = [side for side in (0, 1) if are_of(record.keys, own_dims(x.product, side))]
    elif record.single:  # one key: of two operands without a dimension of their own, keys are mostly the second
        sides = [side for side in (1, 0) if not own_dims(x.product, side)][:1]
    else:
        return None
    if x.extended:
        record.reason = f"the column that was joined to the scores is multiplied by values at {user_line()}"
    elif not sides:
        record.reason = "softmax along an axis that is not that of the keys, such as the heads"
    elif summed != record.keys:
        queries = are_of(summed, own_dims(x.product, 1 - sides[0]))
        record.reason = (
            "softmax over the queries, not over the keys that the product with the values sums over" if queries else
            f"the weights are combined along another axis than the keys by {name} at {user_line()}, as in the "
            f"mixing of heads"
        )  # fmt: skip
    else:
        return sides[0]
    return None


def summed_factors(found: Contraction, x: Followed, at: int) -> tuple[Factor, ...]:
    """The factors of the dimensions of operand `at` that the product sums over."""
    return _summed_factors((found.a, found.b)[at], found.summed, x.layout)


@lru_cache(maxsize=1024)
def _summed_factors(letters: str, summed: str, layout: Layout) -> tuple[Factor, ...]:
    factors = [factor for one, dim in zip(letters, layout.dims, strict=True) if one in summed for factor in dim]
    return merged(sorted(factors, key=lambda factor: -factor[1]))
