"""A rectangle of the matrix is a rule of its own: its mask, scores, distances and statistics are those of the whole."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from samples import GAPS, MASKS, SCORES, dense_truth, qkv

from headwise.errors import CheckpointError
from headwise.kernels import KERNELS
from headwise.kernels.call import Call
from headwise.kernels.gradients import run_kernel
from headwise.map import AttentionMap
from headwise.masks import Causal, Documents, Grid, Span, State, spans
from headwise.rule import Rule
from headwise.rule.lowering import Lowered, lower
from headwise.stats import DISTANCE, DISTANCE_VARIANCE, LARGEST, RangeMass

rectangles = st.builds(
    lambda a, b, c, d: (Span(min(a, b), max(a, b) + 1), Span(min(c, d), max(c, d) + 1)),
    st.integers(0, 36), st.integers(0, 36), st.integers(0, 52), st.integers(0, 52),
)  # fmt: skip


def cut(x: torch.Tensor, rows: Span, cols: Span) -> torch.Tensor:
    return x[..., rows.start : rows.stop, cols.start : cols.stop]


@pytest.mark.thorough_except("dense")
@pytest.mark.parametrize("name", MASKS)
@settings(deadline=None, derandomize=True, max_examples=25)
@given(rectangle=rectangles)
def test_a_part_of_a_mask_allows_what_the_whole_does(name: str, rectangle: tuple[Span, Span]) -> None:
    rows, cols = rectangle
    whole = Grid(2, 3, 37, 53)
    mask = MASKS[name](2, 37, 53)
    expected = cut(mask.to_dense(37, 53, batch=2, heads=3).expand(2, 3, 37, 53), rows, cols)
    part, grid = mask.part(rows, cols, whole), whole.part(rows, cols)
    i, j = torch.arange(grid.n), torch.arange(grid.m)
    assert torch.equal(part.allowed(i, j, grid).expand(*grid), expected)
    assert torch.equal(part.only(1, 2, grid).allowed(i, j, replace(grid, b=1, h=1))[0, 0], expected[1, 2])
    found = part.spans(grid)
    if found is not None:
        assert torch.equal(spans.to_dense(found, grid.m)[:, None].expand(*grid), expected)
    state = part.state(Span(0, grid.n), Span(0, grid.m), grid)
    assert state is State.MIXED or bool((expected == (state is State.FULL)).all())
    # A part of a part.
    smaller = Span(grid.n // 2, grid.n), Span(grid.m // 3, grid.m)
    within = grid.part(*smaller)
    again = part.part(*smaller, grid).allowed(i[: within.n], j[: within.m], within)
    assert torch.equal(again.expand(*within), cut(expected, *smaller))


@pytest.mark.thorough_except("soft cap", "alibi", "relative", "relative ahead, shared", "bias of keys", "sinks")
@pytest.mark.parametrize("name", [*SCORES, *GAPS])
@settings(deadline=None, derandomize=True, max_examples=25)
@given(rectangle=rectangles)
def test_a_part_of_the_scores_adds_what_the_whole_does(name: str, rectangle: tuple[Span, Span]) -> None:
    rows, cols = rectangle
    whole = Rule(Causal(), 0.3, Grid(2, 6, 37, 53), {**SCORES, **GAPS}[name](2, 6, 37, 53))
    part, like = whole.part(rows, cols), torch.empty(0, dtype=torch.float64)
    n, m = part.grid.n, part.grid.m

    def added(rule: Rule, rows: Span, cols: Span) -> torch.Tensor:
        total = torch.zeros(2, 6, rows.stop - rows.start, cols.stop - cols.start, dtype=torch.float64)
        return total + sum(rule.terms(like).added(rows, cols))

    assert torch.equal(added(part, Span(0, n), Span(0, m)), added(whole, rows, cols))
    assert part.terms(like).soft_cap == whole.terms(like).soft_cap
    assert part.terms(like).sinks is None
    found = lower(part)
    if isinstance(found, Lowered) and found.relative is not None:
        assert found.relative.shape[1] == n + m - 1


@pytest.mark.parametrize("kernel", ["cpu", "torch_blocks", "reference"])
@pytest.mark.parametrize("name", ["causal", "window and sinks", "documents", "dense", "nothing for some"])
@pytest.mark.parametrize(
    "rectangle", [(Span(5, 30), Span(20, 49)), (Span(0, 1), Span(16, 17)), (Span(9, 37), Span(0, 8))]
)
def test_kernels_compute_a_part(kernel: str, name: str, rectangle: tuple[Span, Span]) -> None:
    rows, cols = rectangle
    q, k, v = qkv()
    mask = MASKS[name](2, 37, 53)
    rule = Rule(mask, 8**-0.5, Grid(2, 6, 37, 53), SCORES["alibi"](2, 6, 37, 53)).part(rows, cols)
    part_k, part_v = k[:, :, cols.start : cols.stop], v[:, :, cols.start : cols.stop]
    near = RangeMass(-2, 1, relative=True)
    wanted = (LARGEST, DISTANCE, DISTANCE_VARIANCE, near)
    call = Call(q[:, :, rows.start : rows.stop], part_k, part_v, rule, statistics=wanted)
    if KERNELS[kernel].refuse(call) is not None:
        pytest.skip(f"{kernel}: {KERNELS[kernel].refuse(call)}")
    found = run_kernel(KERNELS[kernel], call)

    _, allowed, scores = dense_truth(q, k, mask)
    far = (torch.arange(37)[:, None] + 16 - torch.arange(53)).double()
    slopes = torch.linspace(0.02, 0.3, 6, dtype=torch.float64)[:, None, None]
    scores = cut((scores - slopes * far.abs()).masked_fill(~allowed, -torch.inf), rows, cols)
    far = cut(far, rows, cols)
    p = scores.softmax(-1).nan_to_num(0.0)
    values = part_v.double().repeat_interleave(2, 1)
    torch.testing.assert_close(found.out.double(), p @ values, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(found.lse.double(), scores.logsumexp(-1), atol=1e-5, rtol=1e-6)
    mean = (p * far.abs()).sum(-1)
    expected = {
        LARGEST: scores.amax(-1),
        DISTANCE: mean,
        DISTANCE_VARIANCE: (p * (far.abs() - mean[..., None]).square()).sum(-1),
        near: (p * ((far <= 2) & (far > -1))).sum(-1),
    }
    for statistic, value in found.statistics.items():
        torch.testing.assert_close(value.double(), expected[statistic], atol=2e-5, rtol=1e-5)


def test_gradients_of_a_part_are_those_of_its_dense_form() -> None:
    rows, cols = Span(7, 37), Span(11, 40)
    q, k, v = (x.double().requires_grad_() for x in qkv())
    rule = Rule(Causal(), 8**-0.5, Grid(2, 6, 37, 53)).part(rows, cols)
    ours = [x.detach().float().requires_grad_() for x in (q[:, :, 7:37], k[:, :, 11:40], v[:, :, 11:40])]
    out = run_kernel(
        KERNELS["torch_blocks" if KERNELS["cpu"].refuse(Call(*ours, rule)) else "cpu"], Call(*ours, rule)
    ).out
    seen = cut(Causal().to_dense(37, 53), rows, cols)
    keys, values = (x[:, :, 11:40].repeat_interleave(2, 1) for x in (k, v))
    scores = (q[:, :, 7:37] @ keys.transpose(-1, -2) * 8**-0.5).masked_fill(~seen, -torch.inf)
    exact = scores.softmax(-1) @ values
    pull = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    out.backward(pull)
    exact.backward(pull.double())
    pairs = zip(ours, ((q, 7, 37), (k, 11, 40), (v, 11, 40)), strict=True)
    for mine, (theirs, start, stop) in pairs:
        torch.testing.assert_close(mine.grad.double(), theirs.grad[:, :, start:stop], atol=5e-6, rtol=5e-6)


def test_a_map_of_some_queries_is_kept_with_where_they_stand(tmp_path) -> None:
    q, k, v = qkv()
    rows, cols = Span(3, 21), Span(0, 53)
    rule = Rule(Causal(), 8**-0.5, Grid(2, 6, 37, 53)).part(rows, cols)
    call = Call(q[:, :, 3:21], k, v, rule)
    amap = AttentionMap(call.q, k, run_kernel(KERNELS["torch_blocks"], call).lse, rule)
    amap.save(tmp_path / "map")
    again = AttentionMap.load(tmp_path / "map")
    truth = dense_truth(q, k, Causal())[0][:, :, 3:21]
    torch.testing.assert_close(again[:].double(), truth, atol=2e-6, rtol=2e-6)
    expected = (truth * (torch.arange(3, 21)[:, None] + 16 - torch.arange(53)).abs()).sum(-1).mean(-1)
    torch.testing.assert_close(again.measure("mean_distance")["mean_distance"].double(), expected, atol=1e-4, rtol=1e-5)

    packed = Rule(Documents(torch.arange(53) // 9), 1.0, Grid(2, 6, 37, 53)).part(rows, cols)
    with pytest.raises(CheckpointError, match="Part"):
        AttentionMap(call.q, k, amap.lse, packed).save(tmp_path / "packed")
