"""A rule as plain tensors says the same as the rule."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from samples import MASKS, SCORES
from torch import Tensor

from headwise.masks import Causal, Dense, Documents, Everything, Grid, Lengths, Mask, Sinks, Window, spans
from headwise.rule import Rule
from headwise.rule.lowering import Lowered, lower
from headwise.scores import ALiBi, Bias, SinkLogits, SoftCap


def visible(found: Lowered, grid: Grid) -> Tensor:
    """What a kernel that reads the spans one key at a time would let through."""
    assert found.spans.dtype == torch.int32
    assert found.spans.is_contiguous()
    b, n, count, two = found.spans.shape
    assert (b in (1, grid.b), n, two) == (True, grid.n, 2)
    seen = torch.zeros(grid.b, grid.h, grid.n, grid.m, dtype=torch.bool)
    for at in range(grid.b):
        for i, row in enumerate(found.spans[at % b].tolist()):
            filled = [(start, stop) for start, stop in row if (start, stop) != (0, 0)]
            assert row == [list(x) for x in filled] + [[0, 0]] * (count - len(filled))
            last = -1
            for start, stop in filled:
                assert last < start < stop <= grid.m  # sorted, and never touching
                seen[at, :, i, start:stop] = True
                last = stop
    return seen if found.dense is None else seen & found.dense


def dense(mask: Mask, grid: Grid) -> Tensor:
    return mask.to_dense(grid.n, grid.m, batch=grid.b, heads=grid.h).expand(*grid)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("n", "m"), [(37, 53), (53, 53), (1, 53), (6, 7)])
def test_every_mask_is_its_spans(name: str, n: int, m: int) -> None:
    grid = Grid(2, 3, n, m)
    mask = MASKS[name](2, n, m)
    found = lower(Rule(mask, 1.0, grid))
    assert isinstance(found, Lowered)
    assert torch.equal(visible(found, grid), dense(mask, grid))


def leaves(n: int, m: int) -> st.SearchStrategy[Mask]:
    size = st.integers(0, m)
    lengths = st.builds(
        lambda keys, queries, side: Lengths(keys, queries, side=side),
        st.tuples(size, size),
        st.none() | st.tuples(st.integers(0, n), st.integers(0, n)),
        st.sampled_from(["left", "right"]),
    )
    # Sorted ids are one run each; padding may lie anywhere between them.
    ids = st.lists(st.integers(0, 3), min_size=m, max_size=m).map(sorted)
    gaps = st.lists(st.booleans(), min_size=m, max_size=m)
    packed = st.builds(lambda x, gap: Documents([-1 if g and i > m // 2 else i for i, g in zip(x, gap, strict=True)]),
                       ids, gaps)  # fmt: skip
    cells = st.integers(0, 99).map(lambda s: Dense(torch.rand(n, m, generator=torch.Generator().manual_seed(s)) > 0.4))
    plain = st.sampled_from([Everything(), Causal()])
    windows = st.builds(Window, st.integers(1, m), st.integers(0, m))
    return plain | windows | size.map(Sinks) | lengths | packed | cells


@pytest.mark.thorough
@settings(deadline=None, derandomize=True, max_examples=100)
@given(data=st.data())
def test_compositions_are_their_spans(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 9))
    m = data.draw(st.integers(n, 11))
    pairs = st.recursive(
        leaves(n, m),
        lambda inner: st.tuples(inner, inner, st.booleans()).map(lambda x: x[0] & x[1] if x[2] else x[0] | x[1]),
        max_leaves=6,
    )
    mask, grid = data.draw(pairs), Grid(2, 2, n, m)
    mask.check(grid)
    found = lower(Rule(mask, 1.0, grid))
    if isinstance(found, str):
        assert "Documents" in found  # padding between the tokens of one document scatters it
        return
    assert torch.equal(visible(found, grid), dense(mask, grid))
    ranges = mask.spans(grid)
    if ranges is not None:
        assert torch.equal(spans.to_dense(ranges, m).expand(2, n, m), dense(mask, grid)[:, 0])


@pytest.mark.parametrize(
    ("mask", "count"),
    [
        (Everything(), 1),
        (Causal(), 1),
        (Window(5, 2), 1),
        (Causal() & Window(5), 1),
        (Causal() & (Window(5) | Sinks(2)), 2),
        (Causal() & (Window(60) | Sinks(2)), 1),
        (Window(3) | Window(7, 1), 1),
        (Documents(torch.arange(53) // 9) & Causal(), 1),
        (Documents(torch.arange(53) // 9) | Sinks(1), 2),
        (Sinks(0), 1),
    ],
)
def test_spans_are_as_few_as_can_be(mask: Mask, count: int) -> None:
    found = mask.spans(Grid(1, 1, 37, 53))
    assert found is not None
    assert found.shape == (1, 37, count, 2)


def test_more_queries_than_keys_and_none_at_all() -> None:
    for n, m in ((9, 4), (0, 5), (5, 0), (0, 0)):
        for mask in (Everything(), Window(3, 1), Sinks(2), Window(2) | Sinks(1), Lengths([m]) & Sinks(3)):
            grid = Grid(1, 2, n, m)
            found = lower(Rule(mask, 1.0, grid))
            assert isinstance(found, Lowered)
            assert torch.equal(visible(found, grid), dense(mask, grid))


def test_a_dense_mask_stays_the_callers_own_memory() -> None:
    boolean = torch.rand(2, 3, 11, 13) > 0.5
    found = lower(Rule(Causal() & Dense(boolean), 1.0, Grid(2, 3, 11, 13)))
    assert isinstance(found, Lowered)
    assert found.dense is not None
    assert found.dense.data_ptr() == boolean.data_ptr()
    assert found.spans.shape == (1, 11, 1, 2)


def test_scattered_documents_are_told() -> None:
    scattered = Documents([0, 1, 0, 1, 2])
    assert scattered.spans(Grid(1, 1, 5, 5)) is None
    assert (scattered | Causal()).spans(Grid(1, 1, 5, 5)) is None
    reason = lower(Rule(Causal() & scattered, 1.0, Grid(1, 1, 5, 5)))
    assert reason == "the mask Documents(<1×5 ids>) does not allow each query a few ranges of keys"


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize(("n", "m"), [(37, 53), (53, 37), (1, 53)])
def test_every_score_is_its_numbers(name: str, n: int, m: int) -> None:
    grid, score = Grid(2, 6, n, m), SCORES[name](2, 6, n, m)
    found = lower(Rule(Everything(), 1.0, grid, score))
    if name == "two biases" and n > 1:
        assert isinstance(found, str)
        return
    assert isinstance(found, Lowered)
    added = torch.zeros(*grid, dtype=torch.float64)
    if found.relative is not None:
        assert found.relative.shape in ((1, n + m - 1), (6, n + m - 1))
        assert found.relative.is_contiguous()
        at = torch.tensor([[j - i + n - 1 for j in range(m)] for i in range(n)])
        added = added + found.relative[:, at]
    if found.bias is not None:
        added = added + found.bias
    exact = Rule(Everything(), 1.0, grid, score).terms(torch.zeros(0, dtype=torch.float64))
    expected = sum(exact.added_at(torch.arange(n), torch.arange(m)), torch.zeros(*grid, dtype=torch.float64))
    torch.testing.assert_close(added, expected, rtol=1e-6, atol=1e-6)
    for x in (found.relative, found.bias, found.sinks):
        assert x is None or (x.dtype == torch.float32 and x.requires_grad)  # gradients find their way to the scores
    assert found.soft_cap == {"soft cap": 0.8, "all": 1.3}.get(name, 0.0)
    assert (found.sinks is not None) == (name in ("sinks", "all"))


def test_biases_that_would_grow_are_told() -> None:
    by_batch, by_head = Bias(torch.zeros(7, 1, 500, 1)), Bias(torch.zeros(1, 6, 1, 500))
    reason = lower(Rule(Causal(), 1.0, Grid(7, 6, 500, 500), (by_batch, by_head)))
    assert reason == "the sum of biases of shapes (7, 1, 500, 1) and (1, 6, 1, 500) would have shape (7, 6, 500, 500)"


def test_no_scores_are_no_numbers() -> None:
    found = lower(Rule(Causal(), 1.0, Grid(1, 2, 5, 5)))
    assert isinstance(found, Lowered)
    assert (found.soft_cap, found.relative, found.bias, found.sinks) == (0.0, None, None, None)
    constant = lower(Rule(Causal(), 1.0, Grid(1, 2, 5, 5), (ALiBi.standard(2), SinkLogits([0.5, 1.0]), SoftCap(3.0))))
    assert isinstance(constant, Lowered)
    assert constant.relative is not None
    assert constant.relative[1].tolist() == [-abs(t - 4) / 2**8 for t in range(9)]
    assert constant.sinks is not None
    assert constant.sinks.tolist() == [0.5, 1.0]
