"""Sets of parameters: pairs in the place of a whole product, and which sets only `make test-all` runs."""

from collections.abc import Collection, Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairs(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Some sets of the axes' product, in which each two values of different axes are together at least once.

    A defect that shows with one value, or with two together, shows in these as in the product; one that takes three
    may not. The sets are the same each time: always the next that has the most new pairs.
    """
    values = [list(axis) for axis in axes]
    if len(values) < 3:
        return list(product(*values))
    open_pairs = {
        (i, x, j, y)
        for i, j in combinations(range(len(values)), 2)
        for x in range(len(values[i]))
        for y in range(len(values[j]))
    }
    chosen = []
    while open_pairs:
        chosen.append(_next(open_pairs, [len(axis) for axis in values]))
        open_pairs -= _pairs_of(chosen[-1])
    return [tuple(axis[at] for axis, at in zip(values, one, strict=True)) for one in chosen]


def _pairs_of(one: Sequence[int]) -> set[tuple[int, int, int, int]]:
    return {(i, one[i], j, one[j]) for i, j in combinations(range(len(one)), 2)}


def _next(open_pairs: set[tuple[int, int, int, int]], sizes: Sequence[int]) -> list[int]:
    """Begins with a pair that is open, and gives every other axis the value that closes most."""
    i, x, j, y = min(open_pairs)
    given = {i: x, j: y}
    for axis in sorted(set(range(len(sizes))) - given.keys(), key=lambda axis: -sizes[axis]):
        news = [
            sum((*min((axis, value), one), *max((axis, value), one)) in open_pairs for one in given.items())
            for value in range(sizes[axis])
        ]
        given[axis] = news.index(max(news))
    return [given[axis] for axis in range(len(sizes))]


def thorough(names: Iterable[str], which: Collection[str]) -> list[Any]:
    """Names as parameters, of which these are left to `make test-all`."""
    found = list(names)
    assert set(which) <= set(found), f"there is no {sorted(set(which) - set(found))}"
    return [pytest.param(name, marks=pytest.mark.thorough) if name in which else name for name in found]
