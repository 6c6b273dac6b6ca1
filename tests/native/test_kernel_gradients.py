"""The compiled kernel's gradients against float64, and its dropout: one fair pattern in both passes."""

import math
from collections.abc import Iterable

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from kernel_formula import GRADIENT_LIMITS, LIMITS, error, run, truth
from samples import MASKS, SCORES, qkv
from torch import Tensor

from headwise.map.attention import attend
from headwise.masks import Causal, Lengths, Mask, Window
from headwise.scores import Bias, Score, SinkLogits, SoftCap

pytestmark = pytest.mark.usefixtures("target")

NAMES = [name for name in SCORES if name != "two biases"]  # refused


def fixed(score: Iterable[Score]) -> tuple[Score, ...]:
    """Without a graph, so that the gradients are the compiled kernel's own."""
    return tuple(one.kept() for one in score)


def pattern(q: Tensor, k: Tensor, mask: Mask | None, p: float, seed: int) -> Tensor:
    """1 / (1 - p) where a weight stays, else 0: [b, h, n, m] float64. Values that are the identity show the weights."""
    (b, h_kv, m, _), h = k.shape, q.shape[1]
    weights = run(q, k, torch.eye(m, dtype=q.dtype).expand(b, h_kv, m, m), mask, dropout=p, seed=seed).out
    assert h == weights.shape[1]
    return (weights != 0).double() / (1.0 - p)


def compare(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, score: Iterable[Score] = (), dropout: float = 0.0,
    scale: float | None = None,
) -> None:  # fmt: skip
    """Output, and gradients of q, k and v under a random gradient of the output."""
    score = tuple(score)
    kept = pattern(q, k, mask, dropout, 11) if dropout else 1.0
    given = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = run(*given, mask, score, scale=scale, dropout=dropout, seed=11).out
    expected = (truth(exact[0], exact[1], mask, score, scale).p * kept) @ exact[2].repeat_interleave(
        q.shape[1] // v.shape[1], 1
    )
    assert error(out, expected) <= LIMITS[q.dtype]
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(q.dtype)
    out.backward(grad)
    expected.backward(grad.double())
    size = sum(x.grad.norm() for x in exact)
    for x, y in zip(given, exact, strict=True):
        assert x.grad.dtype == q.dtype
        # One key has no gradient of q or k at all: a small one is measured against all three.
        assert (x.grad.double() - y.grad).norm() <= GRADIENT_LIMITS[q.dtype] * max(y.grad.norm(), 0.2 * size)


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", LIMITS)
def test_gradients_under_masks(name: str, dtype: torch.dtype) -> None:
    for n in (2, 37):
        compare(*qkv(n=n, dtype=dtype), MASKS[name](2, n, 53))


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_under_scores(name: str) -> None:
    for mask in ("everything", "window and sinks", "nothing for some", "dense"):
        compare(*qkv(), MASKS[mask](2, 37, 53), fixed(SCORES[name](2, 6, 37, 53)))


@pytest.mark.parametrize("scale", [-0.6, 0.0, 0.9])
@pytest.mark.parametrize("name", ["none", "soft cap", "all"])
def test_gradients_under_any_scale(name: str, scale: float) -> None:
    for dtype in LIMITS:
        inputs = qkv(2, 6, 3, 37, 150, 21, 35, dtype=dtype)
        score = () if name == "none" else fixed(SCORES[name](2, 6, 37, 150))
        compare(*inputs, MASKS["window and sinks"](2, 37, 150), score, scale=scale)


