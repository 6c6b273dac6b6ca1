"""What a view shows is checked where it is made."""

import numpy as np
import pytest
from view_samples import compared, heads_of, passage, report_of, weights

from headwise.errors import ShapeError
from headwise.reports.colours import STOPS, stops
from headwise.reports.data import Comparison, Passage, Report
from headwise.table import HeadTable


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokens": []}, "0 tokens"),
        ({"cell": 0}, "cells of 0"),
        ({"maps": weights(4)}, r"expected \[layers, heads, 5, 5\]"),
        ({"cell": 2}, "expected"),
        ({"peaks": weights(5)}, "peaks"),
        ({"sentences": [(0, 6)]}, r"\(0, 6\)"),
        ({"sentences": [(2, 2)]}, r"\(2, 2\)"),
    ],
)
def test_passage_that_does_not_fit_is_refused(change, named):
    good = {"title": "t", "tokens": list("abcde"), "maps": weights(5)}
    Passage(**good)
    with pytest.raises(ShapeError, match=named):
        Passage(**(good | change))


def test_pooled_passage_needs_its_maxima():
    pooled = passage("abcdefg", cell=3)
    assert pooled.maps.shape[-2:] == (3, 3)
    with pytest.raises(ShapeError, match="peaks"):
        Passage(pooled.title, pooled.tokens, pooled.maps, pooled.cell)


def test_a_report_says_what_it_holds_in_one_line():
    one, two = passage("abc"), passage("defghij")
    count = one.maps.shape[1]
    layers, heads = len(one.maps), len(one.maps) * count
    assert repr(report_of(one)) == f"Report('A report': {layers} layers, {heads} heads; 1 passage, 3 tokens)"
    fewer = report_of(one, two, title="武松", counts=[count] * (layers - 1) + [1])
    assert repr(fewer) == f"Report('武松': {layers} layers, {heads - count + 1} heads; 2 passages, 10 tokens)"


def test_report_whose_parts_differ_is_refused():
    two, three = passage("abc"), passage("abc", heads=2)
    for parts in (
        ([], HeadTable({}), []),
        ([two], HeadTable({}), [["", "", ""]] * 2),
        ([two, three], heads_of(3, 3), [["", "", ""]] * 2),
        ([two], heads_of(2, 2, 2, columns={"s": np.zeros((3, 2))}), [["", "", ""]] * 2),
        ([two], heads_of(3, 3).select(heads=[1, 2]), [["", ""]] * 2),
        ([two], heads_of(3, 3), [["", ""]] * 2),
    ):
        with pytest.raises(ShapeError):
            Report("r", *parts)
    assert report_of(two).shape == (2, 3)


@pytest.mark.parametrize(("order", "said"), [([0, 1, 1], "twice"), ([0, 1, 3], "do not match")])
def test_comparison_names_a_head_once(order, said):
    with pytest.raises(ShapeError, match=said):
        Comparison("c", np.zeros((3, 3)), order, "", "")


def test_layers_may_have_fewer_heads():
    good = compared()
    some = Comparison("c", np.zeros((6, 6)), [4, 0, 1, 2, 3], "", "")

    def report(*counts: int) -> Report:
        return Report("r", good.passages, heads_of(*counts), good.patterns, comparisons=[some])

    assert report(3, 2).heads == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert report(3, 2).counts == [3, 2]
    for counts in ((2, 4), (0, 3), (3,), (3, 3)):
        with pytest.raises(ShapeError, match=r"passages|all heads of each|compares 5 heads, expected 6"):
            report(*counts)


def test_comparisons_roles_and_importance_are_of_all_heads():
    good = compared()
    parts = (good.title, good.passages, good.statistics, good.patterns)
    for name, wrong, said in (
        ("comparisons", [Comparison("c", np.zeros((5, 5)), list(range(5)), "", "")], "5 heads, expected 6"),
        ("labels", [[[]] * 2] * 2, "expected 2 rows of 3"),
        ("importance", heads_of(2, 2, 2, columns={"i": np.zeros((3, 2))}), "importance.*expected"),
    ):
        with pytest.raises(ShapeError, match=said):
            Report(*parts, **{name: wrong})


def test_causal_is_read_from_the_weights():
    assert passage("abcde").causal
    assert passage("abcdefghijk", cell=3).causal
    assert not passage("abcde", causal=False).causal
    assert not passage("a").causal


@pytest.mark.parametrize(("theme", "sign"), [("light", -1), ("dark", 1)])
def test_colours_grow_steadily_in_lightness(theme, sign):
    rgb = np.array([[int(c[i : i + 2], 16) / 255 for i in (1, 3, 5)] for c in stops(theme)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    # OKLab's lightness, computed here the other way round.
    lms = linear @ np.array([[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]]).T
    lightness = np.cbrt(lms) @ np.array([0.2105, 0.7936, -0.0041])
    steps = sign * np.diff(lightness)
    assert len(rgb) == STOPS
    assert steps.min() > 0.6 * steps.mean()
    assert steps.max() < 1.4 * steps.mean()
