"""Curves as SVG: every point stands where the axes say, and what a name contains is text."""

import math
import re
import xml.etree.ElementTree as xml
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from headwise.errors import ConfigError
from headwise_textbook.curves import Curve, Line, label, legend, svg


def elements(curve: Curve) -> xml.Element:
    return xml.fromstring(svg(curve))


def texts(root: xml.Element, anchor: str) -> dict[str, tuple[float, float]]:
    """What stands beside an axis and where: "end" are the numbers of y, "middle" those of x and its name."""
    return {
        one.text or "": (float(one.get("x")), float(one.get("y")))
        for one in root.iter("text")
        if one.get("text-anchor") == anchor
    }


def marks(root: xml.Element, line: int) -> list[tuple[float, float]]:
    found = [one.get("transform") for one in root.iter("path") if one.get("class") == f"mark-{line}"]
    return [tuple(map(float, re.findall(r"-?[\d.]+", where))) for where in found]


def value(text: str) -> float:
    """A label read back."""
    text = text.replace(",", "")
    if "10" in text and re.search("[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]", text):
        factor, _, power = text.rpartition("10")
        plain = power.translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789"))
        return float(factor.rstrip("·") or 1) * 10.0 ** int(plain)
    return float(text)


def read(ticks: list[tuple[float, float]], at: float, log: bool) -> float:
    """The value at a place of an axis whose ticks are (place, value)."""
    (a, u), (b, v) = ticks[0], ticks[-1]
    u, v = (math.log(u), math.log(v)) if log else (u, v)
    found = u + (v - u) * (at - a) / (b - a)
    return math.exp(found) if log else found


numbers = st.lists(st.floats(1e-12, 1e9), min_size=3, max_size=9, unique=True)


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(numbers, st.booleans(), st.data())
def test_points_stand_where_the_axis_says(values, log, data):
    if log and max(values) / min(values) < 100:
        values = [*values[:-1], 1000 * max(values)]
    y = tuple(data.draw(st.permutations(values)))
    root = elements(Curve.of("t", "x", "y", {"a": dict(enumerate(y))}, log="y" if log else ""))
    # Labels stand 4 below their grid line.
    ticks = sorted((place[1] - 4, value(text)) for text, place in texts(root, "end").items())
    assert len(ticks) >= 2
    found = marks(root, 0)
    assert len(found) == len(y)
    span = math.log(max(y) / min(y)) if log else max(y)
    for (_, place), truth in zip(found, y, strict=True):
        back = read(ticks, place, log)
        assert (abs(math.log(back / truth)) if log else abs(back - truth)) <= 0.01 * span
    assert [place for place, _ in found] == sorted(place for place, _ in found)


def test_logarithmic_x_has_equal_steps_and_its_own_values_as_ticks():
    root = elements(Curve.of("t", "heads", "y", {"a": {1: 1.0, 2: 2.0, 4: 3.0, 8: 4.0}}, log="x"))
    steps = {round(b - a, 1) for (a, _), (b, _) in pairwise(marks(root, 0))}
    assert max(steps) - min(steps) < 0.3
    assert {"1", "2", "4", "8", "heads"} == set(texts(root, "middle"))


def test_counts_have_no_ticks_between_them():
    root = elements(Curve.of("t", "heads", "y", {"a": {1: 1.0, 2: 2.0, 3: 3.0}}))
    assert {"1", "2", "3", "heads"} == set(texts(root, "middle"))


def test_zero_on_a_logarithmic_axis_stands_at_its_foot():
    root = elements(Curve.of("t", "x", "y", {"a": {0: 0.0, 1: 1e-6, 2: 1.0}}, log="y"))
    numbers = texts(root, "end")
    assert marks(root, 0)[0][1] == pytest.approx(numbers["0"][1] - 4, abs=0.1)
    assert all(place[1] < numbers["0"][1] - 5 for text, place in numbers.items() if text != "0")
    assert marks(root, 0)[1][1] < marks(root, 0)[0][1] - 5


def test_what_is_not_finite_is_a_gap():
    root = elements(Curve.of("t", "x", "y", {"a": {0: 1.0, 1: 2.0, 2: math.nan, 3: math.inf, 4: 1.0}}))
    path = next(one.get("d") for one in root.iter("path") if one.get("class") == "line-0")
    assert (path.count("M"), path.count("L"), len(marks(root, 0))) == (2, 1, 3)


@pytest.mark.parametrize("values", [(0.0, 0.0), (7.0, 7.0), (-3.0, -3.0), (-2.0, 5.0), (math.nan, math.nan)])
@pytest.mark.parametrize("log", ["", "y"])
def test_constant_and_negative_values_are_drawn(values, log):
    if log and min(values) < 0:
        with pytest.raises(ConfigError, match="negative"):
            Curve.of("t", "x", "y", {"a": dict(enumerate(values))}, log=log)
        return
    root = elements(Curve.of("t", "x", "y", {"a": dict(enumerate(values))}, log=log))
    for _, place in marks(root, 0):
        assert 0 <= place <= 270
    assert len(marks(root, 0)) == sum(map(math.isfinite, values))


def test_what_was_not_measured_is_dashed_and_has_no_marks():
    curve = Curve.of("t", "x", "y", {"a": {1: 1.0, 2: 2.0}}, {"claimed": {1: 1.0, 2: 4.0}})
    assert [line.reference for line in curve.lines] == [False, True]
    assert marks(elements(curve), 1) == []
    assert len(marks(elements(curve), 0)) == 2
    assert 'class="line-1 reference"' in svg(curve)
    assert legend(curve).count("reference") == 1


def test_names_are_text_wherever_they_stand():
    hostile = "</svg><script>alert(1)</script>\"&'"
    curve = Curve.of(hostile, hostile, hostile, {hostile: {1: 1.0, 2: 2.0}})
    assert {one.tag for one in elements(curve).iter()} == {"svg", "path", "text", "title"}
    assert xml.fromstring(legend(curve)).find("li").find("svg").tail == hostile
    assert hostile in texts(elements(curve), "middle")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Curve("t", "x", "y", (), ()), "at least 1 point"),
        (lambda: Curve.of("t", "x", "y", {str(i): {1: 1.0} for i in range(7)}), "7 lines"),
        (lambda: Curve("t", "x", "y", (1.0, 2.0), (Line("a", (1.0,)),)), "has 1 values, expected 2"),
        (lambda: Curve("t", "x", "y", (2.0, 1.0), (Line("a", (1.0, 1.0)),)), "increasing"),
        (lambda: Curve("t", "x", "y", (1.0, math.nan), (Line("a", (1.0, 1.0)),)), "to be finite"),
        (lambda: Curve.of("t", "x", "y", {"a": {-1: 1.0, 2: 1.0}}, log="x"), "x is logarithmic, but -1.0 is negative"),
        (lambda: Curve.of("t", "x", "y", {"a": {1: 1.0}}, {"b": {2: 1.0}}), "'b' has values for"),
    ],
)
def test_what_cannot_be_drawn_is_told(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "0"), (0.02, "0.02"), (4096, "4,096"), (50_000, "50,000"), (1e5, "10⁵"), (3e-7, "3·10⁻⁷"), (-2.5, "-2.5")],
)
def test_numbers_beside_an_axis(number, words):
    assert label(number) == words
    assert value(words) == pytest.approx(number)
