"""einsum of three operands or more: as a product of two, and what else it multiplies."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.models.recognise.products import Contraction, pair, terms, whole
from headwise.models.recognise.tracked import INPUT, Origin, Tracked, learned

Factor = tuple[Tensor, str]  # a tensor and the letters of its dimensions


def of_weights(args: Sequence[Any], at: int) -> tuple[Contraction, int, Tensor] | None:
    """The product of weights, operand `at`, with the one operand that has the dimensions of the keys, which of its
    operands the weights are, and its result, computed here; None if there is no such product."""
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
        return product, 0, torch.einsum(f"{letters[at]},{letters[v]}->{kept}", operands[at], operands[v])


def of_inputs(seen: Tracked, args: Sequence[Any]) -> tuple[Contraction, list[Factor]] | None:
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


def broadcast(factor: Factor, out: str) -> Tensor:
    """A factor with the dimensions of the result, of size 1 where it has none."""
    x, letters = factor
    x = x.permute([letters.index(one) for one in out if one in letters])
    shape = iter(x.shape)
    return x.reshape([next(shape) if one in letters else 1 for one in out])


def _folded(seen: Tracked, x: Factor, by: Factor, rest: set[str]) -> Factor:
    """The product of two operands, as the output of a layer if the second is a parameter."""
    kept = "".join(dict.fromkeys(one for one in x[1] + by[1] if one in rest))
    with torch.no_grad():
        made = torch.einsum(f"{x[1]},{by[1]}->{kept}", x[0], by[0])
    features = tuple(i for i, one in enumerate(kept) if one in by[1] and one not in x[1])
    if features:
        origin = Origin(tuple(made.shape), features, "einsum", seen.root(x[0]))
        seen.remember(made, INPUT.but(layout=whole(origin.shape), origin=origin))
    return made, kept
