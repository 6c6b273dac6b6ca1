"""Sizes for which tiles multiply float32 in parts of bfloat16: as accurate, and the same for unusual numbers."""

import math

import pytest
import torch
from kernel_formula import GRADIENT_LIMITS, LIMITS, error, run, truth
from samples import qkv

from headwise import attend
from headwise.masks import Causal, Lengths, Sinks, Window
from headwise.scores import ALiBi, SoftCap
from headwise.stats import COLUMN_MASS, DISTANCE, ENTROPY, LARGEST, RangeMass, TopKeys

pytestmark = [pytest.mark.usefixtures("target"), pytest.mark.every_target]
SIZE = {"n": 70, "m": 410, "d": 64, "e": 72}
MASKS = {
    "everything": None,
    "causal": Causal(),
    "window and sinks": Causal() & (Window(150) | Sinks(3)),
    "lengths": Lengths([410, 77]),
}


@pytest.mark.thorough
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_statistics_and_gradients(mask: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(2, 4, 2, **SIZE, dtype=dtype)
    wanted = (LARGEST, ENTROPY, DISTANCE, RangeMass(0, 1, relative=False), COLUMN_MASS)
    for score in ((), (SoftCap(3.0), ALiBi([0.1, 0.2, 0.0, 0.3]))):
        expected = truth(q, k, MASKS[mask], score)
        found = run(q, k, v, MASKS[mask], score, statistics=wanted)
        assert torch.equal(found.lse == -torch.inf, expected.lse == -torch.inf)
        assert error(found.out, expected.out(v)) <= 1.5 * LIMITS[dtype]  # the logits are up to 100
        torch.testing.assert_close(found.lse.double(), expected.lse, rtol=2e-6, atol=1e-5)
        assert torch.equal(found.out, run(q, k, v, MASKS[mask], score).out)
        for statistic in wanted[1:4]:
            assert error(found.statistics[statistic], expected.of(statistic)) <= 5e-6
    inputs = [x.requires_grad_() for x in (q, k, v)]
    toward = torch.randn(2, 4, 70, 72, generator=torch.Generator().manual_seed(1)).to(dtype)
    ours = torch.autograd.grad(attend(*inputs, mask=MASKS[mask], kernel="cpu"), inputs, toward)
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    out = attend(*doubles, mask=MASKS[mask], kernel="reference")
    for found_grad, right in zip(ours, torch.autograd.grad(out, doubles, toward.double()), strict=True):
        assert error(found_grad, right) <= GRADIENT_LIMITS[dtype]


def test_no_less_accurate_than_float32() -> None:
    """Without third parts the errors would be some hundred times those of float32."""
    q, k, v = qkv(1, 2, 2, n=64, m=2048, d=64, e=64)
    found, expected = run(q, k, v), truth(q, k)
    assert error(found.out, expected.out(v)) <= 6e-7
    assert (found.lse.double() - expected.lse).abs().max() <= 2e-6


@pytest.mark.parametrize("size", [1e-42, 1e-38, 1e-33, 1e-30, 1e30, 1e37])
@pytest.mark.parametrize("where", ["k", "v", "grad"])
def test_numbers_near_the_ends_of_the_range(where: str, size: float) -> None:
    q, k, v = qkv(1, 2, 1, **SIZE)
    toward = torch.randn(1, 2, 70, 72, generator=torch.Generator().manual_seed(1))
    {"k": k, "v": v, "grad": toward}[where].mul_(size)
    scale = min(1 / (8 * size), 1e37) if where == "k" else 0.125
    expected = truth(q, k, scale=scale)
    found = run(q, k, v, scale=scale)
    near = 1e-43 if where == "v" else 0.0  # some roundings of denormal numbers
    assert (found.out.double() - expected.out(v)).norm() <= 2e-6 * expected.out(v).norm() + 100 * near
    inputs = [x.requires_grad_() for x in (q, k, v)]
    (grad,) = torch.autograd.grad(attend(*inputs, scale=scale, kernel="cpu"), inputs[2:], toward)
    right = (expected.p.mT @ toward.double()).sum(1, keepdim=True)
    assert (grad.double() - right).norm() <= 2e-6 * right.norm() + 1e-41


@pytest.mark.parametrize("size", [1e-39, 1e-36, 1e-33])
@pytest.mark.parametrize("row", [True, False])
def test_small_numbers_beside_others(row: bool, size: float) -> None:
    """The first query attends to the first key alone, and each column of values is summed alone."""
    q, k, v = qkv(1, 2, 1, n=256, m=256, d=64, e=64)
    toward = torch.randn(1, 2, 256, 64, generator=torch.Generator().manual_seed(1))
    for x in (v, toward):
        (x[:, :, 0] if row else x[..., 0]).mul_(size)
    expected = truth(q, k, Causal())
    part = (slice(None), slice(None), 0) if row else (..., 0)
    assert error(run(q, k, v, Causal()).out[part] / size, expected.out(v)[part] / size) <= 2e-6 + 1e-44 / size
    v.requires_grad_()
    (grad,) = torch.autograd.grad(attend(q, k, v, is_causal=True, kernel="cpu"), [v], toward)
    right = (expected.p.mT @ toward.double()).sum(1, keepdim=True)
    near = slice(None) if row else (..., 0)
    assert error(grad[near] / (1.0 if row else size), right[near] / (1.0 if row else size)) <= 2e-6 + 1e-43 / size


def test_queries_that_the_scale_makes_ordinary() -> None:
    q, k, v = qkv(1, 2, 1, n=96, m=200, d=64, e=64)
    inputs = [x.requires_grad_() for x in (q.mul_(1e-36), k, v)]
    toward = torch.randn(1, 2, 96, 64, generator=torch.Generator().manual_seed(1))
    ours = torch.autograd.grad(attend(*inputs, scale=1e35, kernel="cpu"), inputs, toward)
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    right = torch.autograd.grad(attend(*doubles, scale=1e35, kernel="reference"), doubles, toward.double())
    for found, wanted, size in zip(ours, right, (1e35, 1e-1, 1.0), strict=True):
        assert error(found / size, wanted / size) <= GRADIENT_LIMITS[torch.float32]


def test_a_query_that_only_the_scale_makes_infinite() -> None:
    q, k, v = qkv(1, 2, 1, **SIZE)
    q[0, 0, 5, 3] = 3e38
    score = [SoftCap(30.0)]
    found, expected = run(q, k, v, score=score, scale=2.0), truth(q, k, score=score, scale=2.0)
    assert error(found.out, expected.out(v)) <= 4 * LIMITS[torch.float32]


def test_the_output_changes_no_bit_of_the_log_sum() -> None:
    q, k, v = qkv(1, 2, 1, n=64, m=200, d=64, e=64)
    assert torch.equal(run(q, k, v).lse, run(q, k, v[..., :0]).lse)


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3.4e38])
def test_what_has_no_finite_parts(where: str, bad: float) -> None:
    q, k, v = qkv(1, 2, 1, **SIZE)
    {"q": q, "k": k, "v": v}[where][0, 0, 5, 3] = bad
    found, expected = attend(q, k, v, kernel="cpu"), attend(q, k, v, kernel="reference")
    rest = torch.isfinite(expected)
    assert torch.equal(torch.isfinite(found), rest)
    torch.testing.assert_close(found[rest], expected[rest], rtol=1e-4, atol=1e-4)


