"""Second derivatives, and those of forward mode, against those of the formula in float64."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from samples import GAPS, MASKS as EVERY_MASK, SCORES, kernels_here, qkv
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import headwise as hw
from headwise.errors import KernelError
from headwise.kernels import KERNELS
from headwise.kernels.torch_blocks import TorchBlocks
from headwise.rule import TILE_ELEMENTS

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


def ours(mask: str, kernel: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    score = hw.SoftCap(2.0), hw.Bias(BIAS), hw.SinkLogits(SINKS)
    return hw.attend(q, k, v, mask=MASKS[mask], score=score, kernel=kernel)


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
    "reference-twice_reverse-documents", "torch_blocks-pushed-padding", "torch_blocks-twice_reverse-causal",
    "torch_blocks-forward_of_reverse_of_each-none", "torch_blocks-dual-causal", "torch_blocks-hessian-padding",
)  # fmt: skip
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kernel", ["reference", "torch_blocks"])
def test_are_those_of_the_formula(kernel: str, way: Callable[..., Any], mask: str) -> None:
    if way is recorded and kernel != "reference":
        with pytest.raises(KernelError, match=r"no derivative in forward mode .* within a graph"):
            way(partial(ours, mask, kernel), inputs())
        return
    torch.testing.assert_close(
        way(partial(ours, mask, kernel), inputs()), way(partial(formula, mask), inputs()), rtol=1e-10, atol=1e-11
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


@pytest.mark.thorough_beyond(4)
@pytest.mark.parametrize("mask", TENSORS)
@pytest.mark.parametrize("way", [way for way in WAYS if way is not recorded])
def test_a_mask_given_as_a_tensor_has_them(way: Callable[..., Any], mask: str) -> None:
    expected = way(partial(sdpa, mask), inputs())
    for kernel in ("auto", "reference"):
        found = way(partial(of_tensor, mask, kernel), inputs())
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)
    with hw.use_kernel("reference"):
        found = way(partial(of_tensor, mask, "auto"), inputs())
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


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
        torch.testing.assert_close(change(call)(q), expected, rtol=1e-10, atol=1e-11)


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


def of_kernel(kernel: str, mask: hw.masks.Mask | None, scores: Any, dtype: torch.dtype, sizes: Any) -> list[Tensor]:
    """Output, gradients, and the gradients of these, in q, k, v and the tensors of the scores."""
    learned = scores()
    tensors = [x for score in learned for x in vars(score).values() if isinstance(x, Tensor) and x.requires_grad]
    x = [one.requires_grad_() for one in qkv(*sizes, dtype=dtype)]
    out = hw.attend(*x, mask=mask, score=learned, kernel=kernel)
    weight = torch.linspace(-1, 1, out.numel(), dtype=dtype).sin().view(out.shape).requires_grad_()
    first = torch.autograd.grad((out.square() * weight).sum(), [*x, *tensors], create_graph=True)
    total = sum((d.double() * torch.linspace(1, 2, d.numel()).cos().view(d.shape)).sum() for d in first)
    second = torch.autograd.grad(total, [*x, *tensors, weight])  # type: ignore[arg-type]
    return [out, *first, *second]


def assert_alike(found: list[Tensor], expected: list[Tensor], bound: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.isfinite(one).all()
        error = float((one.detach().double() - other.detach()).norm())
        assert error <= bound * max(1e-3, float(other.detach().double().norm()))


@pytest.mark.thorough_except("causal-sinks", "nothing for some-all", "with a gap-bias", "documents-soft cap")
@pytest.mark.parametrize("score", [*SCORES, *GAPS])
@pytest.mark.parametrize("mask", EVERY_MASK)
def test_of_every_mask_and_score(mask: str, score: str) -> None:
    sizes = 2, 6, 3, 37, 53, 8, 5
    given = EVERY_MASK[mask](2, 37, 53), lambda: {**SCORES, **GAPS}[score](2, 6, 37, 53)
    found, expected = (
        of_kernel(kernel, *given, torch.float64, sizes) for kernel in ("torch_blocks", "reference")
    )  # fmt: skip
    assert_alike(found, expected, 1e-9)


@pytest.mark.parametrize("kernel", [name for name in kernels_here() if name != "reference"])
def test_over_several_tiles_in_float32(kernel: str) -> None:
    sizes = 1, 2, 1, 300, 600, 16, 16
    mask, scores = hw.Causal(), lambda: SCORES["all"](1, 2, 300, 600)
    if kernel == "torch_fused":
        sizes, mask, scores = (1, 2, 1, 600, 600, 16, 16), hw.Causal(), lambda: ()
    found = of_kernel(kernel, mask, scores, torch.float32, sizes)
    expected = of_kernel("reference", mask, scores, torch.float64, sizes)
    assert_alike(found, expected, 5e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("mask", ["causal", "padding"])
def test_by_finite_differences(mask: str) -> None:
    x = [one.requires_grad_() for one in inputs()]
    call = partial(ours, mask, "torch_blocks")
    assert torch.autograd.gradcheck(call, x, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(call, x)


def test_reverse_mode_of_forward_mode() -> None:
    x, moves = inputs(), [one.cos() for one in inputs()]

    def gradient(call: Callable[..., Tensor]) -> Any:
        return torch.func.grad(
            lambda x, moves: torch.func.jvp(call, tuple(x), tuple(moves))[1].square().sum(), argnums=(0, 1)
        )(x, moves)

    for mask in MASKS:
        found, expected = (gradient(partial(f, mask)) for f in (lambda m, *x: ours(m, "torch_blocks", *x), formula))
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


def test_a_gradient_that_moves_within_the_backward_pass() -> None:
    x = [one.requires_grad_() for one in inputs()]
    found = []
    for call in (partial(ours, "causal", "torch_blocks"), partial(formula, "causal")):
        out = call(*x)
        with forward_ad.dual_level():
            grad = forward_ad.make_dual(out.detach().sin(), out.detach().cos())
            found.append([forward_ad.unpack_dual(d) for d in torch.autograd.grad(out, x, grad)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one.primal, other.primal, rtol=1e-10, atol=1e-11)
        torch.testing.assert_close(one.tangent, other.tangent, rtol=1e-10, atol=1e-11)


def test_masked_queries_and_keys_that_are_nan_contribute_zero() -> None:
    q, k, v = qkv(1, 2, 1, 5, 7, 4, 3)
    q[:, :, 3:], k[:, :, 6:], v[:, :, 6:] = torch.nan, torch.nan, torch.inf
    clean = [x.nan_to_num(0.0, 0.0, 0.0) for x in (q, k, v)]
    found = []
    for given in ((q, k, v), clean):
        x = [one.clone().requires_grad_() for one in given]
        out = hw.attend(*x, mask=hw.Lengths([6], [3]), kernel="torch_blocks")
        first = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        second = torch.autograd.grad(sum((d[:, :, :3] ** 2).sum() for d in first), x)  # type: ignore[arg-type]
        found.append(second)
        assert (second[0][:, :, 3:] == 0).all()
        assert (second[1][:, :, 6:] == 0).all()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


class Largest(TorchDispatchMode):
    """The largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in found if isinstance(found, (tuple, list)) else [found]:
            if isinstance(x, Tensor) and not func.is_view:
                self.numel = max(self.numel, x.numel())
        return found


