"""The compiled kernel's gradients of what is added to scores: biases by distance and of any shape, slopes, sinks."""

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from kernel_formula import GRADIENT_LIMITS, run, truth
from samples import MASKS, SCORES, qkv
from test_kernel_conduct import at_the_end, forks, guarded, in_child
from test_kernel_gradients import pattern
from torch import Tensor

from headwise.kernels import KERNELS
from headwise.kernels.cpu import binding
from headwise.kernels.cpu.library import library
from headwise.map.attention import attend
from headwise.masks import Causal, Grid, Mask, Window
from headwise.rule import Rule
from headwise.rule.lowering import Lowered, lower
from headwise.scores import ALiBi, Bias, RelativeBias, Score, SinkLogits, SoftCap, t5_bias

pytestmark = pytest.mark.usefixtures("target")
Make = Callable[[], tuple[Score, ...]]


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def leaves(score: Sequence[Score]) -> list[Tensor]:
    """What a call's scores learn, found through their graphs (t5_bias is made of a weight)."""
    found: list[Tensor] = []
    for one in score:
        for x in vars(one).values():
            if isinstance(x, Tensor) and x.requires_grad:
                x.retain_grad()
                found.append(x)
    return found


def compare(
    q: Tensor, k: Tensor, v: Tensor, make: Make, mask: Mask | None = None, dropout: float = 0.0, *, plain: bool = True
) -> None:
    """Gradients of the scores' tensors, and of q, k, v beside them, against float64's."""
    kept = pattern(q, k, mask, dropout, 11) if dropout else 1.0
    score, exact_score = make(), make()
    given = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    ours, theirs = leaves(score), leaves(exact_score)
    assert ours
    out = run(*given, mask, score, dropout=dropout, seed=11).out
    p = truth(exact[0], exact[1], mask, exact_score).p * kept
    expected = p @ exact[2].repeat_interleave(q.shape[1] // v.shape[1], 1)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(q.dtype)
    out.backward(grad)
    expected.backward(grad.double())
    size = sum(float(x.grad.norm()) for x in exact)
    slopes = [x for one in exact_score if isinstance(one, ALiBi) for x in vars(one).values()]
    # What is summed over many rows cancels: the scale is that of the gradients of all scores.
    for x, y in zip((*given, *ours), (*exact, *theirs), strict=True):
        assert x.grad.dtype == x.dtype
        assert x.grad.shape == y.grad.shape
        limit = GRADIENT_LIMITS[q.dtype] * max(float(y.grad.norm()), 0.2 * size)
        if any(y is one for one in slopes):
            limit = max(limit, 4 * torch.finfo(torch.float32).eps * of_distances(p, exact[2], grad))
        assert float((x.grad.double() - y.grad).norm()) <= limit


def of_distances(p: Tensor, v: Tensor, grad: Tensor) -> float:
    """The norm of the sums whose terms cancel in the gradients of slopes: Σ p (|dP| + |δ|) · distance, of each head."""
    n, m = p.shape[2:]
    change = grad.double() @ v.detach().repeat_interleave(p.shape[1] // v.shape[1], 1).mT
    size = p.detach() * (change.abs() + (p.detach() * change).sum(-1, keepdim=True).abs())
    distance = (torch.arange(m - n, m)[:, None] - torch.arange(m)).abs()
    return float((size * distance).sum((0, 2, 3)).norm())


NAMES = [name for name in SCORES if name not in ("soft cap", "two biases")]


@pytest.mark.thorough_except("avx2-dtype0-sinks", "avx2-dtype2-relative", "portable-dtype0-relative ahead, shared")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", GRADIENT_LIMITS)
def test_scores_of_every_kind(name: str, dtype: torch.dtype) -> None:
    for mask in ("everything", "causal", "window and sinks", "nothing for some", "dense"):
        for n in (2, 37):
            compare(*qkv(n=n, dtype=dtype), lambda n=n: SCORES[name](2, 6, n, 53), MASKS[mask](2, n, 53))


def bias_of(*shape: int) -> Make:
    def make() -> tuple[Score, ...]:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).requires_grad_()
        # A sink, or what all keys share would change nothing.
        return Bias(x), SinkLogits(torch.linspace(-1, 1, 6)), SoftCap(2.0)

    return make


@pytest.mark.thorough
@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("h", [1, 6])
@pytest.mark.parametrize("n", [1, 137])
@pytest.mark.parametrize("m", [1, 301])
def test_biases_of_every_shape(b: int, h: int, n: int, m: int) -> None:
    """Which tasks share a place, and have to wait for one another, depends on the axes that are 1."""
    for h_kv in (1, 3):
        compare(*qkv(2, 6, h_kv, 137, 301, 8, 5), bias_of(b, h, n, m), Causal())
    compare(*qkv(2, 6, 3, 137, 301, 8, 5), bias_of(b, h, n, m), Window(90), 0.3)


@pytest.mark.thorough
@pytest.mark.every_target
@settings(deadline=None, derandomize=True, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_shapes(data: st.DataObject) -> None:
    draw = data.draw
    b, h_kv, group = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    n = draw(st.one_of(st.integers(1, 9), st.integers(1, 200)))
    m = draw(st.integers(max(n, 8), n + 280))
    h = h_kv * group
    inputs = qkv(b, h, h_kv, n, m, draw(st.integers(1, 70)), draw(st.integers(1, 70)), seed=draw(st.integers(0, 99)))
    mask = MASKS[draw(st.sampled_from([*MASKS]))](b, n, m)
    if draw(st.booleans()):
        name = draw(st.sampled_from(NAMES))
        compare(*inputs, lambda: SCORES[name](b, h, n, m), mask, draw(st.sampled_from([0.0, 0.0, 0.3])))
        return
    shape = [draw(st.sampled_from([1, size])) for size in (b, h, n, m)]

    def make() -> tuple[Score, ...]:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).requires_grad_()
        return Bias(x), SinkLogits(torch.linspace(-1, 1, h).requires_grad_()), ALiBi(torch.full((h,), 0.1))

    compare(*inputs, make, mask, draw(st.sampled_from([0.0, 0.0, 0.3])))


@pytest.mark.parametrize("n", [1, 95, 96, 97, 193])
@pytest.mark.parametrize("m", [127, 128, 129, 257])
def test_around_the_blocks(n: int, m: int) -> None:
    def make() -> tuple[Score, ...]:
        values = torch.randn(2, n + m - 1, generator=torch.Generator().manual_seed(1)).requires_grad_()
        return (RelativeBias(values, 1 - m),)  # every distance has its own

    mask = None if n > m else Causal()
    compare(*qkv(1, 2, 1, n, m, 17, 33), make, mask)
    compare(*qkv(1, 6, 2, n, m, 7, 3), bias_of(1, 1, n, m), mask)


def test_several_biases_at_once_and_of_half_precision() -> None:
    def make() -> tuple[Score, ...]:
        one = torch.linspace(-1, 1, 53).view(1, 1, 1, 53).requires_grad_()
        two = torch.linspace(-2, 1, 37 * 53).view(1, 1, 37, 53).requires_grad_()
        weight = torch.linspace(-1, 1, 48).view(8, 6).bfloat16().requires_grad_()
        return Bias(one), Bias(two), t5_bias(weight, bidirectional=True, max_distance=20), SoftCap(3.0)

    compare(*qkv(), make, Causal())


def learning(n: int, dtype: torch.dtype, shape: tuple[int, ...], dropout: float = 0.0) -> list[Tensor]:
    """All gradients of a call whose scores learn."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (x.requires_grad_() for x in qkv(2, 6, 3, n, 700, 20, 24, dtype=dtype))
    bias = torch.randn(shape, generator=generator).requires_grad_()
    table, sinks = torch.randn(6, 33, generator=generator).requires_grad_(), torch.zeros(6).requires_grad_()
    score = SoftCap(5.0), RelativeBias(table, -20), SinkLogits(sinks), Bias(bias)
    out = run(q, k, v, MASKS["window and sinks"](2, n, 700), score, dropout=dropout, seed=3).out
    out.backward(torch.randn(out.shape, generator=generator).to(dtype))
    return [x.grad for x in (q, k, v, bias, table, sinks)]


@pytest.mark.thorough
@pytest.mark.parametrize("shape", [(2, 6, 150, 700), (1, 1, 150, 700), (1, 6, 1, 700), (2, 1, 150, 1), (1, 1, 1, 1)])
def test_the_same_bits_for_any_number_of_threads(shape: tuple[int, ...], threads: Callable[[int], None]) -> None:
    for dropout in (0.0, 0.3):
        threads(1)
        first = learning(150, torch.float32, shape, dropout)
        for count in (2, 7):
            threads(count)
            again = learning(150, torch.float32, shape, dropout)
            assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_what_an_earlier_call_left_in_memory_changes_nothing() -> None:
    first = learning(150, torch.float32, (1, 6, 150, 700))
    bad = torch.full((2, 6, 200, 64), math.nan).requires_grad_()
    run(bad, bad, bad, score=[Bias(torch.full((1, 1, 200, 200), math.nan).requires_grad_())]).out.sum().backward()
    again = learning(150, torch.float32, (1, 6, 150, 700))
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_rows_that_see_nothing_teach_nothing() -> None:
    q, k, v = qkv()
    bias, sinks = torch.zeros(2, 6, 37, 53).requires_grad_(), torch.zeros(6).requires_grad_()
    mask = MASKS["nothing for some"](2, 37, 53)
    run(q, k, v, mask, [Bias(bias), SinkLogits(sinks)]).out.sum().backward()
    allowed = mask.to_dense(37, 53, batch=2, heads=6).expand(2, 6, 37, 53)
    assert (bias.grad[~allowed] == 0).all()
    assert (bias.grad[allowed] != 0).float().mean() > 0.9
    assert sinks.grad.isfinite().all()


def test_a_query_that_is_not_finite_spoils_its_own_alone() -> None:
    for score in ((), (SoftCap(2.0),)):
        q, k, v = qkv(1, 2, 2)
        q[0, 0, 5] = math.nan
        bias = torch.zeros(1, 2, 37, 53).requires_grad_()
        run(q, k, v, Causal(), [Bias(bias), *score]).out[:, :, 6:].sum().backward()
        spoiled = bias.grad.isnan()
        assert not spoiled[0, 1].any()
        assert not spoiled[0, 0, 6:].any()


@pytest.mark.parametrize("shape", [(2, 4, 97, 131), (1, 4, 97, 131), (1, 1, 1, 131), (2, 1, 97, 1)])
def test_only_its_own_gradients_are_written(shape: tuple[int, ...]) -> None:
    b, h, h_kv, n, m, d, e = 2, 4, 2, 97, 131, 20, 9
    q, k, v = qkv(b, h, h_kv, n, m, d, e)
    score = RelativeBias(torch.randn(h, 500), -250), Bias(torch.randn(shape)), SinkLogits([0.0] * h)
    rule = Rule(Causal(), d**-0.5, Grid(b, h, n, m), score)
    lowered = lower(rule)
    assert isinstance(lowered, Lowered)
    result = run(q, k, v, Causal(), score)
    outs = [guarded(*x.shape, gaps=True) for x in (q, k, v)]
    learned = [guarded(h, n + m - 1), guarded(*shape), guarded(h)]
    delta, check = guarded(b, h, n)
    grad = torch.randn(result.out.shape)
    views = map(binding.view, (q, k, v, result.out, grad, *(x for x, _ in outs)))
    request = binding.BackwardCall(binding.CODES[q.dtype], 2, b, h, h_kv, n, m, d, e, *views)
    held = [binding.write_lse(request, result.lse)]
    request.delta = delta.data_ptr()
    binding.write_learned(request, *(x for x, _ in learned))
    held += binding.write_rule(request.rule, lowered, rule)
    handle = library().handle
    assert handle is not None
    assert handle.headwise_backward(ctypes.byref(request)) == binding.DONE
    assert held
    assert check()
    assert all(clean() for _, clean in (*outs, *learned))


@pytest.mark.thorough
@forks
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_nothing_is_read_beyond_the_end() -> None:
    def work() -> bool:
        for n, m in ((1, 70), (3, 65), (37, 53), (61, 257)):
            q, k, v = (at_the_end(x).requires_grad_() for x in qkv(2, 4, 2, n, m, 5, 3))
            for shape in ((2, 4, n, m), (1, 1, n, m), (1, 1, 1, m), (1, 4, n, 1)):
                score = (
                    Bias(at_the_end(torch.randn(shape)).requires_grad_()),
                    ALiBi(at_the_end(torch.full((4,), 0.1)).requires_grad_()),
                    SinkLogits(at_the_end(torch.zeros(4)).requires_grad_()),
                )
                result = run(q, k, v, Causal(), score)
                result.out.backward(at_the_end(torch.ones(result.out.shape)))
        return True

    assert in_child(work) == 0


def test_the_same_as_blocks_in_and_outside_of_a_graph() -> None:
    q, k, v = qkv(1, 4, 2, 19, 23)
    found = {}
    for name in ("cpu", "torch_blocks"):
        for graph in (False, True):
            table, bias = (
                torch.linspace(-1, 1, 44).view(4, 11).requires_grad_(),
                torch.zeros(1, 4, 1, 23).requires_grad_(),
            )

            def call(name: str = name, table: Tensor = table, bias: Tensor = bias) -> Tensor:
                return attend(q, k, v, mask=Causal(), score=[RelativeBias(table, -5), Bias(bias)], kernel=name)

            if graph:  # as one operator
                grads = torch.func.grad(
                    lambda t, x, name=name: attend(
                        q, k, v, mask=Causal(), score=[RelativeBias(t, -5), Bias(x)], kernel=name
                    ).square().sum(), (0, 1)
                )(table.detach(), bias.detach())  # fmt: skip
            else:
                grads = torch.autograd.grad(call().square().sum(), (table, bias))
            found[name, graph] = grads
    for other in found.values():
        for x, y in zip(found["torch_blocks", False], other, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_nothing_is_refused_for_what_learns() -> None:
    q, k, v = qkv(1, 2, 2, 30, 30)
    out, amap = attend(
        q, k, v, mask=Causal(), score=Bias(torch.zeros(1, 2, 30, 30).requires_grad_()), dropout_p=0.2, return_map=True
    )
    assert amap.kernel == "cpu"
    assert out.requires_grad
    assert KERNELS["cpu"].name not in amap.refusals
