"""What a backward pass reads is saved as PyTorch saves: checked for changes in place, seen by hooks, freed by
checkpoints."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from samples import kernels_here, qkv
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headwise.kernels.events import listen
from headwise.map.attention import attend
from headwise.masks import Causal, Dense, Documents, Grid, Lengths, Mask, Span, State
from headwise.scores import ALiBi, Bias, Score, SinkLogits, SoftCap

OWN = [name for name in ("cpu", "torch_blocks", "torch_fused") if name in kernels_here()]  # that bring a backward pass
ANY_RULE = [name for name in OWN if name != "torch_fused"]


class Chosen(Mask):
    """A mask of somebody's own class: some keys, for all queries."""

    holds = None

    def __init__(self, keys: Tensor) -> None:
        self.keys = [keys]

    def allowed(self, rows: Tensor, cols: Tensor, grid: Grid) -> Tensor:
        return self.keys[0][cols].expand(1, 1, len(rows), -1)

    def state(self, rows: Span, cols: Span, grid: Grid) -> State:
        return State.MIXED


def bits(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(4)) > 0.3


# Of each mask, the tensor in it, and how it is made of that.
MASKS: dict[str, tuple[Tensor, Callable[[Tensor], Mask]]] = {
    "dense": (bits(2, 1, 7, 11), Dense),
    "causal and dense": (bits(7, 11), lambda given: Causal() & Dense(given)),
    "lengths": (torch.tensor([5, 9]), Lengths),
    "documents": (torch.arange(11) // 3, Documents),
    "own": (bits(11), Chosen),
}
SCORES: dict[str, tuple[Tensor, Callable[[Tensor], Score]]] = {
    "bias": (torch.linspace(-1, 1, 7 * 11).view(1, 1, 7, 11), Bias),
    "sinks": (torch.linspace(-1, 1, 6), SinkLogits),
}


def gradients(kernel: str, *tensors: Tensor, mask: Mask | None = None, score: tuple[Score, ...] = (),
              between: Callable[[], Any] = lambda: None) -> list[Tensor]:  # fmt: skip
    """Of q, k, v and more, with something done between the passes."""
    out = attend(*tensors[:3], mask=mask, score=score, kernel=kernel)
    between()
    return list(torch.autograd.grad(out, tensors, torch.linspace(-1, 1, out.numel()).view(out.shape)))


def leaves(n: int = 7, m: int = 11, e: int = 5) -> list[Tensor]:
    return [x.requires_grad_() for x in qkv(2, 6, 3, n, m, 8, e)]


@pytest.mark.parametrize("kernel", ANY_RULE)
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_that_is_changed_between_the_passes_is_noticed(kernel: str, name: str) -> None:
    tensor, make = MASKS[name]
    given = tensor.clone()
    mask = make(given)
    if name == "own" and kernel == "cpu":
        pytest.skip("a mask of one's own class has no spans")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(kernel, *leaves(), mask=mask, between=lambda: given.copy_(given.roll(1, -1)))


@pytest.mark.parametrize("kernel", OWN)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_an_input_that_is_changed_between_the_passes_is_noticed(kernel: str, which: int) -> None:
    given = [x * 1.0 for x in leaves(7, 11, 8)]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(kernel, *given, between=lambda: given[which].add_(1.0))


@pytest.mark.parametrize("kernel", ANY_RULE)
@pytest.mark.parametrize("name", SCORES)
def test_a_score_that_is_changed_between_the_passes_is_noticed(kernel: str, name: str) -> None:
    tensor, make = SCORES[name]
    given = tensor.clone()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(kernel, *leaves(), score=(make(given),), between=lambda: given.mul_(2.0))


@contextmanager
def moved(seen: list[Tensor]) -> Iterator[None]:
    """Saved tensors go elsewhere and come back as copies, as with `save_on_cpu`."""

    def pack(x: Tensor) -> Tensor:
        seen.append(x.detach())
        return x.detach().clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x.clone()):
        yield