@pytest.mark.thorough
def test_memory_is_linear() -> None:
    n = 2300
    x = [one.requires_grad_() for one in qkv(1, 2, 1, n, n, 4, 4)]
    first = torch.autograd.grad(hw.attend(*x, mask=hw.Causal()).square().sum(), x, create_graph=True)
    with Largest() as largest:
        torch.autograd.grad(sum(d.square().sum() for d in first), x)  # type: ignore[arg-type]
    assert n * 4 < largest.numel <= TILE_ELEMENTS < 2 * n * n / 8
    with Largest() as largest:
        torch.func.jvp(lambda q: hw.attend(q, *x[1:], mask=hw.Causal()), (x[0].detach(),), (x[0].detach(),))
    assert n * 4 < largest.numel <= TILE_ELEMENTS


def test_what_there_is_none_of_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    x = [one.requires_grad_() for one in inputs()]
    plain = [one.detach() for one in x]

    def second(**options: Any) -> None:
        first = torch.autograd.grad(hw.attend(*x, **options).sum(), x, create_graph=True)
        sum(d.square().sum() for d in first).backward()  # type: ignore[union-attr]

    def pushed(**options: Any) -> None:
        torch.func.jvp(lambda *x: hw.attend(*x, **options), tuple(plain), tuple(plain))

    for way in (second, pushed):
        with pytest.raises(KernelError, match="kernel='torch_blocks' with dropout has no second derivative"):
            way(dropout_p=0.5, kernel="torch_blocks")

    def once(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda q: torch.func.jvp(f, (q,), (q,))[1]

    def call(q: Tensor) -> Tensor:
        return hw.attend(q, *plain[1:]).square().sum()

    with pytest.raises(KernelError, match="no second derivative of forward mode over forward mode"):
        once(once(call))(plain[0])
    for third in (torch.func.jacrev(torch.func.hessian(call)), torch.func.jacfwd(once(torch.func.grad(call)))):
        with pytest.raises(KernelError, match=r"no third derivative|forward mode over forward"):
            third(plain[0])
    assert not getattr(KERNELS["triton_gpu"], "twice", False)
    monkeypatch.delattr(TorchBlocks, "twice")  # as of a kernel of somebody else
    for way in (second, pushed):
        with pytest.raises(KernelError, match=r"kernel='torch_blocks' has no second derivative.*'reference' has all"):
            way(kernel="torch_blocks")


@pytest.mark.parametrize("kernel", ["cpu", "torch_blocks"])
@pytest.mark.parametrize("factor", [20.0, 60.0])
def test_heads_with_one_weight_have_no_curvature_but_rounding(kernel: str, factor: float) -> None:
    """The weights of a second pass are not those of the kernel's log-sum-exp where its products round otherwise."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    given = [(q * factor).requires_grad_(), (k * factor).requires_grad_(), v.requires_grad_()]
    found = torch.autograd.grad(hw.attend(*given, kernel=kernel).square().sum(), given, create_graph=True)
    dq, dk, dv = torch.autograd.grad(sum(x.square().sum() for x in found), given)
    assert float(dv.abs().max()) > 10
    assert max(float(x.abs().max()) for x in (dq, dk)) < 0.01
