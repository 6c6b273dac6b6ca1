"""Every score is that of the dense float64 weights, counted cell by cell, for any mask, scores and sizes."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st

import headwise as hw
from headwise.analysis.head_roles.score import LEFT
from headwise.analysis.head_roles.tally import offset_mass

MASKS = {
    "everything": lambda b, h, n, m: None,
    "causal": lambda b, h, n, m: hw.Causal(),
    "window": lambda b, h, n, m: hw.Window(5, 2),
    "window and sinks": lambda b, h, n, m: hw.Causal() & (hw.Window(4) | hw.Sinks(2)),
    "padding": lambda b, h, n, m: hw.Lengths([max(0, m - i) for i in range(b)], [max(0, n - i) for i in range(b)]),
    "padding before": lambda b, h, n, m: hw.Lengths([max(0, m - i) for i in range(b)], side="right") & hw.Causal(),
    "nothing": lambda b, h, n, m: hw.Lengths([0] * b),
    "documents": lambda b, h, n, m: hw.Documents(torch.arange(m) // 7) & hw.Causal(),
    "scattered documents": lambda b, h, n, m: hw.Documents(torch.arange(m) % 3),
    "boolean": lambda b, h, n, m: hw.Dense(torch.rand(b, 1, n, m, generator=generator(4)) > 0.6) & hw.Causal(),
    "boolean of each head": lambda b, h, n, m: hw.Dense(torch.rand(1, h, n, m, generator=generator(5)) > 0.4),
}
SCORES = {
    "none": lambda h, n, m: (),
    "cap": lambda h, n, m: (hw.SoftCap(1.5),),
    "alibi": lambda h, n, m: (hw.ALiBi(torch.linspace(0.05, 0.4, h)),),
    "relative": lambda h, n, m: (hw.RelativeBias(torch.randn(h, 7, generator=generator(1)), -4),),
    "biases": lambda h, n, m: (
        hw.Bias(torch.randn(1, h, n, 1, generator=generator(2))), hw.Bias(torch.randn(1, 1, 1, m)), hw.SoftCap(2.0),
    ),
    "bias": lambda h, n, m: (hw.Bias(torch.randn(1, h, n, m, generator=generator(3))),),
    "sinks": lambda h, n, m: (hw.SinkLogits(torch.linspace(-1, 3, h)),),
}  # fmt: skip


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@st.composite
def cases(draw):
    b, h_kv, group = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    m = draw(st.integers(1, 37))
    n = draw(st.integers(1, m))
    return {
        "b": b, "h": h_kv * group, "h_kv": h_kv, "n": n, "m": m, "d": draw(st.integers(1, 9)),
        "mask": draw(st.sampled_from(sorted(MASKS))), "score": draw(st.sampled_from(sorted(SCORES))),
        "vocabulary": draw(st.integers(1, 12)), "reach": draw(st.integers(1, 9)), "radius": draw(st.integers(1, 9)),
        "one_text": draw(st.booleans()), "seed": draw(st.integers(0, 10**6)),
        "loud": draw(st.sampled_from([0.3, 1, 6])),
    }  # fmt: skip


def built(c):
    """A float32 map, its weights and allowed cells in float64, and tokens."""
    g = generator(c["seed"])
    b, h, n, m, d = c["b"], c["h"], c["n"], c["m"], c["d"]
    q = c["loud"] * torch.randn(b, h, n, d, generator=g)
    k = torch.randn(b, c["h_kv"], m, d, generator=g)
    mask, score = MASKS[c["mask"]](b, h, n, m), SCORES[c["score"]](h, n, m)
    _, amap = hw.attend(q, k, k, mask=mask, score=score, return_map=True)
    _, exact = hw.attend(
        q.double(), k.double(), k.double(), mask=mask, score=score, return_map=True, kernel="reference"
    )
    allowed = amap.mask.to_dense(n, m, batch=b, heads=h).expand(b, h, n, m)
    ids = torch.randint(0, c["vocabulary"], (1 if c["one_text"] else b, m), generator=g)
    return amap, exact.to_dense(), allowed, ids


def members(c, ids, allowed):
    """Role → which keys it means, boolean [b, h, n, m], from its definition in words."""
    b, h, n, m = allowed.shape
    position, key = torch.arange(n)[:, None] + m - n, torch.arange(m)
    text = ids.expand(b, m)
    token = text[:, m - n :]
    found = {
        "previous": key == position - 1,
        "self": key == position,
        "next": key == position + 1,
        "local": (key - position).abs() <= c["radius"],
        "duplicate": (text[:, None] == token[:, :, None]) & (key < position),
    }
    after = torch.zeros(b, n, m, dtype=torch.bool)
    after[:, :, 1:] = (text[:, None, :-1] == token[:, :, None]) & (key[1:] <= position)
    found["induction"] = after
    first = first_of(allowed)
    found["first"] = (key == first[:, None])[:, None].expand(b, n, m)
    return {name: (x if x.ndim == 3 else x[None])[:, None].expand(b, h, n, m) for name, x in found.items()}


def first_of(allowed):
    seen = allowed.any(1).any(1)  # [b, m]
    return torch.where(seen.any(-1), seen.int().argmax(-1), 0)


def mean(score, uniform, eligible, allowed):
    """Score, baseline and coverage [h] over the eligible rows."""
    rows = allowed.any(-1).sum((0, 2)).double()
    count = eligible.sum((0, 2)).double()
    return (score * eligible).nansum((0, 2)) / count, (uniform * eligible).nansum((0, 2)) / count, count / rows


def of_members(weights, allowed, member):
    meant = allowed & member
    return mean((weights * member).sum(-1), meant.sum(-1) / allowed.sum(-1), meant.any(-1), allowed)


def same(found, wanted, what, atol=2e-5):
    np.testing.assert_allclose(found[0], wanted.numpy(), atol=atol, rtol=1e-4, err_msg=what)


@pytest.mark.thorough
@settings(max_examples=40, deadline=None)
@given(cases())
def test_scores_are_those_of_the_dense_weights(c):
    amap, weights, allowed, ids = built(c)
    result = hw.analysis.roles(amap, tokens=ids, reach=c["reach"], radius=c["radius"])
    first = first_of(allowed)
    at = torch.arange(c["b"])
    without = weights.clone()
    without[at, :, :, first] = 0.0
    rest = without.sum(-1)
    hidden = allowed.clone()
    hidden[at, :, :, first] = False
    later = torch.arange(c["m"]) > torch.arange(c["n"])[:, None] + c["m"] - c["n"]
    assert ("induction" in result) != bool((allowed & later).any())
    for name, member in members(c, ids, allowed).items():
        if name not in result:
            continue
        score = result[name]
        mass, uniform, coverage = of_members(weights, allowed, member)
        same(score.mass, mass, name)
        same(score.uniform, uniform, name)
        same(score.coverage, coverage, name)
        if name == "first":
            assert score.without_first is None
            continue
        meant = hidden & member
        kept = meant.any(-1) & (rest >= LEFT)
        renormalised = (without * member).sum(-1) / rest
        mass, uniform, coverage = mean(renormalised, meant.sum(-1) / hidden.sum(-1), kept, allowed)
        other = score.without_first
        if not ((rest - LEFT).abs() < 1e-4).any():  # a row that is on the edge may fall on either side
            same(other.mass, mass, f"{name} without the first", atol=2e-4)
            same(other.uniform, uniform, f"{name} without the first")
            same(other.coverage, coverage * 1.0, f"{name} without the first")

    entropy = -torch.special.xlogy(weights, weights).sum(-1)
    keys = allowed.sum(-1).double()
    mass, uniform, coverage = mean(entropy, keys.log(), allowed.any(-1), allowed)
    same(result["broad"].mass, mass, "broad")
    same(result["broad"].uniform, uniform, "broad")
    mass, _, coverage = mean(entropy / keys.log(), keys, keys >= 2, allowed)
    same(result["even"].mass, mass, "even")
    same(result["even"].coverage, coverage, "even")

    induction = members(c, ids, allowed)["induction"]
    on = (weights * induction).sum((0, 2, 3))
    same(result.olsson, on / (allowed & induction).sum((0, 2, 3)), "olsson")
    same(result.tl_mul, on / weights.sum((0, 2, 3)), "tl_mul")


@pytest.mark.thorough
@settings(max_examples=30, deadline=None)
@given(cases())
@example(
    {
        "b": 1,
        "h": 9,
        "h_kv": 3,
        "n": 1,
        "m": 1,
        "d": 1,
        "mask": "causal",
        "score": "sinks",
        "vocabulary": 1,
        "reach": 1,
        "radius": 1,
        "one_text": False,
        "seed": 0,
        "loud": 0.3,
    }
)  # a score that is small beside its log-sum-exp
def test_the_best_offset_is_that_of_the_largest_weights(c):
    amap, weights, allowed, _ = built(c)
    b, h, n, m = amap.shape
    scores = hw.analysis.roles(amap, reach=c["reach"])["offset"]
    top = weights.topk(min(2, m), -1).values
    close = (top[..., 0] - top[..., -1]).abs() < 1e-4 * top[..., 0]
    if (close & (allowed.sum(-1) > 1)).any():
        return  # which of two nearly equal weights is larger is up to rounding
    offset = weights.argmax(-1) - torch.arange(n) - (m - n)
    offset[~allowed.any(-1)] = 10**6
    for head in range(h):
        best, share = None, -1.0
        for o in range(-c["reach"], c["reach"] + 1):
            diagonal = [(i, i + m - n + o) for i in range(n) if 0 <= i + m - n + o < m]
            eligible = torch.zeros(b, n, dtype=torch.bool)
            for i, j in diagonal:
                eligible[:, i] = allowed[:, head, i, j]
            if eligible.any():
                here = float(((offset[:, head] == o) & eligible).sum() / eligible.sum())
                best, share = (o, here) if here > share + 1e-9 else (best, share)
        if best is None:
            assert np.isnan(scores.mass[0, head])
        else:
            assert scores.mass[0, head] == pytest.approx(share, abs=1e-6)


@pytest.mark.parametrize("classes", [("a", ","), ("\n", "word"), ("", "。")])
def test_classes_of_pieces_are_counted_cell_by_cell(classes):
    c = {"b": 2, "h": 6, "h_kv": 2, "n": 23, "m": 29, "d": 5, "mask": "causal", "score": "sinks", "vocabulary": 5,
         "one_text": False, "seed": 3, "loud": 2.0}  # fmt: skip
    amap, weights, allowed, _ = built(c)
    pieces = [[classes[(i * i + row) % 3 == 0] for i in range(29)] for row in range(2)]
    result = hw.analysis.roles(amap, pieces=pieces)
    is_blank, is_mark = {"\n": True}, {",": True, "。": True}
    for name, kind in (("separator", is_blank), ("punctuation", is_mark)):
        member = torch.tensor([[kind.get(piece, False) for piece in row] for row in pieces])[:, None, None]
        mass, uniform, coverage = of_members(weights, allowed, member.expand(allowed.shape))
        same(result[name].mass, mass, name)
        same(result[name].uniform, uniform, name)
        same(result[name].coverage, coverage, name)


def test_more_queries_than_keys():
    q, k = torch.randn(2, 3, 19, 4), torch.randn(2, 3, 11, 4)
    _, amap = hw.attend(q, k, k, return_map=True)
    weights = amap.to_dense().double()
    result = hw.analysis.roles(amap, tokens=torch.randint(0, 3, (2, 11)))
    previous = torch.stack([weights[:, :, i, i - 9] for i in range(9, 19)], -1)
    np.testing.assert_allclose(result["previous"].mass[0], previous.mean((0, 2)), atol=1e-6)
    assert result["previous"].coverage[0] == pytest.approx(10 / 19)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype):
    q, k = torch.randn(2, 2, 6, 50, 8, generator=generator(0)).to(dtype)
    ids = torch.randint(0, 9, (50,), generator=generator(1))
    _, amap = hw.attend(q, k, k, mask=hw.Causal(), return_map=True)
    _, exact = hw.attend(*(x.double() for x in (q, k, k)), mask=hw.Causal(), return_map=True, kernel="reference")
    one, two = hw.analysis.roles(amap, tokens=ids), hw.analysis.roles(exact, tokens=ids)
    for name in one:
        np.testing.assert_allclose(one[name].mass, two[name].mass, atol=1e-5 if dtype != torch.float64 else 1e-10)


@pytest.mark.parametrize("offset", [0, -1, -20])
def test_offset_mass_reads_the_exact_weights(offset):
    q, k, v = torch.randn(3, 2, 3, 50, 5, generator=generator(1))
    _, amap = hw.attend(q, k, v, mask=hw.Causal(), return_map=True)
    found = offset_mass(amap, range(-offset, 50), offset)
    torch.testing.assert_close(found, amap.to_dense().diagonal(offset, -2, -1), atol=1e-6, rtol=1e-5)


def test_no_number_depends_on_the_kernel():
    q, k = torch.randn(2, 2, 6, 90, 8, generator=generator(2))
    ids = torch.randint(0, 9, (2, 90), generator=generator(3))
    pieces = [",", "a", " "] * 30
    results = []
    for kernel in ("auto", "torch_blocks"):
        with hw.use_kernel(kernel):
            _, amap = hw.attend(q, k, k, mask=hw.Causal() & hw.Window(30), return_map=True)
            results.append(hw.analysis.roles(amap, tokens=ids, pieces=pieces))
    for name, score in results[0].items():
        np.testing.assert_allclose(score.mass, results[1][name].mass, atol=1e-6)


def test_grouped_heads_laid_out_token_by_token():
    """As a layer makes them: heads are the third axis in memory."""
    g = torch.Generator().manual_seed(3)
    q = torch.randn(2, 9, 4, 8, generator=g).transpose(1, 2)
    k, v = torch.randn(2, 2, 9, 2, 8, generator=g).transpose(2, 3)
    tokens = torch.randint(0, 4, (2, 9), generator=g)
    laid, plain = (
        hw.analysis.roles(hw.attend(*x, mask=hw.Causal(), return_map=True)[1], tokens=tokens)
        for x in ((q, k, v), (q.contiguous(), k.contiguous(), v.contiguous()))
    )
    for name in plain:
        np.testing.assert_allclose(laid[name].mass, plain[name].mass, rtol=1e-5)
