"""A rectangle of the matrix, wherever it stands: what the kernel makes of several is what the whole has."""

import pytest
import torch
from formula import distance, error, output, rule, weights
from samples import MASKS, SCORES, qkv
from triton_here import DEVICE, mostly_slow

from headwise.kernels.call import Call
from headwise.kernels.triton_gpu import TritonGPU
from headwise.masks import Span
from headwise.parallel.layout import RowGradients, Rows, ScoreSums, Way
from headwise.stats import CONCENTRATION, DISTANCE, DISTANCE_VARIANCE, ENTROPY, LARGEST, SQUARES, KeyWeights, RangeMass

N, M = 37, 53
ROWS, COLS = (Span(0, 7), Span(7, 37)), (Span(0, 31), Span(31, 53))  # few rows are decoded, and many are not
ON_CPU = pytest.mark.skipif(DEVICE != "cpu", reason="the biases of the samples lie on the CPU")


def cut(x: torch.Tensor, span: Span) -> torch.Tensor:
    return x[:, :, span.start : span.stop]


@pytest.mark.parametrize(
    "score",
    [
        pytest.param("all", marks=ON_CPU),
        *mostly_slow(["none", "alibi", "sinks"]),
        pytest.param("bias", marks=(ON_CPU, pytest.mark.slow)),
    ],
)
@pytest.mark.parametrize("mask", mostly_slow(["everything", "causal window", "documents", "dense"], "causal window"))
def test_rectangles_join_to_the_whole(mask: str, score: str) -> None:
    """Queries left of their keys, right of them, and under a window on neither: outputs, statistics, gradients."""
    q, k, v = qkv(2, 3, 1, N, M)
    scores = () if score == "none" else SCORES[score](2, 3, N, M)
    whole = rule(q, k, MASKS[mask](2, N, M), scores)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    p, lse = weights(leaves[0], leaves[1], whole.mask, scores)
    exact = output(p, leaves[2])
    toward = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    q, k, v = (x.to(DEVICE) for x in (q, k, v))
    terms = whole.terms(q)
    tensors = [x for x in (terms.relative, *terms.biases) if x is not None]
    expected = torch.autograd.grad(exact, leaves, toward)

    classes = torch.rand(2, M, generator=torch.Generator().manual_seed(2))
    near, early = RangeMass(-4, 2, relative=True), RangeMass(3, 45, relative=False)
    wanted = (LARGEST, ENTROPY, SQUARES, CONCENTRATION, DISTANCE, DISTANCE_VARIANCE, near, early, KeyWeights(classes))
    way = Way(whole, "triton_gpu", statistics=wanted)
    given = [x is not None for x in (terms.relative, terms.sinks, *terms.biases)]
    sums = ScoreSums(terms, given, q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    p = p.detach()
    far = distance(p)
    offset = torch.arange(M) - (torch.arange(N)[:, None] + M - N)
    mass = p.sum(-1)
    mean = (p * far).sum(-1) / mass.clamp_min(1e-300)
    truth = {
        ENTROPY: torch.special.entr(p).sum(-1),
        SQUARES: p.square().sum(-1),
        CONCENTRATION: p.square().sum(-1) / mass.square().clamp_min(1e-300),
        DISTANCE: mean * mass,
        DISTANCE_VARIANCE: (p * (far - mean[..., None]).square()).sum(-1) / mass.clamp_min(1e-300),
        near: (p * ((offset >= -4) & (offset < 2))).sum(-1),
        early: p[..., 3:45].sum(-1),
        wanted[-1]: (p * classes.double()[:, None, None]).sum(-1),
    }
    for rows in ROWS:
        found = Rows(cut(q, rows), rows, way, v.shape[-1])
        for cols in COLS:
            found.meet(cut(k, cols), cut(v, cols), cols)
        found.finish(terms.sinks)
        assert not found.missing
        assert error(found.out.cpu(), cut(exact, rows)) <= 3e-6
        torch.testing.assert_close(found.lse.cpu().double(), cut(lse, rows).detach(), rtol=1e-6, atol=2e-6)
        for statistic, value in truth.items():
            assert error(found.found[statistic].cpu(), cut(value, rows)) <= 2e-5, statistic
        back = RowGradients(
            cut(q, rows), rows, way, found.kernels, found.out, found.lse, cut(toward, rows).to(q)
        )  # fmt: skip
        for cols in COLS:
            back.meet(cut(k, cols), cut(v, cols), cols, sums, cut(dk, cols), cut(dv, cols))
        assert error(back.dq.cpu(), cut(expected[0], rows)) <= 1e-5
    assert error(dk.cpu(), expected[1]) <= 1e-5
    assert error(dv.cpu(), expected[2]) <= 1e-5
    of_scores = [x for x in (sums.relative, *sums.biases) if x is not None]
    assert len(of_scores) == len(tensors)
    if not of_scores:
        return
    learned = [x for part in scores for x in vars(part).values() if isinstance(x, torch.Tensor) and x.requires_grad]
    # From the tensors of the rule to those of the scores it is autograd's way; sinks are no part of rectangles.
    through = torch.autograd.grad(
        tensors, learned, [x.to(t.dtype) for x, t in zip(of_scores, tensors, strict=True)], allow_unused=True
    )
    direct = torch.autograd.grad(
        output(weights(leaves[0].detach(), leaves[1].detach(), whole.mask, scores)[0], leaves[2].detach()),
        learned,
        toward,
    )
    for ours, theirs in zip(through, direct, strict=True):
        if ours is not None:
            assert float((ours - theirs).norm()) <= 2e-5 * max(float(theirs.norm()), 0.1 * theirs.numel() ** 0.5)


@pytest.mark.parametrize("rows", [Span(0, 2), Span(0, 20)])
@pytest.mark.parametrize("cols", [Span(40, 53), Span(0, 9)])
def test_distances_are_counted_from_where_a_rectangle_stands(rows: Span, cols: Span) -> None:
    q, k, v = qkv(2, 3, 1, N, M)
    part = rule(q, k, MASKS["everything"](2, N, M), SCORES["alibi"](2, 3, N, M)).part(rows, cols)
    assert not part.grid.at_end
    given = [x.to(DEVICE) for x in (cut(q, rows), cut(k, cols), cut(v, cols))]
    near = RangeMass(-13, 30, relative=True)
    found = TritonGPU().run(Call(*given, part, statistics=(DISTANCE, DISTANCE_VARIANCE, near))).statistics
    offset = torch.arange(M)[cols.start : cols.stop] - torch.arange(M - N, M)[rows.start : rows.stop, None]
    far = offset.abs().double()
    s = cut(q, rows).double() @ cut(k, cols).double().mT * 8**-0.5
    p = (s - torch.linspace(0.02, 0.3, 3, dtype=torch.float64)[:, None, None] * far).softmax(-1)
    mean = (p * far).sum(-1)
    assert error(found[DISTANCE].cpu(), mean) <= 1e-6
    assert error(found[DISTANCE_VARIANCE].cpu(), (p * (far - mean[..., None]).square()).sum(-1)) <= 1e-5
    assert error(found[near].cpu(), (p * ((offset >= -13) & (offset < 30))).sum(-1)) <= 1e-5