def test_a_query_that_is_not_a_number_changes_no_other() -> None:
    q, k, v = qkv(1, 2, 1, **SIZE)
    clean = attend(q, k, v, kernel="cpu")
    q[0, 1, 33, 7] = math.nan
    dirty = attend(q, k, v, kernel="cpu")
    assert dirty[0, 1, 33].isnan().all()
    dirty[0, 1, 33] = clean[0, 1, 33]
    assert torch.equal(clean, dirty)


def test_logits_beyond_the_range_hide_a_key() -> None:
    """A product that overflows to -inf is a weight of 0, though its parts have both signs."""
    q, k, v = qkv(1, 1, 1, **SIZE)
    q[..., 0], k[..., 0] = 3.1e25, 0.0
    k[0, 0, 7, 0] = -2.7e19
    keys = [*range(7), *range(8, 410)]
    found, expected = attend(q, k, v, kernel="cpu"), attend(q, k[:, :, keys], v[:, :, keys], kernel="cpu")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_keys_that_are_equal() -> None:
    q, k, v = qkv(1, 1, 1, **SIZE)
    k[:] = k[:, :, :1]
    found = run(q, k, v, statistics=(TopKeys(3), ENTROPY))
    assert error(found.out, v.double().mean(2, keepdim=True).expand(1, 1, 70, 72)) <= LIMITS[torch.float32]
    assert torch.equal(found.statistics[TopKeys(3)], torch.arange(3).expand(1, 1, 70, 3))
    torch.testing.assert_close(found.statistics[ENTROPY], torch.full((1, 1, 70), math.log(410)))
