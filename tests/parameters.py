"""Which sets of parameters run: each two values together and not the whole product, in `make test` each value."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest

Values = tuple[tuple[int, Any], ...]  # each with its place in a set


def with_new_pairs(sets: Sequence[Sequence[Any]], seen: set[Values], together: int = 2) -> list[int]:
    """The places of few of the sets, in which are all pairs of values that the sets have, or all values with
    `together=1`; those that are `seen` need no set, and the new ones are added there.

    A defect that shows with one value, or with two together, shows in these as in all sets; one that takes three may
    not. The choice is the same each time: always the first of the sets with the most new pairs, or of those with the
    most new values, the first whose values were chosen least.
    """
    new = {at: set(combinations(enumerate(one), together)) - seen for at, one in enumerate(sets)}
    chosen: list[int] = []
    times: Counter[tuple[int, Any]] = Counter()  # that each value was chosen
    while new := {at: values - seen for at, values in new.items() if not values <= seen}:
        chosen.append(max(new, key=lambda at: (len(new[at]), -sum(times[value] for value in enumerate(sets[at])))))
        seen |= new[chosen[-1]]
        if together == 1:
            times.update(enumerate(sets[chosen[-1]]))
    return sorted(chosen)


def without_repeated_pairs(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Of a test with three parameters or more that are combined with each other, the sets with new pairs of values:
    first of those that run always, then of those that are thorough, then of those that are slow."""
    left_out = {item for test in _tests(items) for item in _repeated(test)}
    return [item for item in items if item not in left_out]


def mark_repeated_values(items: Iterable[pytest.Item]) -> None:
    """Of a test that combines parameters with each other, the sets without a new value are thorough."""
    for test in _tests(item for item in items if not (_is_thorough(item) or item.get_closest_marker("slow"))):
        if len(_axes(test[0])) > 1:
            kept = with_new_pairs(_sets(test), set(), together=1)
            for at in set(range(len(test))) - set(kept):
                test[at].add_marker(pytest.mark.thorough)


def mark_beyond(items: Iterable[pytest.Item]) -> None:
    """Of a test with `thorough_beyond`, all sets of parameters but so many are thorough: from the first to the last."""
    for test in _tests(item for item in items if not (_is_thorough(item) or item.get_closest_marker("slow"))):
        mark = test[0].get_closest_marker("thorough_beyond")
        if mark is not None and len(test) > (count := mark.args[0]):
            kept = {at * (len(test) - 1) // max(1, count - 1) for at in range(count)}
            for at in set(range(len(test))) - kept:
                test[at].add_marker(pytest.mark.thorough)


def _tests(items: Iterable[pytest.Item]) -> list[list[pytest.Item]]:
    """The sets of parameters of each test that has some."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return [test for test in tests.values() if len(test) > 1]


def _sets(test: Sequence[pytest.Item]) -> list[list[tuple[int, ...]]]:
    """The values of each axis, as numbers that identify them."""
    axes = _axes(test[0])
    return [[tuple(id(_given(item)[name]) for name in names) for names in axes] for item in test]


def _repeated(test: Sequence[pytest.Item]) -> set[pytest.Item]:
    if len(_axes(test[0])) < 3:
        return set()
    sets = _sets(test)
    seen: set[Values] = set()
    kept = set()
    runs = [(item.get_closest_marker("slow") is not None, _is_thorough(item)) for item in test]
    for run in sorted(set(runs)):
        places = [at for at, of in enumerate(runs) if of == run]
        kept |= {test[places[at]] for at in with_new_pairs([sets[place] for place in places], seen)}
    return set(test) - kept


def _axes(item: pytest.Item) -> list[tuple[str, ...]]:
    """The names of parameters that are combined with each other; those that are given together are one."""
    together = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        together.append(tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else tuple(names))
    alone = set(_given(item)) - {name for names in together for name in names}
    return [*together, *((name,) for name in sorted(alone))]


def _given(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params  # type: ignore[attr-defined]


def _is_thorough(item: pytest.Item) -> bool:
    return item.get_closest_marker("thorough") is not None


def each_value(sets: Sequence[Sequence[Any]]) -> list[Any]:
    """Sets of parameters that combine values with each other, of which `make test` runs some in which each value is."""
    kept = with_new_pairs([[id(value) for value in one] for one in sets], set(), together=1)
    return [one if at in kept else pytest.param(*one, marks=pytest.mark.thorough) for at, one in enumerate(sets)]


def thorough(names: Iterable[str], which: Collection[str]) -> list[Any]:
    """Names as parameters, of which these are left to `make test-all`."""
    found = list(names)
    assert set(which) <= set(found), f"there is no {sorted(set(which) - set(found))}"
    return [pytest.param(name, marks=pytest.mark.thorough) if name in which else name for name in found]