@pytest.mark.parametrize("kernel", ANY_RULE)
@pytest.mark.parametrize("name", MASKS)
def test_the_backward_pass_reads_what_hooks_return_and_nothing_else(kernel: str, name: str) -> None:
    if name == "own" and kernel == "cpu":
        pytest.skip("a mask of one's own class has no spans")

    def given() -> tuple[list[Tensor], Tensor, dict[str, Any]]:
        of_mask = MASKS[name][0].clone()
        bias, slopes, sinks = (torch.full(size, 0.3).requires_grad_() for size in ((2, 1, 7, 11), (6,), (6,)))
        score = Bias(bias), ALiBi(slopes), SinkLogits(sinks), SoftCap(2.0)
        return [*leaves(), bias, slopes, sinks], of_mask, {"mask": MASKS[name][1](of_mask), "score": score}

    tensors, _, rule = given()
    expected = gradients(kernel, *tensors, **rule)
    tensors, of_mask, rule = given()
    seen: list[Tensor] = []

    def spoil() -> None:
        for x in (*tensors[:4], tensors[5]):
            x.data.fill_(torch.nan)
        of_mask.zero_()

    with moved(seen):
        found = gradients(kernel, *tensors, **rule, between=spoil)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    for x in (*tensors[:4], of_mask):
        assert any(x.data_ptr() == one.data_ptr() for one in seen)


@pytest.mark.parametrize("kernel", OWN)
@pytest.mark.parametrize("causal", [False, True])
def test_plain_calls_read_what_hooks_return(kernel: str, causal: bool) -> None:
    mask = Causal() if causal else None
    expected = gradients(kernel, *leaves(11, 11, 8), mask=mask)
    tensors, seen = leaves(11, 11, 8), []
    with moved(seen):
        found = gradients(kernel, *tensors, mask=mask, between=lambda: [x.data.zero_() for x in tensors])
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert sum(x.numel() for x in seen) <= 2 * 6 * 11 * (8 + 8 + 1) + 2 * 2 * 3 * 11 * 8  # q, out, lse; k, v


@pytest.mark.parametrize("kernel", OWN)
def test_checkpointed_layers_hold_none_of_their_tensors(kernel: str) -> None:
    inside: list[weakref.ref[Tensor]] = []

    def layer(x: Tensor) -> Tensor:
        q, k, v = x * 1.1, x * 0.9, x * 0.7
        inside.extend(map(weakref.ref, (q, k, v)))
        return attend(q, k, v, mask=Causal(), kernel=kernel)

    def passes(through: Callable[[Tensor], Tensor]) -> Tensor:
        x = torch.randn(1, 3, 13, 5, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = x
        for _ in range(8):
            y = through(y)
        alive = sum(one() is not None for one in inside)
        assert alive == 0 or through is layer
        y.square().sum().backward()
        assert x.grad is not None
        return x.grad

    plain = passes(layer)
    inside.clear()
    assert torch.equal(passes(lambda x: checkpoint(layer, x, use_reentrant=False)), plain)


def test_delta_is_told_in_checkpointed_and_moved_calls() -> None:
    for kernel in OWN:
        heard: list[Tensor] = []
        with listen(heard.append), moved([]):
            q, k, v = leaves(11, 11, 8)
            out = checkpoint(lambda *x: attend(*x, kernel=kernel), q, k, v, use_reentrant=False)  # noqa: B023
            out.sum().backward()
        torch.testing.assert_close(heard[0], out.detach().sum(-1), rtol=1e-5, atol=1e-5)


def test_a_graph_of_the_backward_pass_that_nobody_differentiates_is_no_error() -> None:
    q, k, v = leaves(7, 7, 8)
    plain = torch.autograd.grad(attend(q, k, v).square().sum(), (q, k, v))
    found = torch.autograd.grad(attend(q, k, v).square().sum(), (q, k, v), create_graph=True)
    assert all(torch.equal(one, other.detach()) for one, other in zip(plain, found, strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize("score", [(), (SoftCap(2.0),), (SinkLogits([0.1, 0.5, -0.3, 0.2]),)])
def test_the_reference_has_second_derivatives(score: tuple[Score, ...]) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(1, 4, 2, 3, 5, 2, 3, dtype=torch.float64))

    def call(*x: Tensor) -> Tensor:
        return attend(*x, mask=Causal(), score=score, kernel="reference")

    assert torch.autograd.gradcheck(call, (q, k, v))
    assert torch.autograd.gradgradcheck(call, (q, k, v))
