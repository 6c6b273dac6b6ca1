"""The walk over blocks: every visible key is walked over once, and what is said to need no mask needs none."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from samples import MASKS
from torch import Tensor

from headwise.kernels.triton_gpu.plan import Plan, key_blocks, key_range, query_blocks
from headwise.masks import Causal, Grid, Mask, Sinks, Window
from headwise.rule import Rule
from headwise.rule.lowering import Lowered, lower


def spans_of(mask: Mask, b: int, n: int, m: int) -> tuple[Tensor, Tensor]:
    """The spans and the mask, [b, n, m]."""
    found = lower(Rule(mask, 1.0, Grid(b, 1, n, m)))
    assert isinstance(found, Lowered)
    index = torch.arange(m)
    inside = (index >= found.spans[..., :1]) & (index < found.spans[..., 1:])  # [b, n, K, m]
    return found.spans, inside.any(2).expand(b, n, m)


def walked(intervals: Tensor, blocks: int) -> Tensor:
    """How often each block is walked over, [b, own blocks, blocks]."""
    index = torch.arange(blocks)
    return ((index >= intervals[..., :1]) & (index < intervals[..., 1:])).sum(2)


def check(plan: Plan, seen: Tensor) -> None:
    """`seen` [b, rows of blocks, cells of a row, blocks, cells of a block]."""
    blocks = seen.shape[3]
    full, mixed = walked(plan.full, blocks), walked(plan.mixed, blocks)
    assert int((full + mixed).max()) <= 1
    cells = seen.transpose(2, 3).flatten(3)
    needed = cells.any(-1).expand(*full.shape)
    assert bool(((full + mixed) > 0)[needed].all())
    whole = cells.all(-1).expand(*full.shape)
    assert bool(whole[full > 0].all())


def tiled(visible: Tensor, rows: int, cols: int) -> Tensor:
    """[b, n, m] as [b, row blocks, rows, column blocks, cols]; past the end, rows repeat and keys are not seen."""
    b, n, m = visible.shape
    down, along = -(-n // rows) * rows, -(-m // cols) * cols
    more = torch.zeros(b, down, along, dtype=torch.bool)
    more[:, :, :m] = visible[:, torch.arange(down).clamp(max=n - 1)]
    return more.view(b, down // rows, rows, along // cols, cols)


@pytest.mark.thorough_except("nothing for some")
@pytest.mark.parametrize("name", [name for name in MASKS if name != "dense"])
@settings(deadline=None, derandomize=True, max_examples=25)
@given(data=st.data())
def test_blocks_are_walked_over_once_and_masked_where_needed(name: str, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 45))
    m = data.draw(st.integers(max(n, 8), 60))
    rows, cols = data.draw(st.sampled_from([1, 4, 16])), data.draw(st.sampled_from([4, 8, 16]))
    spans, visible = spans_of(MASKS[name](2, n, m), 2, n, m)
    plan = key_blocks(spans, m, rows, cols, masked=False)
    seen = tiled(visible, rows, cols)
    b = plan.full.shape[0]
    check(plan, seen[:b] if b < 2 and torch.equal(seen[0], seen[-1]) else seen)
    back = query_blocks(plan, seen.shape[3])
    check(back, seen.permute(0, 3, 4, 1, 2)[: back.full.shape[0]])
    start, stop = key_range(spans, m, rows).expand(2, -1, -1).unbind(-1)
    index = torch.arange(m)
    inside = (index >= start[..., None]) & (index < stop[..., None])
    assert not bool((visible & ~inside.repeat_interleave(rows, 1)[:, :n]).any())


def test_what_no_query_of_a_block_sees_is_not_walked_over() -> None:
    n = 640
    spans, _ = spans_of(Causal() & (Window(64) | Sinks(4)), 1, n, n)
    plan = key_blocks(spans, n, 64, 32, masked=False)
    blocks = walked(plan.full, 20) + walked(plan.mixed, 20)
    assert blocks[0, -1].tolist() == [1] + [0] * 15 + [1] * 4
    assert int(walked(plan.full, 20)[0, -1].sum()) == 0  # 64 queries with windows of 64: no block is seen by all
    causal, _ = spans_of(Causal(), 1, n, n)
    plan = key_blocks(causal, n, 64, 32, masked=False)
    assert walked(plan.full, 20)[0, -1].tolist() == [1] * 18 + [0, 0]
    assert walked(plan.mixed, 20)[0, -1].tolist() == [0] * 18 + [1, 1]
    assert walked(key_blocks(causal, n, 64, 32, masked=True).full, 20).sum() == 0