@pytest.mark.thorough
@pytest.mark.every_target
@settings(deadline=None, derandomize=True, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_gradients_of_random_shapes(data: st.DataObject) -> None:
    draw = data.draw
    b, h_kv, group = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    n = draw(st.one_of(st.integers(1, 9), st.integers(1, 200)))
    m = draw(st.integers(max(n, 8), n + 280))
    d, e = draw(st.integers(1, 70)), draw(st.integers(1, 70))
    inputs = qkv(
        b, h_kv * group, h_kv, n, m, d, e, dtype=draw(st.sampled_from([*LIMITS])), seed=draw(st.integers(0, 99))
    )
    mask = MASKS[draw(st.sampled_from([*MASKS]))](b, n, m)
    score = fixed(SCORES[draw(st.sampled_from(NAMES))](b, h_kv * group, n, m)) if draw(st.booleans()) else ()
    compare(*inputs, mask, score, draw(st.sampled_from([0.0, 0.0, 0.3])))


@pytest.mark.parametrize("n", [1, 5, 6, 7, 95, 96, 97])
@pytest.mark.parametrize("m", [97, 127, 128, 129, 257])
def test_gradients_around_the_blocks(n: int, m: int) -> None:
    compare(*qkv(1, 2, 1, n, m, 17, 33), Causal())


@pytest.mark.parametrize("mask", [None, Causal(), Causal() & Window(5)])
@pytest.mark.parametrize("n", [3, 50])
def test_forward_and_gradients_under_one_dropout_pattern(n: int, mask: Mask | None) -> None:
    for dtype in LIMITS:
        compare(*qkv(2, 4, 2, n, 190, 8, 5, dtype=dtype), mask, dropout=0.35)
    compare(*qkv(2, 4, 2, n, 190, 8, 5), mask, fixed(SCORES["all"](2, 4, n, 190)), dropout=0.35)


def test_gradients_of_learned_sinks() -> None:
    for dropout in (0.0, 0.4):
        q, k, v = qkv()
        mask = Lengths([0, 40], [37, 30])
        one, two = (torch.linspace(-2, 2, 6, dtype=dtype).requires_grad_() for dtype in (torch.float32, torch.float64))
        kept = pattern(q, k, mask, dropout, 4) if dropout else 1.0
        slope = torch.linspace(-1, 2, 5)
        (run(q, k, v, mask, [SinkLogits(one), SoftCap(3.0)], dropout=dropout, seed=4).out * slope).sum().backward()
        p = truth(q, k, mask, [SinkLogits(two), SoftCap(3.0)]).p * kept
        ((p @ v.double().repeat_interleave(2, 1)) * slope).sum().backward()
        assert error(one.grad, two.grad) <= 5e-6


def test_gradients_of_each_alone_and_of_strange_strides() -> None:
    q, k, v = qkv()
    found = [x.clone().requires_grad_() for x in (q, k, v)]
    run(*found, Causal()).out.sum().backward()  # the gradient of the output has strides of 0
    for i in range(3):
        alone = [x.clone().requires_grad_(i == j) for j, x in enumerate((q, k, v))]
        run(*alone, Causal()).out.sum().backward()
        assert torch.equal(alone[i].grad, found[i].grad)
    one = [x.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0).requires_grad_() for x in (q, k, v)]
    grad = torch.ones(5, 37, 6, 2).permute(3, 2, 1, 0)
    run(*one, Causal()).out.backward(grad)
    for x, y in zip(one, found, strict=True):
        assert torch.equal(x.grad, y.grad)


def test_rows_that_see_nothing_pass_nothing_on() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    score = [Bias(torch.zeros(2, 1, 1, 53).index_fill_(0, torch.tensor([0]), -math.inf))]
    run(q, k, v, Lengths([53, 20]), score).out.sum().backward()
    for x in (q, k, v):
        assert (x.grad[0] == 0).all()
        assert torch.isfinite(x.grad).all()
    assert (k.grad[1, :, 20:] == 0).all()
    assert (v.grad[1, :, :20] != 0).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_no_query_sees_stops_no_backward_pass(bad: float) -> None:
    q, k, v = qkv(1, 4, 2, 3, 11, 5, 7)
    found = []
    for dirty in (False, True):
        if dirty:
            k[0, 1, 9, 2] = v[0, 0, 10, 3] = bad
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        run(*inputs, Lengths([9])).out.square().sum().backward()
        found.append([x.grad for x in inputs])
    for clean, one in zip(*found, strict=True):
        assert torch.equal(clean, one)


def test_without_query_heads_gradients_are_zero() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(2, 0, 3, 5, 7))
    attend(q, k, v).sum().backward()
    assert (k.grad == 0).all()
    assert (v.grad == 0).all()


