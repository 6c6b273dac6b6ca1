"""Second derivatives, and those of forward mode: of the reference, against those of the formula in float64."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from samples import qkv
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import headwise as hw
from headwise.errors import KernelError

N, M = 3, 4
BIAS = torch.linspace(-1, 1, 2 * N * M, dtype=torch.float64).sin().view(1, 2, N, M)
SINKS = torch.tensor([0.3, -0.2], dtype=torch.float64)
ALLOWED = {
    "causal": torch.ones(N, M, dtype=torch.bool).tril(M - N),
    "documents": torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]], dtype=torch.bool),
    "padding": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0], [0, 0, 0, 0]], dtype=torch.bool),
    "none": torch.ones(N, M, dtype=torch.bool),
}
MASKS = {"causal": hw.Causal(), "documents": hw.Documents([0, 0, 1, 1]), "padding": hw.Lengths([3], [2]), "none": None}


def inputs() -> list[Tensor]:
    return [x.double() for x in qkv(1, 2, 1, N, M, 2, 2)]


def ours(mask: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    score = hw.SoftCap(2.0), hw.Bias(BIAS), hw.SinkLogits(SINKS)
    return hw.attend(q, k, v, mask=MASKS[mask], score=score, kernel="reference")


def formula(mask: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = 2.0 * torch.tanh(q @ k.repeat_interleave(2, 1).mT / 2**0.5 / 2.0) + BIAS
    weights = scores.exp() * ALLOWED[mask]
    return weights / (weights.sum(-1, keepdim=True) + SINKS.exp()[:, None, None]) @ v.repeat_interleave(2, 1)


def of_sum(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *x: f(*x).square().sum()


def hessian(f: Callable[..., Tensor], x: list[Tensor]) -> Any:
    return torch.func.hessian(of_sum(f), argnums=(0, 1, 2))(*x)


def twice_reverse(f: Callable[..., Tensor], x: list[Tensor]) -> Any:
    return torch.func.jacrev(torch.func.jacrev(of_sum(f), argnums=(0, 1, 2)), argnums=(0, 1, 2))(*x)


def pushed(f: Callable[..., Tensor], x: list[Tensor]) -> Any:
    return torch.func.jvp(f, tuple(x), tuple(torch.ones_like(one) for one in x))


def forward_of_reverse_of_each(f: Callable[..., Tensor], x: list[Tensor]) -> Any:
    batch = [torch.stack([one, -one]) for one in x]
    return torch.vmap(lambda *y: torch.func.jacfwd(torch.func.grad(of_sum(f)))(*y))(*batch)


def dual(f: Callable[..., Tensor], x: list[Tensor]) -> Any:
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(f(forward_ad.make_dual(x[0], torch.ones_like(x[0])), *x[1:])))


def recorded(f: Callable[..., Tensor], x: list[Tensor]) -> Any:
    return make_fx(torch.func.hessian(of_sum(f)))(*x)(*x)


WAYS = [hessian, twice_reverse, pushed, forward_of_reverse_of_each, dual, recorded]


@pytest.mark.thorough_except(
    "twice_reverse-documents", "pushed-padding", "forward_of_reverse_of_each-none", "dual-causal"
)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("way", WAYS)
def test_of_the_reference_are_those_of_the_formula(way: Callable[..., Any], mask: str) -> None:
    torch.testing.assert_close(
        way(partial(ours, mask), inputs()), way(partial(formula, mask), inputs()), rtol=1e-10, atol=1e-11
    )


TENSORS = {
    "boolean": ALLOWED["documents"] | torch.eye(N, M, dtype=torch.bool),
    "causal": ALLOWED["causal"],
    "padding": torch.tensor([True, True, True, False]),
    "added": BIAS,
    "added_with_infinity": BIAS.masked_fill(~ALLOWED["causal"], -torch.inf),
}


def of_tensor(mask: str, kernel: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return hw.attend(q, k, v, mask=TENSORS[mask], kernel=kernel)


def sdpa(mask: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    given = TENSORS[mask]
    added = (
        given if given.is_floating_point() else torch.zeros_like(given, dtype=q.dtype).masked_fill(~given, -torch.inf)
    )
    return ((q @ k.repeat_interleave(2, 1).mT / 2**0.5 + added).softmax(-1)) @ v.repeat_interleave(2, 1)


@pytest.mark.parametrize("mask", TENSORS)
@pytest.mark.parametrize("way", [way for way in WAYS if way is not recorded])
def test_a_mask_given_as_a_tensor_has_them_where_the_error_says_so(way: Callable[..., Any], mask: str) -> None:
    with pytest.raises(KernelError, match="kernel='reference' has all derivatives"):
        way(partial(of_tensor, mask, "auto"), inputs())
    torch.testing.assert_close(
        way(partial(of_tensor, mask, "reference"), inputs()), way(partial(sdpa, mask), inputs()), rtol=1e-10, atol=1e-11
    )
    with hw.use_kernel("reference"):
        torch.testing.assert_close(
            way(partial(of_tensor, mask, "auto"), inputs()), way(partial(sdpa, mask), inputs()), rtol=1e-10, atol=1e-11
        )


def test_a_tensor_that_is_added_to_the_scores_has_a_tangent() -> None:
    q, k, v = inputs()
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    found, expected = (
        torch.func.jvp(f, (BIAS,), (BIAS.cos(),))[1] for f in (
            lambda mask: hw.attend(q, k, v, mask=mask, kernel="reference"),
            lambda mask: (q @ k.mT / 2**0.5 + mask).softmax(-1) @ v,
        )
    )  # fmt: skip
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("kind", [hw.Dense, hw.Documents, None])
def test_a_mask_that_vmap_has_batched_has_them_too(kind: Any) -> None:
    q, k, v = inputs()
    ids = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 2]])
    seen = ids[:, M - N :, None] == ids[:, None]
    given = ids if kind is hw.Documents else seen
    of = kind or (lambda mask: mask)

    def pushed_over(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda mask: torch.func.jvp(lambda q: f(q, mask), (q,), (torch.ones_like(q),))[1]

    found = torch.vmap(pushed_over(lambda q, x: hw.attend(q, k, v, mask=of(x), kernel="reference")))(given)
    for one, mask in zip(found, seen, strict=True):
        wanted = pushed_over(lambda q, x: hw.attend(q, k, v, mask=hw.Dense(x), kernel="reference"))(mask)
        torch.testing.assert_close(one, wanted, rtol=1e-10, atol=1e-11)


def test_use_kernel_selects_it_too() -> None:
    q, k, v = inputs()

    def call(q: Tensor) -> Tensor:
        return hw.attend(q, k, v, return_map=True)[0].square().sum()

    expected = torch.autograd.functional.hessian(lambda q: hw.attend(q, k, v, kernel="reference").square().sum(), q)
    with hw.use_kernel("reference"):
        torch.testing.assert_close(torch.func.hessian(call)(q), expected, rtol=1e-10, atol=1e-11)
    for change in (torch.func.hessian, lambda f: torch.func.jacrev(torch.func.jacrev(f))):
        with pytest.raises(KernelError, match="kernel='reference' has all derivatives"):
            change(call)(q)


@pytest.mark.thorough
def test_masks_may_be_batched_and_dropout_is_refused() -> None:
    q, k, v = inputs()
    masks = torch.stack([ALLOWED["causal"], ALLOWED["documents"]])[:, None, None]
    found = torch.vmap(
        torch.func.grad(lambda q, x: hw.attend(q, k, v, mask=hw.Dense(x), kernel="reference").square().sum()),
        in_dims=(None, 0),
    )(q, masks)
    for mask, one in zip(masks, found, strict=True):
        expected = torch.func.grad(lambda q, x=mask: hw.attend(q, k, v, mask=hw.Dense(x)).square().sum())(q)
        torch.testing.assert_close(one, expected, rtol=1e-10, atol=1e-11)
    with pytest.raises(KernelError, match="does not support dropout"):
        torch.func.grad(lambda q: hw.attend(q, k, v, dropout_p=0.5, kernel="reference").sum())(q)
