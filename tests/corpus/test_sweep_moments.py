"""Moments add up: to what all values together give, whatever the parts and their order."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.testing import assert_close

import headwise as hw
from headwise.corpus.select import OfRows, OfWindows, empty, merged as together, of_values, varied
from headwise.masks import Grid
from headwise.stats import MEASURES


@pytest.mark.thorough
@given(st.lists(st.lists(st.floats(-1e6, 1e6), max_size=9), min_size=1, max_size=5))
@settings(deadline=None, max_examples=60)
def test_parts_give_what_all_values_give(parts):
    total = empty(1)
    for part in parts:
        value = torch.tensor(part, dtype=torch.float64)[None, None]
        if part:
            total = together(total, of_values(value, torch.ones_like(value, dtype=torch.bool))[0])
    every = np.concatenate([np.asarray(part, np.float64) for part in parts])
    count, mean, squares, least, largest = total[:, 0].tolist()
    assert count == len(every)
    if not len(every):
        assert (mean, squares, least, largest) == (0.0, 0.0, np.inf, -np.inf)
        return
    scale = max(1.0, np.abs(every).max())
    assert abs(mean - every.mean()) <= 1e-12 * scale
    assert abs(squares - ((every - every.mean()) ** 2).sum()) <= 1e-10 * scale**2 * len(every)
    assert (least, largest) == (every.min(), every.max())


def test_nothing_changes_nothing():
    value = torch.randn(1, 3, 7, dtype=torch.float64)
    some = of_values(value, torch.ones(1, 3, 7, dtype=torch.bool))[0]
    assert torch.equal(together(some, empty(3)), some)
    assert torch.equal(together(empty(3), some), some)


def test_values_that_do_not_count_leave_no_trace():
    value = torch.tensor([[[1.0, torch.nan, 5.0, torch.inf]]])
    found = of_values(value, torch.tensor([[[True, False, True, False]]]))
    assert_close(found[0, :, 0], torch.tensor([2.0, 3.0, 8.0, 1.0, 5.0], dtype=torch.float64))


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize("by_tiles", [False, True])
@pytest.mark.parametrize("name", MEASURES)
def test_moments_of_a_measure_are_those_of_its_values(name, by_tiles):
    """For every measure that there is: by what a kernel tells, and by tiles."""
    torch.manual_seed(7)
    q, k, v = torch.randn(2, 3, 71, 5), torch.randn(2, 3, 71, 5), torch.randn(2, 3, 71, 5)
    mask = hw.Causal() & hw.Lengths([71, 53], [71, 53])
    _, amap = hw.attend(q, k, v, mask=mask, return_map=True)
    plain_measure = MEASURES[name]()
    if by_tiles:
        plain_measure.needs = lambda rule: None
    measure = varied(plain_measure)
    found = amap.measure(measure)
    numbers = found.states[name].numbers
    plain = amap.measure(plain_measure, rows=True)
    assert_close(found[name], plain[name])
    if isinstance(measure, OfWindows):
        assert torch.equal(numbers[:, 0], torch.ones(2, 3, dtype=torch.float64))
        assert_close(numbers[:, 1].float(), plain[name])
        return
    assert isinstance(measure, OfRows)
    rows = plain.rows[name].double()
    for entry, length in enumerate((71, 53)):
        count = int(plain.states[name].count[entry, 0])
        # Rows that do not count are the first, the last or the padded ones; which, their number says.
        first = {"previous_mass": 1, "normalized_entropy": 1}.get(name, 0)
        kept = rows[entry, :, first:length] if name != "next_mass" else rows[entry, :, :0]
        assert kept.shape[-1] == count
        assert numbers[entry, 0].tolist() == [count] * 3
        if count:
            assert_close(numbers[entry, 1], kept.mean(-1), rtol=1e-6, atol=1e-7)
            assert_close(numbers[entry, 2], kept.var(-1, correction=0) * count, rtol=1e-4, atol=1e-7)
            assert_close(numbers[entry, 3], kept.amin(-1), rtol=1e-6, atol=1e-7)
            assert_close(numbers[entry, 4], kept.amax(-1), rtol=1e-6, atol=1e-7)


def test_merged_states_are_those_of_the_whole_batch():
    q = torch.randn(5, 2, 17, 4)
    _, amap = hw.attend(q, q, q, mask=hw.Causal(), return_map=True)
    for name in ("entropy", "max_logit", "received_mass"):
        measure = varied(MEASURES[name]())
        whole = amap.measure(measure).states[name]
        merged = measure.merge(measure.start(Grid(1, 2, 17, 17), amap.lse), whole)
        one_by_one = empty(2)
        for entry in whole.numbers:
            one_by_one = together(one_by_one, entry)
        assert torch.equal(merged.numbers[0], one_by_one)
