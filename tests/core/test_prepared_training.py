"""Training calls that come again: forward and backward pass from what was kept, with the bits of the usual way."""

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from samples import qkv
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from headwise import kernels
from headwise.errors import KernelError
from headwise.kernels import KERNELS, prepare, register
from headwise.kernels.cpu.kernel import CPU
from headwise.kernels.events import listen
from headwise.kernels.quantized import QuantizedKV
from headwise.map.attention import attend
from headwise.masks import Causal, Mask, Window

pytestmark = pytest.mark.skipif(
    'attend(*qkv(e=8), return_map=True)[1].kernel != "cpu"',
    reason='only calls of the compiled kernel are kept, and "auto" picks another one here',
)
WAYS = {"None": None, "causal": Causal(), "window": Causal() & Window(3)}
SIZES = ((2, 6, 3, 17, 23, 20, 12), (1, 2, 2, 1, 41, 8, 8), (3, 4, 1, 5, 5, 7, 3))


@pytest.fixture(autouse=True)
def usual_way(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Nothing is kept when a test begins. A list that grows with every backward pass by the usual way."""
    monkeypatch.setattr(prepare, "_prepared", {})
    found: list[int] = []
    gradients = CPU.gradients

    def counted(*given: Any) -> Any:
        found.append(1)
        return gradients(*given)

    monkeypatch.setattr(CPU, "gradients", counted)
    return found


def leaves(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [x.requires_grad_() for x in qkv(*(size or (2, 6, 3, 17, 23, 8, 8)), seed=seed, dtype=dtype)]


def turned(x: Tensor) -> Tensor:
    """The same numbers, with heads beside each other in memory, as projections return them."""
    return x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(x.requires_grad)


def grad_of(out: Tensor) -> Tensor:
    return torch.linspace(-1, 1, out.numel(), dtype=torch.float32).to(out.dtype).view(out.shape)


def again(*given: Any, mask: Mask | None = None) -> Tensor:
    """The output by what was kept."""
    found = prepare.again(*given, mask, None, "auto")
    assert found is not None
    return found[0]


def dispatched(*given: Any, mask: Mask | None = None) -> Tensor:
    kept, prepare._prepared = prepare._prepared, {}
    try:
        return attend(*given, mask=mask)
    finally:
        prepare._prepared = kept


def same(found: Any, expected: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("place", [lambda x: x, turned], ids=["contiguous", "turned"])
def test_the_same_bits_as_the_first_time(
    dtype: torch.dtype, mask: Mask | None, size: tuple[int, ...], place: Callable[[Tensor], Tensor],
    usual_way: list[int],
) -> None:  # fmt: skip
    first, second = ([place(x) for x in leaves(*size, seed=seed, dtype=dtype)] for seed in (1, 2))
    attend(*first, mask=mask)
    wanted = dispatched(*second, mask=mask)
    grad = grad_of(wanted)
    expected = torch.autograd.grad(wanted, second, grad)
    before = len(usual_way)
    for given in (grad, turned(grad), grad):
        out = again(*second, mask=mask)
        assert torch.equal(out, wanted)
        assert out.is_contiguous()
        found = torch.autograd.grad(out, second, given)
        assert same(found, expected)
        assert [x.stride() for x in found] == [x.stride() for x in expected]
    assert len(usual_way) == before
    assert same(torch.autograd.grad(again(*second, mask=mask).sum(), second),
                torch.autograd.grad(dispatched(*second, mask=mask).sum(), second))  # fmt: skip


def test_each_input_alone() -> None:
    attend(*leaves())
    for at in range(3):
        given = [x.detach().requires_grad_(i == at) for i, x in enumerate(leaves())]
        out, wanted = again(*given), dispatched(*given)
        found, expected = (torch.autograd.grad(x, given[at], grad_of(x)) for x in (out, wanted))
        assert same(found, expected)


def test_calls_that_are_not_like_it() -> None:
    q, k, v = given = leaves()
    attend(*given)
    again(*given)
    shown = torch.nn.Parameter(q.detach())
    for others in ((q, turned(k), v), (q, k[:, :, 1:], v[:, :, 1:]), [x.bfloat16() for x in given], (shown, k, v)):
        assert prepare.again(*others, None, None, "auto") is None
    assert prepare.again(*given, Causal(), None, "auto") is None
    assert prepare.again(*given, None, 0.5, "auto") is None
    assert prepare.again(*given, None, None, "auto", measures=()) is None
    assert prepare.again(*given, None, None, "torch_blocks") is None
    out, amap = attend(*given, return_map=True)
    assert out.requires_grad
    assert amap.kernel == "cpu"
    keys, values = QuantizedKV.of(k.detach()), QuantizedKV.of(v.detach())
    for _ in range(2):
        assert attend(q, keys, values).requires_grad


def test_whether_gradients_are_recorded() -> None:
    given = leaves()
    with torch.no_grad():
        plain = attend(*given)
        assert not again(*given).requires_grad
    assert prepare.again(*given, None, None, "auto") is None
    out = attend(*given)
    assert again(*given).requires_grad
    with torch.no_grad():
        assert not attend(*given).requires_grad
    with torch.inference_mode():
        assert attend(*given).is_inference()
    assert not attend(*(x.detach() for x in given)).requires_grad
    assert torch.equal(out, plain)


def test_inputs_that_are_changed_between_the_passes_are_noticed() -> None:
    attend(*leaves())
    for at in range(4):
        given = [x * 1.0 for x in leaves()]
        out = again(*given)
        tensors = *given, out
        with torch.no_grad():
            tensors[at].add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize("change", [Tensor.clone, turned, lambda x: x.clone().mul_(0.5)])
def test_the_backward_pass_reads_what_hooks_return(change: Callable[[Tensor], Tensor]) -> None:
    given = leaves()
    attend(*given)
    seen: list[list[torch.Size]] = []
    found = []
    for way in (again, dispatched):
        shapes: list[torch.Size] = []

        def pack(x: Tensor, shapes: list[torch.Size] = shapes) -> Tensor:
            shapes.append(x.shape)
            return x.detach()

        def unpack(x: Tensor) -> Tensor:
            return change(x) if x.ndim == 4 else x.clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            out = way(*given)
        found.append(torch.autograd.grad(out, given, grad_of(out)))
        seen.append(shapes)
    assert same(*found)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("way", [again, dispatched])
@pytest.mark.parametrize("change", [torch.Tensor.double, lambda x: x[:, :, :1], lambda x: x[..., ::2, 0]])
def test_what_hooks_return_of_another_kind_is_an_error(
    way: Callable[..., Tensor], change: Callable[[Tensor], Tensor]
) -> None:
    """The compiled kernel would read other memory."""
    given = leaves()
    attend(*given)
    for changed in range(4):
        number = itertools.count()

        def unpack(x: Tensor, number: Iterator[int] = number, changed: int = changed) -> Tensor:
            return change(x) if next(number) == changed else x

        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            out = way(*given)
        with pytest.raises(KernelError, match="saved tensors came back as"):
            out.backward(grad_of(out))


def test_signs_that_pytorch_keeps_in_a_bit_are_read() -> None:
    given = leaves()
    attend(*given)
    expected = torch.autograd.grad(dispatched(*given), given, -grad_of(dispatched(*given)))
    found = torch.autograd.grad(again(*given), given, torch._neg_view(grad_of(again(*given))))
    assert same(found, expected)
    for at in range(3):
        signs = [torch._neg_view(x.detach()).requires_grad_() if i == at else x for i, x in enumerate(given)]
        numbers = [x.detach().clone().requires_grad_() for x in signs]
        out, wanted = attend(*signs), dispatched(*numbers)
        assert torch.equal(out, wanted)
        assert same(torch.autograd.grad(out, signs, grad_of(out)), torch.autograd.grad(wanted, numbers, grad_of(out)))


@pytest.mark.parametrize("mask", [None, Causal()])
def test_rows_whose_weights_are_all_zero_have_no_gradients(mask: Mask | None, usual_way: list[int]) -> None:
    q, k, v = (x.detach() for x in leaves())
    q[0, 1, 3], k = -torch.inf, k.abs()
    given = [x.requires_grad_() for x in (q, k, v)]
    attend(*leaves(), mask=mask)
    out, wanted = again(*given, mask=mask), dispatched(*given, mask=mask)
    grad = grad_of(out)
    grad[0, 1, 3] = torch.nan
    found = torch.autograd.grad(out, given, grad)
    assert len(usual_way) == 1
    assert same(found, torch.autograd.grad(wanted, given, grad))
    assert not found[0][0, 1, 3].any()
    assert all(x.isfinite().all() for x in found)


def test_what_the_data_show_goes_to_the_next_kernel() -> None:
    q, _, v = given = leaves(2, 6, 3, 17, 17, 8, 8)
    attend(*given, mask=Causal())
    with torch.no_grad():
        v[0, 0, 12] = torch.nan  # which the first queries may not attend to
    assert prepare.again(*given, Causal(), None, "auto") is None
    out = attend(*given, mask=Causal())
    (dq,) = torch.autograd.grad(out.sum(), q)
    assert dq[:, :, :12].isfinite().all()


def test_results_share_no_memory() -> None:
    given = leaves()
    attend(*given)
    outs = [again(*given) for _ in range(2)]
    grads = [x for out in outs for x in torch.autograd.grad(out, given, grad_of(out))]
    held = [x.untyped_storage().data_ptr() for x in (*given, *outs, *grads)]
    assert len(set(held)) == len(held)


def test_the_backward_pass_may_be_repeated_and_batched() -> None:
    given = leaves()
    attend(*given)
    out, wanted = again(*given), dispatched(*given)
    grads = torch.stack([grad_of(out), 1 - grad_of(out), grad_of(out) ** 2])
    ways = [[torch.autograd.grad(x, given, grad, retain_graph=True) for grad in grads] for x in (out, wanted)]
    assert all(same(*each) for each in zip(*ways, strict=True))
    batched = torch.autograd.grad(out, given, grads, is_grads_batched=True)
    assert same(batched, map(torch.stack, zip(*ways[0], strict=True)))


def test_second_derivatives_are_those_of_the_first_call() -> None:
    given = leaves()

    def second(out: Tensor) -> tuple[Tensor, ...]:
        found = torch.autograd.grad(out.square().sum(), given, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in found), given)

    expected = second(attend(*given, kernel="reference"))
    attend(*given)
    for x, y in zip(second(again(*given)), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_delta_is_reported() -> None:
    given, told = leaves(), []
    attend(*given)
    with listen(told.append):
        out = attend(*given)
    out.backward(grad_of(out))
    torch.testing.assert_close(told[0], (out * grad_of(out)).sum(-1))


def test_a_kernel_that_is_registered_later_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Preferred(type(KERNELS["torch_blocks"])):  # type: ignore[misc]
        name, twice = "preferred", False

    given = leaves()
    attend(*given)
    monkeypatch.setattr(kernels, "AUTOMATIC", list(kernels.AUTOMATIC))
    monkeypatch.setitem(KERNELS, "preferred", Preferred())
    register(KERNELS["preferred"], before="cpu")
    assert prepare.again(*given, None, None, "auto") is None
    with pytest.raises(KernelError, match="preferred"):
        torch.autograd.grad(torch.autograd.grad(attend(*given).sum(), given, create_graph=True)[0].sum(), given[0])


def test_autocast_checkpoints_and_modes_change_no_bits() -> None:
    given = leaves()
    attend(*given)
    wanted = dispatched(*given)
    expected = torch.autograd.grad(wanted, given, grad_of(wanted))
    with torch.autocast("cpu", torch.bfloat16):
        out = again(*given)
        assert torch.equal(out, wanted)
        assert same(torch.autograd.grad(out, given, grad_of(out)), expected)
    prepare._prepared.clear()
    out = checkpoint(attend, *given, use_reentrant=False)  # dispatched, and computed again by what was kept
    assert same(torch.autograd.grad(out, given, grad_of(out)), expected)
    out = again(*given)
    with FlopCounterMode(display=False):
        assert prepare.again(*given, None, None, "auto") is None
        assert same(torch.autograd.grad(out, given, grad_of(out)), expected)


def test_torch_func_and_graphs_go_their_own_way() -> None:
    given = leaves()
    wanted = attend(*given)
    expected = torch.autograd.grad(wanted.sum(), given)
    found = torch.func.grad(lambda *of: attend(*of).sum(), (0, 1, 2))(*given)
    assert same(found, expected)
    traced = make_fx(lambda *of: torch.autograd.grad(attend(*of).sum(), of))(*given)
    assert "headwise.attend_backward" in traced.code
    assert same(traced(*given), expected)


@pytest.mark.thorough
def test_callers_at_once_do_not_meet() -> None:
    calls = [leaves(seed=seed) for seed in range(6)]
    outs = [attend(*call) for call in calls]
    wanted = [torch.autograd.grad(out, call, grad_of(out)) for call, out in zip(calls, outs, strict=True)]

    def work(at: int) -> bool:
        grad = grad_of(outs[at])
        grads = (grad, turned(grad))
        return all(
            same(torch.autograd.grad(attend(*calls[at]), calls[at], grads[step % 2]), wanted[at]) for step in range(100)
        )

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(work, range(6)))
