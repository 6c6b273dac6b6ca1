"""A rule as plain tensors says the same as the rule."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from samples import MASKS
from torch import Tensor

from headwise.lowering import Lowered, lower
from headwise.masks import Causal, Dense, Documents, Everything, Grid, Lengths, Mask, Sinks, Window, spans
from headwise.rule import Rule


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


@settings(deadline=None, derandomize=True, max_examples=400)
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
    assert reason == "the keys that a query may see are not a few ranges under Documents(<1×5 ids>)"
