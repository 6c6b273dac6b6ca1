"""Pairs of parameters: every two values are together, and few sets do it."""

from itertools import combinations, product

import pytest

from parameters import pairs, thorough


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 3, 5), (4, 11, 3), (4, 13, 5, 2), (2, 2, 2, 2, 2, 2)])
def test_every_two_values_are_together_in_far_fewer_sets(sizes):
    axes = [[f"{name}{i}" for i in range(size)] for name, size in zip("abcdef", sizes, strict=False)]
    chosen = pairs(*axes)
    for (i, one), (j, other) in combinations(enumerate(axes), 2):
        assert {(each[i], each[j]) for each in chosen} == set(product(one, other))
    assert len(set(chosen)) == len(chosen)
    largest = sorted(sizes)[-1] * sorted(sizes)[-2]
    assert largest <= len(chosen) <= 1.5 * largest + 2
    assert pairs(*axes) == chosen


def test_two_axes_are_their_product():
    assert pairs("ab", range(3)) == list(product("ab", range(3)))


def test_values_that_are_equal_keep_their_places():
    """As one float and one bool may be."""
    assert len(pairs([1, True], [1.0, 2.0], [0, 1])) == 4


def test_what_takes_long_is_marked():
    one, two = thorough(["a", "b"], {"b"})
    assert one == "a"
    assert two.values == ("b",)
    assert [mark.name for mark in two.marks] == ["thorough"]
    with pytest.raises(AssertionError, match="there is no \\['c'\\]"):
        thorough(["a", "b"], {"c"})
