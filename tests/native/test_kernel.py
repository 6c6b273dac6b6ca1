"""The compiled kernel's output and log-sum-exp, on every target that this CPU executes, against the formula."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from kernel_formula import LIMITS, Truth, error, run, truth
from samples import MASKS, SCORES as ALL_SCORES, qkv
from torch import Tensor

from headwise.errors import KernelError
from headwise.kernels import KERNELS
from headwise.kernels.call import Call, Declined, Result
from headwise.map.attention import attend
from headwise.masks import Causal, Dense, Everything, Grid, Lengths, Window
from headwise.rule import Rule
from headwise.scores import ALiBi, Bias, SinkLogits, SoftCap

# All but one that is refused.
SCORES = {name: score for name, score in ALL_SCORES.items() if name != "two biases"}
pytestmark = pytest.mark.usefixtures("target")


def check(found: Result, expected: Truth, v: Tensor) -> None:
    """Output and log-sum-exp within the dtype's budget; rows that see nothing exactly 0 and −∞."""
    assert found.out.dtype == v.dtype
    assert torch.equal(found.lse == -torch.inf, expected.lse == -torch.inf)
    assert (found.out[expected.lse == -torch.inf] == 0).all()
    assert error(found.out, expected.out(v)) <= LIMITS[v.dtype]
    torch.testing.assert_close(found.lse.double(), expected.lse.detach(), rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", LIMITS)
def test_masks(name: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype=dtype)
    mask = MASKS[name](2, 37, 53)
    check(run(q, k, v, mask), truth(q, k, mask), v)


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("mask", ["everything", "window and sinks", "nothing for some", "dense"])
def test_scores(name: str, mask: str) -> None:
    which, score = MASKS[mask](2, 37, 53), SCORES[name](2, 6, 37, 53)
    for dtype in LIMITS:
        q, k, v = qkv(dtype=dtype)
        check(run(q, k, v, which, score), truth(q, k, which, score), v)


@pytest.mark.thorough
@pytest.mark.every_target
@settings(deadline=None, derandomize=True, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_shapes(data: st.DataObject) -> None:
    draw = data.draw
    b, h_kv, group = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    n = draw(st.one_of(st.integers(1, 9), st.integers(1, 130)))
    m = draw(st.integers(max(n, 8), n + 300))
    d, e = draw(st.integers(1, 70)), draw(st.integers(1, 70))
    q, k, v = qkv(
        b, h_kv * group, h_kv, n, m, d, e, dtype=draw(st.sampled_from([*LIMITS])), seed=draw(st.integers(0, 99))
    )
    mask = MASKS[draw(st.sampled_from([*MASKS]))](b, n, m)
    score = SCORES[draw(st.sampled_from([*SCORES]))](b, h_kv * group, n, m) if draw(st.booleans()) else ()
    check(run(q, k, v, mask, score), truth(q, k, mask, score), v)


# Around the sizes of the kernel's blocks: rows, panels and blocks of keys, chunks of a decoding step.
@pytest.mark.parametrize("n", [1, 2, 4, 5, 6, 7, 47, 48, 49, 97])
@pytest.mark.parametrize("m", [1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257, 511, 512, 513, 1023, 1025])
def test_sizes_around_the_blocks(n: int, m: int) -> None:
    for dtype, d, e in ((torch.float32, 16, 33), (torch.bfloat16, 31, 16)):
        q, k, v = qkv(1, 2, 1, n, m, d, e, dtype=dtype)
        mask = Causal() if n <= m else Window(9)
        check(run(q, k, v, mask), truth(q, k, mask), v)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("name", ["plain", "all", "dense"])
def test_decoding_over_many_chunks(n: int, name: str) -> None:
    q, k, v = qkv(1, 4, 2, n, 2053, 16, 24)
    mask = Dense(torch.rand(n, 2053, generator=torch.Generator().manual_seed(1)) > 0.6) if name == "dense" else Causal()
    score = SCORES["all"](1, 4, n, 2053) if name == "all" else ()
    check(run(q, k, v, mask, score), truth(q, k, mask, score), v)


@pytest.mark.parametrize("scale", [-0.7, 0.0, 3.0])
@pytest.mark.parametrize("score", [(), (SoftCap(2.0),), (ALiBi([0.1, 0.2]),)])
def test_any_scale(scale: float, score: tuple[SoftCap | ALiBi, ...]) -> None:
    for dtype in LIMITS:
        for n in (2, 19):
            q, k, v = qkv(1, 2, 1, n, 70, 9, 8, dtype=dtype)
            check(run(q, k, v, Causal(), score, scale=scale), truth(q, k, Causal(), score, scale), v)


@pytest.mark.parametrize("n", [2, 50])
@pytest.mark.parametrize("factor", [1e2, 1e4, 1e8])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_logits_of_any_size(n: int, factor: float, sign: float) -> None:
    """Keys that are whole numbers along one axis: the logits are exact, and so is the softmax."""
    q, k, v = torch.zeros(1, 1, n, 4), torch.zeros(1, 1, 300, 4), qkv(1, 1, 1, n, 300)[2]
    q[..., 0] = sign * factor * 2
    k[..., 0] = (torch.arange(300) * 37 % 300).float() / 64
    check(run(q, k, v, Causal()), truth(q, k, Causal()), v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_some_keys_are_far_below_those_of_others(dtype: torch.dtype) -> None:
    """Those of the first query for keys 64 to 127, where those of the second rise."""
    q, k, v = qkv(1, 1, 1, 40, 192, 32, 8, dtype=dtype)
    q[..., :2], k[..., :2] = torch.tensor([0.0, 1.0]), 0.0
    q[..., 0, :2] = torch.tensor([1.0, 0.0])
    k[..., 64:128, :2] = torch.tensor([-1e10, 60.0])
    check(run(q, k, v), truth(q, k), v)


@pytest.mark.parametrize("n", [1, 50])
def test_denormal_numbers_are_numbers(n: int) -> None:
    q, k, v = qkv(1, 2, 1, n, 90)
    found = run(q, k, v * 1e-40, Causal()).out.double()
    assert (found - truth(q, k, Causal()).out(v * 1e-40)).abs().max() <= 2e-44  # some roundings of 1.4e-45
    even = run(q * 1e-42, k, v)
    check(even, truth(q * 1e-42, k), v)
    check(run(q * 1e-42, k, v, score=[SoftCap(1e-3)]), truth(q * 1e-42, k, score=[SoftCap(1e-3)]), v)


@pytest.mark.parametrize("n", [3, 41])
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_where_the_reference_has_it(n: int, dtype: torch.dtype, where: str, bad: float) -> None:
    q, k, v = qkv(2, 4, 2, n, 41, 7, 6, dtype=dtype)
    {"q": q, "k": k, "v": v}[where][1, 1, 2, 3] = bad
    found, expected = attend(q, k, v, kernel="cpu"), attend(q, k, v, kernel="reference")
    assert not torch.isfinite(found).all()
    assert torch.equal(torch.isfinite(found), torch.isfinite(expected))
    fine = torch.isfinite(expected)
    assert error(found[fine], expected[fine]) <= LIMITS[dtype]


@pytest.mark.parametrize("n", [3, 41])
@pytest.mark.parametrize("where", ["k", "v"])
def test_what_is_not_finite_and_masked_is_declined(n: int, where: str) -> None:
    q, k, v = qkv(1, 4, 2, n, 41, 8, 8)
    (k if where == "k" else v)[0, 1, 39, 3] = math.nan
    with pytest.raises(Declined, match="not finite"):
        run(q, k, v, Causal())
    with pytest.raises(KernelError, match=r"kernel='cpu'.*not finite.*auto"):
        attend(q, k, v, mask=Causal(), kernel="cpu")
    found, expected = (attend(q, k, v, mask=Causal(), kernel=name) for name in ("auto", "reference"))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert torch.isfinite(found[:, :, :-2]).all()


@pytest.mark.parametrize("n", [2, 37])
def test_biases_of_minus_infinity_mask(n: int) -> None:
    q, k, v = qkv(n=n)
    seen = torch.rand(2, 1, n, 53, generator=torch.Generator().manual_seed(2)) > 0.5
    seen[1, :, 1] = False
    for more in ((), (SinkLogits(torch.linspace(-1, 1, 6)),)):
        score = (Bias(torch.zeros(2, 1, n, 53).masked_fill(~seen, -math.inf)), *more)
        check(run(q, k, v, score=score), truth(q, k, Dense(seen), more), v)


@pytest.mark.parametrize("sink", [-200.0, 0.0, 40.0, 200.0])
def test_sinks_of_any_size(sink: float) -> None:
    for n in (2, 37):
        q, k, v = qkv(n=n)
        score = [SinkLogits(torch.full((6,), sink))]
        found, expected = run(q, k, v, Causal(), score), truth(q, k, Causal(), score)
        if sink < 80.0:  # else the weights are below the smallest float
            assert error(found.out, expected.out(v)) <= LIMITS[torch.float32]
        assert found.out.abs().max() <= 1.001 * expected.out(v).abs().max()
        torch.testing.assert_close(found.lse.double(), expected.lse, rtol=1e-6, atol=1e-6)


def test_any_strides() -> None:
    for n in (2, 37):
        q, k, v = qkv(n=n, e=8)
        plain = run(q, k, v, Causal())
        turned = [x.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0) for x in (q, k, v)]
        in_rows = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
        for strange in (turned, in_rows):
            assert not strange[0].is_contiguous()
            found = run(*strange, Causal())
            assert torch.equal(found.out, plain.out)
            assert torch.equal(found.lse, plain.lse)
        one = [x[:1, :1, :1].expand(x.shape) for x in (q, k, v)]
        assert 0 in one[0].stride()
        assert torch.equal(run(*one, Causal()).out, run(*(x.contiguous() for x in one), Causal()).out)
        flat = [x[..., :1].expand(x.shape) for x in (q, k, v)]
        assert torch.equal(run(*flat, Causal()).out, run(*(x.contiguous() for x in flat), Causal()).out)


@pytest.mark.parametrize("dtype", LIMITS)
def test_only_its_own_numbers_are_read(dtype: torch.dtype) -> None:
    """NaN all around, in the rows' ends, between heads and after the last key."""
    for n in (3, 37):
        q, k, v = qkv(n=n, d=13, e=21, dtype=dtype)
        plain = run(q, k, v, Causal())
        inside = []
        for x in (q, k, v):
            around = torch.full([size + 3 for size in x.shape], math.nan, dtype=dtype)
            around[1:-2, 1:-2, 1:-2, 1:-2] = x
            inside.append(around[1:-2, 1:-2, 1:-2, 1:-2])
        found = run(*inside, Causal())
        assert torch.equal(found.out, plain.out)
        assert torch.equal(found.lse, plain.lse)


def test_biases_and_masks_of_any_strides() -> None:
    for n in (3, 37):
        q, k, v = qkv(n=n)
        wide = torch.randn(2, 53, n, 6, generator=torch.Generator().manual_seed(5))
        for bias in (
            wide.permute(0, 3, 2, 1),
            wide[:1, :1, :1].permute(0, 3, 2, 1),
            wide[:, :, :1, :1].permute(0, 3, 2, 1),
        ):
            check(run(q, k, v, Causal(), [Bias(bias)]), truth(q, k, Causal(), [Bias(bias)]), v)
        seen = wide.permute(0, 3, 2, 1) > 0
        for mask in (
            Dense(seen),
            Dense(seen[:, :1]),
            Dense(seen[:1, :1].expand(2, 6, n, 53)),
            Causal() & Dense(seen[0, 0]),
        ):
            check(run(q, k, v, mask), truth(q, k, mask), v)


def test_what_is_refused_and_sizes_of_nothing() -> None:
    q, k, v = qkv(n=37)
    rule = Rule(Everything(), 1.0, Grid(2, 6, 37, 53))
    for nothing in (Grid(0, 6, 37, 53), Grid(2, 0, 37, 53), Grid(2, 6, 0, 53), Grid(2, 6, 37, 0)):
        refusal = KERNELS["cpu"].refuse(Call(q, k, v, Rule(Everything(), 1.0, nothing)))
        assert refusal == "there are no queries or no keys"
    assert KERNELS["cpu"].refuse(Call(q.double(), k.double(), v.double(), rule)) is not None
    grown = Rule(Everything(), 1.0, Grid(2, 6, 37, 53), ALL_SCORES["two biases"](2, 6, 37, 53))
    assert "would have shape" in str(KERNELS["cpu"].refuse(Call(q, k, v, grown)))
    for n in (2, 37):
        assert run(q[:, :, :n], k, v[..., :0]).out.shape == (2, 6, n, 0)
        assert torch.equal(run(q[:, :, :n], k, v[..., :0]).lse, run(q[:, :, :n], k, v).lse)
        even = run(q[:, :, :n, :0], k[..., :0], v, Lengths([53, 20]), scale=1.0)
        check(even, truth(q[:, :, :n, :0], k[..., :0], Lengths([53, 20]), scale=1.0), v)


def test_more_keys_than_it_can_count_are_refused() -> None:
    q, one = torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1)
    many = one.expand(1, 1, 2**31, 1)
    with pytest.raises(KernelError, match="at most 2147483647 keys, got 2147483648"):
        attend(q, many, many, kernel="cpu")
