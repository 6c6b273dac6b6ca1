"""Sets of parameters: every two values are together in those that run, and few sets do it."""

from itertools import combinations, product

import pytest

from parameters import each_value, mark_beyond, mark_repeated_values, thorough, with_new_pairs, without_repeated_pairs


def pairs(sets):
    return {two for one in sets for two in combinations(enumerate(one), 2)}


@pytest.mark.thorough_except("sizes0", "sizes1", "sizes2", "sizes4")
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 3, 5), (4, 11, 3), (4, 13, 5, 2), (2, 2, 2, 2, 2, 2)])
def test_every_two_values_are_together_in_far_fewer_sets(sizes):
    whole = list(product(*map(range, sizes)))
    chosen = [whole[at] for at in with_new_pairs(whole, set())]
    assert pairs(chosen) == pairs(whole)
    largest = sorted(sizes)[-1] * sorted(sizes)[-2]
    assert largest <= len(chosen) <= 1.5 * largest + 2
    assert [whole[at] for at in with_new_pairs(whole, set())] == chosen


def test_pairs_that_were_seen_need_no_set():
    whole = list(product(range(2), range(3), range(2)))
    seen = pairs(whole[:6])  # all with 0 on the first axis
    chosen = with_new_pairs(whole, seen)
    assert all(whole[at][0] == 1 for at in chosen)
    assert seen == pairs(whole)


def test_each_value_of_a_product_runs_with_others_each_time():
    options = [{}, {"a": 1}]
    whole = [(name, one) for name in "abcd" for one in options]
    run = [one for one in each_value(whole) if type(one) is tuple]
    assert run == [("a", {}), ("b", {"a": 1}), ("c", {}), ("d", {"a": 1})]
    assert [one.values for one in each_value(whole) if type(one) is not tuple] == [x for x in whole if x not in run]


def test_what_takes_long_is_marked():
    one, two = thorough(["a", "b"], {"b"})
    assert one == "a"
    assert two.values == ("b",)
    assert [mark.name for mark in two.marks] == ["thorough"]
    with pytest.raises(AssertionError, match="there is no \\['c'\\]"):
        thorough(["a", "b"], {"c"})


EXAMPLE = """
import pytest

@pytest.fixture(params=["t0", "t1"])
def target(request):
    return request.param

@pytest.mark.parametrize("x", ["x0", "x1", pytest.param("x2", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("y", "z"), [("y0", "z0"), ("y1", "z1")])
def test_three(target, x, y, z):
    pass

@pytest.mark.parametrize("x", range(3))
@pytest.mark.parametrize("y", range(5))
def test_two(x, y):
    pass

@pytest.mark.thorough_beyond(3)
@pytest.mark.parametrize("x", [*range(6), pytest.param(6, marks=pytest.mark.thorough)])
def test_some(x):
    pass

def test_none():
    pass
"""


@pytest.fixture
def example(tmp_path):
    """What pytest collects of EXAMPLE, after a function has changed it."""

    def collected(change):
        path, kept = tmp_path / "test_example.py", []
        path.write_text(EXAMPLE, encoding="utf-8")

        class Here:
            def pytest_collection_modifyitems(self, items):
                kept.extend(change(items) or items)

        options = ["--collect-only", "-qq", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(tmp_path)]
        assert (
            pytest.main(
                [*options, "-c", "/dev/null", "-W", "ignore", "--import-mode=importlib", str(path)], plugins=[Here()]
            )
            == 0
        )
        return kept

    return collected


@pytest.mark.thorough
def test_tests_with_three_parameters_run_pairs_first_of_what_is_not_slow(example):
    kept = example(without_repeated_pairs)
    names = [item.name for item in kept]
    assert sum(name.startswith("test_two") for name in names) == 15
    assert "test_none" in names
    three = [item.callspec.id.split("-") for item in kept if item.name.startswith("test_three")]
    axes = [[f"{name}{i}" for i in range(n)] for name, n in (("t", 2), ("y", 2), ("x", 3))]
    chosen = [(target, y, x) for target, y, _, x in three]
    assert pairs(chosen) == pairs(product(*axes))
    assert pairs(one for one in chosen if one[2] != "x2") == pairs(product(*axes[:2], axes[2][:2]))
    assert len(chosen) == 4 + 2


@pytest.mark.thorough
def test_each_value_runs_where_the_product_is_thorough(example):
    kept = [item for item in example(mark_repeated_values) if item.get_closest_marker("thorough") is None]
    two = [item.callspec.id.split("-") for item in kept if item.name.startswith("test_two")]
    assert [sorted({one[at] for one in two}) for at in (0, 1)] == [list("01234"), list("012")]
    assert len(two) == 5
    three = [item for item in kept if item.name.startswith("test_three") and not item.get_closest_marker("slow")]
    values = {word for item in three for word in item.callspec.id.split("-")}
    assert values == {f"{name}{i}" for name in "txyz" for i in (0, 1)}
    assert len(three) == 2
    assert "test_none" in {item.name for item in kept}


@pytest.mark.thorough
def test_so_many_sets_from_the_first_to_the_last_are_kept(example):
    kept = [item.name for item in example(mark_beyond) if item.get_closest_marker("thorough") is None]
    assert [name for name in kept if name.startswith("test_some")] == ["test_some[0]", "test_some[2]", "test_some[5]"]
    assert sum(name.startswith("test_two") for name in kept) == 15
