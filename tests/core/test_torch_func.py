"""Attention under torch.func: vmap, gradients of reverse mode, and what there is none of; alone and in graphs."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from samples import MASKS, qkv
from torch import Tensor
from torch.autograd import forward_ad

from headwise.errors import KernelError
from headwise.map.attention import attend
from headwise.masks import Causal, Dense, Grid, Mask, Span, State, Window
from headwise.nn.multi_head import MultiHeadAttention
from headwise.scores import ALiBi, Bias, SinkLogits

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # of the compiler's own looking around
    pytest.mark.filterwarnings("ignore:Dynamo"),
]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.thorough_beyond(6)
@pytest.mark.parametrize("name", MASKS)
def test_vmap_is_one_call_after_another(name: str) -> None:
    mask = MASKS[name](2, 37, 53)
    inputs = [torch.stack([x, 2 * x, -x], 1) for x in qkv()]
    found = torch.vmap(lambda q, k, v: attend(q, k, v, mask=mask), in_dims=1, out_dims=1)(*inputs)
    each = [attend(*(x[:, i] for x in inputs), mask=mask) for i in range(3)]
    assert torch.equal(found, torch.stack(each, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_vmap_under_autocast_keeps_the_dtype(dtype: torch.dtype) -> None:
    inputs = [torch.stack([x, -x]) for x in qkv(dtype=dtype)]
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.vmap(attend)(*inputs)
    assert found.dtype == dtype
    assert torch.equal(found, torch.stack([attend(*(x[i] for x in inputs)) for i in range(2)]))


def test_vmap_over_masks_biases_and_shared_keys() -> None:
    q, k, v = qkv()
    generator = torch.Generator().manual_seed(2)
    dense, bias = (
        torch.rand(3, 2, 1, 37, 53, generator=generator) > 0.4,
        torch.randn(3, 1, 6, 1, 53, generator=generator),
    )
    found = torch.vmap(lambda x, y: attend(q, k, v, mask=Dense(x), score=Bias(y)))(dense, bias)
    each = [attend(q, k, v, mask=Dense(x), score=Bias(y)) for x, y in zip(dense, bias, strict=True)]
    assert torch.equal(found, torch.stack(each))


@pytest.mark.parametrize("name", ["everything", "documents", "dense"])
def test_gradients_by_torch_func(name: str) -> None:
    mask, q, k, v = MASKS[name](2, 37, 53), *(x.requires_grad_() for x in qkv())
    sinks, bias = torch.linspace(-1, 1, 6, requires_grad=True), torch.ones(1, 6, 1, 53, requires_grad=True)

    def loss(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, bias: Tensor) -> Tensor:
        return attend(q, k, v, mask=mask, score=(SinkLogits(sinks), Bias(bias))).square().sum()

    inputs = q, k, v, sinks, bias
    found = torch.func.grad(loss, argnums=(0, 1, 2, 3, 4))(*(x.detach() for x in inputs))
    for ours, theirs in zip(found, torch.autograd.grad(loss(*inputs), inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_gradients_of_each_sample() -> None:
    q, k, v = qkv()

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q[None], k[None], v[None], mask=Causal()).square().sum()

    found = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    for i in range(2):
        one = [x[i].clone().requires_grad_() for x in (q, k, v)]
        for ours, theirs in zip(found, torch.autograd.grad(loss(*one), one), strict=True):
            assert torch.equal(ours[i], theirs)


def func_grad(f: Callable[..., Tensor]) -> Callable[..., Any]:
    return torch.func.grad(lambda *x: f(*x).square().sum(), argnums=(0, 1, 2, 3))


def func_vjp(f: Callable[..., Tensor]) -> Callable[..., Any]:
    def back(*x: Tensor) -> Any:
        out, pull = torch.func.vjp(f, *x)
        return pull(torch.ones_like(out))

    return back


def func_of_each(f: Callable[..., Tensor]) -> Callable[..., Any]:
    one = torch.func.grad(lambda *x: f(*(part[None] for part in x[:3]), x[3]).square().sum(), argnums=(0, 1, 2, 3))
    return torch.vmap(one, in_dims=(0, 0, 0, None))


@pytest.mark.thorough
@pytest.mark.parametrize("change", [func_grad, func_vjp, func_of_each, torch.vmap], ids=lambda x: x.__name__)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_func_within_one_graph(change: Callable[..., Any], backend: str) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return attend(q, k, v, mask=Causal() & Window(9), score=(ALiBi.standard(6), SinkLogits(sinks)))

    inputs = [*qkv(), torch.linspace(-1, 1, 6)]
    if change is torch.vmap:
        inputs = [torch.stack([x, -x, 2 * x]) for x in inputs]
    compiled = torch.compile(change(call), fullgraph=True, backend=backend)
    for _ in range(2):
        found, expected = compiled(*inputs), change(call)(*inputs)
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)
        inputs = [3 * x for x in inputs]


@pytest.mark.thorough
def test_a_modules_parameters_by_torch_func_within_one_graph() -> None:
    module, x = MultiHeadAttention(24, 6, num_kv_heads=2, rotary=True), torch.randn(2, 13, 24)

    def loss(parameters: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(module, parameters, (x,), {"mask": Causal()}).square().sum()

    parameters = dict(module.named_parameters())
    found = torch.compile(torch.func.grad(loss), fullgraph=True, backend="aot_eager")(parameters, x)
    expected = torch.autograd.grad(loss(parameters, x), [*parameters.values()])
    for name, theirs in zip(parameters, expected, strict=True):
        torch.testing.assert_close(found[name], theirs, rtol=1e-5, atol=1e-6)
    with pytest.raises(KernelError, match="no second derivative"):  # parameters that learn could ask for one
        found["q_proj.weight"].square().sum().backward()


@pytest.mark.thorough
def test_forward_mode_drops_no_tangent() -> None:
    q, k, v = qkv(1, 2, 1, 3, 3, 4, 4)

    def call(q: Tensor) -> Tensor:
        return attend(q, k, v, mask=Causal())

    def pushed(q: Tensor) -> Any:
        return torch.func.jvp(call, (q,), (torch.ones_like(q),))

    expected = pushed(q)[1]
    assert (expected != 0).any()
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(call(forward_ad.make_dual(q, torch.ones_like(q))))
        assert torch.equal(found.tangent, expected)
        assert torch.equal(call(q), attend(q, k, v, mask=Causal()))  # nothing here has a tangent
    with pytest.raises(Exception, match="no derivative in forward mode"):  # in an error of the compiler's own
        torch.compile(pushed, fullgraph=True, backend="aot_eager")(q)


def test_a_call_with_measures_does_not_lose_tangents() -> None:
    x = torch.randn(1, 2, 5, 8)
    with forward_ad.dual_level():
        measured = attend(forward_ad.make_dual(x, x), x, x, return_map=True, measures=["entropy"])[0]
        plain = attend(forward_ad.make_dual(x, x), x, x)
        for one, other in zip(forward_ad.unpack_dual(measured), forward_ad.unpack_dual(plain), strict=True):
            torch.testing.assert_close(one, other)
        torch.testing.assert_close(attend(x, x, x, return_map=True, measures=["entropy"])[0], attend(x, x, x))


class EveryOther(Mask):
    """A mask of somebody's own, which is not registered."""

    holds = None

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        return ((rows[:, None] + cols) % 2 == 0)[None, None]

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        return State.MIXED


def test_masks_of_somebodys_own() -> None:
    q, k, v = qkv()
    ours, dense = EveryOther() & Causal(), Dense((EveryOther() & Causal()).to_dense(37, 53))
    loss = lambda mask: lambda q: attend(q, k, v, mask=mask).square().sum()  # noqa: E731
    assert torch.equal(torch.func.grad(loss(ours))(q), torch.func.grad(loss(dense))(q))
    both = torch.stack([q, -q])
    assert torch.equal(torch.vmap(lambda q: attend(q, k, v, mask=ours))(both)[1], attend(-q, k, v, mask=dense))