@pytest.mark.parametrize("size", [1e9, 1e20])
def test_logits_whose_rounding_is_large_give_weights_of_at_most_one(size: float) -> None:
    q, k, v = qkv(2, 4, 2, 53, 97, 13, 5)
    inputs = [x.requires_grad_() for x in (size * q, k, v)]
    out, amap = attend(*inputs, kernel="cpu", return_map=True)
    out.sum().backward()
    with pytest.warns(UserWarning, match="logits of about"):
        weights = amap.to_dense()
    assert (weights >= 0).all()
    assert (weights <= 1).all()
    assert (amap.measure("top1_mass")["top1_mass"] <= 1).all()
    assert (inputs[2].grad >= 0).all()
    assert (inputs[2].grad <= 53 * 2).all()
    assert all(x.grad.isfinite().all() for x in inputs)


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_dropout_is_fair_and_independent(p: float) -> None:
    b, h, n, m = 2, 3, 61, 509
    q, k = torch.zeros(b, h, n, 2), torch.zeros(b, 1, m, 2)
    kept = pattern(q, k, None, p, 7) * (1.0 - p)
    count, spread = kept.numel(), math.sqrt(p * (1.0 - p))
    assert abs(float(kept.mean()) - (1.0 - p)) < 5 * spread / math.sqrt(count)
    for axis in range(4):  # each entry, head, row and key has its own share of them
        means = kept.transpose(0, axis).flatten(1).mean(1)
        assert (means - (1.0 - p)).abs().max() < 5 * spread / math.sqrt(count / kept.shape[axis])
    even = (kept - (1.0 - p)) / spread
    pairs = {
        "keys beside": (even[..., 1:], even[..., :-1]),
        "keys eight apart": (even[..., 8:], even[..., :-8]),
        "keys 256 apart": (even[..., 256:], even[..., :-256]),
        "rows": (even[:, :, 1:], even[:, :, :-1]),
        "rows, a key on": (even[:, :, 1:, 1:], even[:, :, :-1, :-1]),
        "heads": (even[:, 1:], even[:, :-1]),
        "heads, a row on": (even[:, 1:, 1:], even[:, :-1, :-1]),
        "entries": (even[1], even[0]),
    }
    for seed in (8, 7 + (1 << 32)):
        other = (pattern(q, k, None, p, seed) * (1.0 - p) - (1.0 - p)) / spread
        pairs[f"seed {seed}"] = even, other
        pairs[f"seed {seed}, a row on"] = even[:, :, 1:], other[:, :, :-1]
    for name, (one, two) in pairs.items():
        assert abs(float((one * two).mean())) < 5 / math.sqrt(one.numel()), name


def test_dropout_repeats_with_its_seed_and_only_with_it() -> None:
    for n in (3, 41):
        q, k, v = qkv(n=n)
        one = run(q, k, v, Causal(), dropout=0.3, seed=1).out
        assert torch.equal(one, run(q, k, v, Causal(), dropout=0.3, seed=1).out)
        assert not torch.equal(one, run(q, k, v, Causal(), dropout=0.3, seed=2).out)
        assert not torch.equal(one, run(q, k, v, Causal(), dropout=0.3, seed=1 + (1 << 39)).out)
        torch.manual_seed(3)
        drawn = attend(q, k, v, dropout_p=0.3, kernel="cpu")
        torch.manual_seed(3)
        assert torch.equal(drawn, attend(q, k, v, dropout_p=0.3, kernel="cpu"))
        assert not torch.equal(drawn, attend(q, k, v, dropout_p=0.3, kernel="cpu"))


def test_dropout_does_not_depend_on_how_rows_are_worked_on() -> None:
    """A row's pattern is the same in a decoding step and in a long pass, in float32 and in bfloat16."""
    q, k, _ = qkv(1, 4, 2, 60, 300)
    long = pattern(q, k, None, 0.4, 9)
    assert torch.equal(long[:, :, :3], pattern(q[:, :, :3], k, None, 0.4, 9))
    assert torch.equal(long, pattern(q.bfloat16(), k.bfloat16(), None, 0.4, 9))


@pytest.mark.parametrize("p", [1e-9, 1e-12, 1.0 - 1e-6, 1.0 - 1e-9])
def test_dropout_of_almost_nothing_and_almost_all(p: float) -> None:
    for n in (2, 41):
        q, k, v = qkv(n=n)
        out = run(q, k, v, dropout=p, seed=5).out
        if p < 0.5:
            assert error(out, truth(q, k).out(v)) <= LIMITS[torch.float32]
        else:
            assert torch.isfinite(out).all()
            assert (out == 0).float().mean() > 0.9
