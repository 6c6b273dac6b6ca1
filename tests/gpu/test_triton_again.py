"""Calls that come again launch the GPU kernels with the arguments that were kept, and have the same bits."""

import pytest
import torch
from samples import qkv
from torch import Tensor
from triton_here import DEVICE

import headwise as hw
from headwise.kernels import prepare
from headwise.kernels.triton_gpu import plan
from headwise.masks import Everything, Mask


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "_prepared", {})


def inputs(n: int, m: int, seed: int = 0) -> list[Tensor]:
    return [x.to(DEVICE) for x in qkv(2, 6, 2, n, m, 16, 16, seed=seed, dtype=torch.bfloat16)]


def came_again(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None) -> Tensor | None:
    """The output by what was kept; None if nothing was."""
    found = prepare.again(q, k, v, mask, None, "triton_gpu")
    return None if found is None else found[0]


def dispatched(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None) -> Tensor:
    kept, prepare._prepared = prepare._prepared, {}
    try:
        return hw.attend(q, k, v, mask=mask, kernel="triton_gpu")  # type: ignore[return-value]
    finally:
        prepare._prepared = kept


@pytest.mark.parametrize("mask", [Everything(), hw.Causal(), hw.Causal() & hw.Window(9)])
@pytest.mark.parametrize("n", [1, 5, 37])
def test_other_numbers_at_other_addresses(n: int, mask: Mask) -> None:
    first, second = inputs(n, 53), inputs(n, 53, seed=1)
    assert came_again(*first, mask) is None
    hw.attend(*first, mask=mask, kernel="triton_gpu")
    for given in (second, first, second):
        found = came_again(*given, mask)
        assert found is not None
        assert torch.equal(found, dispatched(*given, mask))


def test_a_cache_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of a buffer, which are split into ranges from some length on."""
    monkeypatch.setattr(plan, "SPLIT_KEYS", 32)
    q, k, v = inputs(1, 140)
    hw.attend(q, k[:, :, :21], v[:, :, :21], mask=hw.Causal(), kernel="triton_gpu")
    for m in (22, 32, 33, 128, 140):
        given = q, k[:, :, :m], v[:, :, :m]
        found = came_again(*given, hw.Causal())
        assert found is not None
        assert torch.equal(found, dispatched(*given, hw.Causal()))


def test_a_cache_that_torch_cat_joins() -> None:
    q, k, v = inputs(1, 80)
    hw.attend(q, *(x[:, :, :21].contiguous() for x in (k, v)), kernel="triton_gpu")
    for m in (22, 32, 80):
        given = q, k[:, :, :m].contiguous(), v[:, :, :m].contiguous()
        found = came_again(*given)
        assert found is not None
        assert torch.equal(found, dispatched(*given))


def test_addresses_that_are_no_multiples_of_sixteen() -> None:
    first = inputs(1, 53)
    hw.attend(*first, kernel="triton_gpu")
    for moved in range(3):
        given = list(first)
        given[moved] = torch.cat((first[moved].new_zeros(1), first[moved].flatten()))[1:].view_as(first[moved])
        assert given[moved].data_ptr() % 16 == 2
        found = came_again(*given)
        assert found is not None
        assert torch.equal(found, dispatched(*first))


def test_what_fails_its_check_with_more_keys_is_dispatched() -> None:
    q, k, v = inputs(1, 53)
    hw.attend(q, k, v, kernel="triton_gpu")
    ((key, kept),) = prepare._prepared.items()
    prepare._prepared[key] = kept._replace(refusal=lambda call, learned: f"{call.rule.grid.m} keys")
    assert came_again(q, k, v) is None  # nothing has been launched yet of what was kept


def test_calls_that_are_not_like_it() -> None:
    q, k, v = inputs(1, 53)
    hw.attend(q, k, v, kernel="triton_gpu")
    assert came_again(q, k, v) is not None
    assert came_again(q, k, v, hw.Causal()) is None
    assert came_again(q, k.transpose(2, 3).contiguous().transpose(2, 3), v) is None
    assert came_again(q.float(), k.float(), v.float()) is None
    assert came_again(q.requires_grad_(), k, v) is None
    with torch.no_grad():
        assert came_again(q, k, v) is not None


@pytest.mark.parametrize("mask", [Everything(), hw.Causal()])
@pytest.mark.parametrize("n", [1, 37])
def test_training_calls(n: int, mask: Mask) -> None:
    """The forward pass is launched again, and the gradients have the same bits."""
    first, second = ([x.requires_grad_() for x in inputs(n, 53, seed=seed)] for seed in (0, 1))
    grad = torch.randn(2, 6, n, 16, generator=torch.Generator().manual_seed(2)).to(DEVICE, torch.bfloat16)
    hw.attend(*first, mask=mask, kernel="triton_gpu").backward(grad)
    for given in (second, first):
        out, wanted = came_again(*given, mask), dispatched(*given, mask)
        assert out is not None
        assert torch.equal(out, wanted)
        found, expected = (torch.autograd.grad(x, given, grad) for x in (out, wanted))
        assert all(map(torch.equal, found, expected))


def test_training_calls_that_fail_their_check_are_dispatched() -> None:
    given = [x.requires_grad_() for x in inputs(1, 53)]
    hw.attend(*given, kernel="triton_gpu")
    ((key, kept),) = prepare._prepared.items()
    learned: list[object] = []
    refused = kept.forward.__self__._replace(refusal=lambda call, of: learned.append(of) or "no")  # type: ignore[attr-defined]
    prepare._prepared[key] = kept._replace(forward=refused.trained)  # type: ignore[attr-defined]
    assert came_again(*given) is None
    assert learned == [(False, False, False)]
