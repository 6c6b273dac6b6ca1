"""A matrix cut into rectangles anyhow, met in any order, is the matrix: outputs, statistics and gradients."""

from itertools import pairwise

import pytest
import torch
from compared import close, leaves
from hypothesis import given, settings, strategies as st
from samples import GAPS, MASKS, SCORES, kernels_here, qkv

import headwise as hw
from headwise.kernels import run
from headwise.kernels.call import Call
from headwise.masks import Grid, Span
from headwise.parallel.layout import RowGradients, Rows, ScoreSums, Way
from headwise.rule import Rule
from headwise.stats import (
    CONCENTRATION,
    DISTANCE,
    DISTANCE_VARIANCE,
    ENTROPY,
    LARGEST,
    SQUARES,
    KeyWeights,
    LargestOther,
    RangeMass,
)

B, H, H_KV, D, E = 2, 4, 2, 5, 3
CUTS = st.lists(st.integers(0, 60), max_size=4)
REFUSED = {"two biases", "all with a gap"}  # by the kernel: biases whose sum is larger than each of them
CUT = {
    "mask": st.sampled_from(list(MASKS)), "score": st.sampled_from(["none", *SCORES, *GAPS]), "m": st.integers(14, 40),
    "fewer": st.integers(0, 9), "row_cuts": CUTS, "col_cuts": CUTS, "order": st.randoms(use_true_random=False),
}  # fmt: skip


def spans(size, cuts):
    return [Span(*ends) for ends in pairwise([0, *sorted(cut % (size + 1) for cut in cuts), size])]


def matrix(mask, score, m, fewer):
    """Queries, keys and values, and the rule over them."""
    n = m - max(fewer, 2 if score in GAPS else 0)  # a gap is before all queries
    scores = () if score == "none" else {**SCORES, **GAPS}[score](B, H, n, m)
    return *qkv(B, H, H_KV, n, m, D, E), Rule(MASKS[mask](B, n, m), D**-0.5, Grid(B, H, n, m), scores)


def meet(q, k, v, rows, blocks, way):
    """The rows after all keys."""
    found = Rows(q[:, :, rows.start : rows.stop], rows, way, E)
    for cols in blocks:
        found.meet(k[:, :, cols.start : cols.stop], v[:, :, cols.start : cols.stop], cols)
    found.finish(way.rule.terms(q).sinks)
    return found


@pytest.mark.thorough
@pytest.mark.skipif("cpu" not in kernels_here(), reason="no compiled kernel here, and no other gives statistics")
@settings(max_examples=30, deadline=None)
@given(**{**CUT, "score": CUT["score"].filter(lambda score: score not in REFUSED)})
def test_statistics_of_rectangles_join(mask, score, m, fewer, row_cuts, col_cuts, order):
    q, k, v, rule = matrix(mask, score, m, fewer)
    weights = torch.rand(B, m, generator=torch.Generator().manual_seed(2))
    wanted = (
        LARGEST, ENTROPY, SQUARES, CONCENTRATION, DISTANCE_VARIANCE, DISTANCE, RangeMass(0, 3, relative=False),
        RangeMass(9, 200, relative=False), RangeMass(-4, 2, relative=True), KeyWeights(weights),
        LargestOther(weights > 0.3),
    )  # fmt: skip
    with torch.no_grad():
        result, _, _ = run(Call(q, k, v, rule, statistics=wanted), "cpu")
    for rows in spans(q.shape[2], row_cuts):
        blocks = spans(m, col_cuts)
        order.shuffle(blocks)
        found = meet(q, k, v, rows, blocks, Way(rule, statistics=wanted))
        assert not found.missing
        for statistic in wanted:
            whole = result.statistics[statistic][:, :, rows.start : rows.stop]
            close(statistic.name, found.found[statistic], whole, 1e-5)


@settings(max_examples=30, deadline=None)
@given(**CUT, kernel=st.sampled_from(["auto", "torch_blocks", "reference"]))
def test_outputs_and_gradients_of_rectangles_join(mask, score, m, fewer, row_cuts, col_cuts, order, kernel):
    q, k, v, rule = matrix(mask, score, m, fewer)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    learned = leaves(rule.scores)
    out, amap = hw.attend(*exact, mask=rule.mask, score=rule.scores, return_map=True)
    toward = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = torch.autograd.grad((out * toward).sum(), [*exact, *learned])

    terms = rule.terms(q)
    tensors = (terms.relative, terms.sinks, *terms.biases)
    sums = ScoreSums(terms, [x is not None for x in tensors], q)
    dk, dv, d_sinks = torch.zeros_like(k), torch.zeros_like(v), torch.zeros(H)
    way = Way(rule, kernel)
    for rows in spans(q.shape[2], row_cuts):
        here = slice(rows.start, rows.stop)
        blocks = spans(m, col_cuts)
        order.shuffle(blocks)
        found = meet(q, k, v, rows, blocks, way)
        close("out", found.out, out[:, :, here], 1e-5)
        close("lse", found.lse, amap.lse[:, :, here], 1e-5)
        back = RowGradients(
            q[:, :, here], rows, way, found.kernels, found.out, found.lse, toward[:, :, here].float()
        )  # fmt: skip
        order.shuffle(blocks)
        for cols in blocks:
            at = slice(cols.start, cols.stop)
            back.meet(k[:, :, at], v[:, :, at], cols, sums, dk[:, :, at], dv[:, :, at])
        close("dq", back.dq, wanted[0][:, :, here], 2e-5)
        d_sinks += 0.0 if terms.sinks is None else back.sinks(terms.sinks.detach())
    close("dk", dk, wanted[1], 2e-5)
    close("dv", dv, wanted[2], 2e-5)
    # From the tensors of the rule to those of the scores it is autograd's way.
    sides = [
        (x, d.to(x.dtype))
        for x, d in zip(tensors, (sums.relative, d_sinks, *sums.biases), strict=True)
        if x is not None and d is not None and x.requires_grad
    ]
    gradients = torch.autograd.grad([x for x, _ in sides], learned, [d for _, d in sides]) if learned else ()
    for at, (gradient, want) in enumerate(zip(gradients, wanted[3:], strict=True)):
        close(f"gradient {at} of {score}", gradient, want, 2e-5)
